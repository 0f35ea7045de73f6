"""Which results of a per-replica program are the same on all replicas.

A result is the same if it depends on nothing that differs: not on split inputs, and not on the
replica's number, except through a reduction or gather over all replicas. This decides whether the
update of a variable needs to be combined. It also finds gradients that were never reduced, before
the program runs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from keras_tpu_dist.programs.calls import Called, calls
from keras_tpu_dist.programs.jaxprs import opened

# They give all devices along their axes the same result. Other operations with axes, such as
# `psum_scatter` and `ppermute`, give every device a different result, even for equal inputs.
_COMBINING = ("psum", "pmax", "pmin", "all_gather")


def shard_map_body(jaxpr: Any) -> Any:
    """The program of one replica inside of a traced `jax.shard_map`, the first one.

    Args:
        jaxpr: The traced function, whose own equations include the `jax.shard_map`.
    """
    equations = opened(jaxpr).eqns
    first = next(equation for equation in equations if equation.primitive.name == "shard_map")
    return opened(first.params["jaxpr"])


def differing(jaxpr: Any, inputs: Sequence[bool], axes: Iterable[str]) -> list[bool]:
    """Which outputs may differ from replica to replica.

    Args:
        jaxpr: The program of one replica.
        inputs: For every input, whether it differs.
        axes: The mesh axes of the replicas.

    Returns:
        For every output, whether it may differ. `False` is certain.
    """
    every = frozenset(axes)
    given = [every if differs else _NONE for differs in inputs]
    return [bool(along) for along in _Flow(every).of(opened(jaxpr), given)]


def _is_followed(call: Called, operands: int) -> bool:
    """Whether the results of an equation are those of a program that it calls."""
    whole = call.kind != "call" or len(call.operands) == operands
    return whole and call.kind not in ("part", "unknown")


# The mesh axes along which a value may differ.
_Axes = frozenset[str]
_NONE: _Axes = frozenset()


class _Flow:
    def __init__(self, axes: _Axes):
        self._axes = axes

    def of(self, jaxpr, inputs: list[_Axes]) -> list[_Axes]:
        state = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom) -> _Axes:
            return _NONE if isinstance(atom, core.Literal) else state.get(atom, _NONE)

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [read(atom) for atom in equation.invars])
            state.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation, inputs: list[_Axes]) -> list[_Axes]:
        name, params = equation.primitive.name, equation.params
        count = len(equation.outvars)
        called = calls(equation)
        if called and all(_is_followed(call, len(inputs)) for call in called):
            return self._called(called, inputs, count)
        either = _NONE.union(*inputs, *map(self._within, params.values()))
        if name in _COMBINING and params.get("axis_index_groups") is None:
            return [either - self._talks_over(params)] * count
        return [either | self._talks_over(params)] * count

    def _talks_over(self, params) -> _Axes:
        """The axes along which an operation depends on its position, or moves values."""
        names = params.get("axes", params.get("axis_name", ()))
        return self._axes.intersection(names if isinstance(names, tuple) else (names,))

    def _called(self, called: list[Called], inputs: list[_Axes], count: int) -> list[_Axes]:
        """The results of programs; for a loop, after as many rounds as still change them."""
        # The first operand chooses the branch.
        chosen = inputs[0] if called[0].kind == "branch" else _NONE
        while True:
            results, grown, rounds = [chosen] * count, list(inputs), _NONE
            for call in called:
                outputs = self.of(call.jaxpr, [inputs[i] for i in call.operands])
                if call.kind == "condition":
                    # A replica that runs more rounds has other results.
                    rounds = _NONE.union(*outputs)
                for result, output in zip(call.results, outputs, strict=False):
                    results[result] |= output
                for result, operand in enumerate(call.carried):
                    grown[operand] |= outputs[result] | rounds
                    results[result] |= grown[operand]
            if grown == inputs:
                return results
            inputs = grown

    def _within(self, value) -> _Axes:
        """The axes that a program communicates over, if no more is known about it."""
        if isinstance(value, (tuple, list)):
            return _NONE.union(*map(self._within, value))
        if not hasattr(opened(value), "eqns"):
            return _NONE
        axes_of_each = [
            self._talks_over(equation.params).union(*map(self._within, equation.params.values()))
            for equation in opened(value).eqns
            if equation.primitive.name not in _COMBINING
        ]
        return _NONE.union(*axes_of_each)
