"""Checkpoints from which training resumes exactly, on any mesh."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks.checkpoint_options import (
    CheckpointOptions,
    SaveWhen,
    keep_of,
)
from keras_tpu_dist.callbacks.fit_checkpoints import FIX, Fit, FitCheckpoints
from keras_tpu_dist.callbacks.in_fit import InFit
from keras_tpu_dist.checkpoint.reader import CheckpointReader, folder
from keras_tpu_dist.checkpoint.store import new_run
from keras_tpu_dist.checkpoint.trained import TRAINED, checked_base
from keras_tpu_dist.common.checks import (
    NAME,
    PositiveInt,
    Seconds,
    above_zero,
    checked_arguments,
    checked_path,
    one_of,
)
from keras_tpu_dist.common.errors import runtime_error, value_error
from keras_tpu_dist.processes.preemption import GRACE_S, Preemption
from keras_tpu_dist.training.compilation_cache import cache_beside
from keras_tpu_dist.training.membership import fit_in_training

_WHERE = 'Write for example Checkpoint("checkpoints", every_steps=500).'


class Checkpoint(InFit):
    """Saves the whole state of training, and resumes from the newest checkpoint.

    A checkpoint holds weights, optimizer slots, random seeds, metrics, history, the position in the
    input, and the state of other callbacks: of Keras's own, such as `EarlyStopping`, and of yours
    if they have `state_dict()` and `load_state_dict(state)`. A run that was killed and started
    again ends with the weights and the history of an uninterrupted run, on any other mesh, plan and
    number of processes. Orbax writes the checkpoint from the devices' shards while training goes
    on. A checkpoint is either complete or not there.

    The input resumes where it stopped: exactly for arrays, also shuffled ones, and for a
    `PyDataset` whose batches depend on their index alone. Generators, `tf.data`, torch and Grain
    loaders are read again from their start and the trained batches are skipped, so they must yield
    the same batches in the same order.

    On SIGTERM the running launch is finished, also in validation or within a callback. Then a
    checkpoint is saved, and the process ends by the signal, or trains on if the previous handler
    returns. With several processes, all save at the same step and end with exit code 143. A run
    that was stopped in validation, or in a callback, repeats the end of that epoch.

    Args:
        directory: The directory for the checkpoints, one subdirectory for each; the same storage
            for all processes.
        every_steps: Train steps between two checkpoints; needs a `TPUStrategy`. With
            `steps_per_execution=N`, the checkpoint follows the launch that reaches this number.
        every_minutes: Minutes between two checkpoints; needs a `TPUStrategy`.
        every_epochs: Epochs between two checkpoints. Defaults to 1 if you give none of the three.
        keep: How many of the newest checkpoints to keep; `None` for all. The newest one with finite
            weights is never deleted, and nothing is deleted before its successor is complete and
            has been read back.
        monitor: A name in the logs of epochs, such as `"val_loss"`. The checkpoint of its best
            epoch is kept in addition.
        mode: `"min"`, `"max"`, or `"auto"`: `"max"` for names with "acc", "auc" or "f1".
        asynchronous: Whether training goes on while a checkpoint is written.
        resume: Whether a fit starts from the newest complete checkpoint.
        overwrite: Whether, with `resume=False`, this run may replace another run in the directory.
            Its checkpoints are deleted once the first checkpoint of this run is complete.
        grace_s: Schedulers send SIGTERM several times. Signals within so many seconds after the
            first wait for the checkpoint too; a later one ends the process at once, without saving.
        keep_every_hours: In addition, keep one checkpoint for every so many hours: the first one,
            and then every one that is this much newer than the last of them.
        only: `"trained"` leaves out the weights that are frozen, such as those under LoRA, and
            saves a fingerprint of each. To load a checkpoint, the model must have the same values
            of them: those that it had when the run began. What trains, the optimizer's state,
            seeds, metrics and moving averages are saved. A weight that changes or trains later is
            saved from then on.
        base: With `only="trained"`, where the left-out weights come from: a `.keras` or weights
            file, a directory of checkpoints or one of its steps (`"run7/1500"`), or a preset of
            KerasHub. Checkpoints note it, and `fit` loads it if the model has other values than
            the checkpoint that it resumes from.

    Raises:
        ValueError: If an argument has the wrong type or value; in `fit`, if the directory has
            checkpoints, `resume=False`, and `overwrite` is not set, or if the model has other
            values of what the newest checkpoint leaves out.
        ImportError: In `fit`, if Orbax is not installed.
        CheckpointError: In `fit`, if there are checkpoints and none can be read, or if another
            process writes into the directory.
        NotImplementedError: In `fit`, if one of several processes trains on its own devices alone.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd, tempfile
    >>> with ktd.TPUStrategy().scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> x, y = np.ones((64, 4)), np.ones((64, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = ktd.callbacks.Checkpoint(folder, every_steps=3, keep=2)
    ...     _ = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[saved])
    ...     saved.steps
    [15, 16]
    """

    @checked_arguments
    def __init__(
        self,
        directory: str | os.PathLike,
        every_steps: PositiveInt | None = None,
        every_minutes: Annotated[float, above_zero("minutes", "30")] | None = None,
        every_epochs: PositiveInt | None = None,
        keep: PositiveInt | None = 3,
        monitor: Annotated[str, NAME] | None = None,
        mode: Annotated[str, one_of("auto", "min", "max")] = "auto",
        asynchronous: bool = True,
        resume: bool = True,
        overwrite: bool = False,
        grace_s: Seconds = GRACE_S,
        keep_every_hours: Annotated[float, above_zero("hours", "6")] | None = None,
        only: Annotated[str, one_of(TRAINED)] | None = None,
        base: str | os.PathLike | None = None,
    ):
        super().__init__()
        _keras.install()  # for `before_fit` and `after_fit`, also without a strategy
        self._options = CheckpointOptions(
            checked_path("Checkpoint", _WHERE, directory=directory),
            SaveWhen(every_steps, every_minutes, every_epochs),
            keep_of(keep, monitor, mode, keep_every_hours),
            asynchronous,
            resume,
            overwrite,
            only,
            checked_base("Checkpoint", _WHERE, only, base),
        )
        self.directory = self._options.path
        # The running fit, from its start to its end.
        self.checkpoints: FitCheckpoints | None = None
        self._preemption = Preemption(grace_s=grace_s)
        self._callbacks: list = []
        self._of_this_kind: list[Checkpoint] = [self]
        self._epochs, self._validation_freq = 1, 1

    @property
    def monitor(self) -> str | None:
        """The name in the logs that decides which checkpoint is best."""
        best = self._options.keep.best
        return None if best is None else best[0]

    @property
    def steps(self) -> list[int]:
        """The train steps that have a complete checkpoint, the newest last."""
        if not folder(self.directory).is_dir():
            return []
        return CheckpointReader(self.directory, alone=True).steps

    # After a batch it only counts, so Keras need not wait for it.
    async_safe = True

    @property
    def sees_launches(self) -> bool:
        """Whether it counts the launches of a strategy's loop instead of Keras's batches."""
        return self.checkpoints is None or self.checkpoints.fit.control is not None

    def before_fit(self, arguments: Mapping[str, Any]) -> None:
        """Looks at the other callbacks of the fit that is about to start.

        Args:
            arguments: The arguments of `fit`; `"callbacks"` is a flat list of all callbacks.
        """
        cache_beside(self.directory)
        callbacks = arguments["callbacks"]
        self._callbacks = [callback for callback in callbacks if callback is not self]
        self._of_this_kind = [
            callback for callback in callbacks if isinstance(callback, Checkpoint)
        ]
        self._epochs = arguments.get("epochs", 1)
        self._validation_freq = arguments.get("validation_freq", 1)

    def on_train_begin(self, logs=None):
        """Resumes from the newest checkpoint."""
        params: Mapping[str, Any] = self.params or {}
        fit = Fit(
            self._trainer,
            self._callbacks,
            fit_in_training(self._trainer),
            # You can build a CallbackList yourself, and it need not have this entry.
            params.get("epochs", self._epochs),
            params.get("steps"),
            self._validation_freq,
        )
        self.checkpoints = None
        self.checkpoints = checkpoints = FitCheckpoints(self._options, fit, self._preemption)
        self._resume(checkpoints)
        if fit.control is not None:
            fit.control.after_launch = self._after_launch
            if self._sigterm is self._preemption:
                self._preemption.start()
                fit.control.after_other_launch = self._after_other_launch

    def _resume(self, checkpoints: FitCheckpoints) -> None:
        there = checkpoints.are_there()
        if there and not (self._options.resume or self._options.overwrite):
            raise value_error(
                "A directory holds the checkpoints of one run.",
                received=f"resume=False and {self.directory!r}, which has checkpoints of steps "
                f"{checkpoints.store.steps}.",
                fix="Give this run its own directory, or write resume=True or overwrite=True.",
            )
        # All of a fit save the same run: the first that starts names it.
        checkpoints.run = self._all[0].run or new_run(FIX)
        # With several Checkpoints in one fit, the one that has the newest checkpoint loads it for
        # all.
        leader = next((others for others in self._all if others.has_loaded), None)
        newer = leader is None or (there and checkpoints.store.newest > leader.store.newest)
        if there and self._options.resume and newer:
            leader = checkpoints
            checkpoints.go_on()
        for others in self._all:
            if leader not in (None, others):
                others.follow(leader)

    @property
    def _all(self) -> list[FitCheckpoints]:
        """The `FitCheckpoints` of all `Checkpoint` callbacks of the fit that have started."""
        of_each = [callback.checkpoints for callback in self._of_this_kind]
        return [checkpoints for checkpoints in of_each if checkpoints is not None]

    @property
    def _sigterm(self) -> Preemption:
        """The one listener for SIGTERM of the fit: two would pass a signal to each other for
        ever."""
        return self._all[0].preemption

    def after_train_begin(self, logs=None) -> None:
        """Restores the callbacks' state: all of them have started, which reset them.

        Args:
            logs: The logs of `on_train_begin`.
        """
        self._in_fit.after_train_begin()

    def before_epoch_begin(self, epoch, logs=None) -> None:
        """Saves the end of the previous epoch, once all callbacks have seen it.

        Args:
            epoch: The epoch, from 0.
            logs: The logs of `on_epoch_begin`.
        """
        _keras.begin_at_epoch(self._trainer, None)
        self._in_fit.begin_epoch(epoch)

    def after_epoch_begin(self, epoch, logs=None) -> None:
        """Undoes what callbacks did just now if they had already done it before the interruption.

        Args:
            epoch: The epoch, from 0.
            logs: The logs of `on_epoch_begin`.
        """
        self._in_fit.after_epoch_begin()

    def on_train_batch_end(self, batch, logs=None):
        """Counts batches without a strategy."""
        if not self.sees_launches:
            self._in_fit.count_batch(batch)

    def on_epoch_end(self, epoch, logs=None):
        """Stores the logs."""
        self._in_fit.end_epoch(logs or {})

    def before_train_end(self, logs=None) -> None:
        """Notes the state that a later run resumes from, before callbacks restore other weights.

        Args:
            logs: The logs of `on_train_end`.
        """
        self._in_fit.before_train_end()

    def on_train_end(self, logs=None):
        """Saves the end."""
        checkpoints = self._in_fit
        if checkpoints.fit.control is not None:
            self._sigterm.comes_at_end()
        # If the fit had no epoch to run, there is nothing new to save.
        if checkpoints.has_begun:
            checkpoints.save_end()
        checkpoints.has_ended = True

    def after_fit(self) -> None:
        """Waits for the last checkpoint, however the fit ended."""
        checkpoints, self.checkpoints = self.checkpoints, None
        if self._trainer is not None:
            _keras.begin_at_epoch(self._trainer, None)
        try:
            if checkpoints is not None:
                checkpoints.close()
        finally:
            self._preemption.stop()

    @property
    def _in_fit(self) -> FitCheckpoints:
        if self.checkpoints is None:
            raise runtime_error(
                "A Checkpoint works within fit.",
                received="a call outside of fit.",
                fix="Pass it as fit(callbacks=[...]); in a custom loop, use ktd.LoopCheckpoint.",
            )
        return self.checkpoints

    def _after_launch(self, steps: int) -> None:
        sigterm = self._sigterm
        ends = sigterm.comes()
        for checkpoints in self._all:
            checkpoints.after_launch(steps, ends)
        if ends:
            sigterm.end()

    def _after_other_launch(self) -> None:
        """Looks for signals after launches of validation and of callbacks."""
        sigterm = self._sigterm
        # Before the first launch of an epoch there may be unsaved state from the end of the last
        # one.
        if sigterm.comes() and all(checkpoints.is_known for checkpoints in self._all):
            for checkpoints in self._all:
                checkpoints.save_last()
            sigterm.end()
