"""Scatters of unevenly split rows, padded with rows that write nowhere."""

from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from keras_tpu_dist.programs.jaxprs import replacement
from keras_tpu_dist.programs.partitioner.indices import narrow, widened
from keras_tpu_dist.programs.partitioner.places import padded_at_the_end
from keras_tpu_dist.programs.partitioner.spread import Spread

PRIMITIVES = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether rows of a scatter can be split unevenly over a mesh, or indices are narrow.

    Args:
        equation: The scatter.
        mesh: The mesh.
    """
    rows = equation.invars[1].aval.shape[:-1]
    return any(size % mesh.size for size in rows) or narrow(equation.invars[1])


def repaired(equation: Any, spread: Spread) -> list | None:
    """A scatter that is right on every mesh, or `None` if it already is.

    Rows of indices and updates that may be split unevenly are padded to a multiple, with an index
    beyond the end, which writes nowhere. Rows that operand and indices share are padded in all
    three and cut off the result.

    Args:
        equation: The scatter.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    numbers = equation.params["dimension_numbers"]
    indices, updates = equation.invars[1:3]
    rows = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
    shared = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    paddings: dict[int, int] = {}
    for dimension, of_updates in enumerate(rows):
        parts = max(spread.parts(indices, dimension), spread.parts(updates, of_updates))
        paddings[dimension] = -indices.aval.shape[dimension] % parts
    short = narrow(indices)
    if not short and not any(paddings.values()):
        return None
    signed = jax.numpy.issubdtype(indices.aval.dtype, jax.numpy.signedinteger)
    if signed and not short and not spread.splits_two_ways:
        return None  # XLA fills with -1, which it ignores
    free = {d: n for d, n in paddings.items() if d not in shared}
    both = {d: n for d, n in paddings.items() if d in shared}

    def scatter(operand, indices, updates, *rest):
        # The added rows all have one index, beyond the end.
        params = {**equation.params, "indices_are_sorted": False, "unique_indices": False}
        indices = widened(indices)
        if equation.params["mode"] == lax.GatherScatterMode.CLIP:
            indices = _clipped(operand, indices, updates, numbers)
        params["mode"] = lax.GatherScatterMode.FILL_OR_DROP
        indices = indices.astype(jax.dtypes.canonicalize_dtype("int64"))
        beyond = max(operand.shape, default=0) + sum(both.values())
        before = operand.shape
        operand = padded_at_the_end(operand, {shared[d]: n for d, n in both.items()})
        indices = padded_at_the_end(padded_at_the_end(indices, both), free, beyond)
        updates = padded_at_the_end(updates, {rows[d]: n for d, n in paddings.items()})
        result = equation.primitive.bind(operand, indices, updates, *rest, **params)
        return lax.slice(result, [0] * len(before), before) if both else result

    return replacement(equation, scatter)


def _clipped(operand, indices, updates, numbers):
    """Indices moved inside, as in `GatherScatterMode.CLIP`."""
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter(updates.shape[d] for d in numbers.update_window_dims)
    window = [1 if d in gone else next(sizes) for d in range(operand.ndim)]
    columns = [
        lax.clamp(
            jax.numpy.zeros((), indices.dtype),
            lax.slice_in_dim(indices, i, i + 1, axis=indices.ndim - 1),
            jax.numpy.array(operand.shape[d] - window[d], indices.dtype),
        )
        for i, d in enumerate(numbers.scatter_dims_to_operand_dims)
    ]
    return lax.concatenate(columns, indices.ndim - 1) if columns else indices
