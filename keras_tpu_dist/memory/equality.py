"""Decides whether two programs compute the same from their inputs."""

import functools
import re
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding

from keras_tpu_dist.programs.jaxprs import is_jaxpr, opened

_ADDRESS = re.compile(r"0x[0-9a-f]+")
# The attributes in which JAX's wrappers store the wrapped function.
_WRAPPED = ("f", "transforms", "fun", "jvp", "fwd", "bwd", "nondiff_argnums", "val", "__wrapped__")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)


class Functions:
    """Gives functions keys, equal for functions that compute the same from the same arguments.

    Programs contain functions, such as gradient rules and policies. They may differ in the
    variables of their closures, for instance a scale, even if their code is the same.

    Args:
        of_object: Returns the key of any other object that a function refers to. By default all
            objects differ.
    """

    def __init__(self, of_object: Callable[[Any], Hashable] = id):
        self._of_object = of_object
        self._open: list[int] = []

    def of(self, value: Any) -> Hashable:
        """The key of a function, or of a value that it refers to."""
        if id(value) in self._open:
            return "itself"
        self._open.append(id(value))
        try:
            return type(value).__qualname__, self._parts(value)
        finally:
            self._open.pop()

    def _parts(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, jax.core.Tracer):
            return str(jax.typeof(value))  # an operand, which the equation has too
        if isinstance(value, (np.ndarray, jax.Array)):
            return value_of(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, (tuple, list)):
            return tuple(map(self.of, value))
        if isinstance(value, dict):
            return tuple((repr(key), self.of(item)) for key, item in value.items())
        if isinstance(value, (set, frozenset)):
            return tuple(sorted(map(repr, value)))
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            return repr(value)
        if _is_of_jax(type(value)):
            if type(value).__qualname__.endswith("Store"):
                return ""  # a place for results
            inner = [self.of(getattr(value, name)) for name in _WRAPPED if hasattr(value, name)]
            return tuple(inner) or without_addresses(value)
        return self._of_object(value)

    def _function(self, function: types.FunctionType) -> Hashable:
        around = [_content(cell) for cell in function.__closure__ or ()]
        if _is_of_jax(function):  # its caches, and its markers for missing values
            around = [value for value in around if type(value) not in (dict, object)]
        defaults = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        return function.__code__, defaults, tuple(map(self.of, around))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not assigned yet


def _is_of_jax(thing: Any) -> bool:
    return (thing.__module__ or "").partition(".")[0] in ("jax", "jaxlib")


def value_of(array: Any) -> Hashable:
    """The content of an array."""
    if isinstance(array, jax.core.Tracer):
        return id(array)
    array = np.asarray(array)
    return array.shape, str(array.dtype), array.tobytes()


def without_addresses(value: Any) -> str:
    """The text of an object, without its address in memory."""
    return _ADDRESS.sub("", repr(value))


class Fingerprints:
    """Gives programs fingerprints, equal for the same equations in the same order.

    Functions that are called several times are only examined once.
    """

    def __init__(self, of_object: Callable[[Any], Hashable] = id):
        self._functions = Functions(of_object)
        self._known: dict[int, tuple[Any, Hashable]] = {}

    def of(self, jaxpr: Any) -> Hashable:
        """The fingerprint of a program, its constants included."""
        known = self._known.get(id(jaxpr))
        if known is None:
            # The program is stored as well: while it lives, no other object has its id.
            known = self._known[id(jaxpr)] = (jaxpr, self._made(jaxpr))
        return known[1]

    def _made(self, jaxpr: Any) -> Hashable:
        program, numbers = opened(jaxpr), {}
        constants = [value_of(constant) for constant in getattr(jaxpr, "consts", ())]

        def atom(each: Any) -> Hashable:
            if isinstance(each, core.Literal):
                return value_of(each.val)
            return numbers.setdefault(each, len(numbers)), _shape(each)

        inputs = [atom(constvar) for constvar in (*program.constvars, *program.invars)]
        equations = [
            (
                eqn.primitive.name,
                tuple(map(atom, eqn.invars)),
                tuple(map(atom, eqn.outvars)),
                tuple((name, self._parameter(v)) for name, v in sorted(eqn.params.items())),
            )
            for eqn in program.eqns
        ]
        return (*constants, *inputs, *equations, *map(atom, program.outvars))

    def _parameter(self, value: Any) -> Hashable:
        if is_jaxpr(value):
            return self.of(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._parameter, value))
        if isinstance(value, np.ndarray):
            return value_of(value)
        if _says_nothing(value):
            return "None"
        # JAX's own wrappers of functions cannot be called.
        if callable(value) or hasattr(value, "transforms"):
            return self._functions.of(value)
        return without_addresses(value)


def _says_nothing(value: Any) -> bool:
    """Whether a layout leaves every dimension to the compiler, as `None` does.

    Functions that JAX traces once have the one or the other, depending on their first call.
    """
    if not isinstance(value, NamedSharding) or not isinstance(value.mesh, AbstractMesh):
        return False
    kinds = {kind.name for kind in value.mesh.axis_types}
    return kinds == {"Auto"} and not any(value.spec)


def _shape(atom: Any) -> Hashable:
    return getattr(atom.aval, "shape", None), str(getattr(atom.aval, "dtype", atom.aval))
