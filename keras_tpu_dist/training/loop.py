"""The functions that Keras's loops call: they launch one or several steps."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist._keras import StateGroup
from keras_tpu_dist.input.batches import BatchPlacer, PlacedBatch
from keras_tpu_dist.input.iterator import DeviceIterator, in_stacks
from keras_tpu_dist.processes import watch as peers
from keras_tpu_dist.processes.arrays import on_every_host
from keras_tpu_dist.programs.answers import Answer, keep
from keras_tpu_dist.training.auto_steps import steps_that_fit
from keras_tpu_dist.training.finite import watched_step
from keras_tpu_dist.training.fit_control import FitControl
from keras_tpu_dist.training.guard import StateGuard, recover
from keras_tpu_dist.training.rows import BatchSizes, RowsAsData
from keras_tpu_dist.training.running import after_other_launch
from keras_tpu_dist.training.step import changed, jitted_step, step_of, with_changes
from keras_tpu_dist.training.turns import Turns

logger = logging.getLogger("keras_tpu_dist")


class StepLoop:
    """The function that Keras's loop calls: `(state, iterator) -> (outputs, state)`.

    With `steps_per_execution=N` it runs N batches of one shape as one `jax.lax.scan`, and prepares
    the next N while the devices work. It runs the remainder (fewer batches, a ragged tail) step by
    step. So there is at most one program for the scan, one for the single step, and one for all
    tails, or for every tail of a step that cannot share it (see `RowsAsData`).

    `Training`, `Evaluation` and `Prediction` define a launch.

    Args:
        trainer: The model. Its variables are adopted already; the loop serves until one of them
            gets another layout, or the model other variables.
        turns: The threads that run the model, and the owner of its state: a launch that overwrites
            the state copies first what others may hold of it.
        placer: Transfers batches to the mesh, padded to equal shards, and trims them in the
            program.
        compiler_options: Options for XLA; `None` for its defaults.

    Attributes:
        kind: Keras's name for the step: `"train"`, `"test"` or `"predict"`.
        is_stale: Whether a variable's layout has changed, so that the next call needs another loop.
    """

    kind: str

    def __init__(
        self,
        trainer: Any,
        turns: Turns,
        placer: BatchPlacer,
        compiler_options: dict[str, Any] | None = None,
    ):
        self.is_stale = False
        self._trainer, self._turns, self._placer = trainer, turns, placer
        self._compiler_options = compiler_options
        self._variables = _keras.state_groups(trainer, self.kind)
        self._compiled = not trainer.run_eagerly and trainer.jit_compile
        self._sizes = BatchSizes(placer, f"the {self.kind} step of model {trainer.name!r}")
        self._programs: dict[Any, Callable] = {}
        # Transfers a host batch, of an iterator, or of `*_on_batch` with `None`.
        self._place = self._sizes.place if self._compiled else self._placed_eagerly

    def __call__(self, state: Any, iterator: Any) -> tuple[Any, Any]:
        """Launches the next steps.

        Args:
            state: Lists of values that Keras read from the variables, or the result of the previous
                call, which is updated.
            iterator: A `DeviceIterator`, or any iterator over host batches.

        Raises:
            StopIteration: At the end of the input.
        """
        # Lists at first, then the results of this function.
        groups = state if type(state[0]) is StateGroup else self._grouped(state)
        launched = []
        # *_on_batch: one batch, whatever the setting.
        ours = isinstance(iterator, DeviceIterator)
        launches = self._launches(iterator) if ours else ((self._place(None, next(iterator)), 1),)
        for batch, steps in launches:
            launched.append((self._launch(groups, batch, steps), steps))
            self._look()
        if not launched:
            raise StopIteration
        return self._outputs(launched), groups

    def _grouped(self, state: Any) -> tuple:
        return tuple(map(StateGroup, state, self._variables))

    def serves(self) -> bool:
        """Whether the model still has the variables that the programs were created for."""
        if self._compiled and _keras.constants_changed(self._trainer, self.kind):
            return False
        now = _keras.state_groups(self._trainer, self.kind)
        return not self.is_stale and all(
            len(group) == len(others) and all(a is b for a, b in zip(group, others, strict=True))
            for group, others in zip(now, self._variables, strict=True)
        )

    def _launch(self, groups: Any, batch: PlacedBatch, steps: int) -> Any:
        """Runs the program; afterwards the groups and the variables hold the new state."""
        state = tuple(group.values for group in groups)
        kind = steps > 1, None, batch.is_longer
        program = self._programs.get(kind) or self._made_program(*kind)
        outputs, changes = program(state, batch)
        if not self._placer.is_local:
            # Until its outputs are ready, this process may wait for the others' launches.
            peers.launched(outputs)
        changes = changed(state, changes)
        with self._turns.lock:
            # A callback may run the model and change its variables; the fit continues from those.
            # If another thread has started a fit meanwhile, that one continues from its own state.
            if _keras.stateless_scope() is not None or not self._turns.elsewhere:
                _keras.follow_changes(self._variables, changes)
        for group, values in zip(groups, with_changes(state, changes), strict=True):
            group.values = values
        return outputs

    def _outputs(self, launched: list[tuple[Any, int]]) -> Any:
        """The outputs for Keras's loop, from those of the launches: here the last ones."""
        return launched[-1][0]

    def _launches(
        self, iterator: DeviceIterator, skipped: int = 0
    ) -> Iterable[tuple[PlacedBatch, int]]:
        """Yields placed batches and their steps, to launch one after the other.

        Args:
            skipped: How many steps of this call ran before training was interrupted.
        """
        # Another thread's call may have other batches, and its own number of steps.
        most = iterator.chosen_steps or self._trainer.steps_per_execution
        if skipped == most:
            return ()
        place = functools.partial(self._place, iterator)
        if most == 1:
            return iterator.launches(1, place)
        wanted = functools.partial(self._wanted, most)
        several = functools.partial(self._several, most, iterator)
        return iterator.launches(min(wanted(), most - skipped), place, several, wanted)

    def _wanted(self, most: int) -> int:
        """How many of this number of steps may run."""
        return most

    def _several(
        self, most: int, iterator: DeviceIterator, batches: list
    ) -> Iterator[tuple[PlacedBatch, int]]:
        """Places host batches, stacked if they fill scans and have the same shapes."""
        length = most if self._compiled else 1
        if iterator.chosen_steps is not None:
            length = steps_that_fit(self._placer.bytes_per_device(batches[0]), length)

        def many(batches: list) -> PlacedBatch | None:
            stacked = self._placer.place_many(batches)
            if stacked is not None:
                self._sizes.follow(iterator, batches[0])
            return stacked

        place = functools.partial(self._place, iterator)
        return in_stacks(batches, length, place, many)

    def _look(self) -> None:
        """Lets an outer fit look for signals, if all of its processes run this launch."""
        look = after_other_launch()
        if look is not None and (jax.process_count() == 1 or not self._placer.is_local):
            look()

    def _made_program(
        self, scanned: bool, mask: tuple[bool, ...] | None = None, longer: bool = False
    ) -> Callable:
        """The program for one step or several, which later launches reuse."""
        kind = scanned, mask, longer
        if longer:
            exact = self._programs.get((scanned, mask, False)) or self._made_program(scanned, mask)
            program = self._shared(exact, mask)
        elif self._compiled:
            program = self._jitted(scanned, mask)
        else:
            program = self._eager(scanned, mask)
        self._programs[kind] = program
        return program

    def _jitted(self, scanned: bool, mask: tuple[bool, ...] | None) -> Callable:
        return jitted_step(
            self._trainer,
            self.kind,
            self._placer,
            donate=self._donates,
            scanned=scanned,
            mask=mask,
            compiler_options=self._compiler_options,
        )

    def _shared(self, exact: Any, mask: tuple[bool, ...] | None) -> Callable:
        step = step_of(self._trainer, self.kind, self._placer, self._donates, mask)

        def compiled(function: Callable) -> Callable:
            return step.compiled(function, False, self._compiler_options)

        def kept(words: str, done: bool) -> None:
            keep("rows", self._trainer, [Answer(f"{self.kind} step", words, done)])

        returns_rows = self.kind == "predict"
        return RowsAsData(exact, compiled, self._sizes, returns_rows, kept)

    def _placed_eagerly(self, iterator: DeviceIterator | None, batch: Any) -> PlacedBatch:
        return self._placer.place_eagerly(batch)

    def _eager(self, scanned: bool, mask: tuple[bool, ...] | None) -> Callable:
        step = step_of(self._trainer, self.kind, self._placer)

        def eager_step(state, batch: PlacedBatch):
            return step.on_arrays(state, batch.data)

        return eager_step if mask is None else watched_step(eager_step, mask)

    @property
    def _donates(self) -> bool:
        return False


class Evaluation(StepLoop):
    """Test steps."""

    kind = "test"


class Prediction(StepLoop):
    """Predict steps, whose outputs are the rows of this process, or all."""

    kind = "predict"

    def _launch(self, groups, batch, steps):
        outputs = super()._launch(groups, batch, steps)
        return self._placer.process_rows(outputs, batch, stacked=steps > 1)

    def _outputs(self, launched):
        if len(launched) == 1 and launched[0][1] == 1:
            return launched[0][0]
        launches = [
            jax.tree.map(lambda rows: np.concatenate(np.asarray(rows)), outputs)
            if steps > 1
            else outputs
            for outputs, steps in launched
        ]
        return jax.tree.map(lambda *rows: np.concatenate(rows), *launches)

    def _eager(self, scanned, mask):
        run = super()._eager(scanned, mask)

        def eager_step(state, batch: PlacedBatch):
            outputs, state = run(state, batch)
            # Keras reads all rows on every host.
            return on_every_host(outputs), state

        return eager_step


class Training(StepLoop):
    """Train steps, with the requests of callbacks and a guard for the state.

    Args:
        trainer: The model.
        turns: The threads that run the model, and the arrays of its state.
        placer: Transfers batches to the mesh and trims them in the program.
        guard: Keeps the training state.
        fit: The requests of callbacks to the fit.
        compiler_options: Options for XLA; `None` for its defaults.
    """

    kind = "train"

    def __init__(
        self,
        trainer: Any,
        turns: Turns,
        placer: BatchPlacer,
        guard: StateGuard,
        fit: FitControl,
        compiler_options: dict[str, Any] | None = None,
    ):
        super().__init__(trainer, turns, placer, compiler_options)
        self._guard, self._fit = guard, fit
        self._all_variables = [v for group in self._variables for v in group]
        self._metrics: list | None = None

    def __call__(self, state, iterator):
        """Launches the next steps. See `StepLoop`."""
        self._turns.steps()
        groups = state if type(state[0]) is StateGroup else self._grouped(state)
        try:
            if isinstance(iterator, DeviceIterator):
                return self._steps_of_fit(groups, iterator), groups
            # train_on_batch: one batch, whatever the setting.
            logs = self._launch(groups, self._place(None, next(iterator)), 1)
            self._look()
            return logs, groups
        except StopIteration:
            _keras.keep_metrics(self._trainer, self._metrics)
            raise
        except BaseException:
            # Keras does not have the new state yet, and would return to the old one, which a launch
            # may have consumed.
            with self._turns.lock:
                recover(self._trainer, self._guard)
            raise

    def _steps_of_fit(self, groups: Any, iterator: DeviceIterator) -> Any:
        """Runs the launches for one call of Keras's loop; returns the logs."""
        fit, skipped, ran = self._fit, 0, False
        if iterator is not fit.input or fit.begin_at is not None:
            fit.reads(iterator)
        if fit.batches_to_skip:
            skipped = self._skip(iterator)
        if fit.step is None and fit.on_launch:
            fit.counts_from(_keras.train_steps_counted(self._trainer.optimizer))
        for batch, steps in self._launches(iterator, skipped):
            logs, ran = self._launch(groups, batch, steps), True
            iterator.clock.launched(logs, self._trainer.stop_training)
            fit.launched(steps, batch, logs)
            if fit.after_launch is not None:
                fit.after_launch(steps)
            elif after_other_launch() is not None:
                self._look()
        if ran:
            return logs
        if not skipped:
            raise StopIteration
        # The logs of an epoch that is skipped completely.
        return {} if fit.batches_to_skip else self._trainer.get_metrics_result()

    def _launch(self, groups, batch, steps):
        # `groups` are the lists that Keras made when its loop began, `self._variables` the objects.
        # Between launches the arrays are the truth: variables get them when somebody reads.
        watch = self._fit.watch
        kind = steps > 1, None if watch is None else watch.mask, batch.is_longer
        program = self._programs.get(kind) or self._made_program(*kind)
        with self._turns.lock:
            state = self._newest(groups)
            if watch is not None:
                state = (*state, watch.health_on(self._placer.mesh))
            outputs, state = self._guard.launch(program, state, batch)
            if not self._placer.is_local:
                peers.launched(outputs)
            _keras.follow_state(self._variables, state)
            if not self._guard.kept:
                values = [value for group in state[:4] for value in group]
                self._turns.made(self._all_variables, values)
        if watch is not None:
            *state, watch.health = state
            outputs = watch.noted(outputs, batch, steps)
        for group, values in zip(groups, state, strict=True):
            group.values = values
        self._metrics = state[3]
        if self._fit.steps_left is not None and self._fit.spend(steps):
            self._trainer.stop_training = True
        return outputs

    def _newest(self, groups: Any) -> tuple[list, ...]:
        """The variables' current values: a callback or another thread may have assigned some.

        Args:
            groups: The state that Keras passes on. Its lists get these values too, so that they
                hold no arrays that the launch consumes.
        """
        if not self._guard.kept:
            for group in groups:
                # An array that must be copied first is freed as soon as it has its copy.
                group.values.clear()
            values = self._turns.to_consume(self._all_variables)
        else:
            values = _keras.values_of(self._all_variables)
        given = iter(values)
        for group, variables in zip(groups, self._variables, strict=True):
            group.values[:] = itertools.islice(given, len(variables))
        return tuple([group.values for group in groups])

    def _skip(self, iterator: DeviceIterator) -> int:
        """How many steps of this call ran before training was interrupted."""
        skipped = self._fit.skip(iterator.chosen_steps or self._trainer.steps_per_execution)
        if iterator.skip(skipped) < skipped:
            # Of an input whose length is known, the epoch would have begun anew.
            logger.warning(
                "the epoch ends without further steps: the input has only %d batches now, and the "
                "checkpoint was saved after more",
                iterator.progress.made,
            )
            self._fit.batches_to_skip, self._fit.made_before = 0, False
        if self._fit.stops_before_more:
            self._trainer.stop_training = True
        return skipped

    def _wanted(self, most):
        return self._fit.within(most)

    @property
    def _donates(self):
        return self._guard.donate
