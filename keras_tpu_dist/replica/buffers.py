"""Which arrays a launch of replica code may consume: the outputs of earlier launches."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from keras_tpu_dist import _keras
from keras_tpu_dist.training.buffers import copy_apart


class ReplicaBuffers:
    """The arrays of variables that a strategy's replica code updates in place.

    It does the same as `training.buffers.Buffers` for the steps of one model: XLA overwrites a
    donated array even if something else refers to it. Functions that update different sets of
    variables take turns here, so every variable knows by itself whether its array may be consumed.

    Attributes:
        lock: Held while a launch consumes arrays, until the variables have the new ones.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self._thread: threading.Thread | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether another thread launched last, and its launch still runs."""
        thread = self._thread
        return thread not in (None, threading.current_thread()) and thread.is_alive()

    @contextmanager
    def launching(self, variables: list) -> Iterator[list[jax.Array]]:
        """The context of a launch: the values of variables, which it may consume.

        Raises:
            Exception: The exception of the launch, with a note if it has already consumed values.
        """
        with self.lock:
            self._thread = threading.current_thread()
            values = _keras.values_of(variables)
            owners = [_keras.owner_of(variable) for variable in variables]
            foreign = [
                i
                for i, (owner, value) in enumerate(zip(owners, values, strict=True))
                if not (self._owns(owner) and owner.made() is value)
            ]
            for i in foreign:
                _keras.set_owner([variables[i]], _Owner(self))
            copy_apart(variables, values, foreign)
            try:
                yield values
            except Exception as error:
                _note_what_is_lost(error, variables, values)
                raise

    def made(self, variables: list, values: list[jax.Array]) -> None:
        """Assigns the outputs of a launch to variables."""
        _keras.follow_state((variables,), (values,))
        for variable, value in zip(variables, values, strict=True):
            owner = _keras.owner_of(variable)
            if self._owns(owner):
                owner.made = weakref.ref(value)

    def _owns(self, owner: Any) -> bool:
        # A variable of another strategy has another lock.
        return isinstance(owner, _Owner) and owner.buffers is self


class _Owner:
    """Knows whether the array of a variable comes from a launch and has not been read."""

    def __init__(self, buffers: ReplicaBuffers):
        self.buffers = buffers
        self.made: Callable[[], jax.Array | None] = _nothing

    @property
    def lock(self) -> Any:
        return self.buffers.lock

    @property
    def elsewhere(self) -> bool:
        return self.buffers.elsewhere

    def hand_out(self, variable: Any, stock: Callable) -> Any:
        """Reads the variable; called after `_keras.set_owner`."""
        with self.lock:
            value = stock(variable)
            if _keras.holds(variable, value):
                self.made = _nothing
        return value

    def note_outside_reader(self) -> None:
        """Notes that a call of a model reads the variable and keeps its array for long."""
        with self.lock:
            self.made = _nothing

    def __reduce__(self):
        # A variable that is copied or pickled has its own array.
        return type(None), ()


def _nothing() -> None:
    return None


def _note_what_is_lost(error: Exception, variables: list, values: list[jax.Array]) -> None:
    lost = [v.path for v, value in zip(variables, values, strict=True) if value.is_deleted()]
    if lost:
        error.add_note(
            f"The launch had consumed the values of {len(lost)} variable(s), such as "
            f"{lost[0]!r}, before it failed; they are lost. Restore a checkpoint, or build the "
            "model again. TPUStrategy(donate_state=False) keeps old values until a launch is made."
        )
