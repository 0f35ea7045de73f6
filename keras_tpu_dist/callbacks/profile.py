"""A callback that traces some steps of a fit with JAX's profiler."""

import logging
import os
from typing import Annotated, Any

import jax

from keras_tpu_dist.callbacks.in_fit import InFit
from keras_tpu_dist.common.checks import Requirement, checked_arguments, checked_path, is_count
from keras_tpu_dist.training.auto_steps import MOST_STEPS
from keras_tpu_dist.training.fit_control import FitControl

logger = logging.getLogger("keras_tpu_dist")


def _are_steps(value: Any) -> bool:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    return pair and all(is_count(step, 1) for step in value) and value[0] <= value[1]


_STEPS = Requirement(
    "the first and the last train step to trace, counted from 1", _are_steps, "(10, 13)"
)


class Profile(InFit):
    """Traces the train steps from the first to the last, with JAX's profiler.

    Steps count from 1 in each fit. With several steps in a launch (`steps_per_execution`), the
    launches with these steps are traced completely, and `traced` has the steps. Before and after
    the trace it waits for the devices, so that the trace contains no other steps. The trace stops
    however the fit ends. If JAX's profiler is already on, or the steps never run, you get a
    warning and training continues.

    Open the directory with `xprof --logdir`. Every process writes into a folder of its own in it.

    It needs a `TPUStrategy`.

    Args:
        steps: The first and the last step.
        directory: The directory for the trace.

    Attributes:
        traced: The first and the last step of the trace; `None` before there is one.

    Raises:
        ValueError: If an argument has the wrong type or value; in `fit`, without a `TPUStrategy`.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd
    >>> with ktd.TPUStrategy().scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> profile = ktd.callbacks.Profile(steps=(10, 13), directory="profile")
    >>> _ = model.fit(x, y, callbacks=[profile])  # doctest: +SKIP
    >>> profile.traced  # doctest: +SKIP
    (10, 13)
    """

    @checked_arguments
    def __init__(
        self,
        steps: Annotated[tuple[int, int], _STEPS] = (10, 13),
        directory: str | os.PathLike[str] = "profile",
    ):
        super().__init__()
        self.steps = int(steps[0]), int(steps[1])
        self.directory = checked_path(
            "Profile", "Name a folder, such as directory='profile'.", directory=directory
        )
        self.traced: tuple[int, int] | None = None
        self._fit: FitControl | None = None
        self._made = 0
        # The first step of the trace, also of one that could not start.
        self._first: int | None = None
        self._is_on = False

    def on_train_begin(self, logs=None):
        """Asks to be called after launches, and when the fit ends."""
        fit = self._fit = self._strategys_loop(
            "Profile traces the launches of a TPUStrategy.", ", or use jax.profiler.trace"
        )
        self._made, self._first, self.traced = 0, None, None
        fit.on_launch.append(self._launched)
        fit.at_end.append(self._stop)

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the trace before a launch that may have the first step."""
        steps = self._trainer.steps_per_execution
        most = steps if is_count(steps, 1) else MOST_STEPS
        if self._first is None and self._made + most >= self.steps[0]:
            self._start()

    def on_train_end(self, logs=None):
        """Warns if the fit was too short."""
        if self._first is None:
            logger.warning(
                "Profile(steps=%s): the fit ended after %d steps, before these: nothing is traced",
                self.steps,
                self._made,
            )

    def _start(self) -> None:
        self._first = self._made + 1
        options = jax.profiler.ProfileOptions()
        # Python's calls would make most of the file.
        options.python_tracer_level = 0
        self._wait_for_devices()
        folder = os.path.join(self.directory, f"process_{jax.process_index()}")
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
            self._is_on = True
        except RuntimeError as error:
            logger.warning(
                "Profile(steps=%s): JAX's profiler does not start, so nothing is traced: %s",
                self.steps,
                error,
            )

    def _launched(self, step: int, steps: int, batch: Any, outputs: Any) -> None:
        self._made += steps
        if self._made >= self.steps[1]:
            self._stop()

    def _stop(self) -> None:
        if not self._is_on or self._first is None:
            return
        self._is_on = False
        self._wait_for_devices()
        jax.profiler.stop_trace()
        # A launch that failed was no step.
        self.traced = (self._first, self._made) if self._made >= self._first else None

    def _wait_for_devices(self) -> None:
        if self._fit is not None:
            jax.block_until_ready(self._fit.outputs)
