"""The function that Keras's loop calls: launches of one or several steps, as batches come."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.input.batches import BatchPlacer, PlacedBatch
from keras_tpu_dist.input.iterator import DeviceIterator
from keras_tpu_dist.processes.arrays import on_every_host
from keras_tpu_dist.training.auto_steps import steps_that_fit
from keras_tpu_dist.training.finite import watched_step
from keras_tpu_dist.training.fit_control import FitControl, after_other_launch
from keras_tpu_dist.training.guard import StateGuard, recover
from keras_tpu_dist.training.step import changed, jitted_step, step_function, with_changes
from keras_tpu_dist.training.turns import Turns


class StepLoop:
    """The function that Keras's loop calls: `(state, iterator) -> (outputs, state)`.

    With `steps_per_execution=N` it runs N batches of one shape as one `jax.lax.scan`, prepares
    the next N while the devices work, and runs what is left over (fewer batches, a ragged tail)
    step by step: at most one program for the scan, one for the single step, one for each tail.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        turns: Who runs the model, and the arrays of its state.
        placer: Puts batches on the mesh and trims them in the program.
        guard: Keeps the training state (used for `"train"`).
        fit: What callbacks asked of the fit (likewise).
        chosen: The `steps_per_execution` of the running call if it was chosen for the user, who may
            then not have the memory for the batches of one launch; or `None`.
        compiler_options: What the compiler is told; `None` for its defaults.

    Attributes:
        is_stale: Whether the model's variables lie otherwise than when it was made, so that the
            next call makes another one.
    """

    def __init__(
        self,
        trainer: Any,
        kind: str,
        turns: Turns,
        placer: BatchPlacer,
        guard: StateGuard,
        fit: FitControl,
        chosen: Callable[[], int | None] = lambda: None,
        compiler_options: dict[str, Any] | None = None,
    ):
        self.is_stale = False
        self._trainer, self._kind = trainer, kind
        self._turns, self._placer, self._guard, self._fit = turns, placer, guard, fit
        self._chosen, self._compiler_options = chosen, compiler_options
        self._groups = _keras.state_groups(trainer, kind)
        self._variables = [v for group in self._groups for v in group]
        self._compiled = not trainer.run_eagerly and trainer.jit_compile
        self._place = placer.place if self._compiled else placer.place_eagerly
        self._programs: dict[Any, Callable] = {}
        self._metrics: list | None = None

    def __call__(self, state: Any, iterator: Any) -> tuple[Any, Any]:
        """Launches the next steps.

        Args:
            state: The training state.
            iterator: A `DeviceIterator`, or any iterator over host batches.

        Returns:
            Outputs and new state.

        Raises:
            StopIteration: At the end of the input.
        """
        state = tuple(
            each.values if isinstance(each, _keras.StateGroup) else each for each in state
        )
        try:
            if isinstance(iterator, DeviceIterator):
                outputs, state = self._next(state, iterator)
            else:
                # *_on_batch: one batch, whatever the setting.
                outputs, state = self._launch(state, self._place(next(iterator)))
                self._look()
            return outputs, tuple(map(_keras.StateGroup, state))
        except StopIteration:
            if self._kind == "train":
                _keras.keep_metrics(self._trainer, self._metrics)
            raise
        except BaseException:
            # Keras has not been given the new state yet, and would go back to the old, which a
            # launch may have consumed.
            if self._kind == "train":
                with self._turns.lock:
                    recover(self._trainer, self._guard)
            raise

    def serves(self) -> bool:
        """Whether the model's variables are those that the programs were made for."""
        now = _keras.state_groups(self._trainer, self._kind)
        return not self.is_stale and all(
            len(group) == len(others) and all(a is b for a, b in zip(group, others, strict=True))
            for group, others in zip(now, self._groups, strict=True)
        )

    def _next(self, state, iterator: DeviceIterator):
        if self._kind == "train":
            self._fit.reads(iterator)
        most = self._most()
        skipped = self._skip(iterator, most)
        if skipped and self._fit.stops_before_more:
            self._trainer.stop_training = True
            return self._trainer.get_metrics_result(), state
        if skipped == most:
            # Where a whole epoch is skipped, these are its logs.
            logs = {} if self._fit.batches_to_skip else self._trainer.get_metrics_result()
            return logs, state
        if skipped:
            try:
                return self._launch_several(state, iterator, skipped)
            except StopIteration:
                return self._trainer.get_metrics_result(), state
        if most == 1:
            outputs, state = self._launch(state, iterator.take(self._place))
            self._note(iterator, outputs, 1)
            return outputs, state
        return self._launch_several(state, iterator, skipped)

    def _launch(self, state, batch, steps: int = 1):
        if self._kind == "train":
            return self._train(state, batch, steps)
        outputs, changes = self._program(steps > 1)(state, batch)
        changes = changed(state, changes)
        with self._turns.lock:
            # A callback may run the model: what that changes, and what it leaves, counts from here
            # on. A fit that another thread began meanwhile goes on from its own.
            if _keras.stateless_scope() is not None or not self._turns.elsewhere:
                _keras.follow_changes(self._groups, changes)
        state = with_changes(state, changes)
        if self._kind == "predict":
            outputs = self._placer.own_rows(outputs, batch, stacked=steps > 1)
        return outputs, state

    def _train(self, state, batch, steps: int):
        program, watch = self._program(steps > 1), self._fit.watch
        with self._turns.lock:
            state = self._newest(state)
            if watch is not None:
                state = (*state, watch.health_on(self._placer.mesh))
            outputs, state = self._guard.launch(program, state, batch)
            _keras.follow_state(self._groups, state)
            if self._guard.donate:
                self._turns.buffers.made([v for group in state[:4] for v in group])
        if watch is not None:
            *state, watch.health = state
            outputs = watch.noted(outputs, batch, steps)
        self._metrics = state[3]
        if self._fit.spend(steps):
            self._trainer.stop_training = True
        return outputs, tuple(state)

    def _newest(self, state: tuple[list, ...]) -> tuple[list, ...]:
        """What the variables hold now: a callback or another thread may have assigned some.

        Args:
            state: The state that Keras knows, whose lists are made to hold it: arrays that a copy
                replaces may be gone then.
        """
        if self._guard.donate:
            values = self._turns.buffers.to_consume(self._variables)
        else:
            values = _keras.values_of(self._variables)
        given = iter(values)
        for known, group in zip(state, self._groups, strict=True):
            known[:] = itertools.islice(given, len(group))
        return state

    def _launch_several(self, state, iterator: DeviceIterator, skipped: int):
        left = min(self._steps_wanted(), self._most() - skipped)
        collected = []
        while left:
            try:
                batch, steps = iterator.take_steps(left, self._place_group)
            except StopIteration:
                if not collected:
                    raise
                break
            outputs, state = self._launch(state, batch, steps)
            self._note(iterator, outputs, steps)
            collected.append((outputs, steps))
            left -= steps
            if iterator.at_epoch_end:
                break
        if left:
            iterator.not_made(left)
        iterator.prepare_steps(self._steps_wanted(), self._place_group)
        return (_all_rows(collected) if self._kind == "predict" else outputs), state

    def _note(self, iterator: DeviceIterator, outputs, steps: int) -> None:
        if self._kind == "train":
            iterator.launched(outputs, self._trainer.stop_training, steps)
            if self._fit.after_launch is not None:
                self._fit.after_launch(steps)
                return
        self._look()

    def _look(self) -> None:
        """Lets the fit around this look for signals, if all of its processes make the launch."""
        look = after_other_launch.get()
        if look is not None and (jax.process_count() == 1 or not self._placer.is_local):
            look()

    def _most(self) -> int:
        """How many steps a launch makes of this call; another thread's may have other batches."""
        return self._chosen() or self._trainer.steps_per_execution

    def _steps_wanted(self) -> int:
        steps = self._most()
        return self._fit.within(steps) if self._kind == "train" else steps

    def _skip(self, iterator: DeviceIterator, most: int) -> int:
        """How many steps of this launch were made before training was interrupted."""
        steps = self._fit.skip(most) if self._kind == "train" else 0
        if steps:
            iterator.skip(steps)
        return steps

    def _program(self, scanned: bool) -> Callable:
        """What to launch, for one step or several; made when first asked for."""
        # Validation within a fit that is watched updates nothing that could be watched.
        watch = self._fit.watch if self._kind == "train" else None
        mask = None if watch is None else watch.mask
        if (scanned, mask) not in self._programs:
            self._programs[scanned, mask] = self._made_program(scanned, mask)
        return self._programs[scanned, mask]

    def _made_program(self, scanned: bool, mask: tuple[bool, ...] | None) -> Callable:
        trainer, kind = self._trainer, self._kind
        if self._compiled:
            options = {"scanned": scanned, "mask": mask, "compiler_options": self._compiler_options}
            return jitted_step(trainer, kind, self._placer, self._guard.donate, **options)
        step = step_function(trainer, kind)

        def eager_step(state, batch: PlacedBatch):
            outputs, new_state = step(state, batch.data)
            # Each process reads all rows.
            return (on_every_host(outputs) if kind == "predict" else outputs), new_state

        return eager_step if mask is None else watched_step(eager_step, mask)

    def _steps_of_a_scan(self, batch) -> int:
        steps = self._most() if self._compiled else 1
        if self._chosen() is None:
            return steps
        return steps_that_fit(self._placer.bytes_per_device(batch), steps)

    def _place_group(self, batches: list) -> list:
        length = self._steps_of_a_scan(batches[0])
        if len(batches) % length or length == 1:
            return self._placed_singly(batches)
        placed: list = []
        for start in range(0, len(batches), length):
            try:
                stacked = self._placer.place_many(batches[start : start + length])
            except ValueError:
                # One of them is at fault: placed singly, it raises in its turn.
                stacked = None
            if stacked is None:
                return placed + self._placed_singly(batches[start:])
            placed.append((stacked, length))
        return placed

    def _placed_singly(self, batches: list) -> list:
        placed: list = []
        for batch in batches:
            try:
                placed.append((self._place(batch), 1))
            except Exception as error:
                # Kept, not swallowed: it is raised when this batch's turn comes.
                placed.append(error)
                break
        return placed


def _all_rows(collected: list) -> Any:
    """The outputs of predict launches, joined along the batch as Keras joins them."""
    launches = [
        jax.tree.map(lambda rows: np.concatenate(np.asarray(rows)), outputs)
        if steps > 1
        else outputs
        for outputs, steps in collected
    ]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *launches)
