"""The seam to Keras's input: whose dataset is split by whom, and the count of an epoch's steps."""

import inspect
from typing import Any

import keras
import numpy
from keras.src.trainers.data_adapters import is_grain_dataset
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from keras_tpu_dist._keras.seam import Replacement, declare
from keras_tpu_dist._keras.trainer import active_strategy, is_strategy

_NOTHING = object()
_ONE_ROW = numpy.zeros((1, 1))
# Keras's own, of `fit`.
_DEFAULT_BATCH_SIZE = 32


def _read_dataset(stock, adapter, dataset, class_weight=None, distribution=None):
    ours = is_strategy(distribution)
    stock(adapter, dataset, class_weight=class_weight, distribution=None if ours else distribution)


def _own_part(stock, iterator, *args, **kwargs):
    strategy = active_strategy()
    own_input = None if strategy is None else strategy.runner.own_input
    if own_input is None:
        stock(iterator, *args, **kwargs)
        return
    bound = inspect.signature(stock).bind(iterator, *args, **kwargs)
    given = bound.arguments
    x, empty = given["x"], False
    if can_convert_arrays((x, given.get("y"), given.get("sample_weight"))):
        sizes = given.get("batch_size"), given.get("steps_per_epoch")
        given["batch_size"] = _own_batch_size(own_input, x, *sizes)
    elif inspect.isgenerator(x):
        # Keras refuses a generator without any batch.
        given["x"], empty = _peeked(x)
    elif is_grain_dataset(x):
        # The adapter takes the shapes from the first batches.
        empty = next(iter(x), _NOTHING) is _NOTHING
    given["x"] = _ONE_ROW if empty else given["x"]
    stock(*bound.args, **bound.kwargs)
    if empty:
        iterator.data_adapter = _NoBatches()
    iterator.data_adapter = _AgreedLength(iterator.data_adapter, own_input)
    iterator._num_batches = iterator.data_adapter.num_batches


def _own_batch_size(own_input, x, batch_size, steps_per_epoch) -> int:
    if batch_size is None and steps_per_epoch is not None:
        # As Keras has it: all rows in that many steps.
        return max(-(-len(keras.tree.flatten(x)[0]) // steps_per_epoch), 1)
    return own_input.shares.of(_DEFAULT_BATCH_SIZE if batch_size is None else batch_size)


def _peeked(generator: Any) -> tuple[Any, bool]:
    """A generator that yields the same, and whether that is nothing."""
    first = next(generator, _NOTHING)

    def again():
        if first is not _NOTHING:
            yield first
            yield from generator

    return again(), first is _NOTHING


class _NoBatches:
    """The data adapter of an input without any batch."""

    num_batches = None
    has_partial_batch = False

    def get_jax_iterator(self):
        return iter(())

    def on_epoch_begin(self):
        """Nothing to prepare."""

    def on_epoch_end(self):
        """Nothing to put away."""


class _AgreedLength:
    """A data adapter that says how many batches the longest input of all processes has."""

    def __init__(self, adapter: Any, own_input: Any):
        self._adapter = adapter
        self.num_batches, self.has_partial_batch = own_input.length(
            adapter.num_batches, ends_ragged(adapter)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def ends_ragged(data_adapter: Any) -> bool:
    """Whether the last batch of an input is known to be smaller than the others.

    Args:
        data_adapter: Keras's adapter of the input.
    """
    try:
        return bool(data_adapter.has_partial_batch)
    except NotImplementedError:
        return False  # a PyDataset, which does not know


def is_users_code(data_adapter: Any) -> bool:
    """Whether batches are made by code of the user's: a generator or a `PyDataset`.

    Args:
        data_adapter: Keras's adapter of the input.

    Public replacement: none; the adapter is what is left of the input.
    """
    stock = getattr(data_adapter, "_adapter", data_adapter)
    return isinstance(stock, (GeneratorDataAdapter, PyDatasetAdapter))


def uncount_steps(epoch_iterator: EpochIterator, steps: int, ran_out: bool) -> None:
    """Tells an epoch's iterator of steps that it counted and that were not made.

    Keras counts `steps_per_execution` for each launch, also for one that was cut short; and it
    learns that an input of unknown length ran out from a launch without any batch, of which there
    is none after the last of an epoch.
    Public replacement: none.

    Args:
        epoch_iterator: The iterator of the epoch under way.
        steps: How many of the steps that it counted were not made.
        ran_out: Whether the launch was the epoch's last one, cut short by the end of the input.
    """
    seen: Any = epoch_iterator._steps_seen
    epoch_iterator._steps_seen = seen - steps
    if ran_out and epoch_iterator._num_batches is None:
        epoch_iterator._num_batches = epoch_iterator._steps_seen
        epoch_iterator._interrupted_warning()


declare(
    Replacement(
        *("keras.src.trainers.epoch_iterator:EpochIterator", "__init__", _own_part),
        why="each process brings its part of a batch, and its input may be shorter than another's",
        hook="a distribution that makes the iterator",
        parameters=("x", "batch_size", "steps_per_epoch"),
    ),
    Replacement(
        "keras.src.trainers.data_adapters.tf_dataset_adapter:TFDatasetAdapter",
        "__init__",
        _read_dataset,
        why="Keras has the distribution cut the dataset for its process; a method of the same name "
        "makes per-replica batches here, as in tf.distribute",
        hook="a name of its own for that",
        parameters=("dataset", "class_weight", "distribution"),
    ),
)
