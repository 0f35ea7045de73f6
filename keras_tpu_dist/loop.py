"""The step as compiled: batches trimmed in the program, one or many steps in one launch."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.data import BatchPlacer, DeviceIterator, PlacedBatch
from keras_tpu_dist.guard import StateGuard, recover
from keras_tpu_dist.layout import named_sharding

logger = logging.getLogger("keras_tpu_dist")


def make_step(trainer: Any, kind: str, placer: BatchPlacer, guard: StateGuard) -> Callable:
    """Builds the function that Keras's loop calls: `(state, iterator) -> (outputs, state)`.

    With `steps_per_execution=N` it runs N batches of one shape as one `jax.lax.scan`, prepares
    the next N while the devices work, and runs what is left over (fewer batches, a ragged tail)
    step by step: at most one program for the scan, one for the single step, one for each tail.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Puts batches on the mesh and trims them in the program.
        guard: Keeps the training state (used for `"train"`).

    Returns:
        The function; it takes a `DeviceIterator`, or any iterator over host batches.
    """
    groups = _keras.state_groups(trainer)
    compiled = not trainer.run_eagerly and trainer.jit_compile
    if not compiled:
        step = scan = _step_function(trainer, kind)
        place = placer.place_eagerly
    else:
        step = jitted_step(trainer, kind, placer, guard.donate)
        scan = jitted_step(trainer, kind, placer, guard.donate, scanned=True)
        place = placer.place

    def launch(function, state, batch, steps=1):
        if kind != "train":
            return function(state, batch)
        try:
            outputs, state = guard.launch(function, state, batch, steps)
            _keras.follow_state(groups, state)
            return outputs, state
        except BaseException:
            recover(trainer, guard)
            raise

    def one(state, iterator):
        if isinstance(iterator, DeviceIterator):
            return launch(step, state, iterator.take(place))
        return launch(step, state, place(next(iterator)))

    if trainer.steps_per_execution == 1:
        return one
    place_group = _group_placer(placer, place, trainer.steps_per_execution if compiled else 0)

    def many(state, iterator):
        if not isinstance(iterator, DeviceIterator):
            # *_on_batch: one batch, whatever the setting.
            return one(state, iterator)
        left = trainer.steps_per_execution
        if kind == "train" and guard.steps_left is not None:
            left = min(left, guard.steps_left)
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
            outputs, state = launch(scan if steps > 1 else step, state, batch, steps)
            collected.append((outputs, steps))
            left -= steps
            if iterator.at_epoch_end:
                break
        iterator.prepare_steps(trainer.steps_per_execution, place_group)
        return (_all_rows(collected) if kind == "predict" else outputs), state

    return many


def _group_placer(placer: BatchPlacer, place: Callable, scan_length: int) -> Callable:
    def place_group(batches: list) -> list:
        if len(batches) == scan_length:
            try:
                stacked = placer.place_many(batches)
            except ValueError:
                # One of them is at fault: placed singly below, it raises in its turn.
                stacked = None
            if stacked is not None:
                return [(stacked, scan_length)]
        placed: list = []
        for batch in batches:
            try:
                placed.append((place(batch), 1))
            except Exception as error:
                placed.append(error)
                break
        return placed

    return place_group


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
    trainer: Any, kind: str, placer: BatchPlacer, donate: bool, scanned: bool = False
) -> Callable:
    """The jitted step alone, `(state, PlacedBatch) -> (outputs, state)`, as dry runs lower it.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Trims batches in the program.
        donate: Whether a train step consumes its input state.
        scanned: Whether the batch is several, stacked, of which each is a step.

    Returns:
        A `jax.jit` function.
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

    def many_steps(state, batches: PlacedBatch):
        def body(state, data):
            outputs, new_state = one_step(state, PlacedBatch(data, batches.slots))
            return jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, state), outputs

        state, outputs = jax.lax.scan(body, state, batches.data)
        if kind != "predict":
            outputs = jax.tree.map(lambda each: each[-1], outputs)
        return outputs, state

    run = many_steps if scanned else one_step
    if kind == "train":
        # The name that JAX's logs and profiles show.
        run.__name__ = "train_steps" if scanned else "train_step"
        return jax.jit(
            run,
            donate_argnums=(0,) if donate else (),
            out_shardings=(replicated, shardings),
        )

    def forward(state, batch: PlacedBatch):
        outputs, new_state = run(state, batch)
        return outputs, jax.tree.map(_constrain_if_new, state, new_state, shardings)

    # Weights that a step only reads are not among its outputs: JAX forwards them, neither copied
    # nor donated, as long as no output sharding is asked for.
    forward.__name__ = f"{kind}_steps" if scanned else f"{kind}_step"
    return jax.jit(forward)


def _constrain_if_new(old, new, sharding: NamedSharding):
    return old if new is old else jax.lax.with_sharding_constraint(new, sharding)
