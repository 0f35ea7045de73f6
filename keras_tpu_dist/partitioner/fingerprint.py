"""Whether two programs compute the same of their inputs."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding

from keras_tpu_dist.partitioner.functions import Functions, value_of, without_addresses
from keras_tpu_dist.partitioner.jaxprs import is_jaxpr, opened


class Fingerprints:
    """Of programs: equal ones for programs that have the same equations, in the same order.

    What calls of the same function have in common is looked at once.

    Args:
        of_object: See `Functions`; of what rules for gradients refer to.
    """

    def __init__(self, of_object: Callable[[Any], Hashable] = id):
        self._functions = Functions(of_object)
        self._known: dict[int, tuple[Any, Hashable]] = {}

    def of(self, jaxpr: Any) -> Hashable:
        """The fingerprint of a program, its constants included.

        Args:
            jaxpr: A `ClosedJaxpr` or a `Jaxpr`.
        """
        known = self._known.get(id(jaxpr))
        if known is None:
            # The program is kept as well: while it lives, nothing else has its identity.
            known = self._known[id(jaxpr)] = (jaxpr, self._made(jaxpr))
        return known[1]

    def _made(self, jaxpr: Any) -> Hashable:
        program, numbers = opened(jaxpr), {}
        constants = [value_of(each) for each in getattr(jaxpr, "consts", ())]

        def atom(each: Any) -> Hashable:
            if isinstance(each, core.Literal):
                return value_of(each.val)
            return numbers.setdefault(each, len(numbers)), _shape(each)

        inputs = [atom(each) for each in (*program.constvars, *program.invars)]
        equations = [
            (
                each.primitive.name,
                tuple(map(atom, each.invars)),
                tuple(map(atom, each.outvars)),
                tuple((name, self._parameter(v)) for name, v in sorted(each.params.items())),
            )
            for each in program.eqns
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

    Functions that JAX traces once have the one or the other, by where they were called first.
    """
    if not isinstance(value, NamedSharding) or not isinstance(value.mesh, AbstractMesh):
        return False
    kinds = {kind.name for kind in value.mesh.axis_types}
    return kinds == {"Auto"} and not any(value.spec)


def _shape(atom: Any) -> Hashable:
    return getattr(atom.aval, "shape", None), str(getattr(atom.aval, "dtype", atom.aval))
