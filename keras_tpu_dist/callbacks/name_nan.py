"""Finds NaN and infinity in the step that produces them, and names the variables."""

import logging

from keras_tpu_dist.callbacks.in_fit import InFit
from keras_tpu_dist.common.checks import checked_arguments
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.training.finite import FiniteWatch, NonFinite
from keras_tpu_dist.training.membership import fit_in_training

logger = logging.getLogger("keras_tpu_dist")


class NameNaN(InFit):
    """Stops training at the first NaN or infinity, and says which variable and input had it.

    The loss, the weights and the optimizer's variables are checked inside the compiled step. A step
    that would spoil one of them, and every step after it, leaves the model unchanged. So you have
    the weights after the last finite step, exactly, also in the middle of a launch of many steps
    and with `donate_state=True`. The error comes at most two launches later, and before
    `on_epoch_end`. It names the step, the losses and variables, and the inputs of that step that
    already had NaN or infinity. Variables that are infinite before training, such as masks, are not
    checked.

    The check reads the state once more in every step and keeps it until the step has ended, so a
    step needs memory for a second copy of the state. The checked step is a program of its own and
    is compiled separately.

    It needs a `TPUStrategy`. Stock Keras has `keras.callbacks.TerminateOnNaN`, which looks at the
    loss alone, after the weights are spoiled.

    Args:
        stop: Whether to stop training and log an error instead of raising one.

    Attributes:
        found: The `NonFinite` of the last fit, or `None`.

    Raises:
        FloatingPointError: In `fit`, if a step is not finite, unless `stop` is set.
        ValueError: In `fit`, if a weight is not finite before the first step, or without a
            `TPUStrategy`.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd
    >>> with ktd.TPUStrategy().scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="out")])
    ...     model.compile("sgd", "mse", steps_per_execution=4)
    >>> x, y = np.ones((64, 4)), np.ones((64, 1))
    >>> x[43] = np.nan
    >>> name = ktd.callbacks.NameNaN(stop=True)
    >>> _ = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[name])
    >>> name.found.step, name.found.launch, name.found.inputs
    (6, (5, 8), ('x',))
    """

    @checked_arguments
    def __init__(self, stop: bool = False):
        super().__init__()
        self.stop = stop
        self.found: NonFinite | None = None
        self._watch: FiniteWatch | None = None

    def on_train_begin(self, logs=None):
        """Forgets the result of the last fit."""
        self.found = self._watch = None
        self._strategys_loop(
            "NameNaN checks inside the compiled step of a TPUStrategy.",
            ", or use keras.callbacks.TerminateOnNaN",
        )

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the check, before the first step."""
        # Not in on_train_begin: callbacks restore models there, some of them after this one.
        fit = fit_in_training(self._trainer)
        if self._watch is None and fit is not None:
            self._watch = fit.watch = FiniteWatch(self._trainer, self._on_found)

    def on_epoch_end(self, epoch, logs=None):
        """Reads the results of the epoch's last launches."""
        if self._watch is not None:
            self._watch.read()

    def _on_found(self, found: NonFinite) -> None:
        self.found = found
        look = (
            "Clean the input first."
            if found.inputs
            else "Look for division, logarithms and square roots in the loss, lower the learning "
            "rate, or clip gradients with the optimizer's clipnorm or global_clipnorm."
        )
        said = message(
            "A train step must give finite losses and weights.",
            received=f"{found}.",
            fix=f"The weights are those after {found.step - 1} steps of this fit. {look}",
        )
        if not self.stop:
            raise FloatingPointError(said)
        logger.error(said)
        self._trainer.stop_training = True
