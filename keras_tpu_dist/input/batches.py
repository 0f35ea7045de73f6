"""Transfers batches to the mesh: any number of rows, any batch axis."""

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import Mesh, NamedSharding

from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.hardware.mesh import sequence_axis
from keras_tpu_dist.input.batch_axis import (
    axes_by_array,
    checked_batch_axis,
    element_names,
    flatten,
)
from keras_tpu_dist.input.host_arrays import (
    ARRAYS,
    check_numbers,
    check_same_rows,
    checked_rows,
    padded,
)
from keras_tpu_dist.processes.arrays import put


@dataclass(frozen=True)
class Slot:
    """The layout of one array of a batch.

    Attributes:
        axis: The dimension that is split over the data axes, or `None` if replicated.
        rows: The true number of rows along `axis` if the array was padded, else `None`.
        filled: If processes provide their own rows, the true rows in every part of the batch;
            `None` if parts are filled one after the other.
        time: The dimension that is split over the sequence axis, or `None`.
    """

    axis: int | None
    rows: int | None = None
    filled: tuple[int, ...] | None = None
    time: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedBatch:
    """A batch on the devices, padded to equal shards, with its true number of rows.

    The true numbers are static. So a jitted function compiles once for every true shape, as on one
    device. Programs of longer batches get them as data instead.

    Attributes:
        data: The batch's structure of arrays.
        is_longer: Whether it was padded to the rows of a larger batch, to run in one program with
            other numbers of rows.
    """

    data: Any
    slots: tuple[Slot, ...] = field(metadata={"static": True})
    is_longer: bool = field(default=False, metadata={"static": True})

    @property
    def kind(self) -> Hashable:
        """Its structure, slots, shapes and dtypes: the key of a step's program."""
        leaves, structure = jax.tree.flatten(self)
        return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    @property
    def rows(self) -> list[int]:
        """The true rows of each array that is split."""
        pairs = zip(jax.tree.leaves(self.data), self.slots, strict=True)
        return [s.rows or leaf.shape[s.axis] for leaf, s in pairs if s.axis is not None]

    @property
    def ragged(self) -> bool:
        """Whether an array was padded."""
        return any(slot.rows is not None for slot in self.slots)


def kind_of(state: Any, batch: PlacedBatch, *others: Any) -> Hashable:
    """The key of a step's program; shapes of other arguments than its batch never change."""
    return batch.kind


@dataclass(frozen=True)
class PlacementPlan:
    """The layouts of the arrays of all batches of one structure and equal shapes.

    Attributes:
        slots: The layout of every array.
        paddings: How many rows each array gets, so that its shards are equal.
        shardings: The sharding of every array.
        rows: The number of rows; 0 if batches are not padded to the rows of others.
        others: The other sizes, the dtypes and the structure.
    """

    slots: tuple[Slot, ...]
    paddings: tuple[int, ...]
    shardings: tuple[NamedSharding, ...]
    rows: int = 0
    others: Hashable = None

    @functools.cached_property
    def is_padded(self) -> bool:
        """Whether an array is padded."""
        return any(self.paddings)


class BatchPlacer:
    """Transfers host batches to a mesh, split over the data axes, and sequences also over time.

    If the rows of an array are not divisible by the number of shards, the array is padded on the
    host. `trim` cuts it back inside the compiled program, where uneven shards are allowed. So no
    row is added, no sample weight is changed, and losses and metrics keep their meaning.

    Args:
        mesh: The mesh.
        data_axes: The mesh axes that split the batch; may be empty (replicate).
        batch_axis: The batch dimension: an integer for all arrays, `None` for arrays without a
            batch (replicated), or a structure of those that is a prefix of the batch
            `(x, y, sample_weight)`, for example `(1, 0)` for time-major `x`, or
            `({"image": 0, "anchors": None}, 0)`. A dict alone applies to `x`.

    Attributes:
        pads_rows: Whether it can pad batches to any number of rows.
    """

    pads_rows = True

    def __init__(self, mesh: Mesh, data_axes: tuple[str, ...], batch_axis: Any = 0):
        self.mesh = mesh
        self.data_axes = data_axes
        self.batch_axis = checked_batch_axis(batch_axis)
        self.num_shards = math.prod(mesh.shape[name] for name in data_axes)
        self.sequence_axis = sequence_axis(mesh, data_axes)
        self._replicated = named_sharding(mesh)
        self._plans: dict[Any, PlacementPlan] = {}

    @functools.cached_property
    def device_set(self) -> set:
        """The devices of the mesh."""
        return set(self.mesh.devices.flat)

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether all devices of the mesh belong to this process."""
        return self._replicated.is_fully_addressable

    @functools.cached_property
    def own_parts(self) -> dict[Any, int]:
        """For every device of this process, the number of its part of a batch."""
        places = self.sharding(0).addressable_devices_indices_map((self.num_shards,))
        return {device: index[0].start or 0 for device, index in places.items() if index}

    @functools.cached_property
    def by_replica(self) -> NamedSharding:
        """The sharding of an array whose first dimension counts the replicas."""
        return self.sharding(0)

    @functools.cached_property
    def replica_ids(self) -> jax.Array:
        """The number of every replica, on its devices; shape `(replicas,)`."""
        ids = np.arange(self.num_shards, dtype=np.int32)
        return put([ids], [self.by_replica])[0]

    def place(self, batch: Any) -> PlacedBatch:
        """Transfers a host batch, padded if its rows are not divisible.

        Args:
            batch: A structure (tuple, list, dict, `None`) of arrays.

        Raises:
            ValueError: If an array has no rows, does not have the declared batch axis or is not
                numeric, or if the arrays differ in their number of rows.
        """
        return self.place_planned(*self.planned(batch))

    def place_planned(
        self, leaves: list, treedef: Any, plan: PlacementPlan, rows: int | None = None
    ) -> PlacedBatch:
        """Transfers the arrays of a host batch, as `planned` returns them.

        Args:
            rows: The rows to pad it to, with its last one, or `None` for the fewest.
        """
        slots = plan.slots
        if rows is not None:
            slots = tuple(
                slot if slot.axis is None else replace(slot, rows=leaf.shape[slot.axis])
                for leaf, slot in zip(leaves, slots, strict=True)
            )
        if rows is not None or plan.is_padded:
            leaves = [
                self._padded(leaf, slot, padding, rows)
                for leaf, slot, padding in zip(leaves, plan.slots, plan.paddings, strict=True)
            ]
        arrays = put(leaves, plan.shardings)
        return PlacedBatch(jax.tree.unflatten(treedef, arrays), slots, rows is not None)

    def _padded(self, leaf: Any, slot: Slot, padding: int, rows: int | None) -> Any:
        if slot.axis is None or (not padding and rows is None):
            return leaf
        size = leaf.shape[slot.axis]
        if rows is None:
            return padded(leaf, slot.axis, size + padding)
        # What is computed of the further rows is not used; but it should be no NaN, nor an index
        # beyond the end.
        return np.take(np.asarray(leaf), np.minimum(np.arange(rows), size - 1), slot.axis)

    def place_many(self, batches: list) -> PlacedBatch | None:
        """Transfers several batches of one shape at once, for a launch of several steps.

        Args:
            batches: Host batches.

        Returns:
            The batches stacked along a new first dimension, with the slots of one of them; or
            `None` if they differ in structure or shape, or cannot be stacked.
        """
        planned = [self.planned(batch) for batch in batches]
        leaves, treedef, plan = planned[0]
        if any(other is not plan or tree != treedef for _, tree, other in planned):
            return None
        if any(isinstance(leaf, JAXSparse) for leaf in leaves):
            return None
        columns = [
            np.stack(column) for column in zip(*(leaves for leaves, _, _ in planned), strict=True)
        ]
        columns = [
            padded(column, slot.axis + 1, column.shape[slot.axis + 1] + padding)
            if padding and slot.axis is not None
            else column
            for column, slot, padding in zip(columns, plan.slots, plan.paddings, strict=True)
        ]
        stack = PlacedBatch(jax.tree.unflatten(treedef, columns), plan.slots)
        arrays = put(columns, jax.tree.leaves(self.shardings(stack, stacked=True)))
        return PlacedBatch(jax.tree.unflatten(treedef, arrays), plan.slots)

    def place_eagerly(self, batch: Any) -> PlacedBatch:
        """Transfers a host batch for eager code.

        Outside of a compiled program, JAX has no uneven shards. Every operation is a separate
        program that XLA partitions, which may be wrong on a mesh with a second axis (see
        `keras_tpu_dist.programs.partitioner`). On such a mesh, or if rows are not divisible,
        arrays are replicated.

        Args:
            batch: A structure (tuple, list, dict, `None`) of arrays.

        Returns:
            The batch on the devices, not padded.

        Raises:
            ValueError: If `place` raises it.
        """
        leaves, treedef, plan = self.planned(batch)
        split = self.num_shards > 1 or self.sequence_axis is not None
        whole = split and self.num_shards != self.mesh.size
        if whole or plan.is_padded:
            log_once(
                "not compiled (run_eagerly, or a layer that Keras does not compile): batches are "
                "whole on every device, since "
                + ("the mesh has an axis besides the data axes" if whole else "rows are uneven"),
                WARNING,
            )
        shardings = [
            self._replicated if whole or padding else sharding
            for sharding, padding in zip(plan.shardings, plan.paddings, strict=True)
        ]
        slots = tuple(Slot(slot.axis) for slot in plan.slots)
        return PlacedBatch(jax.tree.unflatten(treedef, put(leaves, shardings)), slots)

    def process_rows(self, outputs: Any, batch: PlacedBatch, stacked: bool = False) -> Any:
        """The outputs of `predict` for this process's rows: here all of them.

        Args:
            outputs: A structure of arrays, with the rows of all processes.
            batch: The input batch.
            stacked: Whether these are several batches, stacked along a first dimension.
        """
        return outputs

    def bytes_per_device(self, batch: Any) -> float:
        """The bytes of a host batch on one device.

        Args:
            batch: A structure of arrays.
        """
        return sum(getattr(leaf, "nbytes", 0) for leaf in flatten(batch)[0]) / self.num_shards

    def axes(self, batch: Any) -> list[int | None]:
        """The batch dimension of every array of a batch, in the order of `flatten`.

        Args:
            batch: A structure of arrays, or of objects with their shape.

        Raises:
            ValueError: If the structure of `batch_axis` is not a prefix of the batch's.
        """
        return axes_by_array(self.batch_axis, batch)

    def describe(self, batch: Any) -> PlacedBatch:
        """The result of `place` for a batch of shapes, as `jax.ShapeDtypeStruct`, without any data.

        Args:
            batch: A structure of `jax.ShapeDtypeStruct`.

        Returns:
            The batch with padded shapes and shardings.
        """
        leaves, treedef = flatten(batch)
        plan = self._make_plan(batch, leaves)
        described = []
        for leaf, slot, padding, sharding in zip(
            leaves, plan.slots, plan.paddings, plan.shardings, strict=True
        ):
            shape = list(leaf.shape)
            if padding and slot.axis is not None:
                shape[slot.axis] += padding
            described.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding))
        return PlacedBatch(jax.tree.unflatten(treedef, described), plan.slots)

    def describe_many(self, batch: PlacedBatch, number: int) -> PlacedBatch:
        """The result of `place_many` for several batches of the same shapes."""
        shardings = self.shardings(batch, stacked=True)

        def stacked(leaf, sharding):
            return jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(stacked, batch, shardings)

    def checked(self, batch: Any) -> Any:
        """A host batch as arrays, after all checks of `place`.

        Args:
            batch: A structure (tuple, list, dict, `None`) of arrays.

        Raises:
            ValueError: If `place` raises it.
        """
        leaves, treedef, _ = self.planned(batch)
        return jax.tree.unflatten(treedef, leaves)

    def trim(self, batch: PlacedBatch) -> Any:
        """Cuts a placed batch back to its true rows; call it inside the compiled program.

        Args:
            batch: A batch from `place`, or one of those that `place_many` stacked.

        Returns:
            The batch's structure of arrays, without the slots.
        """
        leaves, treedef = flatten(batch.data)
        return jax.tree.unflatten(
            treedef,
            [self._trim(leaf, slot) for leaf, slot in zip(leaves, batch.slots, strict=True)],
        )

    def sharding(self, axis: int | None, time: int | None = None) -> NamedSharding:
        """The sharding of an array whose dimension `axis` is the batch.

        Args:
            axis: The dimension, or `None` for an array without a batch, which is replicated.
            time: The dimension that is split over the sequence axis, or `None`.
        """
        entries: dict[int, Any] = {}
        if axis is not None and self.data_axes:
            entries[axis] = self.data_axes[0] if len(self.data_axes) == 1 else self.data_axes
        if time is not None:
            entries[time] = self.sequence_axis
        dimensions = range(max(entries, default=-1) + 1)
        return named_sharding(self.mesh, tuple(entries.get(d) for d in dimensions))

    def time(self, leaf: Any, axis: int | None) -> int | None:
        """The dimension of an array that the sequence axis splits, or `None`.

        Sequences are `(batch, time, features)`, tokens and masks `(batch, time)`.

        Args:
            leaf: The array.
            axis: Its batch dimension.
        """
        if self.sequence_axis is None or axis not in (0, 1) or isinstance(leaf, JAXSparse):
            return None
        tokens = leaf.ndim == 2 and np.dtype(leaf.dtype).kind in "iub"
        if leaf.ndim != 3 and not tokens:
            return None
        return None if leaf.shape[1 - axis] % self.mesh.shape[self.sequence_axis] else 1 - axis

    def log_if_whole(self, batch: Any, slots: Sequence[Slot]) -> None:
        """Warns once if the sequence axis splits no array of a batch.

        Args:
            batch: The batch.
            slots: The layouts of its arrays.
        """
        if self.sequence_axis is None or any(slot.time is not None for slot in slots):
            return
        ways = self.mesh.shape[self.sequence_axis]
        leaves = zip(element_names(batch), flatten(batch)[0], strict=True)
        shapes = ", ".join(f"{name} {np.shape(leaf)}" for name, leaf in leaves)
        log_once(
            f"the {ways} devices of the mesh axis {self.sequence_axis!r} compute the same: no "
            "array of the batch has a time that is divisible by their number, as (batch, time, "
            f"features) or as integers (batch, time): {shapes}",
            WARNING,
        )

    def shardings(self, batch: PlacedBatch, stacked: bool = False) -> PlacedBatch:
        """The shardings of a placed batch's arrays, in the structure of the batch.

        Args:
            batch: The batch.
            stacked: Whether these are several batches, stacked along a first dimension.
        """
        shardings = []
        for leaf, slot in zip(flatten(batch.data)[0], batch.slots, strict=True):
            dimensions = (slot.axis, slot.time)
            axis, time = (d if d is None or not stacked else d + 1 for d in dimensions)
            shardings.extend([self.sharding(axis, time)] * len(jax.tree.leaves(leaf)))
        return jax.tree.unflatten(jax.tree.structure(batch), shardings)

    def _trim(self, leaf, slot: Slot):
        if slot.rows is None or slot.axis is None:
            return leaf
        if not isinstance(leaf, jax.core.Tracer):
            return self._trimmed_outside(leaf, slot.axis, slot)
        if slot.filled is None:
            true = jax.lax.slice_in_dim(leaf, 0, slot.rows, axis=slot.axis)
        else:
            true = self._joined(leaf, slot.axis, slot.filled)
        return jax.lax.with_sharding_constraint(true, self.sharding(slot.axis, slot.time))

    def _trimmed_outside(self, leaf, axis: int, slot: Slot):
        """Trims outside of a program: `jax_debug_nans` runs a step operation by operation.

        With NumPy: if the rows already have a NaN, JAX would report that this slice produced it.
        """
        values = np.moveaxis(np.asarray(leaf), axis, 0)
        if slot.filled is None:
            true = values[: slot.rows]
        else:
            length = len(values) // len(slot.filled)
            parts = enumerate(slot.filled)
            true = np.concatenate([values[i * length : i * length + rows] for i, rows in parts])
        return jax.device_put(np.moveaxis(true, 0, axis), self._replicated)

    def _joined(self, leaf, axis: int, filled: tuple[int, ...]):
        # Gathered first: parts are filled unevenly, so the rows move between devices anyway.
        leaf = jax.lax.with_sharding_constraint(leaf, self._replicated)
        length = leaf.shape[axis] // len(filled)
        parts = [
            jax.lax.slice_in_dim(leaf, i * length, i * length + rows, axis=axis)
            for i, rows in enumerate(filled)
            if rows
        ]
        return jax.lax.concatenate(parts, axis)

    def planned(self, batch: Any) -> tuple[list, Any, PlacementPlan]:
        """The arrays of a host batch, their structure, and how they are placed."""
        leaves, treedef = flatten(batch)
        leaves = [leaf if isinstance(leaf, ARRAYS) else np.asarray(leaf) for leaf in leaves]
        # A sparse array is a leaf too, but replicated, unlike a dense one of its shape.
        key = (
            treedef,
            tuple((leaf.shape, leaf.dtype, isinstance(leaf, JAXSparse)) for leaf in leaves),
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(batch, leaves)
            if not any(isinstance(leaf, JAXSparse) for leaf in leaves):
                pairs = list(zip(leaves, [slot.axis for slot in plan.slots], strict=True))
                rows = next((leaf.shape[axis] for leaf, axis in pairs if axis is not None), 0)
                shapes = tuple(
                    tuple(n for d, n in enumerate(leaf.shape) if d != axis) for leaf, axis in pairs
                )
                others = shapes, treedef, tuple(leaf.dtype for leaf in leaves)
                plan = self._plans[key] = replace(plan, rows=rows, others=others)
        return leaves, treedef, plan

    def _make_plan(self, batch, leaves) -> PlacementPlan:
        names = element_names(batch)
        axes = axes_by_array(self.batch_axis, batch)
        slots, paddings = [], []
        first = None
        for name, axis, leaf in zip(names, axes, leaves, strict=True):
            if axis is None or leaf.ndim == 0 or isinstance(leaf, JAXSparse):
                check_numbers(name, leaf)
                slots.append(Slot(None))
                paddings.append(0)
                continue
            rows = checked_rows(name, axis, leaf)
            first = first or (name, rows)
            check_same_rows(first, name, rows, leaf)
            padding = -rows % self.num_shards
            slots.append(Slot(axis, rows if padding else None, time=self.time(leaf, axis)))
            paddings.append(padding)
        self.log_if_whole(batch, slots)
        shardings = tuple(self.sharding(slot.axis, slot.time) for slot in slots)
        return PlacementPlan(tuple(slots), tuple(paddings), shardings)
