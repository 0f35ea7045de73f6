"""What runs in another thread while fit trains a model; and what it may have seen there."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

SEEN = "seen beside a fit"


class _Keeps(keras.callbacks.Callback):
    """Keeps the weights as they are between two steps, for stock Keras on one device."""

    def __init__(self, states: list):
        super().__init__()
        self._states = states

    def _keep(self, *_, **logs):
        self.model.jax_state_sync()
        self._states.append(self.model.get_weights())

    on_train_begin = on_train_batch_end = on_epoch_end = _keep


def alone(
    fit: Callable[[list], Any], call: Callable[[keras.Model], Any], model: keras.Model, twin: Any
) -> tuple[Any, np.ndarray]:
    """What fit gives, and what the call may give beside it, with a twin: a row for each state."""
    states: list = []
    result = fit([_Keeps(states)])
    states.append(model.get_weights())
    rows = []
    for state in states:
        twin.set_weights(state)
        rows.append(_flat(call(twin)))
    return result, np.stack(rows)


def together(fit: Callable[[list], Any], call: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """What fit gives, and what the call gave beside it, as often as there was time."""
    done, seen = threading.Event(), []

    def watch():
        while not done.is_set():
            seen.append(_flat(call()))
            done.wait(0.01)

    def trains():
        try:
            return fit([])
        finally:
            done.set()

    result, _ = in_threads(trains, watch)
    return result, np.stack(seen)


def in_threads(*functions: Callable[[], Any]) -> list:
    """What each gives, run at once: the first here, others in threads of their own."""
    results: list = [None] * len(functions)
    x64 = jax.config.jax_enable_x64

    def run(number):
        try:
            with jax.enable_x64(x64):
                results[number] = functions[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(1, len(functions))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _flat(values: Any) -> np.ndarray:
    arrays = [np.ravel(np.asarray(each, np.float64)) for each in keras.tree.flatten(values)]
    return np.concatenate(arrays)


def gap(seen: np.ndarray, possible: np.ndarray) -> float:
    """How far what was seen is from the next that might have been, relative to the largest."""
    scale = max(np.max(np.abs(possible)), 1e-2)
    gaps = [np.max(np.abs(possible - each), axis=1).min() for each in seen]
    return float(max(gaps)) / scale
