"""The options of `Checkpoint`, checked on creation."""

import math
import os
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.common.checks import check_flags, check_seconds, is_count
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.processes.preemption import GRACE_S


@dataclass(frozen=True)
class CheckpointOptions:
    """The arguments of `Checkpoint`; see there.

    Raises:
        ValueError: If an argument has the wrong type or value.
    """

    directory: Any
    every_steps: int | None = None
    every_minutes: float | None = None
    every_epochs: int | None = None
    keep: int | None = 3
    monitor: str | None = None
    mode: str = "auto"
    asynchronous: bool = True
    resume: bool = True
    overwrite: bool = False
    grace_s: float = GRACE_S
    keep_every_hours: float | None = None

    def __post_init__(self):
        _check_intervals(self)
        check_flags(
            "Checkpoint",
            asynchronous=self.asynchronous,
            resume=self.resume,
            overwrite=self.overwrite,
        )
        _check_monitor(self.monitor)
        _check_hours(self.keep_every_hours)
        check_seconds("Checkpoint", grace_s=self.grace_s)
        _check_directory(self.directory)

    @property
    def path(self) -> str:
        """The directory as text."""
        return os.fspath(self.directory)

    @property
    def epochs_between(self) -> int | None:
        """Epochs between two checkpoints: 1 if no other interval is given."""
        given = (self.every_steps, self.every_minutes, self.every_epochs)
        return 1 if given == (None, None, None) else self.every_epochs

    @property
    def seconds_between(self) -> float | None:
        """Seconds between two checkpoints."""
        return None if self.every_minutes is None else 60 * self.every_minutes

    @property
    def seconds_kept(self) -> float | None:
        """Seconds between the checkpoints that `keep_every_hours` keeps."""
        return None if self.keep_every_hours is None else 3600.0 * self.keep_every_hours

    @property
    def best(self) -> tuple[str, str] | None:
        """The monitored name, and whether its best value is the `"min"` or the `"max"`.

        Example:

        >>> CheckpointOptions("checkpoints", monitor="val_accuracy").best
        ('val_accuracy', 'max')
        """
        if self.monitor is None:
            return None
        if self.mode != "auto":
            return self.monitor, self.mode
        largest = any(part in self.monitor for part in ("acc", "auc", "f1"))
        return self.monitor, "max" if largest else "min"


def _check_intervals(options: CheckpointOptions) -> None:
    counts = {name: getattr(options, name) for name in ("every_steps", "every_epochs", "keep")}
    wrong: dict[str, Any] = {
        n: v for n, v in counts.items() if v is not None and not is_count(v, 1)
    }
    minutes, mode = options.every_minutes, options.mode
    if minutes is not None and not _is_positive(minutes):
        wrong["every_minutes"] = minutes
    if not isinstance(mode, str) or mode not in ("auto", "min", "max"):
        wrong["mode"] = mode
    if wrong:
        raise value_error(
            "every_steps, every_epochs and keep are whole numbers of at least 1, every_minutes "
            "is above 0, mode is 'auto', 'min' or 'max'.",
            received=wrong,
            fix="Write for example Checkpoint(directory, every_steps=500, keep=3).",
        )


def _check_monitor(monitor: Any) -> None:
    if monitor is not None and not (isinstance(monitor, str) and monitor):
        raise value_error(
            "monitor is a name in the logs of epochs, or None.",
            received={"monitor": monitor},
            fix='Write for example monitor="val_loss".',
        )


def _check_hours(hours: Any) -> None:
    if hours is not None and not _is_positive(hours):
        raise value_error(
            "keep_every_hours is a number of hours above 0, or None.",
            received={"keep_every_hours": hours},
            fix="Write for example keep_every_hours=6.",
        )


def _check_directory(directory: Any) -> None:
    path = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise value_error(
            "Checkpoint needs a directory.",
            received={"directory": directory},
            fix='Write for example Checkpoint("checkpoints", every_steps=500).',
        )


def _is_positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < math.inf
