"""The optimizer that a saved state is loaded into."""

import contextlib
from typing import Any

from keras_tpu_dist.training import membership


def build_optimizer(model: Any) -> None:
    """Makes a model's optimizer its slots, where it has not trained yet, to load what was saved.

    Args:
        model: A built model.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built:
        return
    member = membership.of_model(model)
    scope = contextlib.nullcontext() if member is None else member.strategy.scope()
    with scope:
        optimizer.build(model.trainable_variables)
