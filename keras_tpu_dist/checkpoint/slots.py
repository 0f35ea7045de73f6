"""The door to an optimizer's slots: made to be loaded, or begun with the weights that were loaded.

An optimizer's `build` may read the weights: `ScheduleFreeAdamW` begins with a copy of them. Slots
must exist before they can be loaded, and what they begin with is right only afterwards.
"""

import contextlib
import logging
from collections.abc import Collection
from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.training import membership

logger = logging.getLogger("keras_tpu_dist")


def build_optimizer(model: Any, optimizer: Any = None) -> None:
    """Makes the slots of an optimizer, by default the model's, if there are none yet.

    If weights are loaded afterwards, call `begin_slots`.

    Args:
        model: A built model.
        optimizer: The optimizer; `None` for the model's own.
    """
    optimizer = optimizer or getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built:
        return
    with _scope_of(model):
        optimizer.build(model.trainable_variables)


def begin_slots(model: Any, loaded: Collection[Any], trained: bool) -> None:
    """Lets the slots that were not loaded begin with the weights as they are now.

    If nothing of the optimizer was loaded and it has trained, all of it stays, as in Keras.

    Args:
        loaded: The variables that were loaded.
        trained: Whether the optimizer had trained before.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    ids = {id(variable) for variable in loaded}
    if trained and not any(id(variable) in ids for variable in optimizer.variables):
        return
    for inside in _keras.optimizers_in(optimizer).values():
        slots = _keras.slots_of_optimizer(inside)
        left = any(id(variable) not in ids for variable in _keras.variables_of_optimizer(inside))
        # One that holds others, as `LossScaleOptimizer` does, need not have slots of its own.
        if inside.built and left and (slots or len(_keras.optimizers_in(inside)) == 1):
            _begin_anew(model, inside, ids)
        for name, slot, weight in slots:
            # At the first step of all, Keras takes the weights; zeros would count as an average.
            if name == "model_variables_moving_average" and id(slot) not in ids:
                slot.assign(weight.value)


def _begin_anew(model: Any, optimizer: Any, loaded: set[int]) -> None:
    try:
        with _scope_of(model):
            begun = _keras.begun_anew(optimizer)
    except Exception as error:
        # `build` is anybody's code, and ran without error before; the weights are loaded.
        logger.warning(
            "slots of optimizer %r stay as they are, although other weights were loaded: they "
            "cannot be made again (%s: %s). If they begin with the weights, compile the model "
            "after loading",
            optimizer.name,
            type(error).__name__,
            error,
        )
        return
    for variable, value in begun:
        if id(variable) not in loaded:
            variable.assign(value)


def _scope_of(model: Any) -> contextlib.AbstractContextManager:
    member = membership.of_model(model)
    return contextlib.nullcontext() if member is None else member.strategy.scope()
