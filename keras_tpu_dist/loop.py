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

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Puts batches on the mesh and trims them in the program.
        guard: Keeps the training state (used for `"train"`).

    Returns:
        The function; it takes a `DeviceIterator`, or any iterator over host batches.
    """
    compiled = not trainer.run_eagerly and trainer.jit_compile
    step = _step_function(trainer, kind, placer)
    if compiled:
        step = _jit(trainer, kind, step, placer, guard.donate)
    place = placer.place if compiled else placer.place_eagerly

    def one(state, iterator):
        if isinstance(iterator, DeviceIterator):
            batch = iterator.take(place)
        else:
            batch = place(next(iterator))
        if kind != "train":
            return step(state, batch)
        try:
            return guard.launch(step, state, batch)
        except BaseException:
            recover(trainer, guard)
            raise

    def many(state, iterator):
        outputs, state = one(state, iterator)
        collected = [outputs]
        for _ in range(trainer.steps_per_execution - 1):
            try:
                outputs, state = one(state, iterator)
            except StopIteration:
                break
            collected.append(outputs)
        if kind == "predict":
            outputs = jax.tree.map(lambda *rows: np.concatenate(rows), *collected)
        return outputs, state

    return many if trainer.steps_per_execution > 1 else one


def jitted_step(trainer: Any, kind: str, placer: BatchPlacer, donate: bool) -> Callable:
    """The jitted step alone, `(state, PlacedBatch) -> (outputs, state)`, as dry runs lower it.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        placer: Trims batches in the program.
        donate: Whether a train step consumes its input state.

    Returns:
        A `jax.jit` function.
    """
    return _jit(trainer, kind, _step_function(trainer, kind, placer), placer, donate)


def _step_function(trainer, kind: str, placer: BatchPlacer) -> Callable:
    user_step = getattr(trainer, f"{kind}_step")
    if kind != "predict":
        return user_step

    def predict_step(state, data):
        outputs, non_trainable = user_step(state, data)
        return outputs, (state[0], non_trainable)

    return predict_step


def _jit(trainer, kind: str, step: Callable, placer: BatchPlacer, donate: bool) -> Callable:
    replicated = named_sharding(placer.mesh)
    shardings = _keras.state_shardings(trainer, kind)

    def train_step(state, batch: PlacedBatch):
        return step(state, placer.trim(batch))

    def forward_step(state, batch: PlacedBatch):
        outputs, new_state = step(state, placer.trim(batch))
        new_state = tuple(list(group) for group in new_state)
        if kind == "predict" and batch.ragged:
            # Uneven rows cannot leave a program split over devices.
            outputs = jax.lax.with_sharding_constraint(outputs, replicated)
        return outputs, jax.tree.map(_constrain_if_new, state, new_state, shardings)

    if kind == "train":
        return jax.jit(
            train_step,
            donate_argnums=(0,) if donate else (),
            out_shardings=(replicated, shardings),
        )
    # Weights that a step only reads are not among its outputs: JAX forwards them, neither copied
    # nor donated, as long as no output sharding is asked for.
    return jax.jit(forward_step)


def _constrain_if_new(old, new, sharding: NamedSharding):
    return old if new is old else jax.lax.with_sharding_constraint(new, sharding)
