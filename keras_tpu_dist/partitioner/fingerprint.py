"""Whether two programs compute the same of their inputs."""

import re
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from keras_tpu_dist.partitioner.jaxprs import is_jaxpr, opened

_ADDRESS = re.compile(r"0x[0-9a-f]+")


class Fingerprints:
    """Of programs: equal ones for programs that have the same equations, in the same order.

    What calls of the same function have in common is looked at once.
    """

    def __init__(self):
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
        constants = [_value(each) for each in getattr(jaxpr, "consts", ())]

        def atom(each: Any) -> Hashable:
            if isinstance(each, core.Literal):
                return _value(each.val)
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
            return _value(value)
        name = getattr(value, "__qualname__", None)
        return name if isinstance(name, str) else _ADDRESS.sub("", repr(value))


def _shape(atom: Any) -> Hashable:
    return getattr(atom.aval, "shape", None), str(getattr(atom.aval, "dtype", atom.aval))


def _value(value: Any) -> Hashable:
    if isinstance(value, jax.core.Tracer):
        return id(value)
    array = np.asarray(value)
    return array.shape, str(array.dtype), array.tobytes()
