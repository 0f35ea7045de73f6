"""Transfers host batches to the mesh, with a part for every replica."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.input.batch_axis import flatten
from keras_tpu_dist.input.batches import BatchPlacer, Slot
from keras_tpu_dist.input.host_arrays import padded
from keras_tpu_dist.input.own_input import ShardBatch
from keras_tpu_dist.replica.run_options import RunOptions, check_no_rows, pad_host
from keras_tpu_dist.replica.values import (
    DescribedValue,
    HostParts,
    PerReplica,
    Steps,
    host_parts,
    place_steps,
)
from keras_tpu_dist.training.protocol import Strategy


def place_global(strategy: Strategy, batch: Any, options: RunOptions | None) -> Any:
    """Transfers a global batch, of which every replica gets a part."""
    padded: list[tuple[int, int] | None] | None = None
    if options is not None and options.buckets is not None:
        host = batch.batch if isinstance(batch, ShardBatch) else batch
        host, padded = _bucketed(host, options)
        batch = replace(batch, batch=host) if isinstance(batch, ShardBatch) else host
    placed = strategy.placer.place(batch)
    leaves, treedef = flatten(placed.data)
    number = strategy.num_replicas_in_sync
    spread = []
    for array, slot, length in zip(
        leaves, placed.slots, padded or [None] * len(leaves), strict=True
    ):
        if slot.axis is None or not array.ndim:
            spread.append(array)
            continue
        if length is not None:
            check_no_rows(length[0], slot.axis, array.shape)
        sizes = {} if length is None else {length[0]: (length[1],) * number}
        spread.append(_of_slot(strategy, array, slot, sizes))
    return jax.tree.unflatten(treedef, spread)


def place_many_global(strategy: Strategy, batches: list, options: RunOptions | None) -> Any:
    """Transfers several global batches at once.

    Returns:
        The structure of a batch, with `Steps` instead of every array; `None` if the batches differ
        in shapes, or may.
    """
    if options is not None and options.buckets is not None:
        return None
    placed = strategy.placer.place_many(batches)
    if placed is None:
        return None
    leaves, treedef = flatten(placed.data)
    stacks = []
    for array, slot in zip(leaves, placed.slots, strict=True):
        whole = slot.axis is None or array.ndim == 1
        form = None if whole else functools.partial(_of_slot, strategy, slot=slot)
        stacks.append(Steps(array, form))
    return jax.tree.unflatten(treedef, stacks)


def _of_slot(strategy: Strategy, array: Any, slot: Slot, sizes: dict | None = None) -> PerReplica:
    sizes = dict(sizes or {})
    if slot.rows is not None and slot.axis is not None:
        rows = _rows_of_each(slot.rows, strategy.num_replicas_in_sync)
        sizes[slot.axis] = slot.filled or rows
    return PerReplica(array, strategy, axis=slot.axis or 0, sizes=sizes)


def _rows_of_each(rows: int, number: int) -> tuple[int, ...]:
    each = -(-rows // number)
    return tuple(min(max(rows - i * each, 0), each) for i in range(number))


def _bucketed(batch: Any, options: RunOptions) -> tuple[Any, list[tuple[int, int] | None]]:
    """A host batch padded to its buckets, and the varying dimension and length of every array."""
    leaves, treedef = jax.tree.flatten(batch)
    leaves = [np.asarray(leaf) for leaf in leaves]
    ranks = [leaf.ndim for leaf in leaves]
    # `axis` may describe `args` with one element, the batch, as in `run(fn, (batch,))`.
    one = not isinstance(options.axis, tuple) or len(options.axis) == 1
    axes = options.axes((batch,) if one else batch, ranks)
    padded = [
        leaf if axis is None else pad_host(leaf, axis, options, "a batch")
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    lengths = [
        None if axis is None else (axis, leaf.shape[axis])
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(treedef, padded), lengths


def place_parts(parts: list, strategy: Strategy) -> Any:
    """Transfers the batches of one step.

    Args:
        parts: One batch for every replica, in order; or one `ShardBatch` for every replica of a
            process. Batches of the last replicas may be missing.
        strategy: The strategy.
    """
    return jax.tree.map(lambda parts: parts.placed(strategy), _host_parts(parts, strategy))


def place_parts_of_steps(steps: list, strategy: Strategy) -> Any:
    """Transfers the batches of several steps at once.

    Args:
        steps: The batches of every step. See `place_parts`.
        strategy: The strategy.

    Returns:
        The structure of a batch, with `Steps` instead of every array; `None` if the steps differ in
        shapes.
    """
    flat = [jax.tree.flatten(_host_parts(parts, strategy)) for parts in steps]
    treedef = flat[0][1]
    if any(tree != treedef for _, tree in flat):
        return None
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    if any(other.form != column[0].form for column in columns for other in column):
        return None
    return jax.tree.unflatten(treedef, [place_steps(column, strategy) for column in columns])


def _host_parts(parts: list, strategy: Strategy) -> Any:
    """The structure of a batch, with `HostParts` instead of every array."""
    own = strategy.runner.own_input
    # The replicas of every input shard; without shards, all of them belong to one.
    held = (tuple(range(strategy.num_replicas_in_sync)),) if own is None else own.shards.blocks
    mine = held[0 if own is None else own.shards.own]
    batches = [part.batch if isinstance(part, ShardBatch) else part for part in parts]
    columns, treedef, axes = _columns(batches, strategy.placer)
    leaves = []
    for column, axis in zip(columns, axes, strict=True):
        if axis is None:
            leaves.append(_whole(column, held, mine))
        else:
            leaves.append(_split(column, axis, _rows(parts, column, axis, held, strategy), mine))
    return jax.tree.unflatten(treedef, leaves)


def _split(arrays: list, axis: int, rows: tuple[int, ...], mine: Sequence[int]) -> HostParts:
    empty = arrays[0][(*(slice(None),) * axis, slice(0))]
    arrays = [*arrays, *[empty] * (len(mine) - len(arrays))]
    blocks = {i: padded(array, axis, max(rows)) for i, array in zip(mine, arrays, strict=True)}
    return HostParts(blocks, axis, {axis: rows} if len(set(rows)) > 1 else {})


def _whole(arrays: list, held: Sequence, mine: Sequence[int]) -> HostParts:
    """Arrays without a batch axis, of the same shapes in all processes."""
    arrays = [*arrays, *[np.zeros_like(arrays[0])] * (len(mine) - len(arrays))]
    every = {
        i: DescribedValue.of(a) for replicas in held for i, a in zip(replicas, arrays, strict=True)
    }
    described = [every[i] for i in range(len(every))]
    return host_parts(dict(zip(mine, arrays, strict=True)), described, "dataset_fn")


def _rows(
    parts: list, arrays: list, axis: int, held: Sequence, strategy: Strategy
) -> tuple[int, ...]:
    """The number of rows of every replica."""
    rows = [0] * strategy.num_replicas_in_sync
    for shard, replicas in enumerate(held):
        # The parts of the last replicas may be missing.
        for part, array, replica in zip(parts, arrays, replicas, strict=False):
            here = part.rows[shard] if isinstance(part, ShardBatch) else array.shape[axis]
            rows[replica] = here
    return tuple(rows)


def _columns(parts: list, placer: BatchPlacer) -> tuple[list, Any, list]:
    """The batches of one step, array by array, with each array's batch axis."""
    flat = []
    for part in parts:
        checked = placer.checked(part)
        leaves, treedef = jax.tree.flatten(checked)
        flat.append(([np.asarray(leaf) for leaf in leaves], treedef))
    treedef = flat[0][1]
    if any(other != treedef for _, other in flat):
        raise value_error(
            "All batches of a dataset must have one structure.",
            received={"structures": sorted({str(other) for _, other in flat})},
            fix="Yield the same keys and lengths every time.",
        )
    axes = placer.axes(parts[0])
    arrays = [leaves for leaves, _ in flat]
    axes = [axis if leaf.ndim else None for axis, leaf in zip(axes, arrays[0], strict=True)]
    columns = [list(column) for column in zip(*arrays, strict=True)]
    for column, axis in zip(columns, axes, strict=True):
        _check_alike(column, axis)
    return columns, treedef, axes


def _check_alike(arrays: list, axis: int | None) -> None:
    """Raises a `ValueError` if arrays of one step differ in more than their rows."""
    if axis is None:
        return
    kinds = {(a.dtype, a.ndim, *a.shape[:axis], *a.shape[axis + 1 :]) for a in arrays}
    if len(kinds) > 1:
        raise value_error(
            "The batches of one step must have one dtype, and one shape apart from their rows.",
            received={"arrays": [f"{a.dtype}{a.shape}" for a in arrays]},
            fix="Pad or cast the arrays.",
        )
