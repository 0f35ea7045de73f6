"""The states of callbacks, saved so that they continue to decide as they would have."""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks.identity import Identity, Pairing, identity_of, paired
from keras_tpu_dist.checkpoint.snapshot import MOST_BYTES_OF_CALLBACK
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.common.marked import WHAT, UnmarkableError, marked, unmarked
from keras_tpu_dist.common.once import log_once

logger = logging.getLogger("keras_tpu_dist")

_RULE = f"A callback's state_dict() returns {WHAT}."
_FIX = "Leave it out of the state, or return numbers that load_state_dict can make it from."
_WITHOUT = "checkpoints have all but the state of %s, which begins anew if you resume from them"
# The name, among the arrays of a callback, of those that are in its state.
_IN_STATE = "in_state"


@dataclass(frozen=True)
class Lost:
    """Why a checkpoint has no state of a callback.

    Attributes:
        callback: The number of the callback, among those that have a state.
    """

    callback: int
    level: int
    text: str


def identities_of(callbacks: Sequence[Any]) -> dict[int, Identity]:
    """The identities of callbacks that have a state, by the callbacks' `id`."""
    return {id(each): _identity_of(each) for each in _that_know(callbacks)}


def _identity_of(callback: Any) -> Identity:
    return identity_of(callback, _keras.changing(callback, _keras.CHANGING))


def states_of(
    callbacks: Sequence[Any],
    most_bytes: int = MOST_BYTES_OF_CALLBACK,
    identities: Mapping[int, Identity] = MappingProxyType({}),
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray], list[Lost]]:
    """The states of callbacks: as plain data, arrays by name, and what cannot be saved.

    For Keras's own callbacks, the saved attributes are listed in
    `keras_tpu_dist._keras.callback_states`. Any callback with `state_dict()` and
    `load_state_dict(state)` provides its own.

    Args:
        callbacks: The callbacks of a fit.
        most_bytes: The most bytes of arrays in the state of one callback.
        identities: Those that are known: see `identities_of`.
    """
    states: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    lost = []
    for i, callback in enumerate(_that_know(callbacks)):
        try:
            state, values = _state_of(callback, most_bytes)
            identity = identities.get(id(callback)) or _identity_of(callback)
            state = identity.to_dict() | state
        except UnmarkableError as error:
            lost.append(_lost(i, callback, error))
            continue
        arrays |= {f"{len(states)}/{name}": array for name, array in values.items()}
        states.append(state)
    return states, arrays, lost


def check_states(callbacks: Sequence[Any], most_bytes: int = MOST_BYTES_OF_CALLBACK) -> None:
    """Raises a `ValueError` if the state of a callback cannot be saved."""
    for callback in _that_know(callbacks):
        if hasattr(callback, "state_dict"):
            try:
                _state_of(callback, most_bytes)
            except UnmarkableError as error:
                raise value_error(_RULE, received=_received(callback, error), fix=_FIX) from None


def _state_of(callback: Any, most_bytes: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The state of one callback: as plain data, and arrays by name."""
    state: dict[str, Any] = {}
    arrays: list[np.ndarray] = []
    if hasattr(callback, "state_dict"):
        state["state"] = marked(callback.state_dict(), arrays)
        size = sum(array.nbytes for array in arrays)
        if size > most_bytes:
            raise UnmarkableError("", f"has arrays of {size:,} bytes, {most_bytes:,} at most")
        return state, _in_state(arrays)
    values = {
        name: _number(getattr(callback, name))
        for name in _keras.changing(callback, _keras.CHANGING)
    }
    state["attributes"] = marked(values, arrays)
    in_state = _in_state(arrays)
    for name in _keras.changing(callback, _keras.ARRAYS):
        for j, array in enumerate(getattr(callback, name) or ()):
            in_state[f"{name}/{j}"] = np.asarray(array)
    return state, in_state


def _in_state(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{_IN_STATE}/{j}": array for j, array in enumerate(arrays)}


def _number(value: Any) -> Any:
    """A value of the logs; a scalar of another framework becomes one of NumPy."""
    if not hasattr(value, "__array__") or isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return value
    array = np.asarray(value)
    return value if array.ndim else array[()]


def _lost(number: int, callback: Any, error: UnmarkableError) -> Lost:
    if hasattr(callback, "state_dict"):
        text = message(_RULE, received=_received(callback, error), fix=_FIX)
        return Lost(number, logging.ERROR, f"{_WITHOUT % type(callback).__name__}. {text}")
    # The attribute, from "['best']".
    text = message(
        "The attributes of a callback of Keras are numbers.",
        received=f"{type(callback).__name__}{error.place}, which {error.reason}.",
        fix="Let the logs have numbers: logs[name] = float(value).",
    )
    return Lost(number, logging.WARNING, f"{_WITHOUT % type(callback).__name__}. {text}")


def _received(callback: Any, error: UnmarkableError) -> str:
    return f"{type(callback).__name__}.state_dict(){error.place}, which {error.reason}."


def give_back(
    callbacks: Sequence[Any],
    states: Sequence[dict],
    arrays: Mapping[str, np.ndarray],
    say: bool = True,
) -> None:
    """Restores the states of callbacks; see `identity.paired` for which gets which.

    Args:
        callbacks: The callbacks of the fit that resumes.
        states: The result of `states_of` for the callbacks of the fit that ended.
        arrays: The arrays that it returned.
        say: Whether to log which callbacks get nothing.
    """
    with_state = _that_know(callbacks)
    here = [_identity_of(each) for each in with_state]
    there = [Identity.of_saved(state) for state in states]
    pairing = paired(here, there)
    if say:
        _say(with_state, here, there, pairing)
    averages = any(each.get("attributes", {}).get(_keras.AVERAGES_IN_MODEL) for each in states)
    if say and averages and not any(hasattr(each, _keras.AVERAGES_IN_MODEL) for each in callbacks):
        logger.warning(
            "the checkpoint has averages in place of the weights, and this fit has no "
            "SwapEMAWeights to swap them back: training goes on with the averages"
        )
    for callback, i in zip(with_state, pairing.saved, strict=True):
        if i is not None:
            values = {n.partition("/")[2]: a for n, a in arrays.items() if n.startswith(f"{i}/")}
            _load(callback, states[i], values)


def _say(
    with_state: Sequence[Any],
    here: Sequence[Identity],
    there: Sequence[Identity],
    pairing: Pairing,
) -> None:
    """Logs which callbacks begin anew, and which may have got the state of another one."""
    anew = [identity for identity, i in zip(here, pairing.saved, strict=True) if i is None]
    if anew:
        # What they follow matters where that tells them apart.
        followed = {(identity.kind, identity.monitor) for identity in (*here, *there)}
        several = Counter(kind for kind, _ in followed)
        named = {identity.kind for identity in anew if several[identity.kind] > 1}
        there_, here_, anew_ = (
            [str(identity) if identity.kind in named else identity.kind for identity in ones]
            for ones in (there, here, anew)
        )
        logger.warning(
            "the checkpoint has the state of %s, the callbacks of this fit are %s: %s begin anew",
            there_,
            here_,
            anew_,
        )
    if pairing.by_order:
        logger.warning(
            "the checkpoint has several states for %s, and nothing but the order in callbacks=[...]"
            " says which of them is whose: give callbacks of one class in the order in which they "
            "were saved, or with the same arguments",
            [str(here[i]) for i in pairing.by_order],
        )
    for i, names in pairing.changed.items():
        # Where files are is not what a callback follows.
        values = {
            name: getattr(with_state[i], name) for name in names if name in (here[i].config or {})
        }
        texts = {n: v for n, v in values.items() if isinstance(v, str) and os.sep not in v}
        if texts:
            logger.warning(
                "%s continues with the state of a callback that had other settings: here %s",
                here[i],
                ", ".join(f"{name}={value!r:.80}" for name, value in texts.items()),
            )


def _load(callback: Any, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    try:
        in_state = _numbered(arrays, _IN_STATE)
        value = unmarked(state.get("state", state.get("attributes", {})), in_state)
        if "state" not in state and not isinstance(value, dict):
            raise ValueError(f"attributes of type {type(value).__name__}")
    except ValueError as error:
        logger.warning(
            "%s begins anew, as its state in the checkpoint cannot be read: %s",
            type(callback).__name__,
            error,
        )
        return
    if hasattr(callback, "load_state_dict"):
        if "state" in state:
            callback.load_state_dict(value)
        return
    if "state" in state:
        return
    _give_attributes(callback, value)
    for name in _keras.changing(callback, _keras.ARRAYS):
        values = _numbered(arrays, name)
        if values:
            setattr(callback, name, values)


def _numbered(arrays: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    in_order: list[np.ndarray] = []
    while (key := f"{name}/{len(in_order)}") in arrays:
        in_order.append(arrays[key])
    return in_order


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
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        real = jnp.issubdtype(value.dtype, jnp.integer) or jnp.issubdtype(value.dtype, jnp.floating)
        return real and value.size == 1 and not isinstance(now, int)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def history_of(history: Any) -> dict[str, Any]:
    """A History callback's record as plain data.

    Args:
        history: The callback, or `None`.
    """
    if history is None:
        return {"epoch": [], "logs": {}}
    return {
        "epoch": list(map(int, history.epoch)),
        "logs": {
            name: [_of_log(name, value) for value in values]
            for name, values in history.history.items()
            if _is_name(name)
        },
    }


def _is_name(name: Any) -> bool:
    if not isinstance(name, str):
        log_once(
            f"checkpoints have no history of logs[{name!r:.80}]: names in the logs must be texts",
            logging.WARNING,
        )
    return isinstance(name, str)


def _of_log(name: str, value: Any) -> Any:
    """A value of the logs as plain data; a scalar is a number."""
    try:
        value = _number(value)
        is_scalar = isinstance(value, (np.generic, np.ndarray, jax.Array)) and not value.ndim
        # Python's JSON supports NaN and infinity.
        return marked(np.asarray(value).tolist() if is_scalar else value)
    except UnmarkableError as error:
        log_once(
            f"checkpoints have None for logs[{name!r}] in the history, because "
            f"logs[{name!r}]{error.place} {error.reason}: let the logs have numbers",
            logging.WARNING,
            about=f"history of logs[{name!r}]",
        )
        return None


def give_back_history(history: Any, record: dict[str, Any]) -> None:
    """Puts a record before that of a History callback.

    Args:
        history: The callback, or `None`.
        record: A result of `history_of`.
    """
    if history is None:
        return
    history.epoch[:0] = record["epoch"]
    for name, values in record["logs"].items():
        try:
            before = unmarked(values)
        except ValueError as error:
            logger.warning("the history in the checkpoint is without %r: %s", name, error)
            continue
        history.history[name] = [*before, *history.history.get(name, ())]


def _that_know(callbacks: Sequence[Any]) -> list:
    return [
        callback
        for callback in callbacks
        if hasattr(callback, "state_dict") or _keras.changing(callback, _keras.CHANGING)
    ]


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
    lost: Sequence[Lost] = ()
    _variables: Sequence[Any] = ()
    _values: Sequence[Any] = ()

    @contextlib.contextmanager
    def in_variables(self) -> Iterator[None]:
        """A context in which variables have their values of that moment."""
        changed = [
            (variable, value)
            for variable, value, now in zip(
                self._variables, self._values, _keras.values_of(list(self._variables)), strict=True
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
    most_bytes: int = MOST_BYTES_OF_CALLBACK,
    identities: Mapping[int, Identity] = MappingProxyType({}),
) -> Standing:
    """The current state of training.

    Args:
        model: The model that trains.
        callbacks: The callbacks whose states are saved.
        history: The record of the epochs that have ended, if already known.
        variables: Variables of the training state, if callbacks may change them before they are
            saved.
        most_bytes: The most bytes of arrays in the state of one callback.
        identities: What distinguishes each callback from others of its class, by `id`.
    """
    states, arrays, lost = states_of(callbacks, most_bytes, identities)
    return Standing(
        states=states,
        arrays=arrays,
        history=history or history_of(model.history),
        global_seed=_keras.global_seed(),
        stopped=bool(model.stop_training),
        lost=lost,
        _variables=variables,
        _values=_keras.values_of(list(variables)),
    )
