"""The step as compiled: batches trimmed in the program, one or many steps in one launch."""

import logging
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.layout.rules import named_sharding
from keras_tpu_dist.partitioner import Jitted
from keras_tpu_dist.training.auto_steps import steps_that_fit
from keras_tpu_dist.training.batches import BatchPlacer, DeviceIterator, PlacedBatch
from keras_tpu_dist.training.finite import first_bad, watched_step
from keras_tpu_dist.training.guard import StateGuard, recover

logger = logging.getLogger("keras_tpu_dist")


def make_step(
    trainer: Any,
    kind: str,
    placer: BatchPlacer,
    guard: StateGuard,
    auto: Callable[[], bool] = lambda: False,
) -> Callable:
    """Builds the function that Keras's loop calls: `(state, iterator) -> (outputs, state)`.

    With `steps_per_execution=N` it runs N batches of one shape as one `jax.lax.scan`, prepares
    the next N while the devices work, and runs what is left over (fewer batches, a ragged tail)
    step by step: at most one program for the scan, one for the single step, one for each tail.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Puts batches on the mesh and trims them in the program.
        guard: Keeps the training state (used for `"train"`).
        auto: Whether `steps_per_execution` was chosen for the user, who may then not have the
            memory for the batches of one launch.

    Returns:
        The function; it takes a `DeviceIterator`, or any iterator over host batches.
    """
    groups = _keras.state_groups(trainer)
    compiled = not trainer.run_eagerly and trainer.jit_compile
    program = _programs(trainer, kind, placer, guard, compiled)
    place = placer.place if compiled else placer.place_eagerly

    def scan_length(batch):
        steps = trainer.steps_per_execution if compiled else 1
        return steps_that_fit(batch, steps, placer.num_shards) if auto() else steps

    place_group = _group_placer(placer, place, scan_length)

    def train(state, batch, steps=1):
        watch = guard.watch
        try:
            if watch is not None:
                state = (*state, watch.health_on(placer.mesh))
            outputs, state = guard.launch(program(steps > 1), state, batch)
            _keras.follow_state(groups, state)
            if watch is not None:
                *state, watch.health = state
                outputs = watch.noted(outputs, batch, steps)
            if guard.spend(steps):
                trainer.stop_training = True
            return outputs, tuple(state)
        except BaseException:
            recover(trainer, guard)
            raise

    def forward(state, batch, steps=1):
        return program(steps > 1)(state, batch)

    launch = train if kind == "train" else forward

    def note(iterator, outputs):
        if kind == "train":
            iterator.launched(outputs, last=trainer.stop_training)

    def one(state, iterator):
        if not isinstance(iterator, DeviceIterator):
            return launch(state, place(next(iterator)))
        outputs, state = launch(state, iterator.take(place))
        note(iterator, outputs)
        return outputs, state

    def steps_wanted():
        steps = trainer.steps_per_execution
        limited = kind == "train" and guard.steps_left is not None
        return min(steps, guard.steps_left) if limited else steps

    def skipped(iterator):
        """How many steps of this launch were made before training was interrupted."""
        steps = min(trainer.steps_per_execution, guard.batches_to_skip)
        iterator.skip(steps)
        guard.batches_to_skip -= steps
        return steps

    def many(state, iterator, already=0):
        left = min(steps_wanted(), trainer.steps_per_execution - already)
        collected = []
        while left:
            try:
                batch, steps = iterator.take_steps(left, place_group)
            except StopIteration:
                if not collected:
                    raise
                break
            except BaseException:
                if kind == "train":
                    recover(trainer, guard)
                raise
            outputs, state = launch(state, batch, steps)
            note(iterator, outputs)
            collected.append((outputs, steps))
            left -= steps
            if iterator.at_epoch_end:
                break
        if left:
            iterator.not_made(left)
        iterator.prepare_steps(steps_wanted(), place_group)
        return (_all_rows(collected) if kind == "predict" else outputs), state

    def step(state, iterator):
        # *_on_batch: one batch, whatever the setting.
        single = trainer.steps_per_execution == 1 or not isinstance(iterator, DeviceIterator)
        already = 0
        if kind == "train" and guard.batches_to_skip and isinstance(iterator, DeviceIterator):
            already = skipped(iterator)
            if already == trainer.steps_per_execution:
                return {}, state
        return one(state, iterator) if single else many(state, iterator, already)

    return step


def _programs(trainer, kind: str, placer, guard, compiled: bool) -> Callable[[bool], Callable]:
    """What to launch, for one step or several; made when first asked for."""
    made: dict[Any, Callable] = {}

    def program(scanned: bool) -> Callable:
        # Validation within a fit that is watched updates nothing that could be watched.
        watch = guard.watch if kind == "train" else None
        mask = None if watch is None else watch.mask
        if (scanned, mask) not in made:
            if compiled:
                step = jitted_step(trainer, kind, placer, guard.donate, scanned=scanned, mask=mask)
            else:
                step = _step_function(trainer, kind)
                step = step if mask is None else watched_step(step, mask)
            made[scanned, mask] = step
        return made[scanned, mask]

    return program


def _group_placer(placer: BatchPlacer, place: Callable, scan_length: Callable) -> Callable:
    def place_group(batches: list) -> list:
        length = scan_length(batches[0])
        if len(batches) % length or length == 1:
            return _placed_singly(batches, place)
        placed: list = []
        for start in range(0, len(batches), length):
            part = batches[start : start + length]
            try:
                stacked = placer.place_many(part)
            except ValueError:
                # One of them is at fault: placed singly, it raises in its turn.
                stacked = None
            if stacked is None:
                return placed + _placed_singly(batches[start:], place)
            placed.append((stacked, length))
        return placed

    return place_group


def _placed_singly(batches: list, place: Callable) -> list:
    placed: list = []
    for batch in batches:
        try:
            placed.append((place(batch), 1))
        except Exception as error:
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


def _step_function(trainer, kind: str) -> Callable:
    user_step = getattr(trainer, f"{kind}_step")
    if kind != "predict":
        return user_step

    def predict_step(state, data):
        outputs, non_trainable = user_step(state, data)
        return outputs, (state[0], non_trainable)

    return predict_step


def jitted_step(
    trainer: Any,
    kind: str,
    placer: BatchPlacer,
    donate: bool,
    scanned: bool = False,
    mask: tuple[bool, ...] | None = None,
) -> Jitted:
    """The jitted step alone, `(state, PlacedBatch) -> (outputs, state)`, as dry runs lower it.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Trims batches in the program.
        donate: Whether a train step consumes its input state.
        scanned: Whether the batch is several, stacked, of which each is a step.
        mask: For a train step that watches for values that are not finite, the variables to
            check; see `keras_tpu_dist.training.finite`.

    Returns:
        A function that is compiled for each shape of batch; a `Jitted`.
    """
    step = _step_function(trainer, kind)
    replicated = named_sharding(placer.mesh)
    shardings = _keras.state_shardings(trainer, kind)

    def one_step(state, batch: PlacedBatch):
        outputs, new_state = step(state, placer.trim(batch))
        if kind == "predict" and batch.ragged:
            # Uneven rows cannot leave a program split over devices.
            outputs = jax.lax.with_sharding_constraint(outputs, replicated)
        return outputs, tuple(list(group) for group in new_state)

    if mask is not None:
        one_step = watched_step(one_step, mask)
        shardings = (*shardings, [replicated, replicated])

    def many_steps(state, batches: PlacedBatch):
        def body(state, data):
            outputs, new_state = one_step(state, PlacedBatch(data, batches.slots))
            return jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, state), outputs

        state, outputs = jax.lax.scan(body, state, batches.data)
        if kind == "predict":
            return outputs, state
        outputs, *report = outputs if mask is not None else (outputs,)
        outputs = jax.tree.map(lambda each: each[-1], outputs)
        if report:
            outputs = (outputs, first_bad(*report))
        return outputs, state

    run = many_steps if scanned else one_step

    def layouts(state, batch: PlacedBatch):
        return shardings, placer.shardings(batch, stacked=scanned)

    if kind == "train":
        # The name that JAX's logs and profiles show.
        run.__name__ = "train_steps" if scanned else "train_step"
        outputs = (replicated, shardings)
        donated = (0,) if donate else ()
        return Jitted(
            *(run, placer.mesh, layouts, outputs, _kind_of_batch),
            donate_argnums=donated,
            out_shardings=outputs,
        )

    def forward(state, batch: PlacedBatch):
        outputs, new_state = run(state, batch)
        return outputs, jax.tree.map(_constrain_if_new, state, new_state, shardings)

    # Weights that a step only reads are not among its outputs: JAX forwards them, neither copied
    # nor donated, as long as no output sharding is asked for.
    forward.__name__ = f"{kind}_steps" if scanned else f"{kind}_step"
    return Jitted(forward, placer.mesh, layouts, kind_of=_kind_of_batch)


def _kind_of_batch(state, batch: PlacedBatch) -> Hashable:
    """What tells step programs apart; the form of the state does not change."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _constrain_if_new(old, new, sharding: NamedSharding):
    return old if new is old else jax.lax.with_sharding_constraint(new, sharding)
