"""Each device's share of attention: rows over data axes, heads over others, queries along time."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from keras_tpu_dist.attention import kernel, sequence
from keras_tpu_dist.attention.time import divides
from keras_tpu_dist.common.axes import axis_size, dividing_axes, entry_names


def on_shares(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    mesh: Mesh,
    data_axes: Sequence[str],
    time_axis: str | None,
    is_causal: bool,
    soft_cap: float | None,
    interpret: bool,
) -> jax.Array:
    """Runs the flash kernel on each device's share.

    See `kernel.flash_attention` for the arrays, and `dispatch.dot_product_attention` for the axes.

    Args:
        query: `(batch, time, heads, width)`, scaled.
        key: `(batch, source, kv_heads, width)`.
        value: `(batch, source, kv_heads, value_width)`.
        mask: Rank 4, or `None`.
        mesh: The mesh.
        data_axes: Mesh axes that split the batch.
        time_axis: The mesh axis that splits queries along time where it divides them, or `None`.
        is_causal: Whether query `i` sees only keys `0..i`.
        soft_cap: `cap * tanh(logits / cap)`, or `None`.
        interpret: Run the kernel's program in plain JAX.
    """
    context = jax.sharding.get_abstract_mesh()
    taken = set(context.manual_axes)  # strategy.run() has already split these
    free = set(mesh.axis_names) - taken
    local = functools.partial(kernel.flash_attention, soft_cap=soft_cap, interpret=interpret)
    if not free:
        return local(query, key, value, mask, is_causal=is_causal)
    data_axes = tuple(axis for axis in data_axes if axis not in taken)
    others = [axis for axis in mesh.axis_names if axis not in (*data_axes, *taken, time_axis)]
    head_axes = entry_names(dividing_axes(query.shape[2], others, mesh))
    batch = query.shape[0]
    short = -batch % axis_size(mesh, data_axes)
    repeats = math.lcm(key.shape[2], axis_size(mesh, head_axes)) // key.shape[2]
    query, key, value = (_more_rows(x, short) for x in (query, key, value))
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    if mask is not None and mask.shape[0] > 1:
        mask = _more_rows(mask, short)
    mapped = functools.partial(
        jax.shard_map,
        mesh=context if taken else mesh,
        axis_names=free,
        check_vma=False,  # pallas_call does not say over which axes its results vary
    )
    axes = _Axes(mesh, data_axes, head_axes, None)
    if time_axis is not None and time_axis not in taken and divides(query, mesh, time_axis):
        axes = _Axes(mesh, data_axes, head_axes, time_axis)
        # A mask that hides different keys from different queries or heads is a matrix.
        if is_causal and mask is not None and mask.shape[3] > 1 and max(mask.shape[1:3]) > 1:
            triangle = jnp.arange(query.shape[1])[:, None] >= jnp.arange(key.shape[1])
            mask, is_causal = mask & triangle, False
        if is_causal:
            kernel_of = functools.partial(
                sequence.causal_kernel, soft_cap=soft_cap, interpret=interpret
            )
            return _causal(kernel_of, (query, key, value), mask, mapped, axes)[:batch]
    local = functools.partial(local, is_causal=is_causal)
    return _plain(local, (query, key, value), mask, mapped, axes)[:batch]


_Call = Callable[..., Any]
_Arrays = tuple[jax.Array, ...]
_Mask = jax.Array | None


class _Axes(NamedTuple):
    """What splits what."""

    mesh: Mesh
    rows: tuple[str, ...]
    heads: tuple[str, ...]
    time: str | None

    def of_query(self) -> P:
        return P(self.rows or None, self.time, self.heads or None, None)

    def of_key(self, key: jax.Array) -> P:
        time = self.time if self.splits(key) else None
        return P(self.rows or None, time, self.heads or None, None)

    def splits(self, key: jax.Array) -> bool:
        return self.time is not None and divides(key, self.mesh, self.time)

    def of_mask(self, mask: jax.Array) -> P:
        entries = (self.rows or None, self.heads or None, self.time, None)
        return P(
            *(entry if size > 1 else None for entry, size in zip(entries, mask.shape, strict=True))
        )


def _plain(local: _Call, arrays: _Arrays, mask: _Mask, mapped: _Call, axes: _Axes) -> jax.Array:
    """Attention in which no query asks for its place in the sequence, unless all are here."""
    _, key, value = arrays
    if axes.time is not None and axes.splits(key):
        local = sequence.gathered(local, axes.time)
    specs = [axes.of_query(), axes.of_key(key), axes.of_key(value)]
    arguments = [*arrays]
    if mask is not None:
        arguments.append(mask)
        specs.append(axes.of_mask(mask))
    share = local if mask is not None else lambda query, key, value: local(query, key, value, None)
    return jax.jit(mapped(share, in_specs=tuple(specs), out_specs=specs[0]))(*arguments)


def _causal(
    kernel_of: _Call, arrays: _Arrays, mask: _Mask, mapped: _Call, axes: _Axes
) -> jax.Array:
    """Causal attention, split along time; the mask hides keys, or queries, from all."""
    query, key, value = arrays
    time, source = query.shape[1], key.shape[1]
    assert axes.time is not None
    pieces = sequence.Pieces.of(axes.mesh.shape[axes.time], time)
    devices = axis_size(axes.mesh, axes.heads)
    heads = query.shape[2] // devices // sequence.groups_of_heads(key.shape[2] // devices)
    made = kernel_of(pieces, source, heads)
    specs = [sequence.kernel_specs(made, axes.mesh, axes.time), axes.of_query()]
    specs += [axes.of_key(key), axes.of_key(value)]
    arguments, sees = [made, *arrays], mask
    if mask is not None and mask.shape[3] > 1:
        valid = jnp.broadcast_to(mask[:, 0, 0], (query.shape[0], source))
        arguments.append(valid)
        specs.append(P(axes.rows or None, None))
        sees = kernel.seen_by_row(valid, time, is_causal=True)[:, None, :, None]
    share = functools.partial(
        sequence.causal_local, pieces=pieces, axis=axes.time, split_keys=axes.splits(key)
    )
    output = jax.jit(mapped(share, in_specs=tuple(specs), out_specs=axes.of_query()))(*arguments)
    return output if sees is None else kernel.mean_where_blind(output, sees, value)


def _more_rows(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, rows), *((0, 0),) * (x.ndim - 1))) if rows else x
