"""What a distributed dataset reads: host batches of arrays, of datasets, and of functions."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.input.batch_axis import flatten
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.input.host_arrays import Copies
from keras_tpu_dist.input.own_input import OwnInput
from keras_tpu_dist.input.same_input import compared


def in_groups(batches: Iterator, number: int) -> Iterator[list]:
    """Batches in lists of `number`; the last list may be shorter.

    Args:
        batches: Yields one batch after the other, each for one replica.
        number: The number of replicas.
    """
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
    """A function that starts an iteration whose steps run in all processes together.

    Args:
        batches: Starts an iteration over this process's host batches.
        placer: The strategy's placer.
        own: How the processes agree on their rows; `None` if all have the same.
    """
    if own is not None:
        return lambda: own.agreed(batches(), None, may_be_empty=True)
    return batches if placer.is_local else lambda: compared(batches())


def agreed_length(length: int | None, own: OwnInput | None) -> int | None:
    """The number of steps that all processes run, if all know theirs.

    Args:
        length: The number in this process.
        own: See `in_step`.
    """
    return length if own is None else own.length(length, ragged=False)[0]


def batches_of(
    dataset: Any, batch_size: int | None, placer: BatchPlacer, own: OwnInput | None = None
) -> tuple[Callable[[], Iterator], int | None]:
    """A function that starts an iteration over host batches, and their number if known.

    Args:
        dataset: An iterable of batches; or an array, or a tuple or dict of arrays, to divide.
        batch_size: The rows of a batch, if `dataset` is arrays (the last batch may have fewer);
            `None` for an iterable of batches.
        placer: The strategy's placer, which knows the batch dimension of every array.
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
