"""The position in an input: random numbers before its first batch, and the batches since."""

import base64
import json
import logging
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.forms import DictOf
from keras_tpu_dist.common.marked import UnmarkableError, marked, unmarked
from keras_tpu_dist.common.once import log_once

logger = logging.getLogger("keras_tpu_dist")

# The 32-bit words of a Mersenne twister's state.
_WORDS = 624


@dataclass(frozen=True)
class InputPosition:
    """The position in an input that can be read from its start again.

    Attributes:
        start: The state of NumPy's and Python's random numbers before the first batch was read:
            Keras 3.15 shuffles arrays with the one and `PyDataset`s with the other.
        made: How many batches of the input were used for training.
        done: How many of these belong to the running epoch.
        state: The input's own state, as plain data; `None` if it has none.
        start_epoch: The epoch by which Keras 3.16 shuffled the current rows, as its data adapter
            counts epochs; `None` without shuffling, and with Keras 3.15.
        now_epoch: The epoch by which it shuffles them the next time.
        epoch: What is known of the running epoch: its `"steps"`, and the `"batches"` of the input,
            with their `"rows"`, and the rows of the `"last"` one.
    """

    start: dict[str, Any]
    now: dict[str, Any]
    made: int
    done: int
    state: Any = None
    start_epoch: int | None = None
    now_epoch: int | None = None
    epoch: dict[str, int] | None = None

    def begins(self, steps_per_epoch: int | None, source_batches: int | None) -> bool:
        """Whether the next batch is the first of the input.

        Args:
            steps_per_epoch: The argument of `fit`.
            source_batches: The number of batches after which the input starts again, if it does.
        """
        if steps_per_epoch and source_batches and not self.done:
            return self.made >= source_batches
        return not (steps_per_epoch or self.done)

    def in_epoch(self, epoch: Mapping[str, int]) -> "InputPosition":
        """The position to go on from in an input that may have other batches, or fewer.

        Batches of another size are not those that were used. So the epoch begins anew, with a
        WARNING, unless only its end is left. `steps_per_epoch` batches of an unchanged input may
        end an epoch earlier than before; then it begins anew with the next batch of the input.
        """
        saved, steps = self.epoch or {}, epoch.get("steps", self.done)
        names = ("batches", "rows", "last")
        same = all(saved[n] == epoch[n] for n in names if n in saved and n in epoch)
        if not self.done or (same and self.done <= steps):
            return self
        whole = self.done == saved.get("steps")
        if not whole:
            say_begins_anew(self, epoch)
        done = steps if whole else 0
        if same:
            return replace(self, done=done)
        return replace(self, done=done, made=done, state=None)

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name; plain data."""
        return asdict(self)


class Progress:
    """Counts how much of an input was read and handed out.

    Args:
        batches: The iterator over the input, which may have a position of its own.
        data_adapter: Keras's adapter for the input, which may count epochs and use them to shuffle.
        epoch: What is known about an epoch of the input: its batches, rows, and steps.

    Attributes:
        follows: Whether more than a count must be recorded for a batch.
    """

    def __init__(self, batches: Any, data_adapter: Any = None, epoch: dict[str, int] | None = None):
        self.made = 0
        self.epoch = epoch
        self._batches, self._data_adapter = batches, data_adapter
        # The random numbers before the first batch was read.
        self._start: dict[str, Any] | None = None
        # The epochs of the first batch and of the newest, as Keras's data adapter counts them.
        self._start_epoch = self._newest_epoch = _keras.shuffling_epoch(data_adapter)
        # The input's states after every batch that was read and not handed out yet.
        self._states: deque | None = None
        self._state: Any = None
        self.follows = self._start_epoch is not None

    def begins(self) -> None:
        """Records the state that decides the order of the batches, before the first is read."""
        self._start = self._start or random_numbers()
        self._start_epoch = _keras.shuffling_epoch(self._data_adapter)

    def drew_with(self, numbers: dict[str, Any]) -> None:
        """Records the random numbers with which the order of an input was drawn ahead.

        Args:
            numbers: The result of `random_numbers` before that.
        """
        self._start = self._start or numbers

    def keep_states(self) -> None:
        """Starts to record the input's own states, if it has any, for `position`."""
        if self._states is None and hasattr(self._batches, "get_state"):
            self._states, self.follows = deque(), True

    def was_read(self) -> None:
        """Records the input's state after a batch was read."""
        if self._states is not None:
            self._states.append(state_of(self._batches))

    def follow(self, steps: int) -> None:
        """Records the states that belong to batches that are handed out.

        Args:
            steps: The number of batches.
        """
        self._newest_epoch = _keras.shuffling_epoch(self._data_adapter)
        states = self._states or deque()
        for _ in range(min(steps, len(states))):
            self._state = states.popleft()

    def goes_to(self, position: InputPosition, begins: bool) -> bool:
        """Moves the input to a position, if it can be moved.

        Args:
            position: The position of an iterator over the same input in an earlier process.
            begins: Whether that is its beginning.

        Returns:
            Whether the input is there now: after all batches that were handed out before.
        """
        stands = bool(not begins and position.state) and set_state(self._batches, position.state)
        if not _keras.orders_ahead(self._data_adapter):
            set_random_numbers(position.now if begins or stands else position.start)
        if stands:
            self._start, self._state = position.start, position.state
        return stands

    def has_epoch_of(self, position: InputPosition) -> None:
        """Lets Keras's data adapter count epochs from those of a position.

        Args:
            position: The position.
        """
        if position.now_epoch is not None and self._newest_epoch is not None:
            self._newest_epoch = position.now_epoch
            _keras.set_shuffling_epoch(self._data_adapter, position.now_epoch)

    def position(self, done: int) -> InputPosition:
        """The current position of training in the input.

        Args:
            done: The number of steps that ran in the current epoch.
        """
        now, epoch = random_numbers(), _keras.shuffling_epoch(self._data_adapter)
        if epoch is not None and self._newest_epoch is not None and not done:
            # Keras does not count an epoch that a callback ends.
            epoch = max(epoch, self._newest_epoch + 1)
        return InputPosition(
            start=self._start or now,
            now=now,
            made=self.made,
            done=done,
            state=self._state,
            start_epoch=self._start_epoch,
            now_epoch=epoch,
            epoch=self.epoch,
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _has_words(text: Any, count: int) -> bool:
    decoded = _decoded(text)
    return decoded is not None and len(decoded) == 4 * count


def _has_python_words(text: Any) -> bool:
    # The last word of Python's state is the index into the others.
    return _has_words(text, _WORDS + 1) and int(_words(text)[-1]) <= _WORDS


def _is_state(state: Any) -> bool:
    if not isinstance(state, dict) or len(state) != 1:
        return False
    if "bytes" in state:
        return _decoded(state["bytes"]) is not None
    try:
        json.loads(state["json"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return True


def _decoded(text: Any) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except ValueError:
        return None


_NUMBERS = {
    "numpy": [
        lambda name: name == "MT19937",
        lambda keys: _has_words(keys, _WORDS),
        lambda at: type(at) is int and 0 <= at <= _WORDS,
        lambda has_gauss: has_gauss in (0, 1),
        (int, float),
    ],
    "python": [lambda version: version == 3, _has_python_words, (None, float)],
}
# The form of `InputPosition.to_dict`, from any source.
POSITION = {
    "start": _NUMBERS,
    "now": _NUMBERS,
    "made": _is_count,
    "done": _is_count,
    "state": (None, _is_state),
    "start_epoch": (None, _is_count),
    "now_epoch": (None, _is_count),
    "epoch": (None, DictOf(_is_count)),
}


def random_numbers() -> dict[str, Any]:
    """The state of NumPy's and Python's global random numbers, as plain data."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    version, words, gauss = random.getstate()
    return {
        "numpy": [
            name,
            _text(keys),
            *rest,
        ],
        "python": [version, _text(np.asarray(words, np.uint32)), gauss],
    }


def set_random_numbers(state: dict[str, Any]) -> None:
    """Sets the state of NumPy's and Python's global random numbers.

    Args:
        state: A result of `random_numbers`.
    """
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, _words(keys), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in _words(words)), gauss))


def position_before_first(epoch: dict[str, int] | None = None) -> InputPosition:
    """The position before the first batch of an input."""
    now = random_numbers()
    return InputPosition(now, now, 0, 0, epoch=epoch)


def say_begins_anew(position: InputPosition, epoch: Mapping[str, int]) -> None:
    """Logs that an epoch has other batches than those with which it was begun."""
    logger.warning(
        "the epoch cannot be continued as it was begun: the checkpoint was saved after %d batches "
        "of %s, and now there are %s. The epoch begins anew, so some rows train twice in it. To "
        "resume exactly, give the same data in batches of the same size",
        position.done,
        _epoch_text(position.epoch or {}),
        _epoch_text(epoch),
    )


def _epoch_text(epoch: Mapping[str, int]) -> str:
    number = epoch.get("steps", epoch.get("batches"))
    rows = f" of {epoch['rows']} rows" if "rows" in epoch else ""
    last = f" (the last of {epoch['last']})" if epoch.get("last") != epoch.get("rows") else ""
    return f"{'an unknown number' if number is None else number} an epoch{rows}{last}"


def position_between_epochs() -> InputPosition:
    """The position in the input of the running fit between epochs, without a strategy.

    Its data adapter may not have counted an epoch that a callback ended.
    """
    now, iterator = random_numbers(), _keras.epoch_iterator_of_fit()
    epoch = None if iterator is None else _keras.shuffling_epoch(iterator.data_adapter)
    return InputPosition(now, now, 0, 0, None, epoch, epoch)


def own_position(positions: Sequence) -> InputPosition | None:
    """This process's position; the first one if the number of processes has changed.

    Args:
        positions: The positions of the processes that wrote the checkpoint, as plain data.
    """
    if len(positions) == jax.process_count():
        here = positions[jax.process_index()]
    else:
        here = positions[0]
        if any(other != here for other in positions):
            logger.warning(
                "%d processes wrote the checkpoint, with different random numbers; of %d "
                "processes, all resume with those of the first",
                len(positions),
                jax.process_count(),
            )
    return None if here is None else InputPosition(**{name: here[name] for name in POSITION})


def shuffle_from(position: InputPosition, epoch: int) -> None:
    """Makes the fit that starts shuffle its input as the interrupted fit did.

    Call it before the epoch begins, because workers of a `PyDataset` draw its order then. Keras
    3.15 draws any other order with the first batch: see `DeviceIterator.begin_at`.

    Args:
        position: Where training stopped.
        epoch: The epoch in which it resumes, from 0.
    """
    iterator: Any = _keras.epoch_iterator_of_fit()
    if iterator is None:
        return
    adapter = iterator.data_adapter
    begins = position.begins(iterator.steps_per_epoch, adapter.num_batches)
    if _keras.orders_ahead(adapter):
        set_random_numbers(position.now if begins else position.start)
    fresh, was_counted = _keras.shuffling_epoch(adapter), position.now_epoch is not None
    if (fresh is not None) != was_counted:
        logger.warning(
            "the checkpoint is from another version of Keras, or from an input that was shuffled "
            "differently: training resumes with rows in another order"
        )
    if fresh is not None:
        of_input = position.now_epoch if begins else position.start_epoch
        # Epochs have different orders, so if the old epoch is unknown, counting starts at a new
        # one.
        _keras.set_shuffling_epoch(adapter, fresh + epoch if of_input is None else of_input)


def state_of(batches: Any) -> Any:
    """The state of an iterator with `get_state()`, such as Grain's, as plain data.

    Args:
        batches: The iterator.

    Returns:
        The state, or `None` if it cannot be saved.
    """
    state = batches.get_state()
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        return {"json": json.dumps(marked(state))}
    except UnmarkableError as error:
        log_once(
            f"{type(batches).__name__}.get_state(){error.place} {error.reason}, which a checkpoint "
            "cannot have: a resumed run reads the input from its start, and skips what was trained",
            logging.WARNING,
            about=f"state of {type(batches).__qualname__}",
        )
        return None


def set_state(batches: Any, state: dict[str, str]) -> bool:
    """Moves an iterator to the position of another one over the same input.

    Args:
        batches: The iterator.
        state: The result of `state_of` for the other.

    Returns:
        Whether it moved; it does not if it has no states, or rejects this one.
    """
    if not hasattr(batches, "set_state"):
        return False
    try:
        if "bytes" in state:
            batches.set_state(base64.b64decode(state["bytes"]))
        else:
            batches.set_state(unmarked(json.loads(state["json"])))
    except Exception as error:
        logger.warning(
            "the input does not accept the state in the checkpoint (%s: %s), so it is read "
            "from its start again",
            type(error).__name__,
            error,
        )
        return False
    return True


def _text(words: np.ndarray) -> str:
    return base64.b64encode(words.astype("<u4").tobytes()).decode()


def _words(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<u4").astype(np.uint32)
