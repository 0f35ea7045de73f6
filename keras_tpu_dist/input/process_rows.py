"""Transfers separate rows from every process to the mesh."""

import functools
import math
from collections.abc import Sequence
from logging import WARNING
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.input.batch_axis import flatten
from keras_tpu_dist.input.batches import BatchPlacer, PlacedBatch, Slot
from keras_tpu_dist.input.host_arrays import as_array, padded
from keras_tpu_dist.input.own_input import OwnInput, ShardBatch
from keras_tpu_dist.input.shards import InputShards, input_shards_of
from keras_tpu_dist.processes.arrays import put


class ProcessRowsPlacer(BatchPlacer):
    """Transfers the rows of every process to its own devices, as one batch.

    The rows of a batch are those of input shard 0, then those of input shard 1, and so on, if the
    parts of the mesh that a shard fills follow one another. If their rows are uneven, or are not
    divisible by a process's parts, they are padded, and the compiled program joins the true rows.

    Args:
        mesh: The mesh.
        data_axes: The mesh axes that split the batch.
        batch_axis: The batch dimension. See `BatchPlacer`.
        shards: Which rows of a batch every process provides.
    """

    pads_rows = False

    def __init__(
        self, mesh: Mesh, data_axes: tuple[str, ...], batch_axis: Any, shards: InputShards
    ):
        super().__init__(mesh, data_axes, batch_axis)
        self.own_input = OwnInput(shards, self.axes)
        self._shards = shards

    def place(self, batch: Any) -> PlacedBatch:
        """Transfers this process's rows.

        Args:
            batch: A `ShardBatch`, or a single host batch, as for `train_on_batch`.
        """
        if not isinstance(batch, ShardBatch):
            batch = self.own_input.of_call(batch)
        leaves, treedef = flatten(batch.batch)
        slots = self._slots(batch, leaves)
        arrays = [
            self._put(leaf, slot, batch.rows) for leaf, slot in zip(leaves, slots, strict=True)
        ]
        return PlacedBatch(jax.tree.unflatten(treedef, arrays), slots)

    def place_many(self, batches: list) -> PlacedBatch | None:
        """Transfers this process's rows for several steps at once. See `BatchPlacer.place_many`.

        Args:
            batches: One `ShardBatch` for every step.
        """
        if len({batch.rows for batch in batches}) > 1:
            return None
        flat = [flatten(batch.batch) for batch in batches]
        leaves, treedef = flat[0]
        steps = [of_step for of_step, _ in flat]
        shapes = [[leaf.shape for leaf in of_step] for of_step in steps]
        if any(tree != treedef for _, tree in flat) or any(shape != shapes[0] for shape in shapes):
            return None
        slots = self._slots(batches[0], leaves)
        columns = [np.stack(column) for column in zip(*steps, strict=True)]
        arrays = [
            self._put(column, slot, batches[0].rows, stacked=True)
            for column, slot in zip(columns, slots, strict=True)
        ]
        return PlacedBatch(jax.tree.unflatten(treedef, arrays), slots)

    def place_eagerly(self, batch: Any) -> PlacedBatch:
        """Transfers this process's rows for eager code, in which every device has all rows.

        Args:
            batch: A `ShardBatch`, or a single host batch.
        """
        log_once(
            "not compiled (run_eagerly, or a layer that Keras does not compile): every device gets "
            "the rows of all processes",
            WARNING,
        )
        placed = self.place(batch)
        return PlacedBatch(self._whole(placed), placed.slots)

    def checked(self, batch: Any) -> Any:
        """A host batch as arrays, which may have no rows here.

        Args:
            batch: A structure (tuple, list, dict, `None`) of arrays.
        """
        leaves, treedef = flatten(batch)
        return jax.tree.unflatten(treedef, [as_array(leaf) for leaf in leaves])

    def process_rows(self, outputs: Any, batch: PlacedBatch, stacked: bool = False) -> Any:
        """See `BatchPlacer`.

        Args:
            outputs: A structure of arrays, with the rows of all processes.
            batch: The input batch.
            stacked: Whether these are several batches, stacked along a first dimension.
        """
        filled = next((slot.filled for slot in batch.slots if slot.filled is not None), None)
        if filled is None:
            return outputs
        starts = np.cumsum([0, *filled])
        places = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in self._process_blocks])

        def cut(output):
            if output.ndim <= stacked or output.shape[int(stacked)] != starts[-1]:
                return output
            return np.take(np.asarray(output), places, axis=int(stacked))

        return jax.tree.map(cut, outputs)

    def bytes_per_device(self, batch: Any) -> float:
        """The bytes of a `ShardBatch` on one device; the same number in all processes.

        Args:
            batch: The `ShardBatch`.
        """
        longest, _ = self._shards.rows_of_blocks(batch.rows)
        leaves = flatten(batch.batch)[0]
        return sum(
            _bytes_of_a_row(leaf, axis) * (longest if _has_rows(leaf, axis) else 1)
            for leaf, axis in zip(leaves, self.axes(batch.batch), strict=True)
        )

    @property
    def _process_blocks(self) -> tuple[int, ...]:
        return self._shards.blocks[self._shards.own]

    @functools.cached_property
    def _whole(self) -> Any:
        return jax.jit(self.trim, out_shardings=self._replicated)

    def _slots(self, batch: ShardBatch, leaves: Sequence) -> tuple[Slot, ...]:
        longest, filled = self._shards.rows_of_blocks(batch.rows)
        rows = None if set(filled) == {longest} else sum(filled)
        slots = tuple(
            Slot(axis, rows, filled, self.time(leaf, axis)) if _has_rows(leaf, axis) else Slot(None)
            for leaf, axis in zip(leaves, self.axes(batch.batch), strict=True)
        )
        self.log_if_whole(batch.batch, slots)
        return slots

    def _put(self, leaf: Any, slot: Slot, rows: Sequence[int], stacked: bool = False) -> jax.Array:
        if slot.axis is None:
            return put([leaf], [self._replicated])[0]
        axis, time = slot.axis + stacked, None if slot.time is None else slot.time + stacked
        longest, _ = self._shards.rows_of_blocks(rows)
        blocks = self._process_blocks
        local = padded(leaf, axis, longest * len(blocks))
        local = local.astype(jax.dtypes.canonicalize_dtype(local.dtype), copy=False)
        shape = list(local.shape)
        shape[axis] = longest * self._shards.num_blocks

        def part(index):
            start = blocks.index((index[axis].start or 0) // longest) * longest
            return local[(*index[:axis], slice(start, start + longest), *index[axis + 1 :])]

        return jax.make_array_from_callback(tuple(shape), self.sharding(axis, time), part)


def placer_for(mesh: Mesh, data_axes: tuple[str, ...], batch_axis: Any, source: str) -> BatchPlacer:
    """The placer for a kind of input.

    Args:
        mesh: The mesh.
        data_axes: The mesh axes that split the batch.
        batch_axis: The batch dimension. See `BatchPlacer`.
        source: `"global"`, or `"per_process"` if processes provide their own rows.
    """
    if source == "global" or named_sharding(mesh).is_fully_addressable:
        return BatchPlacer(mesh, data_axes, batch_axis)
    return ProcessRowsPlacer(mesh, data_axes, batch_axis, input_shards_of(mesh, data_axes))


def _has_rows(leaf: Any, axis: int | None) -> bool:
    return axis is not None and leaf.ndim > 0


def _bytes_of_a_row(leaf: Any, axis: int | None) -> int:
    shape = [size for i, size in enumerate(leaf.shape) if not _has_rows(leaf, axis) or i != axis]
    # With the dtype on the devices: one process may have float64 and another float32.
    return math.prod(shape) * jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize
