"""Which results of a per-replica program are the same on all replicas.

A result is the same if it depends on nothing that differs: not on split inputs, not on the
replica's number, except through a reduction or gather over all replicas. That decides whether an
update of a variable needs to be combined, and finds gradients that were never reduced, before the
program runs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from keras_tpu_dist.partitioner.jaxprs import opened, scan_parts

_COMBINING = {"psum": "axes", "pmax": "axes", "pmin": "axes", "all_gather": "axis_name"}

_CALLED_ONCE = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def shard_map_body(jaxpr: Any) -> Any:
    """The program of one replica inside of a traced `jax.shard_map`, or `None`.

    Args:
        jaxpr: The traced function, which has the `jax.shard_map` among its own equations.
    """
    for equation in opened(jaxpr).eqns:
        if equation.primitive.name == "shard_map":
            return opened(equation.params["jaxpr"])
    return None


def differing(jaxpr: Any, inputs: Sequence[bool], axes: Iterable[str]) -> list[bool]:
    """Which outputs may differ from replica to replica.

    Args:
        jaxpr: The program of one replica.
        inputs: For each input, whether it differs.
        axes: The mesh axes over which the replicas lie.

    Returns:
        For each output, whether it may differ. `False` is certain.
    """
    return _Flow(frozenset(axes)).of(opened(jaxpr), list(inputs))


class _Flow:
    def __init__(self, axes: frozenset):
        self._axes = axes

    def of(self, jaxpr, inputs: list[bool]) -> list[bool]:
        state = dict(zip(jaxpr.invars, inputs))

        def read(atom) -> bool:
            return not isinstance(atom, core.Literal) and state.get(atom, False)

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [read(atom) for atom in equation.invars])
            state.update(zip(equation.outvars, outputs))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation, inputs: list[bool]) -> list[bool]:
        name, params = equation.primitive.name, equation.params
        count = len(equation.outvars)
        if name in _COMBINING and self._over_all(params, _COMBINING[name]):
            return [False] * count
        if name == "axis_index":
            return [bool(self._axes & set(_names(params["axis_name"])))] * count
        if name == "scan":
            return self._scan(equation, inputs)
        if name == "while":
            return self._while(params, inputs)
        if name == "cond":
            return self._cond(params, inputs, count)
        for key in _CALLED_ONCE:
            called = params.get(key)
            if called is not None:
                body = opened(called)
                if len(body.invars) == len(inputs) and len(body.outvars) == count:
                    return self.of(body, inputs)
        inner = any(self._mentions_replica(value) for value in params.values())
        return [any(inputs) or inner] * count

    def _over_all(self, params, key: str) -> bool:
        groups = params.get("axis_index_groups")
        return groups is None and self._axes <= set(_names(params[key]))

    def _scan(self, equation, inputs):
        body, consts, carries = scan_parts(equation)
        fixed, carry, xs = (
            inputs[:consts],
            inputs[consts : consts + carries],
            inputs[consts + carries :],
        )
        while True:
            outputs = self.of(body, [*fixed, *carry, *xs])
            grown = [a or b for a, b in zip(carry, outputs[:carries])]
            if grown == carry:
                return [*carry, *outputs[carries:]]
            carry = grown

    def _while(self, params, inputs):
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
        cond_consts, body_consts = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
        carry = inputs[of_cond + of_body :]
        while True:
            # A replica that goes round more often has other results.
            differs = any(self.of(cond, [*cond_consts, *carry]))
            outputs = self.of(body, [*body_consts, *carry])
            grown = [a or b or differs for a, b in zip(carry, outputs)]
            if grown == carry:
                return carry
            carry = grown

    def _cond(self, params, inputs, count: int):
        branches = [self.of(opened(branch), inputs[1:]) for branch in params["branches"]]
        return [inputs[0] or any(branch[i] for branch in branches) for i in range(count)]

    def _mentions_replica(self, value) -> bool:
        if isinstance(value, (tuple, list)):
            return any(self._mentions_replica(entry) for entry in value)
        if not hasattr(opened(value), "eqns"):
            return False
        return any(
            equation.primitive.name == "axis_index"
            or any(self._mentions_replica(inner) for inner in equation.params.values())
            for equation in opened(value).eqns
        )


def _names(axes) -> tuple:
    return axes if isinstance(axes, tuple) else (axes,)
