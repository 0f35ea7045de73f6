"""Saves files with several processes: one writes, and all take part in reading the weights."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.processes import assigned
from keras_tpu_dist.processes.arrays import put, whole
from keras_tpu_dist.processes.channel import PeerError, agree, is_open

_FIX = (
    "Call save in all processes, not under `if jax.process_index() == 0`: one of them writes, and "
    "all provide their parts of the weights."
)


def written_once(stock: Callable, model: Any, filepath: Any, *args, **kwargs) -> Any:
    """Writes a model's file: only in process 0, if several processes have parts of the weights.

    Args:
        stock: Keras's function, which writes it.
        model: The model.
        filepath: The file.
        *args, **kwargs: Further arguments of `stock`.
    """
    if not any(_on_several_hosts(v) for v in model.variables):
        return stock(model, filepath, *args, **kwargs)
    agree(f"saving model {model.name!r} to {filepath}", _FIX)
    error = None
    with tempfile.TemporaryDirectory() as elsewhere:
        if jax.process_index() and isinstance(filepath, (str, os.PathLike)):
            filepath = os.path.join(elsewhere, os.path.basename(str(filepath)))
        try:
            stock(model, filepath, *args, **kwargs)
        except PeerError:
            raise
        except Exception as caught:
            # It is raised below, once the others know: they wait for this process.
            error = caught
    reason = None if error is None else f"{type(error).__name__}: {error}"
    answers = agree("saved", _FIX, reason)
    if error is not None:
        raise error
    failed = [f"process {i}: {reason}" for i, reason in enumerate(answers) if reason]
    if failed:
        raise PeerError(f"Saving failed in another process. {'; '.join(failed)}")


def _on_several_hosts(variable: Any) -> bool:
    return _spans_hosts(variable.value)


def _spans_hosts(value: Any) -> bool:
    concrete = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return concrete and not value.is_fully_addressable


def _values(stock, variable: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    # NumPy 2 passes `copy`, which Keras's `__array__` does not accept.
    if _on_several_hosts(variable):
        return np.array(whole(variable.value), dtype, copy=copy)
    return np.array(stock(variable, dtype), copy=copy)


def _assigned(stock, variable: Any, value: Any) -> None:
    # A move to another layout assigns the same value: no change to compare.
    moved = isinstance(value, jax.core.Tracer) or _keras.is_value_of(value, variable)
    if is_open() and not moved:
        assigned.note(variable)
    layout = _keras.variable_layout(variable)
    spans = isinstance(layout, jax.sharding.Sharding) and not layout.is_fully_addressable
    if not spans or isinstance(value, jax.core.Tracer) or _spans_hosts(value):
        stock(variable, value)
    else:
        # Keras's `assign` calls `jax.device_put`, in which all processes compare the value, with a
        # collective for every variable.
        stock(variable, put([value], [layout])[0])


def print_in_one_process(process_id: int) -> None:
    """Leaves Keras's progress bars and messages to process 0.

    Args:
        process_id: This process.
    """
    if process_id:
        keras.config.disable_interactive_logging()


_keras.serve_variables(_values, _assigned)
