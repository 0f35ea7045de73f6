"""A callback that traces some steps of a fit with JAX's profiler."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax

from keras_tpu_dist.callbacks.in_fit import InFit
from keras_tpu_dist.common.checks import checked_path, is_count, known_words
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.training.auto_steps import MOST_STEPS
from keras_tpu_dist.training.fit_control import FitControl
from keras_tpu_dist.training.profiles import MANIFEST, Trace

logger = logging.getLogger("keras_tpu_dist")


class Profile(InFit):
    """Traces exactly the train steps from the first to the last, with JAX's profiler.

    Steps count from 1 over the whole run: a fit that a `Checkpoint` resumes at step 700 continues
    with 701. With several steps in a launch (`steps_per_execution`), the launches with these steps
    are traced completely, and a line in the log gives the traced steps. Before and after a trace it
    waits for the devices, so that the trace contains nothing else; validation between the steps is
    left out. A clock also measures the time of the steps, including their input.

    The trace stops however the fit ends. If JAX's profiler is already on, or the steps never run,
    you get a warning and training continues. In the directory, every process has a folder with its
    traces (open it with `xprof --logdir`), the text of the programs that ran, and the data for
    `read_profile` and `DryRun.compare`.

    It needs a `TPUStrategy`.

    Args:
        steps: The first and the last step.
        directory: The directory for the traces. It replaces an earlier profile there.
        all_processes: Whether every process traces its devices, or only the first one.

    Attributes:
        traced: The first and last step of every trace, of this fit or of the one that it resumes.

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
    [(10, 13)]
    """

    @known_words
    def __init__(
        self,
        steps: tuple[int, int] = (10, 13),
        directory: str | os.PathLike[str] = "profile",
        all_processes: bool = True,
    ):
        super().__init__()
        self.steps = _checked_steps(steps)
        self.directory = checked_path(
            "Profile", "Name a folder, such as directory='profile'.", directory=directory
        )
        self.all_processes = bool(all_processes)
        self.traced: list[tuple[int, int]] = []
        self._fit: FitControl | None = None
        self._trace: Trace | None = None
        self._made = 0
        self._before_epoch = 0
        self._gave_up = False

    def state_dict(self) -> dict[str, Any]:
        """The steps that ran and were traced, for a fit that resumes."""
        return {"made": self._made, "traced": [list(pair) for pair in self.traced]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues to count from a state.

        Args:
            state: A result of `state_dict`.
        """
        made, traced = state.get("made"), state.get("traced")
        if is_count(made, 0):
            self._made = self._before_epoch = made
        if isinstance(traced, list):
            pairs = [pair for pair in traced if isinstance(pair, (list, tuple)) and len(pair) == 2]
            self.traced = [(a, b) for a, b in pairs if is_count(a, 1) and is_count(b, 1)]

    def set_model(self, model):
        """Stores the model; a fit counts from its first step unless it resumes."""
        super().set_model(model)
        self._made = self._before_epoch = 0
        self.traced, self._gave_up = [], False

    def on_train_begin(self, logs=None):
        """Asks to be called when the fit ends."""
        self._fit = self._strategys_loop(
            "Profile traces the launches of a TPUStrategy.", ", or use jax.profiler.trace"
        )
        self._fit.at_end.append(self._stop)

    def on_epoch_begin(self, epoch, logs=None):
        """Stores the number of earlier steps."""
        self._before_epoch = self._made

    def on_train_batch_begin(self, batch, logs=None):
        """Starts a trace before a launch that may have one of the steps."""
        # In a resumed epoch, Keras also counts the earlier batches.
        first = self._made + 1
        steps = self._trainer.steps_per_execution
        most = steps if is_count(steps, 1) else MOST_STEPS
        wanted = first <= self.steps[1] and first + most > self.steps[0]
        if self._trace is None and wanted and self._is_traced_here() and not self._gave_up:
            self._start(first)

    def on_train_batch_end(self, batch, logs=None):
        """Counts the launch's steps, and ends a trace after the last step."""
        self._made = max(self._made, self._before_epoch + int(batch) + 1)
        if self._trace is not None and self._made >= self.steps[1]:
            self._stop()

    def on_test_begin(self, logs=None):
        """Leaves validation out."""
        self._stop()

    def on_epoch_end(self, epoch, logs=None):
        """Leaves out the work of other callbacks at the end of an epoch."""
        self._stop()

    def on_train_end(self, logs=None):
        """Warns if nothing was traced."""
        self._stop()
        if self._is_traced_here() and not self._gave_up and not self.traced:
            logger.warning(
                "Profile(steps=%s): the fit ended after step %d, before these: nothing is traced",
                self.steps,
                self._made,
            )

    def _is_traced_here(self) -> bool:
        return self.all_processes or jax.process_index() == 0

    def _start(self, first: int) -> None:
        folder = Path(self.directory) / f"process_{jax.process_index()}"
        if not self.traced:
            _removed(folder)
        try:
            self._trace = Trace(folder / f"from_step_{first}", first)
        except (RuntimeError, OSError) as error:
            self._gave_up = True
            logger.warning(
                "Profile(steps=%s): JAX's profiler does not start, so nothing is traced: %s",
                self.steps,
                error,
            )

    def _stop(self) -> None:
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        last = self._made
        try:
            trace.stop()
        except (RuntimeError, OSError) as error:
            self._gave_up = True
            logger.warning("Profile(steps=%s): the trace is not complete: %s", self.steps, error)
            return
        if last < max(trace.first, self.steps[0]):
            # A shorter launch, or one that failed, had none of the steps.
            _removed(trace.folder)
            return
        self.traced.append((trace.first, last))
        if trace.first < self.steps[0] or last > self.steps[1]:
            logger.info(
                "Profile(steps=%s): the launches that hold them are steps %d to %d",
                self.steps,
                trace.first,
                last,
            )
        trace.describe(last, self.steps, self._trainer)


def _removed(folder: Path) -> None:
    """Removes the files of an earlier profile."""
    for trace in folder.glob("from_step_*"):
        if (trace / MANIFEST).is_file() and not trace.is_symlink():
            shutil.rmtree(trace, ignore_errors=True)
    if folder.name.startswith("from_step_") and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


def _checked_steps(steps: Any) -> tuple[int, int]:
    pair = list(steps) if isinstance(steps, (tuple, list)) else []
    if len(pair) == 2 and all(is_count(number, 1) for number in pair) and pair[0] <= pair[1]:
        return int(pair[0]), int(pair[1])
    raise value_error(
        "steps of Profile are the first and the last train step to trace, counted from 1.",
        received={"steps": steps},
        fix="Write for example Profile(steps=(10, 13), directory='profile').",
    )
