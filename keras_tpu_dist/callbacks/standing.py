"""Where training stands after a launch, before callbacks go on from there."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks.averages import swapped
from keras_tpu_dist.callbacks.states import history_of, states_of


@dataclass(frozen=True)
class Standing:
    """The state of a moment, to be saved then or later; arrays are referred to, not copied.

    Validation and the end of an epoch change metrics, history and what callbacks know; callbacks
    may change weights. A run that is cut there is saved as its last launch left it, and makes the
    end of the epoch again.

    Attributes:
        states: What callbacks know. See `states_of`.
        arrays: The arrays among it.
        history: The record of the epochs that have ended.
        global_seed: Keras's.
        stopped: Whether training stops here.
        swapped: Whether averages are in the place of weights.
    """

    states: list[dict[str, Any]]
    arrays: dict[str, np.ndarray]
    history: dict[str, Any]
    global_seed: Any
    stopped: bool
    swapped: bool
    _variables: Sequence[Any] = ()
    _values: Sequence[Any] = ()

    @contextlib.contextmanager
    def in_variables(self) -> Iterator[None]:
        """A context in which variables have the values of that moment."""
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
    """Where training stands now.

    Args:
        model: The model that trains.
        callbacks: Those of the fit whose states are saved.
        history: The record of the epochs that have ended, if that is known already.
        variables: Those of the training state, if callbacks may change them before they are saved.
    """
    states, arrays = states_of(callbacks)
    return Standing(
        *(states, arrays, history or history_of(model.history), _keras.global_seed()),
        *(bool(model.stop_training), swapped(callbacks)),
        *(variables, _keras.values_of(list(variables))),
    )
