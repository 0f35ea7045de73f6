"""What callbacks know besides the model, so that they go on deciding as they would have."""

import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

logger = logging.getLogger("keras_tpu_dist")

# What Keras's callbacks change while they run.
_CHANGING: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: (
        *("best", "epochs_since_last_save", "_batches_seen_since_last_saving"),
        *("_last_batch_seen", "_current_epoch"),
    ),
}
_BEST_WEIGHTS = "best_weights"


def states_of(callbacks: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """What callbacks know: as plain data, and arrays by name.

    Keras's `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` are known, and any callback
    with `state_dict()` and `load_state_dict(state)` says itself, in plain data.

    Args:
        callbacks: The callbacks of a fit.
    """
    states, arrays = [], {}
    for i, callback in enumerate(_that_know(callbacks)):
        state: dict[str, Any] = {"class": type(callback).__name__}
        if hasattr(callback, "state_dict"):
            state["state"] = callback.state_dict()
        else:
            names = _changing(callback)
            state["attributes"] = {
                n: _plain(getattr(callback, n)) for n in names if _has(callback, n)
            }
        best = getattr(callback, _BEST_WEIGHTS, None)
        for j, array in enumerate(best or ()):
            arrays[f"{i}/{_BEST_WEIGHTS}/{j}"] = np.asarray(array)
        states.append(state)
    return states, arrays


def give_back(
    callbacks: Sequence[Any], states: Sequence[dict], arrays: dict[str, np.ndarray]
) -> None:
    """Gives callbacks what they knew.

    Args:
        callbacks: The callbacks of the fit that goes on.
        states: What `states_of` returned for those of the fit that ended.
        arrays: The arrays that it returned.
    """
    callbacks = _that_know(callbacks)
    names = [type(callback).__name__ for callback in callbacks]
    if names != [state["class"] for state in states]:
        logger.warning(
            "the checkpoint has what %s knew, the callbacks of this fit are %s: they begin anew",
            [state["class"] for state in states],
            names,
        )
        return
    for i, (callback, state) in enumerate(zip(callbacks, states)):
        if "state" in state:
            callback.load_state_dict(state["state"])
        _give_attributes(callback, state.get("attributes", {}))
        best: list[np.ndarray] = []
        while (name := f"{i}/{_BEST_WEIGHTS}/{len(best)}") in arrays:
            best.append(arrays[name])
        if best and hasattr(callback, _BEST_WEIGHTS):
            setattr(callback, _BEST_WEIGHTS, best)


def _give_attributes(callback: Any, saved: dict[str, Any]) -> None:
    """Sets what changes while a callback runs; a file's names and values decide nothing else."""
    for name in _changing(callback):
        value = saved.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in saved and (value is None or number):
            setattr(callback, name, value)
    left = [n for n, v in saved.items() if v is not None and n not in _changing(callback)]
    left += [n for n in _changing(callback) if isinstance(saved.get(n), (str, bool, list, dict))]
    if left:
        logger.warning(
            "the checkpoint has %s for %s, which are not among what that callback counts (%s): "
            "they are left out",
            *(left[:3], type(callback).__name__, ", ".join(_changing(callback))),
        )


def history_of(history: Any) -> dict[str, Any]:
    """A History callback's record as plain data.

    Args:
        history: The callback, or `None`.
    """
    if history is None:
        return {"epoch": [], "logs": {}}
    return {
        "epoch": list(history.epoch),
        "logs": {name: [_plain(v) for v in values] for name, values in history.history.items()},
    }


def give_back_history(history: Any, record: dict[str, Any]) -> None:
    """Puts a record in front of what a History callback has.

    Args:
        history: The callback, or `None`.
        record: What `history_of` returned.
    """
    if history is None:
        return
    history.epoch[:0] = record["epoch"]
    for name, values in record["logs"].items():
        history.history[name] = [*values, *history.history.get(name, ())]


def _that_know(callbacks: Sequence[Any]) -> list:
    return [each for each in callbacks if hasattr(each, "state_dict") or _changing(each)]


def _changing(callback: Any) -> tuple[str, ...]:
    return next((names for kind, names in _CHANGING.items() if isinstance(callback, kind)), ())


def _has(callback: Any, name: str) -> bool:
    value = getattr(callback, name, None)
    return value is None or isinstance(value, (int, float, str, np.generic))


def _plain(value: Any) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    # Python's JSON has NaN and infinity.
    return np.asarray(value).tolist()
