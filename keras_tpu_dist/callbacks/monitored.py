"""The value of a checkpoint by the logs of its epoch, and which epochs are validated."""

from collections.abc import Container, Mapping
from typing import Any

from keras_tpu_dist.common.errors import value_error


def is_validated(epoch: int, frequency: int | Container[int]) -> bool:
    """Whether `fit` validates at the end of an epoch.

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
    value = float(logs[monitor])
    worst = float("inf") if mode == "min" else -float("inf")
    return value if value == value else worst
