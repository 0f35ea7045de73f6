"""`strategy.check`."""

from typing import Any

from keras_tpu_dist.common.checks import above_zero, check_model, require, whole
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.tools.checkup.batch import Given
from keras_tpu_dist.tools.checkup.prepared import why_not
from keras_tpu_dist.tools.checkup.report import Check
from keras_tpu_dist.tools.checkup.run import run_check, steps
from keras_tpu_dist.training.protocol import Strategy


def check(
    strategy: Strategy,
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    sequence_length: int | None,
    minutes: float,
) -> Check:
    """See `TPUStrategy.check`."""
    if strategy.topology is not None:
        raise value_error(
            "Only attached devices can be checked.",
            received={"topology": strategy.topology.name},
            fix="Leave `topology` out; for a slice that you don't have, use dry_run.",
        )
    if model is not None:
        check_model(model, "check")
    require("check", above_zero("minutes", "3"), minutes=minutes)
    if batch_size is not None:
        require("check", whole(strategy.num_replicas_in_sync), batch_size=batch_size)
    require("check", whole(1), True, sequence_length=sequence_length)
    if model is not None and (why := why_not(model)):
        raise value_error(
            "A check of a model compares one of its training steps.",
            received=f"model {model.name!r}: {why}.",
            fix="Build the model, compile it without run_eagerly, or leave it out.",
        )
    given = Given(x, y, sample_weight, sequence_length, batch_size)
    return run_check(strategy, steps(model, given), minutes)
