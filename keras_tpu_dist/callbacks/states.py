"""What callbacks know besides the model, so that they go on deciding as they would have."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_tpu_dist import _keras

logger = logging.getLogger("keras_tpu_dist")


def states_of(callbacks: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """What callbacks know: as plain data, and arrays by name.

    What Keras's own change is listed in `keras_tpu_dist._keras.callback_states`; any callback with
    `state_dict()` and `load_state_dict(state)` says itself, in plain data.

    Args:
        callbacks: The callbacks of a fit.
    """
    states, arrays = [], {}
    for i, callback in enumerate(_that_know(callbacks)):
        state: dict[str, Any] = {"class": type(callback).__name__}
        if hasattr(callback, "state_dict"):
            state["state"] = callback.state_dict()
        else:
            names = _keras.changing(callback, _keras.CHANGING)
            values = {name: getattr(callback, name) for name in names}
            state["attributes"] = {n: _plain(v) for n, v in values.items() if _is_plain(v)}
            for name in _keras.changing(callback, _keras.ARRAYS):
                for j, array in enumerate(getattr(callback, name) or ()):
                    arrays[f"{i}/{name}/{j}"] = np.asarray(array)
        states.append(state)
    return states, arrays


def give_back(
    callbacks: Sequence[Any],
    states: Sequence[dict],
    arrays: Mapping[str, np.ndarray],
    say: bool = True,
) -> None:
    """Gives callbacks what they knew: of each class the first gets what the first knew, and so on.

    Args:
        callbacks: The callbacks of the fit that goes on.
        states: What `states_of` returned for those of the fit that ended.
        arrays: The arrays that it returned.
        say: Whether to log which callbacks get nothing.
    """
    here = _numbered([type(callback).__name__ for callback in _that_know(callbacks)])
    there = _numbered([state["class"] for state in states])
    if say and set(here) - set(there):
        logger.warning(
            "the checkpoint has what %s knew, the callbacks of this fit are %s: %s begin anew",
            [name for name, _ in there],
            [name for name, _ in here],
            [key[0] for key in here if key not in there],
        )
    for callback, key in zip(_that_know(callbacks), here):
        if key in there:
            i = there.index(key)
            own = {n.partition("/")[2]: a for n, a in arrays.items() if n.startswith(f"{i}/")}
            _load(callback, states[i], own)


def _load(callback: Any, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    if hasattr(callback, "load_state_dict"):
        if "state" in state:
            callback.load_state_dict(state["state"])
        return
    _give_attributes(callback, state.get("attributes", {}))
    for name in _keras.changing(callback, _keras.ARRAYS):
        found: list[np.ndarray] = []
        while (key := f"{name}/{len(found)}") in arrays:
            found.append(arrays[key])
        if found:
            setattr(callback, name, found)


def _give_attributes(callback: Any, saved: Mapping[str, Any]) -> None:
    """Sets what changes while a callback runs; a file's names and values decide nothing else."""
    names = _keras.changing(callback, _keras.CHANGING)
    for name in names:
        if name in saved and _fits(saved[name], getattr(callback, name)):
            setattr(callback, name, saved[name])
    left = [n for n, v in saved.items() if v is not None and n not in names]
    left += [n for n in names if n in saved and not _fits(saved[n], getattr(callback, n))]
    if left:
        logger.warning(
            "the checkpoint has %s for %s, which are not among what that callback counts (%s): "
            "they are left out",
            *(left[:3], type(callback).__name__, ", ".join(names)),
        )


def _fits(value: Any, now: Any) -> bool:
    if isinstance(now, bool):
        return isinstance(value, bool)
    if value is None:
        return not isinstance(now, int)  # a best value may be none yet, a counter is a number
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
    return [
        each
        for each in callbacks
        if hasattr(each, "state_dict") or _keras.changing(each, _keras.CHANGING)
    ]


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each name with how often it came before."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        numbered.append((name, seen[name]))
        seen[name] += 1
    return numbered


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str, np.generic))


def _plain(value: Any) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    # Python's JSON has NaN and infinity.
    return np.asarray(value).tolist()
