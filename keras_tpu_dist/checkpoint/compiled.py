"""An optimizer that is compiled differently from the one whose state is loaded."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_tpu_dist import _keras

logger = logging.getLogger("keras_tpu_dist")

# Optimizers of one family have slots of one meaning.
_FAMILIES = ({"adam", "adam_w"},)


@dataclass(frozen=True)
class CompiledOptimizer:
    """How an optimizer was compiled, as far as a checkpoint has to know.

    Attributes:
        rate: The learning rate with which the run began; `None` for a schedule.
        accumulation: The steps whose gradients are accumulated.
        within: The learning rates of the optimizers in a `MultiOptimizer`, by their places; not
            saved.
    """

    rate: float | None = None
    accumulation: int = 1
    within: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """What is saved, by name."""
        return {"rate": self.rate, "accumulation": self.accumulation}


def compiled_of(optimizer: Any) -> CompiledOptimizer:
    """How an optimizer is compiled."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is None:
        return CompiledOptimizer()
    if hasattr(optimizer, "optimizers"):
        inner = {
            p: inside
            for p, inside in _keras.optimizers_in(optimizer).items()
            if inside is not optimizer
        }
        rates = {place: _rate_of(inside) for place, inside in inner.items()}
        return CompiledOptimizer(within={p: rate for p, rate in rates.items() if rate is not None})
    rate_of_all = _rate_of(optimizer)
    return CompiledOptimizer(
        rate_of_all, getattr(optimizer, "gradient_accumulation_steps", None) or 1
    )


def _rate_of(optimizer: Any) -> float | None:
    rate = optimizer.learning_rate
    return float(rate) if isinstance(rate, keras.Variable) else None


def has_trained(optimizer: Any) -> bool:
    """Whether an optimizer has made a step, after which callbacks may have set its rate."""
    return optimizer is not None and _keras.train_steps_counted(optimizer) > 0


# The form of `CompiledOptimizer.to_dict`, from any source.
COMPILED = {
    "rate": (None, float),
    "accumulation": lambda steps: type(steps) is int and 1 <= steps < 2**31,
}


def one_family(one: str, other: str) -> bool:
    """Whether the slots of two classes of optimizers have one meaning."""
    names = {_keras.to_snake_case(name) for name in (one, other)}
    return same_class(one, other) or any(names <= family for family in _FAMILIES)


def same_class(one: str, other: str) -> bool:
    """Whether two names are of one class: its own name, or what Keras makes of it."""
    return _keras.to_snake_case(one) == _keras.to_snake_case(other)


def follow_compiled(
    optimizer: Any, compiled: CompiledOptimizer, trained: bool, saved: Mapping[str, Any] | None
) -> None:
    """Lets an optimizer whose state was just loaded be as it was compiled, with a WARNING.

    A rate that a callback set during the run is state. One that you compiled and that differs from
    the one with which the run began is what you want now.

    Args:
        compiled: How it was compiled, noted before loading.
        saved: `CompiledOptimizer.to_dict` of the run that was saved; `None` if it is unknown.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not trained:
        _say_rates_within(optimizer, compiled)
    if saved is None:
        _say_rate(optimizer, compiled, trained)
        return
    began = saved["rate"]
    if not (trained or None in (began, compiled.rate)) and not _close(began, compiled.rate):
        logger.warning(
            "training goes on with the learning rate %g, as you compiled it: the run began with "
            "%g, and had %g when it was saved. To go on with that one, compile with %g",
            compiled.rate,
            began,
            float(optimizer.learning_rate),
            began,
        )
        optimizer.learning_rate = compiled.rate
    before, now = saved["accumulation"], compiled.accumulation
    if before != now:
        counted = _keras.train_steps_counted(optimizer)
        logger.warning(
            "gradients of %d steps are accumulated now, of %d when the checkpoint was saved: the "
            "sums of %d steps are left out, and the optimizer's %d updates stay counted",
            now,
            before,
            counted % before,
            counted // before,
        )
        # The count of Keras is of steps, and updates are computed from it.
        optimizer.variables[0].assign(counted // before * now)
        for name, slot, _ in _keras.slots_of_optimizer(optimizer):
            if name == "accumulated_gradients":
                slot.assign(keras.ops.zeros_like(slot.value))


def _say_rate(optimizer: Any, compiled: CompiledOptimizer, trained: bool) -> None:
    now = compiled_of(optimizer).rate
    if trained or None in (now, compiled.rate) or _close(now, compiled.rate):
        return
    logger.warning(
        "the learning rate is %g, as it was saved, and not %g, as you compiled it: the checkpoint "
        "does not say with which one its run began. To change it, assign "
        "model.optimizer.learning_rate after loading",
        now,
        compiled.rate,
    )


def _say_rates_within(optimizer: Any, compiled: CompiledOptimizer) -> None:
    """A checkpoint does not say with which rates the optimizers in a `MultiOptimizer` began."""
    inner = _keras.optimizers_in(optimizer)
    for place, now in compiled_of(optimizer).within.items():
        before = compiled.within.get(place)
        if before is not None and not _close(now, before):
            logger.warning(
                "the learning rate of %s in the %s is %g, as it was saved, and not %g, as you "
                "compiled it. To change it, assign optimizer.learning_rate of that one of "
                "model.optimizer.optimizers after loading",
                inner[place].name,
                type(optimizer).__name__,
                now,
                before,
            )


def _close(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-6)
