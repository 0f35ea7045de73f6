"""Datasets and values, distributed over replicas for `strategy.run`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.checks import check_callable
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.input.batch_axis import flatten
from keras_tpu_dist.input.iterator import DeviceIterator
from keras_tpu_dist.input.own_input import OwnInput, Share
from keras_tpu_dist.input.position import InputPosition
from keras_tpu_dist.replica.blocks import own_replicas
from keras_tpu_dist.replica.input_context import InputContext, ValueContext
from keras_tpu_dist.replica.options import RunOptions, check_no_rows, pad_host
from keras_tpu_dist.replica.parts import place_parts
from keras_tpu_dist.replica.sources import agreed_length, batches_of, in_groups, in_step
from keras_tpu_dist.replica.stacked import stacked
from keras_tpu_dist.replica.values import PerReplica
from keras_tpu_dist.training.strategy import Strategy, StrategyPart


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
        self._running: DeviceIterator | None = None
        self._begin_at: InputPosition | None = None
        self._keeps_position = False

    def __iter__(self) -> Iterator:
        ahead = DeviceIterator(self._batches(), self._prefetch)
        if self._keeps_position:
            ahead.keep_states()
        if self._begin_at is not None:
            position, self._begin_at = self._begin_at, None
            ahead.begin_at(position)
            if position.made:
                ahead.skip(position.made)
        self._running = ahead
        while True:
            try:
                batch = ahead.take(self._place)
            except StopIteration:
                if self._running is ahead:
                    self._running = None
                return
            ahead.handed_out()
            yield batch

    def keep_position(self) -> None:
        """Has iterations note where in the source they are; `LoopCheckpoint` calls it."""
        self._keeps_position = True

    def position(self) -> InputPosition | None:
        """Where the iteration that runs is, or `None` between two; `LoopCheckpoint` calls it."""
        return None if self._running is None else self._running.position(self._running.made)

    def begin_at(self, position: InputPosition | None) -> None:
        """Makes the next iteration begin there; `LoopCheckpoint` calls it.

        Args:
            position: What `position` returned in another process.
        """
        self._begin_at = position

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

        Several processes give the same dataset each and transfer their own replicas' rows. Under
        `TPUStrategy(input="per_process")` each gives its own rows (`strategy.input_shard`), as to
        `fit`: they go to its own replicas, a step takes the next batch of every process, and all
        iterations end together.

        Args:
            dataset: An iterable of global batches (structures of arrays): a list, a generator, a
                `keras.utils.PyDataset`, a `tf.data.Dataset`, a torch `DataLoader`; or, with
                `batch_size`, an array or a structure of arrays to cut into batches along the
                strategy's `batch_axis`.
            options: The `RunOptions` that go to `run`: lengths are padded to buckets already here,
                before the transfer.
            batch_size: The global batch size, of all processes, where `dataset` is arrays.

        Returns:
            A `DistributedDataset`; its batches hold a `PerReplica` for each array.

        Raises:
            ValueError: If arrays come without `batch_size` or batches with it; while iterating,
                on all processes, if their batches do not fit together.
            PeerError: While iterating, if not all processes do.
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
        one_by_one = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        of_tensorflow = hasattr(dataset, "as_numpy_iterator")
        if not (isinstance(dataset, Iterable) or one_by_one or of_tensorflow):
            raise ValueError(
                message(
                    "A dataset is an iterable of batches, or arrays with batch_size.",
                    received={"dataset": dataset},
                    fix="Pass for example a list of batches, or a tf.data.Dataset.",
                )
            )
        own = self.runner.own_input
        batches, length = batches_of(dataset, batch_size, self.placer, own)
        return DistributedDataset(
            in_step(batches, self.placer, own),
            lambda batch: self._place_global(batch, options),
            self.runner.prefetch,
            agreed_length(length, own),
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable]
    ) -> DistributedDataset:
        """Distributes a dataset that is already in batches for one replica.

        Each step takes one batch for each replica, in order. If the dataset ends within a step,
        the replicas that are left get no rows.

        Several processes call the function each. By default there is one input pipeline, which
        all of them read; under `TPUStrategy(input="per_process")` there is one for each input
        shard, whose batches go to the replicas of its processes. A function that cuts its data by
        the context's `input_pipeline_id` of `num_input_pipelines` is right either way.

        Args:
            dataset_fn: From an `InputContext` to an iterable of batches of one replica's size
                (`context.get_per_replica_batch_size(global_batch_size)`).

        Returns:
            A `DistributedDataset`.
        """
        check_callable("distribute_datasets_from_function", dataset_fn=dataset_fn)
        check_attached(self, "distribute_datasets_from_function")
        own, number = self.runner.own_input, self.num_replicas_in_sync
        context = InputContext(num_replicas_in_sync=number)
        if own is not None:
            shard = own.shares.shard
            context = InputContext(shard.count, shard.index, number)
            # What has no batch axis is each replica's own here.
            own = OwnInput(own.shares, self.placer.axes, alike=False)
        batches, length = batches_of(dataset_fn(context), None, self.placer)
        each = number // context.num_input_pipelines
        together = in_step(batches, self.placer, own)
        return DistributedDataset(
            lambda: in_groups(together(), each),
            lambda parts: place_parts(parts, self),
            self.runner.prefetch,
            agreed_length(None if length is None else -(-length // each), own),
        )

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes per-replica values from a function called once for each replica.

        Each of several processes calls it for its own replicas, in the order of their numbers.

        Args:
            value_fn: From a `ValueContext` to a number, an array or a structure of them.

        Returns:
            The structure, with a `PerReplica` in place of each array.

        Raises:
            ValueError: If the values are no numbers or do not fit together.
            PeerError: If not all processes call it.

        Example:

        >>> import jax, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
        >>> strategy.distribute_values_from_function(lambda context: context.num_replicas_in_sync)
        PerReplica:{
          0: array(2, dtype=int32),
          1: array(2, dtype=int32)
        }
        """
        check_callable("distribute_values_from_function", value_fn=value_fn)
        check_attached(self, "distribute_values_from_function")
        number = self.num_replicas_in_sync
        made = {i: value_fn(ValueContext(i, number)) for i in own_replicas(self)}
        return stacked(made, self, "value_fn")

    def _place_global(self, batch: Any, options: RunOptions | None) -> Any:
        padded: list[tuple[int, int] | None] | None = None
        if options is not None and options.buckets is not None:
            host = batch.batch if isinstance(batch, Share) else batch
            host, padded = _bucketed(host, options)
            batch = replace(batch, batch=host) if isinstance(batch, Share) else host
        placed = self.placer.place(batch)
        leaves, treedef = flatten(placed.data)
        number = self.num_replicas_in_sync
        spread = []
        for array, slot, length in zip(leaves, placed.slots, padded or [None] * len(leaves)):
            if slot.axis is None or not array.ndim:
                spread.append(array)
                continue
            if length is not None:
                check_no_rows(length[0], slot.axis, array.shape)
            sizes = {} if length is None else {length[0]: (length[1],) * number}
            if slot.rows is not None:
                sizes[slot.axis] = slot.filled or _rows_of_each(slot.rows, number)
            spread.append(PerReplica(array, self, axis=slot.axis, sizes=sizes))
        return jax.tree.unflatten(treedef, spread)

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


def check_attached(strategy: Strategy, what: str) -> None:
    """Raises if a strategy's devices are only named, or of some of the processes.

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
    if 1 < strategy.num_hosts < jax.process_count():
        raise NotImplementedError(
            message(
                "Replica code runs in one process, or in all of them.",
                received=f"{what} on a mesh of {strategy.num_hosts} of {jax.process_count()} "
                "processes.",
                fix="Make the strategy of all devices, or of this process's: "
                "TPUStrategy(devices=jax.local_devices()).",
            )
        )
