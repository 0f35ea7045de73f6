"""The checkpoints of one fit: finding, resuming and saving them."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks.checkpoint_options import CheckpointOptions, SaveWhen
from keras_tpu_dist.callbacks.identity import Identity
from keras_tpu_dist.callbacks.monitored import is_validated, worth
from keras_tpu_dist.callbacks.states import (
    Standing,
    check_states,
    give_back,
    give_back_history,
    history_of,
    identities_of,
    standing_of,
)
from keras_tpu_dist.callbacks.stop_at_step import goes_beyond, reached_by
from keras_tpu_dist.checkpoint.compiled import compiled_of, has_trained
from keras_tpu_dist.checkpoint.manifest import OF_FIT, Manifest
from keras_tpu_dist.checkpoint.matching import apart, weights_there
from keras_tpu_dist.checkpoint.restore import load_newest
from keras_tpu_dist.checkpoint.snapshot import (
    MOST_BYTES_OF_CALLBACK,
    extra_of,
    most_of_callback,
    snapshot,
)
from keras_tpu_dist.checkpoint.store import Store, finish, logged
from keras_tpu_dist.checkpoint.trained import Base
from keras_tpu_dist.common import phases
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.input.position import (
    InputPosition,
    own_position,
    position_between_epochs,
    set_random_numbers,
    shuffle_from,
)
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.preemption import Preemption
from keras_tpu_dist.training.fit_control import FitControl
from keras_tpu_dist.training.membership import is_local

logger = logging.getLogger("keras_tpu_dist")

FIX = "Give the same Checkpoint callback to fit in all processes."
# Launches between two looks at the clock of process 0, which decides for all processes.
_LAUNCHES_BETWEEN_LOOKS = 32


@dataclass(frozen=True)
class Fit:
    """The fit that a `Checkpoint` belongs to.

    Attributes:
        control: The controls of the strategy's loop; `None` in stock Keras.
        epochs: The epoch before which the fit ends, from 0.
    """

    trainer: Any
    callbacks: Sequence[Any]
    control: FitControl | None
    epochs: int
    steps: int | None
    validation_freq: Any = 1


@dataclass
class TrainingPlace:
    """The current position of training.

    Attributes:
        done: The batches of the epoch that were trained.
        resumed_at: How many of them were trained before the fit started.
        standing: The state after the last launch.
        end: The state after the last epoch, if a later run resumes from there.
    """

    step: int = 0
    epoch: int = 0
    done: int = 0
    resumed_at: int = 0
    saved_step: int | None = None
    logs: dict[str, Any] | None = None
    history: dict[str, Any] | None = None
    standing: Standing | None = None
    end: Standing | None = None


@dataclass
class Due:
    """When the next checkpoint of a fit is due."""

    when: SaveWhen
    steps: int = 0
    launches: int = 0
    saved_at_s: float = field(default_factory=time.monotonic)

    def launched(self, steps: int) -> None:
        """Counts a launch.

        Args:
            steps: Its train steps.
        """
        self.steps += steps
        self.launches += 1

    def saved(self) -> None:
        """Notes that a checkpoint is being saved."""
        self.steps, self.saved_at_s = 0, time.monotonic()

    def within_epoch(self) -> bool:
        """Whether a checkpoint is due after this launch, the same in all processes."""
        every_steps, every_minutes = self.when.every_steps, self.when.every_minutes
        if every_steps is not None and self.steps >= every_steps:
            return True
        if every_minutes is None:
            return False
        if self.launches % _LAUNCHES_BETWEEN_LOOKS and jax.process_count() > 1:
            return False
        due = time.monotonic() - self.saved_at_s >= 60 * every_minutes
        return agree("looking at the clock of process 0", FIX, due)[0]

    def after_epochs(self, epochs: int) -> bool:
        """Whether a checkpoint is due after this number of epochs.

        Args:
            epochs: The number of epochs.
        """
        every = self.when.every_epochs
        return every is not None and epochs % every == 0


@dataclass
class Resumed:
    """The state that a fit resumes from, until its first epoch has started.

    Attributes:
        epoch: The epoch before which the fit starts.
        manifest: The loaded checkpoint; `None` if another callback loaded it.
        history_at_end: The record of a fit that had nothing left to do.
    """

    epoch: int
    manifest: Manifest | None = None
    history_at_end: dict[str, Any] | None = None
    variables: list[tuple[Any, Any]] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)
    position: InputPosition | None = None


class FitCheckpoints:
    """The checkpoints of one fit in one directory.

    Args:
        options: The options of the `Checkpoint`.
        fit: The fit.
        preemption: Notices SIGTERM.

    Attributes:
        resumed: The state that the fit resumes from, until its first epoch has started.
    """

    def __init__(self, options: CheckpointOptions, fit: Fit, preemption: Preemption):
        _check_loop(
            fit.control,
            "Checkpoints within an epoch need",
            "save every_epochs=1",
            every_steps=options.when.every_steps,
            every_minutes=options.when.every_minutes,
        )
        _check_processes(fit.trainer)
        self.options, self.fit, self.preemption = options, fit, preemption
        self.store = Store(
            options.path,
            keep=options.keep,
            overwrites=options.overwrite and not options.resume,
            asynchronous=options.asynchronous,
        )
        self.run = ""
        self.base: Base | None = None
        if options.only is not None:
            self.base = Base(options.base)
            self.base.begin([fit.trainer])
        self.place = TrainingPlace()
        self.due = Due(options.when)
        self.resumed: Resumed | None = None
        self.has_ended = False
        # How the run was compiled: what callbacks change in it is state.
        self._compiled = compiled_of(fit.trainer.optimizer)
        # Complete once the first launch has created the optimizer's variables.
        self._variables: list = []
        self._identities: dict[int, Identity] | None = None
        # The most bytes of arrays in a callback's state, once the model is built.
        self._most_bytes = MOST_BYTES_OF_CALLBACK
        # The callbacks of which the log says that their state is not saved.
        self._said: set[int] = set()

    @property
    def has_loaded(self) -> bool:
        """Whether the fit resumes from a checkpoint of this directory."""
        return self.resumed is not None and self.resumed.manifest is not None

    @property
    def has_begun(self) -> bool:
        """Whether an epoch has started."""
        return self.place.history is not None

    @property
    def is_known(self) -> bool:
        """Whether the current position is saved, or can be."""
        return self.place.standing is not None or self.place.saved_step == self.place.step

    def are_there(self) -> bool:
        """Whether there are checkpoints, the same ones for all processes."""
        directory = self.options.path
        # The first process may still be deleting checkpoints of the previous fit.
        agree(f"opening {directory}", FIX, None)
        here = self.store.steps
        by_process = agree(f"looking for checkpoints in {directory}", FIX, here)
        # Each process orders them by what it reads.
        if any(sorted(steps) != sorted(by_process[0]) for steps in by_process):
            raise value_error(
                "All processes must see the same checkpoints.",
                received="; ".join(f"{steps} in process {i}" for i, steps in enumerate(by_process))
                + f" ({directory}).",
                fix="Give a directory on storage that all processes share.",
            )
        return bool(here)

    def go_on(self) -> None:
        """Loads the newest checkpoint and resumes the fit from there."""
        fit, place = self.fit, self.place
        trained = has_trained(fit.trainer.optimizer)
        report, manifest = load_newest(fit.trainer, self.store, needs=OF_FIT, base=self.base)
        training = manifest.training
        if trained:
            self._compiled = replace(self._compiled, rate=training["compiled"]["rate"])
        place.step = place.saved_step = training["step"]
        # `reached`: `StopAtStep` stopped the run at this number of steps, and a larger number goes
        # on. `stopped`: a callback did, at an epoch's end (`done`, the batches of an epoch that is
        # not complete, is 0), and nothing is left to do.
        reached = training["reached"]
        stopped = (training["stopped"] and not training["done"]) or reached is not None
        stopped &= not goes_beyond(fit.callbacks, reached)
        position, done = own_position(training["positions"]), training["done"]
        iterator = _keras.epoch_iterator_of_fit()
        if done and position is not None and iterator is not None:
            position = position.in_epoch(_keras.known_of_epoch(iterator))
            done = position.done
        fix = "load the weights alone: ktd.restore(model, directory), Checkpoint(resume=False)"
        _check_loop(fit.control, "Resuming within an epoch needs", fix, batches=done)
        place.epoch, place.resumed_at = training["epoch"], done
        epoch = fit.epochs if stopped else place.epoch
        self.resumed = resumed = Resumed(epoch, manifest)
        resumed.history_at_end = training.get("history_at_end") if stopped else None
        _keras.begin_at_epoch(fit.trainer, epoch)
        arrays = extra_of(manifest, fit.trainer, len(fit.callbacks))
        values = self.store.load(
            report.step, [(saved, None, saved.entry.dtype) for saved in arrays]
        )
        resumed.arrays = {
            saved.entry.path: value for saved, value in zip(arrays, values, strict=True)
        }
        resumed.variables = [(v, v.value) for v in _keras.state_variables(fit.trainer)]
        resumed.position = position
        if position is not None:
            shuffle_from(position, place.epoch)
        if fit.control is not None:
            fit.control.begin_at = resumed.position
            fit.control.batches_to_skip = done
        self.run = manifest.run
        if resumed.epoch < fit.epochs:
            logged(self.store.go_on)
        self._log(manifest, resumed)

    def follow(self, leader: "FitCheckpoints") -> None:
        """Resumes from the checkpoint that another callback of the fit has loaded.

        Args:
            leader: The `FitCheckpoints` of that callback.
        """
        place, theirs = self.place, leader.place
        place.step, place.epoch, place.resumed_at = theirs.step, theirs.epoch, theirs.resumed_at
        self.run = leader.run
        self.resumed = Resumed(theirs.epoch)
        steps = self.store.agreed_steps()
        if self.base is not None and steps:
            manifest = self.store.agreed_manifest(steps[-1])
            self.base.resume(apart(weights_there(self.fit.trainer, manifest))[1])

    def put_back(self, *, log: bool) -> None:
        """Restores model and callbacks to their state in the checkpoint.

        Args:
            log: Whether to log which callbacks are not restored.
        """
        resumed = self.resumed
        if resumed is None or resumed.manifest is None:
            return
        training = resumed.manifest.training
        for variable, value in resumed.variables:
            if variable.value is not value:
                variable.assign(value)
        _keras.forget_state(self.fit.trainer)
        _keras.set_global_seed(training["global_seed"])
        give_back(self.fit.callbacks, training["callbacks"], resumed.arrays, log)

    def begin_epoch(self, epoch: int) -> None:
        """Saves the end of the previous epoch, and restarts the counts.

        Args:
            epoch: The epoch that starts, from 0.
        """
        place = self.place
        place.standing = None
        if self.resumed is None and place.logs is not None and self.due.after_epochs(epoch):
            self.save(epoch, 0)
        if epoch != place.epoch:
            place.resumed_at = 0
        place.epoch, place.done, place.logs = epoch, place.resumed_at, None
        place.history = history_of(self.fit.trainer.history)
        if self.fit.control is not None:
            self.fit.control.begin_epoch()

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Handles the end of an epoch.

        Args:
            logs: Its logs.
        """
        self.place.logs = dict(logs)
        if self.fit.control is None:
            self.place.step += self.place.done

    def count_batch(self, batch: int) -> None:
        """Counts a launch without a strategy.

        Args:
            batch: Its last batch, from 0.
        """
        # Keras may call this in a thread, and the last launch may have fewer steps than it is
        # counted for.
        self.place.done = min(max(self.place.done, batch + 1), self.fit.steps or batch + 1)

    def after_launch(self, steps: int, ends: bool) -> None:
        """Counts a launch, and saves if a checkpoint is due.

        Args:
            steps: The train steps of the launch.
            ends: Whether the process is about to end.
        """
        fit, place = self.fit, self.place
        self._variables = self._variables or _keras.state_variables(fit.trainer)
        place.standing = self._standing(place.history, self._variables)
        place.step += steps
        place.done += steps
        self.due.launched(steps)
        # If a callback stops training here, `save_end` saves, which also records that it stopped.
        if ends:
            self.save_last()
        elif not fit.trainer.stop_training and self.due.within_epoch():
            self.save_place()

    def save_last(self) -> None:
        """Saves the position after the last launch, and waits."""
        self.save_place()
        self.wait()

    def save_place(self) -> None:
        """Saves the position after the last launch."""
        self.save(self.place.epoch, self.place.done, self.place.standing)

    def before_train_end(self) -> None:
        """Notes the current state, if a later run resumes from there.

        `EarlyStopping` restores the best weights after this. They are the result of this fit, not
        the state to resume from.
        """
        if self.has_begun and reached_by(self.fit.callbacks) is not None:
            self._sync()
            self.place.end = self._standing()

    def save_end(self) -> None:
        """Saves the end of the fit."""
        place, reached = self.place, reached_by(self.fit.callbacks)
        cut = place.done and (self.fit.steps is None or place.done < self.fit.steps)
        if reached is None or place.standing is None or not cut:
            self.save(place.epoch + 1, 0, place.end, reached)
            return
        # A longer run repeats the rest of this epoch, and then its end.
        self.save(place.epoch, place.done, place.standing, reached)

    @phases.phase(phases.OTHER)
    def save(
        self,
        epoch: int,
        done: int,
        standing: Standing | None = None,
        reached: int | None = None,
    ) -> None:
        """Saves a checkpoint, unless this step has one.

        Args:
            epoch: The epoch in which a run resumes.
            done: How many batches of it are done.
            standing: The state to save; by default the current one.
            reached: The optimizer step at which `StopAtStep` ended the fit.
        """
        place = self.place
        metrics = {} if done and reached is None else self._monitored()
        if place.saved_step == place.step:
            # A run that resumes from the step before the epoch's end repeats that end.
            if metrics:
                logged(lambda: self.store.judge(place.step, metrics))
            return
        model = self.fit.trainer
        self._sync()
        self.due.saved()
        standing_now = standing or self._standing()
        for lost in standing_now.lost:
            if lost.callback not in self._said:
                self._said.add(lost.callback)
                logger.log(lost.level, "%s", lost.text)
        training = self._described(epoch, done, standing_now) | {
            "reached": reached,
            "metrics": metrics,
        }
        if done and reached is not None:
            training["history_at_end"] = history_of(model.history)
        with standing_now.in_variables():
            arrays, manifest = snapshot(model, training, standing_now.arrays, base=self.base)
        if logged(lambda: self.store.save(place.step, arrays, manifest)):
            place.saved_step = place.step

    def _standing(
        self, history: dict[str, Any] | None = None, variables: Sequence[Any] = ()
    ) -> Standing:
        fit, identities = self.fit, self._identities or {}
        return standing_of(
            fit.trainer, fit.callbacks, history, variables, self._most_bytes, identities
        )

    def _sync(self) -> None:
        if self.fit.control is None:
            # Under a strategy the variables follow every launch; this call would bring back older
            # values that the trainer holds.
            self.fit.trainer.jax_state_sync()

    @phases.phase(phases.OTHER)
    def wait(self) -> None:
        """Waits for the newest checkpoint."""
        finish(self.store.wait)

    def after_train_begin(self) -> None:
        """Restores the callbacks' state: all of them have started, which reset them."""
        resumed, fit = self.resumed, self.fit
        if resumed is None or resumed.manifest is None:
            return
        training = resumed.manifest.training
        # A callback may have loaded another state, and set another first epoch.
        _keras.begin_at_epoch(fit.trainer, resumed.epoch)
        self.put_back(log=True)
        give_back_history(fit.trainer.history, resumed.history_at_end or training["history"])
        if fit.control is None and resumed.position is not None:
            set_random_numbers(resumed.position.now)

    def after_epoch_begin(self) -> None:
        """Undoes what callbacks did just now if they had already done it before the
        interruption; in the first epoch, looks whether their states can be saved."""
        if self._identities is None:
            # Here, all of them have begun, and no step was made.
            self._identities = identities_of(self.fit.callbacks)
            self._most_bytes = most_of_callback(self.fit.trainer)
            check_states(self.fit.callbacks, self._most_bytes)
        if self.place.resumed_at:
            self.put_back(log=False)
        self.resumed = None

    @phases.phase(phases.OTHER)
    def close(self) -> None:
        """Waits for the last checkpoint, however the fit ended."""
        finish(lambda: self.store.close(run_has_ended=self.has_ended))

    def _described(self, epoch: int, done: int, standing: Standing) -> dict[str, Any]:
        """The contents of a checkpoint besides arrays."""
        control, place = self.fit.control, self.place
        position = position_between_epochs() if control is None else control.input_position(done)
        what = f"checkpoint of model {self.fit.trainer.name!r} after {place.step} steps"
        plain = None if position is None else position.to_dict()
        return {
            "epoch": epoch,
            "done": done,
            "step": place.step,
            "positions": agree(what, FIX, plain),
            "stopped": standing.stopped,
            "callbacks": standing.states,
            "history": standing.history,
            "global_seed": standing.global_seed,
            "compiled": self._compiled.to_dict(),
            "run": self.run,
        }

    def _monitored(self) -> dict[str, float]:
        """The value of the monitored name for the epoch that has ended."""
        best, place = self.options.keep.best, self.place
        if best is None or place.logs is None:
            return {}
        validated = is_validated(place.epoch, self.fit.validation_freq)
        value = worth(*best, place.logs, may_lack=not validated)
        return {} if value is None else {best[0]: value}

    def _log(self, manifest: Manifest, resumed: Resumed) -> None:
        place, directory = self.place, self.store.directory
        who = (manifest.written.get("model"), manifest.written.get("at"), place.step)
        if resumed.epoch < self.fit.epochs:
            logger.warning(
                "training goes on with the run of %s, saved %s, after %d steps, in epoch %d after "
                "%d batches (%s). For a new run give another directory.",
                *who,
                place.epoch + 1,
                place.resumed_at,
                directory,
            )
        else:
            logger.warning(
                "nothing is left to do: the run of %s, saved %s, has ended after %d steps (%s)",
                *who,
                directory,
            )
        if manifest.written.get("finite") is False:
            logger.warning(
                "the weights of checkpoint %d are not finite. To go back: ktd.restore(model, "
                "directory, step=...), then fit with Checkpoint(another directory)",
                place.step,
            )


def _check_loop(control: FitControl | None, rule: str, fix: str, **asked: Any) -> None:
    """Raises a `ValueError` if stock Keras is asked for something that needs a strategy's loop."""
    received = {name: value for name, value in asked.items() if value}
    if control is None and received:
        rule = f"{rule} the loop of a TPUStrategy."
        fix = f"Build the model in TPUStrategy().scope(), or {fix}."
        raise value_error(rule, received=received | {"strategy": None}, fix=fix)


def _check_processes(model: Any) -> None:
    """Raises a `NotImplementedError` if one of several processes trains on its own devices."""
    if jax.process_count() > 1 and is_local(model):
        raise NotImplementedError(
            message(
                "All processes write a checkpoint together.",
                received=f"a fit of model {model.name!r} on the devices of process "
                f"{jax.process_index()}, one of {jax.process_count()}.",
                fix="Build the strategy on all devices, or use keras.callbacks.ModelCheckpoint.",
            )
        )
