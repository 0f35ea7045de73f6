"""What functions are made of: code, and the values it finds around it."""

import functools
import re
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Where JAX's wrappers keep what they wrap.
_WRAPPED = ("f", "transforms", "fun", "jvp", "fwd", "bwd", "nondiff_argnums", "val", "__wrapped__")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)


class Functions:
    """Of functions: equal values for functions that compute the same of the same arguments.

    Programs hold rules for gradients and policies as functions, which may differ in what they
    close over, a scale for instance, where their code is the same.

    Args:
        of_object: From any other object that a function refers to, to what it has in common with
            those that may stand in its place. By default nothing may.
    """

    def __init__(self, of_object: Callable[[Any], Hashable] = id):
        self._of_object = of_object
        self._open: list[int] = []

    def of(self, value: Any) -> Hashable:
        """What a function, or a value that it refers to, is made of.

        Args:
            value: The function or the value.
        """
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
            return tuple((repr(key), self.of(each)) for key, each in value.items())
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
        if _is_of_jax(function):  # what it remembers, and marks for what it does not
            around = [each for each in around if type(each) not in (dict, object)]
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
    """What an array holds.

    Args:
        array: An array, or a tracer, which equals itself alone.
    """
    if isinstance(array, jax.core.Tracer):
        return id(array)
    array = np.asarray(array)
    return array.shape, str(array.dtype), array.tobytes()


def without_addresses(value: Any) -> str:
    """The text of an object, without where it lies in memory.

    Args:
        value: The object.
    """
    return _ADDRESS.sub("", repr(value))
