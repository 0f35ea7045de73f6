"""Checkpoints of what trains: the weights that they leave out, because the run's base has them."""

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.fingerprint import identities
from keras_tpu_dist.checkpoint.manifest import Saved
from keras_tpu_dist.checkpoint.names import dtype_of
from keras_tpu_dist.common.checks import checked_path
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.show.text import size_text

# The other word of `Checkpoint(only=...)` is `None`: all of the model.
TRAINED = "trained"
_FIX = "Load the same weights in all processes."
_MOST_NAMED = 3


def checked_base(
    caller: str, example: str, only: str | None, base: str | os.PathLike | None
) -> str | None:
    """The argument `base` of a class that saves checkpoints, as text.

    Args:
        caller: The class, for errors.
        example: The error's last sentence.
        only: Its argument of that name.
    """
    if base is None:
        return None
    path = checked_path(caller, example, base=base)
    if only is None:
        raise value_error(
            "A base has what the checkpoints of a run leave out.",
            received={"only": only, "base": path},
            fix='Write only="trained", too, or leave base out.',
        )
    return path


def frozen_weights(models: Iterable[Any]) -> list[Any]:
    """The variables of models that a training step does not change, because they were frozen.

    Keras lists a variable by what it was created as. One that was created to train and does not was
    frozen, by its layer, by itself or for LoRA. One that was created not to train is state, such as
    a moving mean or a seed, except in a quantized layer and in a frozen `BatchNormalization`.
    """
    found: dict[int, Any] = {}
    trained: set[int] = set()
    for model in models:
        trained |= {id(variable) for variable in _keras.weights_by_training(model)[0]}
        for layer in _keras.flatten_layers(model):
            variables = _keras.created_to_train(layer)
            if _keeps_no_state(layer):
                variables = _keras.own_variables(layer)
            found |= {id(variable): variable for variable in variables}
    return [variable for key, variable in found.items() if key not in trained]


def _keeps_no_state(layer: Any) -> bool:
    if isinstance(layer, keras.layers.BatchNormalization):
        return not layer.trainable
    return getattr(layer, "quantization_mode", None) is not None


def numbers_of(
    variables: Sequence[Any], values: Sequence[Any] | None = None
) -> list[tuple[int, bool]]:
    """The identities of the values of variables, in the dtypes that they declare.

    Args:
        variables: The variables.
        values: Their values, if they were read already.
    """
    values = [variable.value for variable in variables] if values is None else values
    return identities(
        [
            value if value.dtype == dtype_of(variable) else value.astype(dtype_of(variable))
            for value, variable in zip(values, variables, strict=True)
        ]
    )


class Base:
    """What the checkpoints of a run leave out: weights that do not train, and that its base has.

    The base is what the model holds before the run trains; a run that resumes has the base of the
    checkpoint that it resumes from. Whether a weight still has its value is computed for each
    checkpoint, by the devices: a step of your own may assign one that does not train.

    Args:
        source: What the user calls it, if anything: see `ktd.restore`.
    """

    def __init__(self, source: str | None = None):
        self.source = source
        self._numbers: dict[int, tuple[Any, int]] = {}
        self._resumed = False

    def begin(self, models: Iterable[Any]) -> None:
        """Takes the weights that are frozen now as the base of a new run."""
        frozen = frozen_weights(models)
        numbers = [number for number, _ in numbers_of(frozen)]
        self._numbers = {id(v): (v, n) for v, n in zip(frozen, numbers, strict=True)}
        self._resumed = False

    def resume(self, left_out: Iterable[tuple[Saved, Any]]) -> None:
        """Takes the base of a checkpoint.

        Args:
            left_out: What it leaves out, with the variables.
        """
        self._numbers = {id(v): (v, saved.fingerprint) for saved, v in left_out}
        self._resumed = True

    def left_out(self, models: Iterable[Any]) -> dict[int, tuple[int, bool]]:
        """What a checkpoint leaves out now: by the `id` of the variable, its identity, and whether
        all its numbers are finite."""
        frozen = frozen_weights(models)
        known = [v for v in frozen if id(v) in self._numbers]
        # Not `variable.value`: a step copies what was handed out, before it overwrites its state.
        values = _keras.values_of(known)
        numbers = dict(zip(map(id, known), numbers_of(known, values), strict=True))
        same = {id(v) for v in known if numbers[id(v)][0] == self._numbers[id(v)][1]}
        places = [i for i, v in enumerate(frozen) if id(v) in same]
        # Of all processes, as all write the same arrays.
        of_all = agree("choosing what a checkpoint leaves out", _FIX, places)
        left = [frozen[i] for i in sorted(set(places).intersection(*of_all))]
        ids = set(map(id, left))
        self._say([v for v in frozen if id(v) not in ids], left)
        return {id(v): numbers[id(v)] for v in left}

    def _say(self, kept: list[Any], left: list[Any]) -> None:
        changed = [v for v in kept if id(v) in self._numbers]
        other = [v for v in kept if id(v) not in self._numbers]
        if changed:
            log_once(
                f"{named(changed)} changed in this run, although they do not train: its "
                "checkpoints hold them from now on",
                logging.WARNING,
            )
        if other:
            log_once(
                f"{named(other)} do not train now, and the run's base does not have them: its "
                "checkpoints hold them. To leave them out, begin a run in another directory, with "
                "a checkpoint of this one as base=",
                logging.WARNING,
            )
        if left and self.source is None and not self._resumed:
            log_once(
                f"checkpoints leave out {named(left)}: to load them, the model must have the same "
                "values by then. Checkpoint(..., base=...) notes where they come from",
                logging.WARNING,
            )


def named(variables: Sequence[Any]) -> str:
    """The number of variables, their size, and the first paths, for a message.

    Example:

    >>> import keras
    >>> named([keras.Variable([0.0, 1.0], name="one"), keras.Variable([0.0], name="two")])
    '2 weights of 12 B (one, two)'
    """
    size = size_text(sum(bytes_of(variable) for variable in variables))
    paths = ", ".join(variable.path for variable in variables[:_MOST_NAMED])
    more = ", ..." if len(variables) > _MOST_NAMED else ""
    return f"{weights_text(len(variables))} of {size} ({paths}{more})"


def weights_text(count: int) -> str:
    """A number of weights, for a message."""
    return f"{count} weight" + ("s" if count != 1 else "")
