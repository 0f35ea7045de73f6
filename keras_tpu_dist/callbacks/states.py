"""The states of callbacks, saved so that they continue to decide as they would have."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.names import numbered

logger = logging.getLogger("keras_tpu_dist")


def states_of(callbacks: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """The states of callbacks: as plain data, and arrays by name.

    For Keras's own callbacks, the saved attributes are listed in
    `keras_tpu_dist._keras.callback_states`. Any callback with `state_dict()` and
    `load_state_dict(state)` provides its own, in plain data.
    """
    states, arrays = [], {}
    for i, callback in enumerate(_that_know(callbacks)):
        state: dict[str, Any] = {"class": type(callback).__name__}
        if hasattr(callback, "state_dict"):
            state["state"] = callback.state_dict()
        else:
            names = _keras.changing(callback, _keras.CHANGING)
            values = {name: getattr(callback, name) for name in names}
            plain = (type(None), int, float, str, np.generic)
            state["attributes"] = {n: _plain(v) for n, v in values.items() if isinstance(v, plain)}
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
    """Restores the states of callbacks: for every class, the first gets the first's state, and so
    on.
    """
    here = numbered([type(callback).__name__ for callback in _that_know(callbacks)])
    there = numbered([state["class"] for state in states])
    if say and set(here) - set(there):
        logger.warning(
            "the checkpoint has the state of %s, the callbacks of this fit are %s: %s begin anew",
            [name for name, _ in there],
            [name for name, _ in here],
            [key[0] for key in here if key not in there],
        )
    averages = any(each.get("attributes", {}).get(_keras.AVERAGES_IN_MODEL) for each in states)
    if say and averages and not any(hasattr(each, _keras.AVERAGES_IN_MODEL) for each in callbacks):
        logger.warning(
            "the checkpoint has averages in place of the weights, and this fit has no "
            "SwapEMAWeights to swap them back: training goes on with the averages"
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
    """Sets only attributes that change while a callback runs, whatever names the file has."""
    names = _keras.changing(callback, _keras.CHANGING)
    for name in names:
        if name in saved and _fits(saved[name], getattr(callback, name)):
            setattr(callback, name, saved[name])
    left = [n for n, v in saved.items() if v is not None and n not in names]
    left += [n for n in names if n in saved and not _fits(saved[n], getattr(callback, n))]
    if left:
        logger.warning(
            "the checkpoint has %s for %s, which are not among the attributes that change (%s): "
            "they are left out",
            left[:3],
            type(callback).__name__,
            ", ".join(names),
        )


def _fits(value: Any, now: Any) -> bool:
    if isinstance(now, bool):
        return isinstance(value, bool)
    if value is None:
        return not isinstance(now, int)  # a best value may be none yet, a counter is a number
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def history_of(history: Any) -> dict[str, Any]:
    """A History callback's record as plain data."""
    if history is None:
        return {"epoch": [], "logs": {}}
    return {
        "epoch": list(history.epoch),
        "logs": {name: [_plain(v) for v in values] for name, values in history.history.items()},
    }


def give_back_history(history: Any, record: dict[str, Any]) -> None:
    """Puts a record before that of a History callback."""
    if history is None:
        return
    history.epoch[:0] = record["epoch"]
    for name, values in record["logs"].items():
        history.history[name] = [*values, *history.history.get(name, ())]


def _that_know(callbacks: Sequence[Any]) -> list:
    return [
        callback
        for callback in callbacks
        if hasattr(callback, "state_dict") or _keras.changing(callback, _keras.CHANGING)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    # Python's JSON supports NaN and infinity.
    return np.asarray(value).tolist()


@dataclass(frozen=True)
class Standing:
    """The state at one moment, to be saved then or later; arrays are referenced, not copied.

    Validation and the end of an epoch change metrics, history and callbacks' states; callbacks may
    change weights. If a run is stopped there, the state after its last launch is saved, and a later
    run repeats the end of the epoch.
    """

    states: list[dict[str, Any]]
    arrays: dict[str, np.ndarray]
    history: dict[str, Any]
    global_seed: Any
    stopped: bool
    _variables: Sequence[Any] = ()
    _values: Sequence[Any] = ()

    @contextlib.contextmanager
    def in_variables(self) -> Iterator[None]:
        """A context in which variables have their values of that moment."""
        changed = [
            (variable, value)
            for variable, value, now in zip(
                self._variables, self._values, _keras.values_of(list(self._variables))
            )
            if value is not now and not value.is_deleted()
        ]
        with keras.StatelessScope(state_mapping=changed) if changed else contextlib.nullcontext():
            yield


def standing_of(
    model: Any,
    callbacks: Sequence[Any],
    history: dict[str, Any] | None = None,
    variables: Sequence[Any] = (),
) -> Standing:
    """The current state of training."""
    states, arrays = states_of(callbacks)
    return Standing(
        states=states,
        arrays=arrays,
        history=history or history_of(model.history),
        global_seed=_keras.global_seed(),
        stopped=bool(model.stop_training),
        _variables=variables,
        _values=_keras.values_of(list(variables)),
    )
