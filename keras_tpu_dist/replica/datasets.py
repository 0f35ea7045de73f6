"""Datasets and values, distributed over replicas for `strategy.run`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.replica.options import RunOptions, pad_host
from keras_tpu_dist.replica.sources import batches_of, in_groups
from keras_tpu_dist.replica.values import PerReplica, stack
from keras_tpu_dist.training.batch_axis import flatten
from keras_tpu_dist.training.host_arrays import padded
from keras_tpu_dist.training.iterator import DeviceIterator
from keras_tpu_dist.training.strategy import Strategy, StrategyPart


@dataclass(frozen=True)
class InputContext:
    """What a function that makes a dataset knows about where its batches go.

    Args:
        num_input_pipelines: How many processes read input.
        input_pipeline_id: The number of this one.
        num_replicas_in_sync: The number of replicas.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> ktd.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(32)
    8
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows each replica gets of a global batch.

        Args:
            global_batch_size: Rows of all replicas together.

        Raises:
            ValueError: If they do not divide by the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                message(
                    "The global batch size must be divisible by the number of replicas.",
                    received={
                        "global_batch_size": global_batch_size,
                        "num_replicas_in_sync": self.num_replicas_in_sync,
                    },
                    fix="Choose a multiple of it; distribute_dataset takes batches of any size.",
                )
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """What a function that makes one replica's value knows.

    Args:
        replica_id_in_sync_group: The replica's number, a Python integer.
        num_replicas_in_sync: The number of replicas.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> context = ktd.ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    >>> context.replica_id_in_sync_group / context.num_replicas_in_sync
    0.5
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class DistributedDataset:
    """Batches with a part for each replica; iterate over it, as often as its source allows.

    Args:
        batches: Gives an iterator over host batches.
        place: Puts a host batch on the mesh.
        prefetch: Batches held ready on the devices.
        length: The number of batches, if known.

    Example:

    >>> import jax, numpy as np, keras_tpu_dist as ktd
    >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    >>> dataset = strategy.distribute_dataset(np.arange(8), batch_size=4)
    >>> isinstance(dataset, ktd.DistributedDataset), len(dataset)
    (True, 2)
    """

    def __init__(
        self,
        batches: Callable[[], Iterator],
        place: Callable[[Any], Any],
        prefetch: int,
        length: int | None = None,
    ):
        self._batches = batches
        self._place = place
        self._prefetch = prefetch
        self._length = length

    def __iter__(self) -> Iterator:
        ahead = DeviceIterator(self._batches(), self._prefetch)
        while True:
            try:
                batch = ahead.take(self._place)
            except StopIteration:
                return
            yield batch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(
                message(
                    "The number of batches is known where the source knows it.",
                    received="a distributed dataset over a source without len().",
                    fix="Count while iterating.",
                )
            )
        return self._length


class DistributedInput(StrategyPart):
    """The part of `TPUStrategy` that gives each replica its input."""

    def distribute_dataset(
        self, dataset: Any, options: RunOptions | None = None, *, batch_size: int | None = None
    ) -> DistributedDataset:
        """Splits each global batch of a dataset over the replicas.

        A batch of B rows gives each of N replicas ceil(B / N) consecutive rows and the last ones
        fewer, or none, as `tf.distribute` does; pass `RunOptions(dynamic_batch=True)` to `run`
        for such a batch. Elements that the strategy's `batch_axis` declares without a batch, and
        scalars, go to all replicas whole.

        Args:
            dataset: An iterable of global batches (structures of arrays): a list, a generator, a
                `keras.utils.PyDataset`, a `tf.data.Dataset`, a torch `DataLoader`; or, with
                `batch_size`, an array or a structure of arrays to cut into batches.
            options: The `RunOptions` that go to `run`: lengths are padded to buckets already here,
                before the transfer.
            batch_size: The global batch size where `dataset` is arrays.

        Returns:
            A `DistributedDataset`; its batches hold a `PerReplica` for each array.

        Raises:
            ValueError: If arrays come without `batch_size` or batches with it.
            TypeError: If `options` is something else.

        Example:

        >>> import jax, numpy as np, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
        >>> for x in strategy.distribute_dataset(np.arange(4), batch_size=2):
        ...     print(strategy.run(lambda x: x * 2, args=(x,)))
        PerReplica:{
          0: array([0], dtype=int32),
          1: array([2], dtype=int32)
        }
        PerReplica:{
          0: array([4], dtype=int32),
          1: array([6], dtype=int32)
        }
        """
        check_attached(self, "distribute_dataset")
        if options is not None and not isinstance(options, RunOptions):
            raise TypeError(
                message(
                    "options of distribute_dataset are those of run.",
                    received={"options": type(options).__name__},
                    fix="Pass a keras_tpu_dist.RunOptions, or nothing; how many batches are held "
                    "ready is TPUStrategy(prefetch=...).",
                )
            )
        batches, length = batches_of(dataset, batch_size)
        return DistributedDataset(
            batches, lambda batch: self._place_global(batch, options), self.runner.prefetch, length
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable]
    ) -> DistributedDataset:
        """Distributes a dataset that is already in batches for one replica.

        Each step takes one batch for each replica, in order. If the dataset ends within a step,
        the replicas that are left get no rows.

        Args:
            dataset_fn: From an `InputContext` to an iterable of batches of one replica's size
                (`context.get_per_replica_batch_size(global_batch_size)`).

        Returns:
            A `DistributedDataset`.
        """
        check_attached(self, "distribute_datasets_from_function")
        context = InputContext(jax.process_count(), jax.process_index(), self.num_replicas_in_sync)
        batches, length = batches_of(dataset_fn(context), None)
        steps = None if length is None else -(-length // self.num_replicas_in_sync)
        return DistributedDataset(
            lambda: in_groups(batches(), self.num_replicas_in_sync),
            self._place_parts,
            self.runner.prefetch,
            steps,
        )

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes per-replica values from a function called once for each replica.

        Args:
            value_fn: From a `ValueContext` to a number, an array or a structure of them.

        Returns:
            The structure, with a `PerReplica` in place of each array.

        Raises:
            ValueError: If the values are no numbers or do not fit together.

        Example:

        >>> import jax, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
        >>> strategy.distribute_values_from_function(lambda context: context.num_replicas_in_sync)
        PerReplica:{
          0: array(2, dtype=int32),
          1: array(2, dtype=int32)
        }
        """
        check_attached(self, "distribute_values_from_function")
        number = self.num_replicas_in_sync
        made = [jax.tree.flatten(value_fn(ValueContext(i, number))) for i in range(number)]
        if any(treedef != made[0][1] for _, treedef in made):
            raise ValueError(
                message(
                    "value_fn must return the same structure for all replicas.",
                    received={"structures": sorted({str(treedef) for _, treedef in made})},
                    fix="Return the same keys and lengths for each replica.",
                )
            )
        leaves = [stack(column, self, "value_fn") for column in zip(*(row for row, _ in made))]
        return jax.tree.unflatten(made[0][1], leaves)

    def _place_global(self, batch: Any, options: RunOptions | None) -> Any:
        padded: list[tuple[int, int] | None] | None = None
        if options is not None and options.buckets is not None:
            batch, padded = _bucketed(batch, options)
        placed = self.placer.place(batch)
        leaves, treedef = flatten(placed.data)
        number = self.num_replicas_in_sync
        spread = []
        for array, slot, length in zip(leaves, placed.slots, padded or [None] * len(leaves)):
            if slot.axis is None or not array.ndim:
                spread.append(array)
                continue
            sizes = {} if length is None else {length[0]: (length[1],) * number}
            if slot.rows is not None:
                sizes[slot.axis] = _rows_of_each(slot.rows, number)
            spread.append(PerReplica(array, self, axis=slot.axis, sizes=sizes))
        return jax.tree.unflatten(treedef, spread)

    def _place_parts(self, parts: list) -> Any:
        columns, treedef, axes = _columns(parts, self.placer)
        leaves = [self._place_column(column, axis) for column, axis in zip(columns, axes)]
        return jax.tree.unflatten(treedef, leaves)

    def _place_column(self, arrays: list, axis: int | None) -> PerReplica:
        """One array per replica, of which the last ones may be missing."""
        missing = self.num_replicas_in_sync - len(arrays)
        if axis is None:
            return stack([*arrays, *[np.zeros_like(arrays[0])] * missing], self, "dataset_fn")
        true = (*(array.shape[axis] for array in arrays), *(0,) * missing)
        empty = np.zeros_like(arrays[0]).take([], axis)
        longer = [padded(a, axis, max(true)) for a in [*arrays, *[empty] * missing]]
        joined = jax.device_put(np.concatenate(longer, axis), self.placer.sharding(axis))
        sizes = {axis: true} if len(set(true)) > 1 else {}
        return PerReplica(joined, self, axis=axis, sizes=sizes)

    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function


def _rows_of_each(rows: int, number: int) -> tuple[int, ...]:
    each = -(-rows // number)
    return tuple(min(max(rows - i * each, 0), each) for i in range(number))


def _bucketed(batch: Any, options: RunOptions) -> tuple[Any, list[tuple[int, int] | None]]:
    """A host batch padded to its buckets, and each array's varying dimension with its length."""
    leaves, treedef = jax.tree.flatten(batch)
    leaves = [np.asarray(leaf) for leaf in leaves]
    ranks = [leaf.ndim for leaf in leaves]
    axes = options.axes((batch,), ranks) if _one_entry(options) else options.axes(batch, ranks)
    padded = [
        leaf if axis is None else pad_host(leaf, axis, options, "a batch")
        for leaf, axis in zip(leaves, axes)
    ]
    lengths = [
        None if axis is None else (axis, leaf.shape[axis]) for leaf, axis in zip(leaves, axes)
    ]
    return jax.tree.unflatten(treedef, padded), lengths


def _one_entry(options: RunOptions) -> bool:
    """Whether `axis` speaks of `args` of one element, the batch, as `run(fn, (batch,))` has it."""
    return not isinstance(options.axis, tuple) or len(options.axis) == 1


def _columns(parts: list, placer) -> tuple[list, Any, list]:
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
    return [list(column) for column in zip(*arrays)], treedef, axes


def check_attached(strategy: Strategy, what: str) -> None:
    """Raises if a strategy's devices are only named, or of several processes.

    Args:
        strategy: The strategy.
        what: The method that needs devices, for the error.
    """
    if strategy.topology is not None:
        raise RuntimeError(
            message(
                "A strategy for a slice that is only named can compile a model, not run code.",
                received=f"{what} with topology={strategy.topology.name!r}.",
                fix="Leave `topology` out to run on the devices that are here.",
            )
        )
    if strategy.num_hosts > 1:
        raise NotImplementedError(
            message(
                "Replica code runs in one process for now.",
                received=f"{what} on a mesh of {strategy.num_hosts} processes.",
                fix="Train with model.fit, which runs over all of them, or make a strategy of "
                "this process's devices: TPUStrategy(devices=jax.local_devices()).",
            )
        )
