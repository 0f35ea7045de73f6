"""Datasets and values, distributed over replicas for `strategy.run`."""

import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist.common.checks import (
    NaturalInt,
    PositiveInt,
    is_count,
    known_words,
    knows_words,
)
from keras_tpu_dist.common.errors import message, runtime_error, type_error, value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.tensorflow_names import TensorFlowNames, of_value
from keras_tpu_dist.input.batch_axis import flatten
from keras_tpu_dist.input.batches import BatchPlacer, Slot
from keras_tpu_dist.input.host_arrays import Copies, padded
from keras_tpu_dist.input.iterator import DeviceIterator, in_stacks
from keras_tpu_dist.input.own_input import OwnInput, ShardBatch
from keras_tpu_dist.input.position import (
    InputPosition,
    position_before_first,
    say_begins_anew,
    set_random_numbers,
)
from keras_tpu_dist.input.same_input import compared
from keras_tpu_dist.replica.blocks import own_replicas
from keras_tpu_dist.replica.run_options import RunOptions, check_no_rows, pad_host
from keras_tpu_dist.replica.values import (
    DescribedValue,
    HostParts,
    PerReplica,
    Steps,
    host_parts,
    in_single_steps,
    place_steps,
    stack_structures,
)
from keras_tpu_dist.training.protocol import Strategy

logger = logging.getLogger("keras_tpu_dist")


@knows_words
@dataclass(frozen=True)
class InputContext:
    """The arguments for a function that creates a dataset for `strategy.run`.

    With `TPUStrategy(input="per_process")` there is one pipeline for every input shard; otherwise
    there is one that all processes read.

    Args:
        num_input_pipelines: The number of different pipelines: `strategy.input_shard.count`.
        input_pipeline_id: The number of this process's pipeline: `strategy.input_shard.index`.
        num_replicas_in_sync: The number of replicas in all processes.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> ktd.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(32)
    8
    """

    num_input_pipelines: PositiveInt = 1
    input_pipeline_id: NaturalInt = 0
    num_replicas_in_sync: PositiveInt = 1

    @known_words
    def get_per_replica_batch_size(self, global_batch_size: PositiveInt) -> int:
        """The rows of a global batch that one replica gets.

        Args:
            global_batch_size: The rows of all replicas together.

        Raises:
            ValueError: If they are not divisible by the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise value_error(
                "The global batch size must be divisible by the number of replicas.",
                received={"global_batch_size": global_batch_size}
                | {"num_replicas_in_sync": self.num_replicas_in_sync},
                fix="Choose a multiple of it; distribute_dataset takes batches of any size.",
            )
        return global_batch_size // self.num_replicas_in_sync


@knows_words
@dataclass(frozen=True)
class ValueContext:
    """The arguments for a function that creates one replica's value.

    Args:
        replica_id_in_sync_group: The replica's number, a Python integer.
        num_replicas_in_sync: The number of replicas.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> context = ktd.ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    >>> context.replica_id_in_sync_group / context.num_replicas_in_sync
    0.5
    """

    replica_id_in_sync_group: NaturalInt = 0
    num_replicas_in_sync: PositiveInt = 1


class DistributedDataset(TensorFlowNames):
    """Batches with a part for every replica. You can iterate as often as the source allows.

    Args:
        batches: Returns an iterator over host batches.
        place: Transfers a host batch to the mesh.
        prefetch: The number of batches to transfer ahead.
        length: The number of batches, if known.
        place_many: Transfers several host batches, stacked; returns `None` if their shapes differ.
        batch_size: The rows of a batch, if the source is arrays.
        reads_once: Whether `batches` returns the same iterator each time, such as a generator.

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
        place_many: Callable[[list], Any] = lambda batches: None,
        batch_size: int | None = None,
        reads_once: bool = False,
    ):
        self._batches = batches
        self._place = place
        self._place_many = place_many
        self._prefetch = prefetch
        self._length = length
        self._batch_size = batch_size
        self._reads_once = reads_once
        # What was read of a source that can only be read once: all iterations share it.
        self._once: DeviceIterator | None = None
        # Iterations that were begun and have not ended, in the order in which they were begun, with
        # what they read. Those that were left have no object any more.
        self._iterations: list[tuple[weakref.ref, DeviceIterator]] = []
        # The position that a restore asked for in `begin_at`, and the iteration that goes there. If
        # that one is garbage by then, the next one that is begun does.
        self._seek: tuple[InputPosition | None, Callable[[], Any]] | None = None
        self._keeps_position = False

    def __iter__(self) -> "DistributedIterator":
        return DistributedIterator(self)

    def _begun(self, iterator: "DistributedIterator") -> DeviceIterator:
        """Starts an iteration over the source."""
        self._iterations = [
            iteration for iteration in self._iterations if iteration[0]() is not None
        ]
        position = None
        if self._seek is not None and self._seek[1]() in (None, iterator):
            position, self._seek = self._seek[0], None
        ahead = self._once
        if ahead is None:
            ahead = DeviceIterator(self._batches(), self._prefetch)
            if self._keeps_position:
                ahead.progress.keep_states()
            if position is not None:
                ahead.begin_at(position)
                skipped = ahead.skip(position.made)
                if skipped < position.made and not self._reads_once:
                    say_begins_anew(position, {"batches": skipped})
                    return self._begun(iterator)
                if skipped < position.made:
                    logger.warning(
                        "nothing is left to train on: the checkpoint was saved after %d batches of "
                        "a generator, which has only %d now",
                        position.made,
                        skipped,
                    )
        elif position is not None:
            # Some of it was read in this process, and some may be on the devices already.
            while ahead.progress.made < position.made:
                ahead.split_ahead(1, in_single_steps)
                if ahead.take(1, self._place) is None:
                    break
        if self._reads_once:
            self._once = ahead
        self._iterations.append((weakref.ref(iterator), ahead))
        return ahead

    def _ended(self, iterator: "DistributedIterator") -> None:
        """Notes that an iteration has come to the end of the source."""
        self._iterations = [
            iteration for iteration in self._iterations if iteration[0]() is not iterator
        ]

    def keep_position(self) -> None:
        """Lets iterations record their position in the source; `LoopCheckpoint` calls it."""
        self._keeps_position = True

    def position(self) -> InputPosition:
        """The position of training in the source; `LoopCheckpoint` calls it.

        If a second pass was begun within another one, such as an evaluation, it is that of the
        outer one.
        """
        if self._seek is not None:
            return self._seek[0] or position_before_first(self._epoch)
        ahead = self._once or (self._iterations[0][1] if self._iterations else None)
        if ahead is None:
            return position_before_first(self._epoch)
        if self._once is None and len(self._open_iterations) > 1:
            log_once(
                "several iterations over one distributed dataset are under way: the first that was "
                "begun is taken for that of training. If it is not, drop its iterator (`del it`) "
                "before you save or restore",
                logging.WARNING,
            )
        progress = ahead.progress
        return replace(progress.position(progress.made), epoch=self._epoch)

    def check_goes_to(self, position: InputPosition | None) -> None:
        """Raises a `ValueError` if the source cannot be read from a position.

        Args:
            position: See `begin_at`.
        """
        made = 0 if self._once is None else self._once.progress.made
        wanted = 0 if position is None else position.made
        if wanted < made:
            raise value_error(
                "A generator cannot go back to the position of a checkpoint.",
                received=f"a dataset over an iterator, of which {made} batches were used, and "
                f"a checkpoint after {wanted}.",
                fix="Distribute batches that can be read again, or leave the dataset out of "
                "LoopCheckpoint, to go on with the generator's next batch.",
            )

    def begin_at(self, position: InputPosition | None) -> None:
        """Moves training to a position in the source; `LoopCheckpoint` calls it.

        An iteration that is under way goes on from there; if there is none, the next one begins
        there.

        Args:
            position: A result of `position`, maybe from another process.
        """
        if position is not None:
            position = position.in_epoch(self._epoch)
            if not position.made:
                # Now, not with the first batch: code before it may draw numbers too.
                set_random_numbers(position.now)
                position = None
        living = self._open_iterations
        # The other ones, such as an evaluation around this call, go on where they are.
        self._iterations = [
            iteration for iteration in self._iterations if iteration[0]() in living[1:]
        ]
        self._seek = position, lambda: None
        if living:
            self._seek = position, weakref.ref(living[0])
            living[0]._ahead = None

    @property
    def _open_iterations(self) -> list["DistributedIterator"]:
        """The iterations that were begun, and were neither left nor have ended."""
        return [iterator for running, _ in self._iterations if (iterator := running()) is not None]

    @property
    def _epoch(self) -> dict[str, int]:
        found = {"steps": self._length, "batches": self._length, "rows": self._batch_size}
        return {name: number for name, number in found.items() if number is not None}

    def __len__(self) -> int:
        if self._length is None:
            raise type_error(
                "The number of batches is only known if the source knows it.",
                received="a distributed dataset over a source without len().",
                fix="Count them while you iterate.",
            )
        return self._length


class DistributedIterator(TensorFlowNames):
    """One iteration over a distributed dataset, of which `strategy.run` takes several steps."""

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset
        self._ahead: DeviceIterator | None = None

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> Any:
        launch = self.take(1)
        if launch is None:
            raise StopIteration
        # Before the user's code runs.
        self.read_ahead(1)
        return launch[0]

    def take(self, steps: int, alike: bool = True) -> tuple[Any, int] | None:
        """The batches of the next launch.

        Args:
            alike: Whether to stack batches of one shape, to launch them together.

        Returns:
            A batch and 1; or a batch with `Steps` instead of arrays, and their number; `None` at
            the end.
        """
        if self._ahead is None:
            # Not earlier: a checkpoint may be restored in the meantime.
            self._ahead = self._dataset._begun(self)
        self._ahead.split_ahead(steps if alike else 1, in_single_steps)
        launch = self._ahead.take(steps, self._dataset._place, self._several(steps, alike))
        if launch is None:
            self._dataset._ended(self)
        return launch

    def read_ahead(self, steps: int, alike: bool = True) -> None:
        """Reads and transfers the next batches while the devices work."""
        if self._ahead is not None:
            place = self._dataset._place
            self._ahead.read_ahead(steps, place, self._several(steps, alike))

    def _several(self, steps: int, alike: bool) -> Callable[[list], Iterator] | None:
        place, place_many = self._dataset._place, self._dataset._place_many
        if steps == 1:
            return None
        return lambda batches: in_stacks(batches, steps if alike else 1, place, place_many)


def distribute_dataset(
    strategy: Strategy, dataset: Any, options: RunOptions | None, batch_size: int | None
) -> DistributedDataset:
    """See `TPUStrategy.distribute_dataset`."""
    check_attached(strategy, "distribute_dataset")
    if options is not None and not isinstance(options, RunOptions):
        raise type_error(
            "distribute_dataset takes the same options as run.",
            received={"options": type(options).__name__},
            fix=of_value(options)
            or "Pass a keras_tpu_dist.RunOptions, or nothing; to set how many batches are "
            "transferred ahead, write TPUStrategy(prefetch=...).",
        )
    own = strategy.runner.own_input
    batches, length = batches_of(dataset, batch_size, strategy.placer, own)
    return DistributedDataset(
        in_step(batches, strategy.placer, own),
        lambda batch: _place_global(strategy, batch, options),
        strategy.runner.prefetch,
        agreed_length(length, own),
        lambda several: _place_many_global(strategy, several, options),
        batch_size,
        reads_once(dataset),
    )


def distribute_datasets_from_function(
    strategy: Strategy, dataset_fn: Callable[[InputContext], Iterable]
) -> DistributedDataset:
    """See `TPUStrategy.distribute_datasets_from_function`."""
    check_attached(strategy, "distribute_datasets_from_function")
    own, number = strategy.runner.own_input, strategy.num_replicas_in_sync
    context = InputContext(num_replicas_in_sync=number)
    if own is not None:
        shard = own.shards.shard
        context = InputContext(shard.count, shard.index, number)
        # Here, every replica has its own arrays without a batch axis.
        own = OwnInput(own.shards, strategy.placer.axes, alike=False)
    dataset = dataset_fn(context)
    batches, length = batches_of(dataset, None, strategy.placer)
    each = number // context.num_input_pipelines
    together = in_step(batches, strategy.placer, own)
    return DistributedDataset(
        lambda: in_groups(together(), each),
        lambda parts: place_parts(parts, strategy),
        strategy.runner.prefetch,
        agreed_length(None if length is None else -(-length // each), own),
        lambda several: place_parts_of_steps(several, strategy),
        reads_once=reads_once(dataset),
    )


def distribute_values_from_function(
    strategy: Strategy, value_fn: Callable[[ValueContext], Any]
) -> Any:
    """See `TPUStrategy.distribute_values_from_function`."""
    check_attached(strategy, "distribute_values_from_function")
    number = strategy.num_replicas_in_sync
    made = {i: value_fn(ValueContext(i, number)) for i in own_replicas(strategy)}
    return stack_structures(made, strategy, "value_fn")


def _place_global(strategy: Strategy, batch: Any, options: RunOptions | None) -> Any:
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


def _place_many_global(strategy: Strategy, batches: list, options: RunOptions | None) -> Any:
    if options is not None and options.buckets is not None:
        return None  # their lengths may differ
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


def check_attached(strategy: Strategy, what: str) -> None:
    """Raises if a strategy has no attached devices, or those of only some of the processes."""
    if strategy.topology is not None:
        raise runtime_error(
            "A strategy for a slice without its chips can compile a model, but not run code.",
            received=f"{what} with topology={strategy.topology.name!r}.",
            fix="Leave `topology` out to run on the attached devices.",
        )
    if 1 < strategy.num_hosts < jax.process_count():
        raise NotImplementedError(
            message(
                "Replica code runs in one process, or in all of them.",
                received=f"{what} on a mesh of {strategy.num_hosts} of {jax.process_count()} "
                "processes.",
                fix="Build the strategy on all devices, or on jax.local_devices().",
            )
        )


def in_groups(batches: Iterator, number: int) -> Iterator[list]:
    """Batches in lists of `number`; the last list may be shorter."""
    group: list = []
    for batch in batches:
        group.append(batch)
        if len(group) == number:
            yield group
            group = []
    if group:
        yield group


def in_step(
    batches: Callable[[], Iterator], placer: BatchPlacer, own: OwnInput | None
) -> Callable[[], Iterator]:
    """A function that starts an iteration whose steps run in all processes together."""
    if own is not None:
        return lambda: own.agreed(batches(), None, may_be_empty=True)
    return batches if placer.is_local else lambda: compared(batches())


def agreed_length(length: int | None, own: OwnInput | None) -> int | None:
    """The number of steps that all processes run, if all know theirs."""
    return length if own is None else own.length(length, ragged=False)[0]


def batches_of(
    dataset: Any, batch_size: int | None, placer: BatchPlacer, own: OwnInput | None = None
) -> tuple[Callable[[], Iterator], int | None]:
    """A function that starts an iteration over host batches, and their number if known.

    Args:
        dataset: An iterable of batches; or an array, or a tuple or dict of arrays, to divide.
        batch_size: The rows of a batch, if `dataset` is arrays (the last batch may have fewer);
            `None` for an iterable of batches.
        own: Given if arrays are this process's rows, of which it provides its part of `batch_size`,
            and may have none.
    """
    arrays = _is_arrays(dataset)
    one_by_one = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    of_tensorflow = hasattr(dataset, "as_numpy_iterator")
    is_read = any([isinstance(dataset, Iterable), one_by_one, of_tensorflow])
    if arrays != (batch_size is not None) or not is_read:
        raise value_error(
            "A dataset to distribute is an iterable of global batches, or arrays with a "
            "batch_size.",
            received={"dataset": type(dataset).__name__, "batch_size": batch_size},
            fix="Write distribute_dataset((x, y), batch_size=32), or distribute_dataset(batches).",
        )
    if batch_size is not None:
        return _cut(dataset, batch_size, placer, own)
    # Copied: a source may write the next batch into the same arrays, while this one is on its way
    # to the devices, or waits for others to be launched with.
    if isinstance(dataset, keras.utils.PyDataset):
        return lambda: Copies(_py_dataset(dataset)), dataset.num_batches
    try:
        length = len(dataset)
    except TypeError:
        length = None
    if of_tensorflow:
        return lambda: iter(dataset.as_numpy_iterator()), length
    return lambda: Copies(iter(dataset)), length


def reads_once(dataset: Any) -> bool:
    """Whether a dataset is a generator or another of Python's own iterators: they never begin anew.

    An `__iter__` in Python may let an iterator begin again.
    """
    return isinstance(dataset, Iterator) and not inspect.isfunction(type(dataset).__iter__)


def _is_arrays(dataset) -> bool:
    if hasattr(dataset, "__array__"):
        return True
    if isinstance(dataset, dict):
        return all(_is_arrays(value) for value in dataset.values())
    # A list of arrays is a list of batches; a tuple of arrays is (x, y).
    return isinstance(dataset, tuple) and bool(dataset) and all(map(_is_arrays, dataset))


def _cut(
    arrays: Any, batch_size: int, placer: BatchPlacer, own: OwnInput | None
) -> tuple[Callable[[], Iterator], int]:
    axes = placer.axes(arrays)
    leaves, treedef = flatten(arrays)
    leaves = [np.asarray(leaf) for leaf in leaves]
    # Arrays without a batch are whole in every batch.
    split = [(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
    rows = {leaf.shape[axis] if leaf.ndim > axis else 0 for leaf, axis in split}
    empty = 0 in rows and (own is None or any(leaf.ndim <= axis for leaf, axis in split))
    if len(rows) != 1 or empty or not is_count(batch_size, 1):
        raise value_error(
            "Arrays to divide into batches must have the same number of rows, at least 1, "
            "and the batch_size must be a positive integer.",
            received={"shapes": [leaf.shape for leaf in leaves], "batch_size": batch_size},
            fix="Give all arrays the same number of rows.",
        )
    total, size = rows.pop(), batch_size if own is None else own.shards.of(batch_size)
    starts = range(0, total, size)

    def batches():
        for start in starts:
            here = slice(start, start + size)
            rows = [
                leaf if axis is None else leaf[(*(slice(None),) * axis, here)]
                for leaf, axis in zip(leaves, axes, strict=True)
            ]
            yield jax.tree.unflatten(treedef, rows)

    return batches, len(starts)


def _py_dataset(dataset: Any) -> Iterator:
    dataset.on_epoch_begin()
    indices: Iterable[int] = itertools.count()
    if dataset.num_batches is not None:
        indices = range(dataset.num_batches)
    for index in indices:
        yield dataset[index]
    dataset.on_epoch_end()


def place_parts(parts: list, strategy: Strategy) -> Any:
    """Transfers the batches of one step.

    Args:
        parts: One batch for every replica, in order; or one `ShardBatch` for every replica of a
            process. Batches of the last replicas may be missing.
    """
    return jax.tree.map(lambda parts: parts.placed(strategy), _host_parts(parts, strategy))


def place_parts_of_steps(steps: list, strategy: Strategy) -> Any:
    """Transfers the batches of several steps at once.

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
