"""Keras 3.16's rules for shuffling, given to the data adapters of Keras 3.15.

There, the order of an epoch is drawn from a number that the adapter counts, not from the global
random numbers (`array_data_adapter.py` and `py_dataset_adapter.py` of keras-nightly 2026-10-27).
"""

import contextlib
import functools
import random
import threading
from unittest import mock

import numpy as np
from keras.src import tree
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer, PyDatasetAdapter


def _counting(stock):
    @functools.wraps(stock)
    def init(adapter, *args, **kwargs):
        stock(adapter, *args, **kwargs)
        adapter._epoch = 0
        if getattr(adapter, "enqueuer", None) is not None:
            adapter.enqueuer.adapter = adapter

    return init


def _ends(stock):
    @functools.wraps(stock)
    def on_epoch_end(adapter):
        stock(adapter)
        adapter._epoch += 1

    return on_epoch_end


def _array_iterator(adapter, slice_and_convert_fn, inputs):
    epoch = int(adapter._epoch)
    permutation = None
    if adapter._shuffle and adapter._shuffle != "batch":
        permutation = np.random.default_rng(epoch).permutation(adapter._num_samples)
    for i in range(adapter._size):
        start = i * adapter._batch_size
        stop = min((i + 1) * adapter._batch_size, adapter._num_samples)
        indices = slice(start, stop)
        if adapter._shuffle == "batch":
            indices = np.random.default_rng(epoch + i).permutation(stop - start) + start
        elif permutation is not None:
            indices = permutation[start:stop]
        convert = functools.partial(slice_and_convert_fn, indices=indices)
        yield tree.map_structure(convert, inputs, none_is_leaf=False)


def _finite_generator(adapter):
    indices = list(range(adapter.py_dataset.num_batches))
    if adapter.shuffle:
        random.Random(adapter._epoch).shuffle(indices)
    for i in indices:
        yield adapter._standardize_batch(adapter.py_dataset[i])


def _started(stock):
    @functools.wraps(stock)
    def start(enqueuer):
        if not enqueuer.running:
            enqueuer.epoch = enqueuer.adapter._epoch
        stock(enqueuer)

    return start


class _Random(threading.local):
    """In the place of the module `random`: what a thread shuffles, it shuffles by its epoch."""

    epoch = 0

    def shuffle(self, indices):
        random.Random(self.epoch).shuffle(indices)


def _run(stock, numbers):
    @functools.wraps(stock)
    def run(enqueuer):
        numbers.epoch = enqueuer.epoch
        stock(enqueuer)

    return run


@contextlib.contextmanager
def shuffling():
    """Within it, adapters shuffle as those of Keras 3.16 do."""
    arrays, datasets, numbers = ArrayDataAdapter, PyDatasetAdapter, _Random()
    with contextlib.ExitStack() as stack:
        for owner, name, by in (
            (arrays, "__init__", _counting(arrays.__init__)),
            (arrays, "_get_iterator", _array_iterator),
            (arrays, "on_epoch_end", _ends(arrays.on_epoch_end)),
            (datasets, "__init__", _counting(datasets.__init__)),
            (datasets, "_finite_generator", _finite_generator),
            (datasets, "on_epoch_end", _ends(datasets.on_epoch_end)),
            (OrderedEnqueuer, "start", _started(OrderedEnqueuer.start)),
            (OrderedEnqueuer, "_run", _run(OrderedEnqueuer._run, numbers)),
        ):
            stack.enter_context(mock.patch.object(owner, name, by))
        stack.enter_context(mock.patch(f"{OrderedEnqueuer.__module__}.random", numbers))
        yield
