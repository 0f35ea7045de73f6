"""Queries, keys and values split along time, where XLA partitions attention by itself."""

from collections.abc import Sequence

import jax
import jax.export
from jax.sharding import Mesh

from keras_tpu_dist.programs.partitioner import in_compiled_code
from keras_tpu_dist.programs.partitioner.places import constrained


def symbolic(*arrays: jax.Array) -> bool:
    """Whether a size is no number: Keras then only asks for the shape of the result.

    Args:
        arrays: Queries and keys.
    """
    return any(map(jax.export.is_symbolic_dim, (size for x in arrays for size in x.shape)))


def divides(x: jax.Array, mesh: Mesh, time_axis: str) -> bool:
    """Whether an axis splits an array evenly along time.

    Args:
        x: `(batch, time, ...)`.
        mesh: The mesh.
        time_axis: The axis.
    """
    return x.shape[1] % mesh.shape[time_axis] == 0


def split(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mesh: Mesh,
    data_axes: Sequence[str],
    time_axis: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keeps the batch split where XLA partitions, and queries along time, of which each sees keys.

    A split bias or weight may pull them elsewhere.

    Args:
        query: `(batch, time, heads, width)`.
        key: `(batch, source, kv_heads, width)`.
        value: `(batch, source, kv_heads, value_width)`.
        mesh: The mesh.
        data_axes: Mesh axes that split the batch.
        time_axis: The mesh axis that splits queries along time where it divides them, or `None`.
    """
    if (
        symbolic(query, key)
        or not in_compiled_code()
        or jax.sharding.get_abstract_mesh().manual_axes
    ):
        return query, key, value
    rows: dict[int, tuple[str, ...]] = {0: tuple(data_axes)}
    if time_axis is None or not divides(query, mesh, time_axis):
        query, key, value = (constrained(x, mesh, rows) for x in (query, key, value))
        return query, key, value
    query = constrained(query, mesh, {**rows, 1: (time_axis,)})
    key, value = (constrained(x, mesh, {**rows, 1: ()}) for x in (key, value))
    return query, key, value
