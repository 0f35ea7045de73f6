"""Keras's accumulation of gradients over several small batches."""

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras

from keras_tpu_dist._keras import seam
from keras_tpu_dist._keras.seam import Replacement
from keras_tpu_dist._keras.state import stateless_scope
from keras_tpu_dist.common.setting import setting

_accumulate: contextvars.ContextVar[Callable | None] = contextvars.ContextVar(
    "accumulate", default=None
)


def accumulating(accumulate: Callable[..., tuple[list, list] | None]) -> AbstractContextManager:
    """A context in which optimizers accumulate gradients with another function.

    Args:
        accumulate: Called as `accumulate(optimizer, is_last, gradients, sums, values, update)`:
            whether the batch is the last one of the update, its gradients, the sums of those
            before, the values that an update may change, and a function from the mean gradients
            and these values to the new ones. It returns the new values and the new sums, or `None`
            to compute what Keras does.
    """
    return setting(_accumulate, accumulate)


def accumulated_for(optimizer: Any) -> dict[int, str]:
    """The weight for each variable in which an optimizer sums gradients up: from id to path."""
    pairs = zip(optimizer._accumulated_gradients, optimizer._trainable_variables, strict=True)
    return {id(accumulator): weight.path for accumulator, weight in pairs}


def _apply_gradients(stock: Callable, optimizer: Any, grads: list, trainable_variables: list):
    accumulate, steps = _accumulate.get(), optimizer.gradient_accumulation_steps
    if accumulate is None or not steps:
        return stock(optimizer, grads, trainable_variables)
    sums = [
        optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]
        for variable in trainable_variables
    ]
    every = set(map(id, optimizer._accumulated_gradients))
    changing = [*trainable_variables, *(v for v in optimizer.variables if id(v) not in every)]
    around = stateless_scope()

    def update(means: list, values: list) -> list:
        scope = keras.StatelessScope()
        scope.state_mapping.update(around.state_mapping)
        scope.state_mapping.update(zip(map(id, changing), values, strict=True))
        with scope:
            clipped = optimizer._clip_gradients(means)
            optimizer._apply_weight_decay(trainable_variables)
            optimizer._backend_update_step(clipped, trainable_variables, optimizer.learning_rate)
        return list(map(scope.get_current_value, changing))

    is_last = (optimizer._iterations.value + 1) % steps == 0
    values = [variable.value for variable in changing]
    found = accumulate(optimizer, is_last, list(grads), [v.value for v in sums], values, update)
    if found is None:
        return stock(optimizer, grads, trainable_variables)
    values, new_sums = found
    for variable, value in zip([*changing, *sums], [*values, *new_sums], strict=True):
        variable.assign(value)
    if optimizer.use_ema:
        _average(optimizer)


def _average(optimizer: Any) -> None:
    """Updates the moving averages of the weights, at every small batch, as Keras does."""
    weights = optimizer._trainable_variables
    optimizer._update_model_variables_moving_average(weights)
    if optimizer.ema_overwrite_frequency is None:
        return
    overwrites = (optimizer.iterations + 1) % optimizer.ema_overwrite_frequency == 0
    for weight, average in zip(weights, optimizer._model_variables_moving_average, strict=True):
        weight.assign(jax.numpy.where(overwrites, average.value, weight.value))


seam.declare(
    Replacement(
        "keras.src.backend.jax.optimizer:JaxOptimizer",
        "_backend_apply_gradients",
        _apply_gradients,
        why="gradients of small batches are summed on each device first, and over the devices once",
        hook="an optimizer that separates accumulation from its update",
        parameters=("grads", "trainable_variables"),
    )
)
