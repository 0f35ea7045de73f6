"""Batches of which each is one replica's, on their way to the mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.input.host_arrays import padded
from keras_tpu_dist.input.own_input import Share
from keras_tpu_dist.replica.blocks import from_blocks
from keras_tpu_dist.replica.stacked import Described, stack
from keras_tpu_dist.replica.values import PerReplica
from keras_tpu_dist.training.strategy import Strategy


def place_parts(parts: list, strategy: Strategy) -> Any:
    """Transfers the batches of one step.

    Args:
        parts: One batch for each replica, in order; or one `Share` for each replica of a process.
            Those of the last replicas may be missing.
        strategy: The strategy.

    Returns:
        The structure of a batch, with a `PerReplica` in place of each array.

    Raises:
        ValueError: If the batches do not fit together.
    """
    own = strategy.runner.own_input
    # For each input shard its replicas; all of them are one shard's where there is none.
    held = (tuple(range(strategy.num_replicas_in_sync)),) if own is None else own.shares.blocks
    mine = held[0 if own is None else own.shares.own]
    batches = [part.batch if isinstance(part, Share) else part for part in parts]
    columns, treedef, axes = _columns(batches, strategy.placer)
    leaves = []
    for column, axis in zip(columns, axes):
        if axis is None:
            leaves.append(_whole(column, held, mine, strategy))
        else:
            rows = _rows(parts, column, axis, held, strategy)
            leaves.append(_split(column, axis, rows, mine, strategy))
    return jax.tree.unflatten(treedef, leaves)


def _split(
    arrays: list, axis: int, rows: tuple[int, ...], mine: Sequence[int], strategy: Strategy
) -> PerReplica:
    empty = arrays[0][(*(slice(None),) * axis, slice(0))]
    arrays = [*arrays, *[empty] * (len(mine) - len(arrays))]
    blocks = {i: padded(array, axis, max(rows)) for i, array in zip(mine, arrays)}
    sizes = {axis: rows} if len(set(rows)) > 1 else {}
    return PerReplica(from_blocks(blocks, axis, strategy), strategy, axis=axis, sizes=sizes)


def _whole(arrays: list, held: Sequence, mine: Sequence[int], strategy: Strategy) -> PerReplica:
    """Arrays without a batch axis, of the same shapes in all processes."""
    arrays = [*arrays, *[np.zeros_like(arrays[0])] * (len(mine) - len(arrays))]
    every = {i: Described.of(a) for replicas in held for i, a in zip(replicas, arrays)}
    described = [every[i] for i in range(len(every))]
    return stack(dict(zip(mine, arrays)), described, strategy, "dataset_fn")


def _rows(
    parts: list, arrays: list, axis: int, held: Sequence, strategy: Strategy
) -> tuple[int, ...]:
    """Each replica's number of rows."""
    rows = [0] * strategy.num_replicas_in_sync
    for shard, replicas in enumerate(held):
        for part, array, replica in zip(parts, arrays, replicas):
            here = part.rows[shard] if isinstance(part, Share) else array.shape[axis]
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
        raise ValueError(
            message(
                "All batches of a dataset must have one structure.",
                received={"structures": sorted({str(other) for _, other in flat})},
                fix="Yield the same keys and lengths each time.",
            )
        )
    axes = placer.axes(parts[0])
    arrays = [leaves for leaves, _ in flat]
    axes = [axis if leaf.ndim else None for axis, leaf in zip(axes, arrays[0])]
    columns = [list(column) for column in zip(*arrays)]
    for column, axis in zip(columns, axes):
        _check_alike(column, axis)
    return columns, treedef, axes


def _check_alike(arrays: list, axis: int | None) -> None:
    """Raises a `ValueError` if arrays of one step differ in more than their rows."""
    if axis is None:
        return
    kinds = {(a.dtype, a.ndim, *a.shape[:axis], *a.shape[axis + 1 :]) for a in arrays}
    if len(kinds) > 1:
        raise ValueError(
            message(
                "The batches of one step have one dtype, and one shape but for their rows.",
                received={
                    "shapes": [a.shape for a in arrays],
                    "dtypes": sorted({str(a.dtype) for a in arrays}),
                },
                fix="Pad or cast the arrays.",
            )
        )
