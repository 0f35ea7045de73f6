"""Keras's list of callbacks, which under a strategy also serves the strategy's loop."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_tpu_dist._keras import seam
from keras_tpu_dist._keras.active import active_strategy
from keras_tpu_dist._keras.seam import Replacement
from keras_tpu_dist.common import phases


def replacement() -> Replacement:
    """The replacement of `CallbackList.__init__`."""
    return Replacement(
        "keras.callbacks:CallbackList",
        "__init__",
        _made,
        why="callbacks see a resumed run as one that never stopped; no thread waits for logs "
        "that are not read; only one process prints a progress bar",
        hook="a distribution that makes the CallbackList",
    )


def _made(stock, callbacks, /, *args, **kwargs):
    stock(callbacks, *args, **kwargs)
    convert_list(callbacks)


def convert_list(callbacks: Any) -> None:
    """Converts a callback list to one of class `_CallbackList`."""
    stock = keras.callbacks.CallbackList
    callbacks.__class__ = seam.in_front_of(stock, _CallbackList, type(callbacks))


class _CallbackList(keras.callbacks.CallbackList):
    """Keras's callback list with the requests of the callbacks to the strategy's loop.

    It calls `before_<moment>` or `after_<moment>` of callbacks around all `on_<moment>`. Keras
    calls callbacks in the order in which the user passed them.
    """

    # The requests of callbacks to the running fit, under a strategy.
    _fit_control: Any = None

    def on_train_begin(self, logs=None):
        strategy = active_strategy()
        self._fit_control = None if strategy is None else strategy.runner.control(self._model)
        if strategy is not None:
            strategy.runner.training_begins(self._model)
        with self._around("train_begin", logs):
            super().on_train_begin(logs)

    def on_train_end(self, logs=None):
        with self._around("train_end", logs):
            super().on_train_end(logs)

    def on_epoch_begin(self, epoch, logs=None):
        with self._around("epoch_begin", epoch, logs):
            super().on_epoch_begin(epoch, logs)
        phases.turn(phases.TRAIN)

    def on_epoch_end(self, epoch, logs=None):
        if phases.is_counted():
            jax.block_until_ready(logs)
            phases.turn(phases.OTHER)
        with self._around("epoch_end", epoch, logs):
            super().on_epoch_end(epoch, logs)
        strategy = active_strategy()
        if strategy is not None:
            strategy.runner.epoch_ended()

    def on_train_batch_begin(self, batch, logs=None):
        skips = self._fit_control is not None and self._fit_control.batches_to_skip
        if not skips or not active_strategy().runner.begins_again(self._model):
            super().on_train_batch_begin(batch, logs)

    # Keras passes the logs of every step to a thread that waits for them and converts them to
    # floats, even if no callback reads them.

    def on_train_batch_end(self, batch, logs=None):
        fit = self._fit_control
        if fit is None or (not fit.made_before and listens(self.callbacks, "train")):
            super().on_train_batch_end(batch, logs)

    def on_test_batch_end(self, batch, logs=None):
        if active_strategy() is None or listens(self.callbacks, "test"):
            super().on_test_batch_end(batch, logs)

    def on_predict_batch_end(self, batch, logs=None):
        if active_strategy() is None or listens(self.callbacks, "predict"):
            super().on_predict_batch_end(batch, logs)

    def _async_dispatch(self, fn, *args):
        # Keras's flag is per thread, and a bar runs in another one.
        if keras.config.is_interactive_logging_enabled():
            super()._async_dispatch(fn, *args)
        else:
            super()._async_dispatch(_without_logging, fn, *args)

    @contextlib.contextmanager
    def _around(self, moment: str, *args):
        self._call(f"before_{moment}", *args)
        yield
        self._call(f"after_{moment}", *args)

    def _call(self, name: str, *args) -> None:
        for callback in self.callbacks:
            method = getattr(callback, name, None)
            if method is not None:
                method(*args)


def _without_logging(function: Callable, *args) -> None:
    keras.config.disable_interactive_logging()
    function(*args)


def listens(callbacks: list, kind: str) -> bool:
    """Whether a callback handles the end of every "train", "test" or "predict" batch.

    Args:
        callbacks: The `keras.callbacks.Callback` objects; the strategy's loop calls those with a
            true `sees_launches` itself.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    names = [f"on_{kind}_batch_end", *(["on_batch_end"] if kind == "train" else [])]
    return any(
        not getattr(getattr(callback, name), "_is_default", False)
        for callback in callbacks
        if not getattr(callback, "sees_launches", False)
        for name in names
    )
