"""The value of a checkpoint by the logs of its epoch, and which epochs are validated."""

from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from keras_tpu_dist.common.errors import value_error


def is_validated(epoch: int, frequency: int | Container[int]) -> bool:
    """Whether `fit` validates at the end of an epoch.

    Args:
        epoch: The epoch, from 0.
        frequency: Its `validation_freq`.

    Example:

    >>> [is_validated(epoch, 2) for epoch in range(4)], is_validated(0, [1, 5])
    ([False, True, False, True], True)
    """
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency


def worth(
    monitor: str | None, mode: str, logs: Mapping[str, Any], may_lack: bool = False
) -> float | None:
    """The value of an epoch by its logs; NaN is the worst value.

    Args:
        monitor: A name in the logs, or `None`.
        mode: `"min"` or `"max"`.
        logs: The logs of the epoch.
        may_lack: Whether the name may be missing, as in an epoch without validation.

    Returns:
        The value, or `None` if nothing is monitored, or the name is missing and may be.
    """
    if monitor is None or (may_lack and monitor not in logs):
        return None
    if monitor not in logs:
        raise value_error(
            "Checkpoint(monitor=...) names an entry of an epoch's logs.",
            received={"monitor": monitor, "logs": sorted(logs)},
            fix="Use one of these.",
            name=str(monitor),
            choices=logs,
        )
    try:
        value = float(np.asarray(logs[monitor]).item())
    except (TypeError, ValueError) as error:
        raise value_error(
            "What Checkpoint(monitor=...) names in an epoch's logs is a number.",
            received=f"logs[{monitor!r}]={logs[monitor]!r:.200}.",
            fix="Let the logs have one number of it, or monitor another name.",
        ) from error
    worst = float("inf") if mode == "min" else -float("inf")
    return value if value == value else worst
