"""Training that is stopped anywhere and goes on from there, on any mesh."""

import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks.monitored import is_validated, worth
from keras_tpu_dist.callbacks.preemption import GRACE_S, Preemption
from keras_tpu_dist.callbacks.states import (
    Standing,
    give_back,
    give_back_history,
    history_of,
    note_swapped,
    standing_of,
)
from keras_tpu_dist.callbacks.stop_at_step import goes_beyond, reached_by
from keras_tpu_dist.checkpoint.manifest import OF_FIT, CheckpointError, Manifest
from keras_tpu_dist.checkpoint.restore import load_newest
from keras_tpu_dist.checkpoint.snapshot import extra_of, snapshot
from keras_tpu_dist.checkpoint.store import Store, folder
from keras_tpu_dist.common.checks import check_flags, check_seconds, is_count, known_words
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.input.position import (
    InputPosition,
    own_position,
    position_between_epochs,
    set_random_numbers,
    shuffle_from,
)
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.encoding import ANYTHING, DictOf, ListOf
from keras_tpu_dist.training.fit_control import FitControl, after_other_launch
from keras_tpu_dist.training.membership import fit_in_training, is_local

logger = logging.getLogger("keras_tpu_dist")

FIX = "Give the same Checkpoint callback to fit in all processes."
# Launches between two looks at the clock of process 0, which all processes go by.
_LAUNCHES_BETWEEN_LOOKS = 32


def directory_of(directory: Any) -> str:
    """The directory that `Checkpoint` was given, as text.

    Args:
        directory: See there.

    Raises:
        ValueError: If it is no path, or empty.
    """
    path = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if isinstance(path, str) and path:
        return path
    raise ValueError(
        message(
            "Checkpoint needs a directory.",
            received={"directory": directory},
            fix='Write for example Checkpoint("checkpoints", every_steps=500).',
        )
    )


def check_arguments(every_steps, every_minutes, every_epochs, keep, mode) -> None:
    """Checks what `Checkpoint` was given.

    Args:
        every_steps: See there.
        every_minutes: See there.
        every_epochs: See there.
        keep: See there.
        mode: See there.

    Raises:
        ValueError: If one is of no such kind.
    """
    counts = {"every_steps": every_steps, "every_epochs": every_epochs, "keep": keep}
    wrong: dict[str, Any] = {
        n: v for n, v in counts.items() if v is not None and not is_count(v, 1)
    }
    number = isinstance(every_minutes, (int, float)) and not isinstance(every_minutes, bool)
    if every_minutes is not None and not (number and 0 < every_minutes < math.inf):
        wrong["every_minutes"] = every_minutes
    if not isinstance(mode, str) or mode not in ("auto", "min", "max"):
        wrong["mode"] = mode
    if wrong:
        raise ValueError(
            message(
                "every_steps, every_epochs and keep are whole numbers of at least 1, every_minutes "
                "is above 0, mode is 'auto', 'min' or 'max'.",
                received=wrong,
                fix="Write for example Checkpoint(directory, every_steps=500, keep=3).",
            )
        )


def check_hours(keep_every_hours: Any) -> None:
    """Checks the hours of which `Checkpoint` keeps one checkpoint each.

    Args:
        keep_every_hours: See there.

    Raises:
        ValueError: If it is no number above 0.
    """
    hours = keep_every_hours
    number = isinstance(hours, (int, float)) and not isinstance(hours, bool)
    if hours is not None and not (number and 0 < hours < math.inf):
        raise ValueError(
            message(
                "keep_every_hours is a number of hours above 0, or None.",
                received={"keep_every_hours": hours},
                fix="Write for example keep_every_hours=6.",
            )
        )


def check_monitor(monitor: Any) -> None:
    """Checks what `Checkpoint` was given to monitor.

    Args:
        monitor: See there.

    Raises:
        ValueError: If it is no name.
    """
    if monitor is not None and not (isinstance(monitor, str) and monitor):
        raise ValueError(
            message(
                "monitor is a name in the logs of epochs, or None.",
                received={"monitor": monitor},
                fix='Write for example monitor="val_loss".',
            )
        )


def check_loop(fit: Any, rule: str, fix: str, **asked: Any) -> None:
    """Checks that what only the loop of a strategy can do is asked of none but that.

    Args:
        fit: What can be asked of the fit, `None` in stock Keras.
        rule: What needs the loop.
        fix: What to do instead.
        **asked: By name what asks for it; `None` and 0 do not.

    Raises:
        ValueError: If it is asked of stock Keras.
    """
    received = {name: value for name, value in asked.items() if value}
    if fit is None and received:
        rule = f"{rule} the loop of a TPUStrategy."
        fix = f"Build the model in TPUStrategy().scope(), or {fix}."
        raise ValueError(message(rule, received=received | {"strategy": None}, fix=fix))


def direction(monitor: str | None, mode: str) -> str:
    """Whether a metric is best where it is smallest or largest: `"min"` or `"max"`.

    Args:
        monitor: Its name.
        mode: What the user said, `"auto"` to go by the name.

    Example:

    >>> direction("val_accuracy", "auto")
    'max'
    """
    if mode != "auto":
        return mode
    return "max" if any(part in str(monitor) for part in ("acc", "auc", "f1")) else "min"


def check_processes(model: Any) -> None:
    """Checks that all processes write a checkpoint together.

    Args:
        model: The model that is about to train.

    Raises:
        NotImplementedError: If it trains on the devices of one of several processes.
    """
    if jax.process_count() > 1 and is_local(model):
        raise NotImplementedError(
            message(
                "Of several processes all write a checkpoint together: Orbax does not write what "
                "lies on the devices of one of them alone.",
                received=f"a fit of model {model.name!r} on the devices of process "
                f"{jax.process_index()}, one of {jax.process_count()}.",
                fix="Make the strategy of all devices, save with keras.callbacks.ModelCheckpoint, "
                "or train it in a program of its own, without ktd.initialize().",
            )
        )


class Checkpoint(keras.callbacks.Callback):
    """Saves the whole state of training, and goes on from the newest checkpoint.

    A checkpoint holds weights, optimizer slots, random seeds, metrics, history, the place in the
    input, and what `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` know: a run that was
    killed and started again ends with the weights and the history of one that was not, on any
    other mesh, plan and number of processes. It is written by Orbax from the devices' shards, whole
    or not there, while training goes on.

    In the input it goes on where it stopped: exactly for arrays, also shuffled ones, and for a
    `PyDataset` whose batches depend on their index alone. Generators, `tf.data`, torch and Grain
    loaders are read again from their start and batches are skipped by count, so they must yield
    the same ones in the same order.

    On SIGTERM the running launch is finished, be it of training, of validation, or of what a
    callback runs. Then a checkpoint is saved, and the process ends by the signal, or trains on if
    its own handler returns; of several processes all save at the same step and end with exit code
    143. A run that was cut in validation, or in a callback, makes the end of that epoch again.

    Args:
        directory: Where the checkpoints are, one directory each; the same storage for all
            processes.
        every_steps: Train steps between two checkpoints; needs a `TPUStrategy`. Under
            `steps_per_execution=N`, the launch that reaches them.
        every_minutes: Minutes between two checkpoints; needs a `TPUStrategy`.
        every_epochs: Epochs between two. Defaults to 1 where none of the three is given.
        keep: How many of the newest to keep; `None` for all. The newest with finite weights is
            kept as well, and nothing is deleted before its successor is whole and read back.
        monitor: A name in the logs of epochs; the checkpoint of its best epoch is kept as well.
        mode: `"min"`, `"max"`, or `"auto"`: `"max"` for names with "acc", "auc" or "f1".
        asynchronous: Whether training goes on while a checkpoint is written.
        resume: Whether a fit begins with the newest checkpoint that is whole.
        overwrite: Whether, with `resume=False`, this run may take the place of another in the
            directory, whose checkpoints are deleted once the first of this run is whole.
        grace_s: Seconds after a SIGTERM in which further ones, which schedulers send, wait for the
            checkpoint too; a later one ends the process at once, unsaved.
        keep_every_hours: Hours of which one checkpoint each is kept as well: the first, and each
            that is so much newer than the last of them.

    Raises:
        ValueError: If an argument is of no such kind; in `fit`, if with `resume=False` the
            directory has checkpoints and `overwrite` does not say that they may go.
        ImportError: In `fit`, if Orbax is not installed.
        CheckpointError: In `fit`, if there are checkpoints and none can be read, or another process
            writes into the directory.
        NotImplementedError: In `fit`, if of several processes one trains on its own devices alone.

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

    @known_words
    def __init__(
        self,
        directory: str | os.PathLike,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        every_epochs: int | None = None,
        keep: int | None = 3,
        monitor: str | None = None,
        mode: str = "auto",
        asynchronous: bool = True,
        resume: bool = True,
        overwrite: bool = False,
        grace_s: float = GRACE_S,
        keep_every_hours: float | None = None,
    ):
        super().__init__()
        _keras.install()  # for `before_fit` and `after_fit`, also where there is no strategy
        check_arguments(every_steps, every_minutes, every_epochs, keep, mode)
        check_flags("Checkpoint", asynchronous=asynchronous, resume=resume, overwrite=overwrite)
        check_monitor(monitor)
        check_hours(keep_every_hours)
        check_seconds("Checkpoint", grace_s=grace_s)
        if (every_steps, every_minutes, every_epochs) == (None, None, None):
            every_epochs = 1
        self.directory = directory_of(directory)
        self._every_steps, self._every_epochs = every_steps, every_epochs
        self._every_s = None if every_minutes is None else 60 * every_minutes
        self._keep, self._asynchronous, self._resume = keep, asynchronous, resume
        self._keep_every_s = None if keep_every_hours is None else 3600.0 * keep_every_hours
        self._has_ended = False
        self._overwrite, self._run = overwrite, ""
        self._monitor = monitor
        self._mode = direction(monitor, mode)
        self._preemption = Preemption(grace_s=grace_s)
        self._looked_before: Any = None
        # The training state's variables, and where training stood after its last launch.
        self._variables: list = []
        self._history: dict[str, Any] | None = None
        self._standing: Standing | None = None
        self._store: Store | None = None
        self._fit: FitControl | None = None
        self._trainer: Any = None
        self._callbacks: list = []
        self._fellows: list[Checkpoint] = [self]
        self._validation_freq: Any = 1
        self._to_give_back: Manifest | None = None
        self._ended_with: dict[str, Any] | None = None
        # The state that was loaded, until its epoch has begun.
        self._loaded: list = []
        self._waits = False
        self._place_in_input: InputPosition | None = None
        self._extra: dict = {}
        self._logs: dict | None = None
        self._step = self._epoch = self._done = self._resumed_at = self._begins_at = 0
        self._since_saved = self._launches = 0
        self._saved_at_s = 0.0
        self._saved_step: int | None = None

    @property
    def steps(self) -> list[int]:
        """The train steps of which there is a whole checkpoint, the newest last."""
        if not folder(self.directory).is_dir():
            return []
        store = Store(self.directory, read_only=True, alone=True)
        try:
            return store.steps
        finally:
            store.close()

    def set_model(self, model):
        """Notes the model."""
        super().set_model(model)
        # Not `self.model`: reading that makes the trainer copy its state to the variables.
        self._trainer = model

    def before_fit(self, arguments: Mapping[str, Any]) -> None:
        """Sees the other callbacks of the fit that is about to begin.

        Args:
            arguments: Those of `fit`; `"callbacks"` is a flat list of all.
        """
        self._callbacks = [each for each in arguments["callbacks"] if each is not self]
        self._fellows = [each for each in arguments["callbacks"] if isinstance(each, Checkpoint)]
        self._validation_freq = arguments.get("validation_freq", 1)

    def on_train_begin(self, logs=None):
        """Goes on from the newest checkpoint."""
        self._fit = fit_in_training(self._trainer)
        # Under a strategy launches are counted, and nobody need wait for the logs of each step.
        vars(self).pop("on_train_batch_end", None)
        if self._fit is None:
            vars(self)["on_train_batch_end"] = self._count_batch
        check_loop(
            self._fit,
            "Checkpoints within an epoch need",
            "save every_epochs=1",
            every_steps=self._every_steps,
            every_minutes=self._every_s and self._every_s / 60,
        )
        check_processes(self._trainer)
        best = None if self._monitor is None else (self._monitor, self._mode)
        self._store = Store(
            self.directory,
            keep=self._keep,
            best=best,
            every_s=self._keep_every_s,
            # Else nobody waits for the last one of a fit that fails.
            asynchronous=self._asynchronous and _keras.failure_is_seen(),
        )
        self._step = self._epoch = self._done = self._resumed_at = self._begins_at = 0
        self._since_saved, self._waits, self._has_ended = 0, False, False
        self._saved_at_s, self._saved_step, self._logs = time.monotonic(), None, None
        self._variables, self._standing = [], None
        # Of several in one fit, the one with the newest checkpoint goes on for all.
        leads = next((each for each in self._fellows if each._to_give_back is not None), None)
        there = self._found(self._store)
        found = there and self._resume
        if there and not self._resume:
            self._take_place_of_others(self._store)
        self._run = agree("naming the run", FIX, uuid.uuid4().hex[:12], str)[0]
        if found and (leads is None or self._store.steps[-1] > leads._step):
            leads = self
            self._go_on(self._store)
        for each in self._fellows:
            if leads not in (None, each):
                each._follow(leads)
        if self._fit is not None:
            self._fit.after_launch = self._after_launch_of_all
            if self._sigterm is self._preemption:
                self._preemption.start()
                self._looked_before = after_other_launch.get()
                after_other_launch.set(self._after_launch_of_others)

    def after_train_begin(self, logs=None) -> None:
        """Gives callbacks what they knew: all of them have begun, and forgotten it.

        Args:
            logs: Those of `on_train_begin`.
        """
        if self._to_give_back is None:
            return
        # A callback may have loaded something else, and sent the fit elsewhere.
        _keras.begin_at_epoch(self._trainer, self._begins_at)
        note_swapped(self._callbacks, self._to_give_back.training.get("swapped", False))
        self._put_back(self._to_give_back, say=True)
        record = self._ended_with or self._to_give_back.training["history"]
        give_back_history(self._trainer.history, record)
        if self._fit is None and self._place_in_input is not None:
            set_random_numbers(self._place_in_input.now)

    def before_epoch_begin(self, epoch, logs=None) -> None:
        """Saves what the epoch before ended with, once all callbacks have seen its end.

        Args:
            epoch: The epoch, from 0.
            logs: Those of `on_epoch_begin`.
        """
        _keras.begin_at_epoch(self._trainer, None)
        self._standing = None
        if not self._waits and self._logs is not None and self._due_after(epoch):
            self._save(epoch, 0)
        if epoch != self._epoch:
            self._resumed_at = 0
        self._epoch, self._done, self._logs = epoch, self._resumed_at, None
        self._history = history_of(self._trainer.history)
        if self._fit is not None:
            self._fit.begin_epoch()

    def after_epoch_begin(self, epoch, logs=None) -> None:
        """Undoes what callbacks did now if they had done it before the interruption.

        Args:
            epoch: The epoch, from 0.
            logs: Those of `on_epoch_begin`.
        """
        if self._to_give_back is not None and self._resumed_at:
            self._put_back(self._to_give_back, say=False)
        self._forget_loaded()

    def on_epoch_end(self, epoch, logs=None):
        """Notes the logs."""
        self._logs = dict(logs or {})
        if self._fit is None:
            self._step += self._done

    def _count_batch(self, batch, logs=None):
        # Maybe in a thread; and the last launch may have fewer steps than it is counted for.
        self._done = min(max(self._done, batch + 1), (self.params or {})["steps"] or batch + 1)

    def on_train_end(self, logs=None):
        """Saves the end."""
        if self._fit is not None:
            self._sigterm.comes_at_end()
        # Where there was no epoch to make, nothing is new.
        if not self._waits:
            self._save_end()
        self._has_ended = True

    def after_fit(self) -> None:
        """Waits for the last checkpoint, however the fit ended."""
        store, self._store, self._fit = self._store, None, None
        self._forget_loaded()  # the fit may have failed before its first epoch
        self._variables, self._standing = [], None
        if after_other_launch.get() == self._after_launch_of_others:
            after_other_launch.set(self._looked_before)
        if self._trainer is not None:
            _keras.begin_at_epoch(self._trainer, None)
        try:
            if store is not None:
                _finish(lambda: store.close(run_has_ended=self._has_ended))
        finally:
            self._preemption.stop()

    @property
    def _sigterm(self) -> Preemption:
        """Which of the fit's checkpoints listens: two would hand a signal to and fro for ever."""
        found = [each._preemption for each in self._fellows]
        return next((each for each in found if each.listens), found[0])

    def _after_launch_of_all(self, steps: int) -> None:
        ends = self._sigterm.comes()
        for each in self._fellows:
            each._after_launch(steps, ends)
        if ends:
            self._sigterm.end()

    def _after_launch_of_others(self) -> None:
        """Looks for signals in validation, and in what callbacks run."""
        # Before the first launch of an epoch there may be something that is not saved yet.
        known = all(each._standing or each._saved_step == each._step for each in self._fellows)
        if self._sigterm.comes() and known:
            for each in self._fellows:
                each._save(each._epoch, each._done, each._standing)
                if each._store is not None:
                    _finish(each._store.wait)
            self._sigterm.end()

    def _after_launch(self, steps: int, ends: bool) -> None:
        self._variables = self._variables or _keras.state_variables(self._trainer)
        self._standing = standing_of(self._trainer, self._callbacks, self._history, self._variables)
        self._step += steps
        self._done += steps
        self._since_saved += steps
        self._launches += 1
        # Where a callback stops training here, the end is saved, which knows that it did.
        if ends or (not self._trainer.stop_training and self._is_due()):
            self._save(self._epoch, self._done, self._standing)
        if ends and self._store is not None:
            _finish(self._store.wait)

    def _is_due(self) -> bool:
        if self._every_steps is not None and self._since_saved >= self._every_steps:
            return True
        if self._every_s is None:
            return False
        if self._launches % _LAUNCHES_BETWEEN_LOOKS and jax.process_count() > 1:
            return False
        due = time.monotonic() - self._saved_at_s >= self._every_s
        return agree("looking at the clock of process 0", FIX, due, bool)[0]

    def _due_after(self, epochs: int) -> bool:
        return self._every_epochs is not None and epochs % self._every_epochs == 0

    def _save_end(self) -> None:
        reached, steps = reached_by(self._callbacks), (self.params or {}).get("steps")
        cut = self._done and (steps is None or self._done < steps)
        if reached is None or self._standing is None or not cut:
            self._save(self._epoch + 1, 0, reached=reached)
            return
        # A longer run makes the rest of this epoch, and then its end.
        self._save(self._epoch, self._done, self._standing, reached)

    def _save(
        self,
        epoch: int,
        done: int,
        standing: Standing | None = None,
        reached: int | None = None,
    ) -> None:
        store = self._store
        judged = self._logs is not None and (not done or reached is not None)
        value = self._monitored(self._logs) if self._logs is not None and judged else None
        metrics = {} if value is None else {str(self._monitor): value}
        if store is None:
            return
        if self._saved_step == self._step:
            # The step before the epoch's end: going on from there, it ends as it has.
            if metrics:
                self._try(lambda: store.judge(self._step, metrics))
            return
        # Under a strategy variables follow each launch, and reading `model` would bring back what
        # the trainer noted before it; under stock Keras, it brings the variables up to date.
        model: Any = self.model if self._fit is None else self._trainer
        self._since_saved, self._saved_at_s = 0, time.monotonic()
        position = self._position(done)
        what = f"checkpoint of model {model.name!r} after {self._step} steps"
        own = None if position is None else position.to_dict()
        positions = agree(what, FIX, own, (None, DictOf(ANYTHING)))
        standing = standing or standing_of(model, self._callbacks)
        training = {
            "epoch": epoch,
            "done": done,
            "step": self._step,
            "positions": positions,
            "stopped": standing.stopped,
            "callbacks": standing.states,
            "history": standing.history,
            "global_seed": standing.global_seed,
            "swapped": standing.swapped,
            "reached": reached,
            "metrics": metrics,
            "run": self._run,
        }
        if done and reached is not None:
            training["history_at_end"] = history_of(model.history)
        with standing.in_variables():
            arrays, manifest = snapshot(model, training, standing.arrays)
        if self._try(lambda: store.save(self._step, arrays, manifest)):
            self._saved_step = self._step

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except CheckpointError as error:
            logger.error("training goes on without this checkpoint. %s", error)
            return False
        return True

    def _position(self, done: int) -> InputPosition | None:
        if self._fit is not None:
            return self._fit.input_position(done)
        return position_between_epochs()

    def _monitored(self, logs: dict) -> float | None:
        validated = is_validated(self._epoch, self._validation_freq)
        return worth(self._monitor, self._mode, logs, may_lack=not validated)

    def _found(self, store: Store) -> bool:
        """Whether there are checkpoints, the same ones for all processes."""
        # The first process may still be deleting what the fit before left.
        agree(f"opening {self.directory}", FIX, None)
        steps = store.steps
        told = agree(f"looking for checkpoints in {self.directory}", FIX, steps, ListOf(int))
        if any(each != told[0] for each in told):
            raise ValueError(
                message(
                    "All processes see the same checkpoints.",
                    received="; ".join(f"{each} in process {i}" for i, each in enumerate(told))
                    + f" ({self.directory}).",
                    fix="Give a directory on storage that all of them share.",
                )
            )
        return bool(steps)

    def _go_on(self, store: Store) -> None:
        report, manifest = load_newest(self._trainer, store, needs=OF_FIT)
        training = manifest.training
        self._step = self._saved_step = training["step"]
        # Where training was stopped by a callback, nothing is left to do.
        reached = training.get("reached")
        stopped = (training["stopped"] and not training["done"]) or reached is not None
        stopped &= not goes_beyond(self._callbacks, reached)
        epochs = (self.params or {})["epochs"]
        fix = "load the weights alone: ktd.restore(model, directory), Checkpoint(resume=False)"
        check_loop(self._fit, "Going on within an epoch needs", fix, batches=training["done"])
        self.begin_after(training["epoch"], training["done"])
        if stopped:
            self._ended_with = training.get("history_at_end")
            self._begins_at = epochs
            _keras.begin_at_epoch(self._trainer, epochs)
        self._to_give_back = manifest
        saved = extra_of(manifest, self._trainer, len(self._callbacks))
        values = store.load(report.step, [(each, None, each.entry.dtype) for each in saved])
        self._extra = {each.entry.path: value for each, value in zip(saved, values)}
        self._loaded = [(v, v.value) for v in _keras.state_variables(self._trainer)]
        self._place_in_input = own_position(training["positions"])
        if self._place_in_input is not None:
            shuffle_from(self._place_in_input, self._epoch)
        if self._fit is not None:
            self._fit.begin_at = self._place_in_input
        self._run = training.get("run", self._run)
        if self._begins_at < epochs:
            self._try(lambda: store.go_on(report.step))
        self._say(manifest, epochs)

    def _say(self, manifest: Manifest, epochs: int) -> None:
        went_on = "nothing is left to do: the run of %s, saved %s, has ended after %d steps (%s)"
        where: tuple = ()
        if self._begins_at < epochs:
            went_on = (
                "training goes on with the run of %s, saved %s, after %d steps, "
                "in epoch %d after %d batches (%s). For a new run give another directory."
            )
            where = (self._epoch + 1, self._resumed_at)
        who = (manifest.written.get("model"), manifest.written.get("at"), self._step)
        logger.warning(went_on, *who, *where, self.directory)
        if manifest.written.get("finite") is False:
            logger.warning(
                "the weights of checkpoint %d are not finite. To go back: ktd.restore(model, "
                "directory, step=...), then fit with Checkpoint(another directory)",
                self._step,
            )

    def _take_place_of_others(self, store: Store) -> None:
        if not self._overwrite:
            raise ValueError(
                message(
                    "A directory holds the checkpoints of one run.",
                    received=f"resume=False and {self.directory!r}, which has those of steps "
                    f"{store.steps}.",
                    fix="Give this run a directory of its own, leave resume=False out to go on, or "
                    "write overwrite=True: they are deleted once this run has saved.",
                )
            )
        store.replace_runs()

    def _follow(self, leads: "Checkpoint") -> None:
        self._forget_loaded()
        self._waits = True
        self._step, self._epoch, self._resumed_at = leads._step, leads._epoch, leads._resumed_at
        self._run = leads._run

    def begin_after(self, epoch: int, done: int) -> None:
        """Makes the fit that begins go on where training stopped.

        Args:
            epoch: The epoch, from 0.
            done: How many of its batches were trained on.
        """
        self._epoch, self._resumed_at = epoch, done
        self._begins_at, self._waits = epoch, True
        _keras.begin_at_epoch(self._trainer, epoch)
        if self._fit is not None:
            self._fit.batches_to_skip = done

    def _put_back(self, manifest: Manifest, say: bool) -> None:
        """Makes model and callbacks what they were when the checkpoint was saved."""
        training = manifest.training
        for variable, value in self._loaded:
            if variable.value is not value:
                variable.assign(value)
        _keras.forget_state(self._trainer)
        _keras.set_global_seed(training["global_seed"])
        give_back(self._callbacks, training["callbacks"], self._extra, say)

    def _forget_loaded(self) -> None:
        self._to_give_back, self._ended_with, self._loaded = None, None, []
        self._waits = False


def _finish(write: Callable[[], None]) -> None:
    try:
        write()
    except CheckpointError as error:
        logger.error("the last checkpoint is missing. %s", error)
