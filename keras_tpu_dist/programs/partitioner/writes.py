"""Writes at one index of a split dimension, as a choice by position instead of a slice."""

import functools
import math
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.sharding import Mesh

from keras_tpu_dist.programs.jaxprs import replacement
from keras_tpu_dist.programs.partitioner.indices import widened
from keras_tpu_dist.programs.partitioner.spread import Spread

_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": lambda operand, update: update,
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}
PRIMITIVES = tuple(_COMBINED)


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether a scatter writes at one position.

    Args:
        equation: The scatter.
        mesh: The mesh, which is not used.
    """
    return math.prod(equation.invars[1].aval.shape[:-1]) == 1 and bool(_single(equation))


def repaired(equation: Any, spread: Spread) -> list | None:
    """A write at one position as a selection by position, or `None` if nothing is split there.

    XLA reads the values that it will overwrite, at an index outside of all parts but one. It merges
    this slice with the one that cut the part from a whole array, without clamping it. A selection
    by position reads nothing, and every device computes it for its own part.

    Args:
        equation: The scatter.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    if not candidate(equation, spread.mesh):
        return None
    atoms = equation.invars[0], equation.outvars[0]
    chosen = {
        column: dimension
        for column, dimension in _single(equation).items()
        if any(spread.axes(atom, dimension) for atom in atoms)
    }
    if not chosen:
        return None

    def write(operand, indices, updates, *rest):
        indices = widened(lax.reshape(indices, indices.shape[-1:]))
        updates = _repeated(equation, operand, updates, chosen.values())
        written = _written(equation, operand, indices, updates, set(chosen))
        here = [
            _at(_start(equation, indices, column, operand.shape[d]), operand.shape, d)
            for column, d in chosen.items()
        ]
        return lax.select(functools.reduce(lax.bitwise_and, here), written, operand)

    return replacement(equation, write)


def _single(equation: Any) -> dict[int, int]:
    """From columns of the indices to the dimensions in which they select one of several rows."""
    numbers = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    window = _window(equation)
    columns = enumerate(map(int, numbers.scatter_dims_to_operand_dims))
    return {column: d for column, d in columns if window[d] == 1 < shape[d]}


def _window(equation: Any) -> list[int]:
    """The number of rows that are written, by dimension."""
    numbers = equation.params["dimension_numbers"]
    operand, _, updates = equation.invars[:3]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter(updates.aval.shape[d] for d in numbers.update_window_dims)
    return [1 if d in gone else next(sizes) for d in range(len(operand.aval.shape))]


def _repeated(equation: Any, operand: Any, updates: Any, dimensions: Any) -> Any:
    """The updates, with one dimension for every dimension of the operand, repeated along some."""
    window = _window(equation)
    shape = [operand.shape[d] if d in dimensions else size for d, size in enumerate(window)]
    updates = lax.reshape(updates, window)
    return lax.broadcast_in_dim(updates, shape, range(len(shape)))


def _written(equation: Any, operand: Any, indices: Any, updates: Any, chosen: set[int]) -> Any:
    """The operand with every row of the chosen dimensions written."""
    numbers = equation.params["dimension_numbers"]
    name = equation.primitive.name
    # `x.at[i].apply(function)` is a scatter with its own function.
    applies = name == "scatter" and equation.params["update_jaxpr"] is not None
    if len(chosen) == indices.shape[0] and updates.shape == operand.shape and not applies:
        return _COMBINED[name](operand, updates)
    every = lax.full((1,), 0, indices.dtype)
    columns = [
        every if column in chosen else lax.slice_in_dim(indices, column, column + 1)
        for column in range(indices.shape[0])
    ]
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(operand.ndim)),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=numbers.scatter_dims_to_operand_dims,
    )
    params = {**equation.params, "dimension_numbers": numbers}
    return equation.primitive.bind(operand, lax.concatenate(columns, 0), updates, **params)


def _start(equation: Any, indices: Any, column: int, rows: int) -> Any:
    """The position that is written, moved inside if the scatter's mode requires that."""
    start = lax.squeeze(lax.slice_in_dim(indices, column, column + 1), (0,))
    if equation.params["mode"] != lax.GatherScatterMode.CLIP:
        return start
    kind = start.dtype.type
    return lax.clamp(kind(0), start, kind(rows - 1))


def _at(place: Any, shape: tuple[int, ...], dimension: int) -> Any:
    """True at an index of a dimension; nowhere if it is out of range."""
    positions = lax.broadcasted_iota(place.dtype, shape, dimension)
    return lax.eq(positions, lax.broadcast(place, shape))
