"""Branches that only some devices take, in which rows must not be exchanged.

`keras_tpu_dist.assign` puts a layer into a branch that one logical device of every replica takes.
If rows are split unevenly, or move, XLA exchanges them between neighbours by a permute that all
devices must join. Devices in the other branch never do, and the program hangs.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh

from keras_tpu_dist.programs.dimensions import dimensions
from keras_tpu_dist.programs.jaxprs import (
    any_equation,
    inner_jaxprs,
    manual_axes,
    opened,
    surrounded,
)
from keras_tpu_dist.programs.partitioner.exchanges import ONE_DEVICE, rows_are_whole
from keras_tpu_dist.programs.partitioner.places import constrained
from keras_tpu_dist.programs.partitioner.spread import Spread

PRIMITIVES = ("shard_map",)


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether a `shard_map` has branches.

    Args:
        equation: The `shard_map`.
        mesh: The mesh, which is not used.
    """
    return any(inner.primitive.name == "cond" for inner in _equations(equation))


def repaired(equation: Any, spread: Spread) -> list | None:
    """A `shard_map` with branches, with whole rows if they would be exchanged.

    Every device that takes the branch then computes all rows. `None` if nothing is exchanged.

    Args:
        equation: The `shard_map`.
        spread: Which mesh axes may split which dimension of the program's values.

    Raises:
        RowsExchanged: If the branch is that of an assigned layer, which can be traced differently.
    """
    conditionals = [e for e in _equations(equation) if e.primitive.name == "cond"]
    branches = [branch for conditional in conditionals for branch in conditional.params["branches"]]
    with spread.within(manual_axes(equation)):
        if not any(any_equation(branch, lambda e: _moves(e, spread)) for branch in branches):
            return None
        operands = [_split_dimensions(atom, spread) for atom in equation.invars]
        results = [_split_dimensions(atom, spread) for atom in equation.outvars]
    if any(map(_on_one_device, conditionals)) and not rows_are_whole():
        raise RowsExchanged

    def whole(dimensions: list[list[int]]) -> Callable:
        return lambda *arrays: [
            constrained(array, spread.mesh, dict.fromkeys(dims, ())) if dims else array
            for array, dims in zip(arrays, dimensions, strict=True)
        ]

    return surrounded(equation, whole(operands), whole(results))


class RowsExchanged(Exception):
    """Rows would be exchanged within a branch: the program is traced again, `with_whole_rows`."""


def choosing_axes(jaxpr: Any) -> frozenset[str]:
    """The axes that choose the branches of a program, empty if it has none.

    Args:
        jaxpr: The program.
    """
    axes: set[str] = set()

    def look(equation: Any) -> bool:
        if equation.primitive.name in PRIMITIVES and any(map(_on_one_device, _equations(equation))):
            axes.update(manual_axes(equation))
        return False

    any_equation(jaxpr, look, lambda equation: bool(equation.params))
    return frozenset(axes)


def _on_one_device(equation: Any) -> bool:
    scopes = str(equation.source_info.name_stack)
    return equation.primitive.name == "cond" and ONE_DEVICE in scopes


def _equations(equation: Any) -> list:
    return [e for inner in inner_jaxprs(equation) for e in opened(inner).eqns]


def _split_dimensions(atom: Any, spread: Spread) -> list[int]:
    """The dimensions that may be split over axes that the `shard_map` leaves to the compiler."""
    return [d for d in range(getattr(atom.aval, "ndim", 0)) if spread.axes(atom, d)]


def _moves(equation: Any, spread: Spread) -> bool:
    """Whether rows may move to other devices in an operation."""
    for atom in [*equation.invars, *equation.outvars]:
        if any(spread.uneven(atom, d) for d in _split_dimensions(atom, spread)):
            return True
    return any(spread.axes(atom, d) for atom, d in _moved(equation))


def _moved(equation: Any) -> Iterator[tuple[Any, int]]:
    """Dimensions along which values move to other positions, or are indexed."""
    known = dimensions(equation)
    # Joined dimensions are split like the first of them, which moves nothing.
    if known is None or equation.primitive.name == "reshape":
        return
    for step in known.mapped:
        places = [
            (equation.invars[step.operand], step.dimension),
            (equation.outvars[step.result], step.to),
        ]
        if step.parts == 1 < max(atom.aval.shape[d] for atom, d in places):
            yield from places
    yield from ((equation.invars[operand], d) for operand, d in known.indexed)
