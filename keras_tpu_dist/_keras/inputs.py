"""The seam to Keras's input: who splits a dataset, and how many steps an epoch has."""

import contextlib
import inspect
from typing import Any

import keras
import numpy
from keras.src.trainers.data_adapters import is_grain_dataset, is_tf_dataset
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from keras_tpu_dist._keras.active import active_strategy
from keras_tpu_dist._keras.seam import Replacement, at, declare, in_front_of
from keras_tpu_dist._keras.structure import without_distribution
from keras_tpu_dist._keras.trainer import input_of_fit, signature

# Keras creates this class to read an epoch on JAX.
JAXEpochIterator = at("keras.src.backend.jax.trainer:JAXEpochIterator")
_NOTHING = object()
_ONE_ROW = numpy.zeros((1, 1))
# Keras's default for `fit`.
_DEFAULT_BATCH_SIZE = 32
_WARNS_OF_EVERY_END = tuple(int(part) for part in keras.__version__.split(".")[:2]) < (3, 16)


def _read_by(stock, iterator, *args, **kwargs):
    _own_part(stock, iterator, *args, **kwargs)
    if isinstance(iterator, JAXEpochIterator):
        kind = type(iterator)
        iterator.__class__ = in_front_of(JAXEpochIterator, _DeviceEpochIterator, kind)
    fit = input_of_fit.get()
    if fit is not None:
        # The first iterator of a fit is its own; later ones belong to validation.
        fit.setdefault("iterator", iterator)


class _DeviceEpochIterator(JAXEpochIterator):
    """Keras's iterator over an epoch, but the strategy places its batches, ahead of the step."""

    def _get_iterator(self):
        strategy = active_strategy()
        return super()._get_iterator() if strategy is None else strategy.runner.batches(self)


def _with_whole_dataset(x, make):
    """Hides the strategy while Keras creates the adapter for a `tf.data.Dataset`.

    Otherwise Keras would call `distribute_dataset` to split it for this process; ours, as in
    `tf.distribute`, returns batches per replica. No user code runs meanwhile.
    """
    strategy = active_strategy()
    if strategy is None or not is_tf_dataset(x):
        make()
        return
    with without_distribution():
        make()


def _own_part(stock, iterator, *args, **kwargs):
    strategy = active_strategy()
    own_input = None if strategy is None else strategy.runner.own_input
    bound = signature(stock).bind(iterator, *args, **kwargs)
    given = bound.arguments
    if own_input is None:
        _with_whole_dataset(given.get("x"), lambda: stock(*bound.args, **bound.kwargs))
        return
    x, empty = given["x"], False
    if can_convert_arrays((x, given.get("y"), given.get("sample_weight"))):
        sizes = given.get("batch_size"), given.get("steps_per_epoch")
        given["batch_size"] = _own_batch_size(own_input, x, *sizes)
    elif inspect.isgenerator(x):
        # Keras refuses a generator without any batch.
        given["x"], empty = _peeked(x)
    elif is_grain_dataset(x):
        # The adapter derives the shapes from the first batches.
        empty = next(iter(x), _NOTHING) is _NOTHING
    given["x"] = _ONE_ROW if empty else given["x"]
    _with_whole_dataset(given["x"], lambda: stock(*bound.args, **bound.kwargs))
    if empty:
        iterator.data_adapter = _NoBatches()
    iterator.data_adapter = _AgreedLength(iterator.data_adapter, own_input)
    iterator._num_batches = iterator.data_adapter.num_batches


def _own_batch_size(own_input, x, batch_size, steps_per_epoch) -> int:
    if batch_size is None and steps_per_epoch is not None:
        # As in Keras: all rows, divided into that many steps.
        return max(-(-len(keras.tree.flatten(x)[0]) // steps_per_epoch), 1)
    return own_input.shards.of(_DEFAULT_BATCH_SIZE if batch_size is None else batch_size)


def _peeked(generator: Any) -> tuple[Any, bool]:
    """A generator that yields the same batches, and whether it is empty."""
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
        """Nothing to clean up."""


class _AgreedLength:
    """A data adapter whose length is that of the longest input of all processes."""

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
        return False  # a PyDataset, for which it is not known


def known_of_epoch(epoch_iterator: EpochIterator) -> dict[str, int]:
    """What is known of the epochs of an input: its `"steps"`, the `"batches"` of the input, with
    their `"rows"`, and the rows of the `"last"` one.
    """
    adapter, found = epoch_iterator.data_adapter, {}
    batches = adapter.num_batches
    with contextlib.suppress(NotImplementedError):  # a PyDataset, whose rows are not known
        found["rows"] = getattr(adapter, "batch_size", None)
        whole = adapter.has_partial_batch is False
        found["last"] = found["rows"] if whole else getattr(adapter, "partial_batch_size", None)
    known = {"steps": epoch_iterator.steps_per_epoch or batches, "batches": batches, **found}
    return {name: int(number) for name, number in known.items() if number}


def is_users_code(data_adapter: Any) -> bool:
    """Whether user code creates the batches: a generator or a `PyDataset`.

    Public replacement: none; only the adapter is left of the input.

    Args:
        data_adapter: Keras's adapter of the input.
    """
    return isinstance(_stock_adapter(data_adapter), (GeneratorDataAdapter, PyDatasetAdapter))


def epoch_iterator_of_fit() -> EpochIterator | None:
    """Keras's iterator over the input of the running fit, or `None`.

    Public replacement: none; `fit` has it in a local variable.
    """
    return (input_of_fit.get() or {}).get("iterator")


def shuffling_epoch(data_adapter: Any) -> int | None:
    """The number of the epoch by which an adapter shuffles, or `None` if there is none.

    Keras 3.16 shuffles arrays and `PyDataset`s by a count in their adapter; 3.15 by NumPy's and
    Python's global random numbers.

    Public replacement: none; `fit(initial_epoch=...)` does not reach the adapter.

    Args:
        data_adapter: Keras's adapter of the input, or `None`.
    """
    stock = _stock_adapter(data_adapter)
    # Arrays and `PyDataset`s have a flag for shuffling; a torch loader's sampler gets the epoch.
    shuffles = getattr(stock, "_shuffle", getattr(stock, "shuffle", True))
    return getattr(stock, "_epoch", None) if shuffles else None


def set_shuffling_epoch(data_adapter: Any, epoch: int) -> None:
    """Makes an adapter shuffle as in a given epoch; call it before its first batch is read.

    Args:
        data_adapter: Keras's adapter for the input, which counts epochs.
        epoch: A result of `shuffling_epoch` for an adapter of the same input.
    """
    _stock_adapter(data_adapter)._epoch = epoch


def orders_ahead(data_adapter: Any) -> bool:
    """Whether an epoch's order is drawn when the epoch begins, before its first batch is read.

    This is so for a `PyDataset` with workers, which start then.

    Public replacement: none.

    Args:
        data_adapter: Keras's adapter of the input, or `None`.
    """
    return getattr(_stock_adapter(data_adapter), "enqueuer", None) is not None


def drop_what_is_left(data_adapter: Any) -> None:
    """Drops batches of an earlier order from the queue of a shuffled `PyDataset`'s workers.

    Keras reads one batch to build a model, and leaves further batches of the workers in the queue.
    So the first epoch would begin with batches in that order, continue with its own, and lack some.
    Public replacement: none.

    Args:
        data_adapter: Keras's adapter of the input, whose epoch has begun.
    """
    stock = _stock_adapter(data_adapter)
    if orders_ahead(stock) and stock.shuffle and stock.num_batches is not None:
        stock.enqueuer.ready_queue.queue.clear()


def _stock_adapter(data_adapter: Any) -> Any:
    return data_adapter._adapter if isinstance(data_adapter, _AgreedLength) else data_adapter


def uncount_steps(epoch_iterator: EpochIterator, steps: int, ran_out: bool) -> None:
    """Tells an epoch's iterator about steps that it counted but that did not run.

    Keras counts `steps_per_execution` for every launch, even for a shorter one. For an input of
    unknown length, it notices the end by a launch without any batch, and there is none after the
    last launch of an epoch. Public replacement: none.

    Args:
        epoch_iterator: The iterator of the running epoch.
        steps: How many of the counted steps did not run.
        ran_out: Whether the launch was the last one of the epoch, shortened by the end of the
            input.
    """
    seen: Any = epoch_iterator._steps_seen
    epoch_iterator._steps_seen = seen - steps
    if ran_out and epoch_iterator._num_batches is None:
        epoch_iterator._num_batches = epoch_iterator._steps_seen
        # Keras 3.16 only warns about the end of an input if it expected more.
        if epoch_iterator.steps_per_epoch or _WARNS_OF_EVERY_END:
            epoch_iterator._interrupted_warning()


declare(
    Replacement(
        "keras.src.trainers.epoch_iterator:EpochIterator",
        "__init__",
        _read_by,
        why="batches of any number of rows are on the devices ahead of the step; each process may "
        "supply rows of its own, and fewer than another",
        hook="a distribution that makes the iterator",
        parameters=("x", "batch_size", "steps_per_epoch"),
    ),
)
