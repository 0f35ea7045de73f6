"""Ends training after an exact number of optimizer steps."""

import logging
from collections.abc import Iterable

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks.in_fit import InFit
from keras_tpu_dist.common.checks import PositiveInt, checked_arguments
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.training.fit_control import FitControl
from keras_tpu_dist.training.membership import fit_in_training

logger = logging.getLogger("keras_tpu_dist")


class StopAtStep(InFit):
    """Stops training when the optimizer has run exactly `n` steps, or `n` more.

    Steps are those of `optimizer.iterations`, which learning-rate schedules see and checkpoints
    save: a model restored at step 700 runs 300 more under `StopAtStep(1000)`. With
    `gradient_accumulation_steps`, they are updates of the weights. A step that a
    `LossScaleOptimizer` skips does not count. The last launch of several steps
    (`steps_per_execution`) is shortened. The epoch ends there: its logs cover the steps that ran,
    and validation and `on_epoch_end` follow as usual.

    If a custom `train_step` never applies `model.optimizer`, its train steps count, from the start
    of the fit. Give `fit` enough `epochs` to get to step `n`; otherwise training ends before.

    With `more=True` every fit runs `n` steps from where it starts or resumes: a run that was
    interrupted and starts again runs `n` more. If you want to end at the same step however often a
    run starts, give that step and leave `more` out.

    It works under a `TPUStrategy`, and under stock Keras if `steps_per_execution` is 1.

    Args:
        n: The number of optimizer steps, counted over the model's life, or, with `more`, from the
            start of the fit.
        more: Whether to count from the start of the fit.

    Raises:
        ValueError: If `n` is not a whole number above 0, or `more` is not a bool; in `fit`, if the
            model has already run `n` steps.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd
    >>> with ktd.TPUStrategy().scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse", steps_per_execution=8)
    >>> x, y = np.ones((96, 4)), np.ones((96, 1))
    >>> _ = model.fit(x, y, batch_size=8, verbose=0, callbacks=[ktd.callbacks.StopAtStep(11)])
    >>> int(model.optimizer.iterations)
    11
    """

    @checked_arguments
    def __init__(self, n: PositiveInt, more: bool = False):
        super().__init__()
        self.n = n.__index__()
        self.more = bool(more)
        self._counts_from = 0
        self._fit: FitControl | None = None
        self._first: int | None = None
        self._left = 0

    @property
    def async_safe(self) -> bool:
        """Whether Keras may run batch callbacks beside training: yes if the strategy's loop
        counts."""
        return _keras.active_strategy() is not None

    @property
    def sees_launches(self) -> bool:
        """Whether the strategy's loop counts; if so, the logs of every step are not fetched."""
        return self._fit is not None

    def on_train_begin(self, logs=None):
        """Looks for a strategy's loop, which can count."""
        self._first = None
        self._fit = fit_in_training(self._trainer)
        if self._fit is None and self._trainer.steps_per_execution != 1:
            raise value_error(
                "Stock Keras cannot shorten a launch of several steps.",
                received={"steps_per_execution": self._trainer.steps_per_execution},
                fix="Build the model in TPUStrategy().scope(), or write steps_per_execution=1.",
            )

    def on_epoch_begin(self, epoch, logs=None):
        """Computes how many steps are left."""
        # Not in on_train_begin: callbacks restore models there, some of them after this one.
        if self._first is None:
            self._first = self._made()
            self._counts_from = self._first if self.more else 0
            self._left = self._from_optimizer()
            # A run that was stopped after the last step repeats the end of its epoch.
            if self._left or self._fit is None or not self._fit.batches_to_skip:
                self._check_left()
        elif self._made() != self._first:
            self._left = self._from_optimizer()
        elif self._fit is not None:
            self._left = self._fit.steps_left or self._left
        fit = self._fit
        # Another callback may stop the fit earlier.
        if fit is not None and (
            fit.more_steps in (None, self._more_steps) or self._left < (fit.steps_left or 0)
        ):
            fit.steps_left, fit.more_steps = self._left, self._more_steps

    def on_train_batch_end(self, batch, logs=None):
        """Counts without a strategy."""
        if self.sees_launches:
            return
        self._left -= 1
        if self._left <= 0:
            # Reading `model` updates its variables.
            self._trainer = self.model
            self._left = self._more_steps()
            if self._left <= 0:
                self._trainer.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """Stops even if a train step ran more than one optimizer step."""
        if self._made() != self._first and self._more_steps() == 0:
            self._trainer.stop_training = True

    @property
    def reached(self) -> bool:
        """Whether the optimizer has run its `n` steps in this fit."""
        return self._first is not None and self._from_optimizer() <= 0

    @property
    def last_step(self) -> int:
        """The optimizer step at which this fit ends, counted over the model's life."""
        return self._counts_from // self._steps_of_an_update() + self.n

    def _made(self) -> int:
        optimizer = getattr(self._trainer, "optimizer", None)
        return 0 if optimizer is None else _keras.train_steps_counted(optimizer)

    def _from_optimizer(self) -> int:
        return self._counts_from + self.n * self._steps_of_an_update() - self._made()

    def _steps_of_an_update(self) -> int:
        optimizer = getattr(self._trainer, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        return getattr(optimizer, "gradient_accumulation_steps", None) or 1

    def _check_left(self) -> None:
        if self._left <= 0:
            raise value_error(
                f"StopAtStep({self.n}) stops when the optimizer has run {self.n} steps.",
                received=f"a model whose optimizer.iterations is "
                f"{int(self._trainer.optimizer.iterations)}.",
                fix="Give a larger n: it counts over the model's life, not from this fit on.",
            )

    def _more_steps(self) -> int:
        """How many steps are still missing when the estimated number has run."""
        made = self._made()
        skips = isinstance(
            getattr(self._trainer, "optimizer", None), keras.optimizers.LossScaleOptimizer
        )
        if made == self._first and not skips:
            logger.info(
                "StopAtStep(%d): the train step of %r never applies model.optimizer, so its train "
                "steps were counted",
                self.n,
                self._trainer.name,
            )
            return 0
        left = self._from_optimizer()
        if left < 0:
            logger.warning(
                "StopAtStep(%d): %r ran %d optimizer steps, because its train step applies "
                "model.optimizer more than once",
                self.n,
                self._trainer.name,
                self.n - left,
            )
        return max(left, 0)


def reached_by(callbacks: Iterable) -> int | None:
    """The step at which a `StopAtStep` has stopped training, if one has.

    Args:
        callbacks: The callbacks of the fit.
    """
    stops = (callback for callback in callbacks if isinstance(callback, StopAtStep))
    found = [stop.last_step for stop in stops if stop.reached]
    return min(found, default=None)


def goes_beyond(callbacks: Iterable, steps: int | None) -> bool:
    """Whether training that a `StopAtStep` has stopped at this step is to continue.

    Args:
        callbacks: The callbacks of the fit that starts.
        steps: The step, as `reached_by` returns it.
    """
    stops = [callback for callback in callbacks if isinstance(callback, StopAtStep)]
    return steps is not None and all(stop.more or stop.n > steps for stop in stops)
