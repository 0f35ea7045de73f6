"""What callbacks of a fit have in common: its model, and the loop of its strategy."""

from typing import Any

import keras

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.training.fit_control import FitControl
from keras_tpu_dist.training.membership import fit_in_training


class InFit(keras.callbacks.Callback):
    """A callback that knows the model of its fit."""

    _trainer: Any = None

    def set_model(self, model):
        """Stores the model."""
        super().set_model(model)
        # Not `self.model`: reading that makes the trainer copy its state to the variables.
        self._trainer = model

    def _strategys_loop(self, rule: str, instead: str = "") -> FitControl:
        """The controls of the fit; a `ValueError` with the rule if it has no strategy."""
        control = fit_in_training(self._trainer)
        if control is None:
            raise value_error(
                rule,
                received="a fit without a TPUStrategy.",
                fix=f"Build the model in TPUStrategy().scope(){instead}.",
            )
        return control
