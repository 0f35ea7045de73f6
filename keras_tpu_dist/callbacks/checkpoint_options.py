"""What a `Checkpoint` does: its arguments, checked."""

import os
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.checkpoint.keeping import Keep
from keras_tpu_dist.common.checks import check_counts, check_flags, check_seconds, checked_path
from keras_tpu_dist.common.errors import value_error


@dataclass(frozen=True)
class SaveWhen:
    """When a fit saves, besides its end. `None` for an interval that does not count.

    Attributes:
        every_steps: Train steps between two checkpoints.
        every_minutes: Minutes between two checkpoints.
        every_epochs: Epochs between two checkpoints; 1 if no other interval is given.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    every_epochs: int | None = None

    def __post_init__(self):
        counts = {"every_steps": self.every_steps, "every_epochs": self.every_epochs}
        check_counts("Checkpoint", **_given(counts))
        check_seconds("Checkpoint", "minutes", **_given({"every_minutes": self.every_minutes}))
        if (self.every_steps, self.every_minutes, self.every_epochs) == (None, None, None):
            object.__setattr__(self, "every_epochs", 1)


@dataclass(frozen=True)
class CheckpointOptions:
    """The arguments of `Checkpoint`; see there.

    Attributes:
        path: The directory.
        when: When it saves.
        keep: Which checkpoints stay.
        asynchronous: See `Checkpoint`.
        resume: See `Checkpoint`.
        overwrite: See `Checkpoint`.

    Raises:
        ValueError: If an argument has the wrong type or value.
    """

    path: str
    when: SaveWhen
    keep: Keep
    asynchronous: bool = True
    resume: bool = True
    overwrite: bool = False

    def __post_init__(self):
        flags = {"asynchronous": self.asynchronous, "resume": self.resume}
        check_flags("Checkpoint", **flags, overwrite=self.overwrite)


def directory_of(directory: Any) -> str:
    """The directory of a `Checkpoint`, checked.

    Args:
        directory: The argument.

    Raises:
        ValueError: If it is no path.
    """
    where = 'Write for example Checkpoint("checkpoints", every_steps=500).'
    checked_path("Checkpoint", where, directory=directory)
    return os.fspath(directory)


def keep_of(keep: Any, monitor: Any, mode: Any, keep_every_hours: Any) -> Keep:
    """Which checkpoints stay, by the arguments of `Checkpoint`.

    Args:
        keep: See `Checkpoint`.
        monitor: See `Checkpoint`.
        mode: See `Checkpoint`.
        keep_every_hours: See `Checkpoint`.

    Raises:
        ValueError: If an argument has the wrong type or value.

    Example:

    >>> keep_of(2, "val_accuracy", "auto", 6)
    Keep(newest=2, best=('val_accuracy', 'max'), every_s=21600)
    """
    check_counts("Checkpoint", **_given({"keep": keep}))
    check_seconds("Checkpoint", "hours", **_given({"keep_every_hours": keep_every_hours}))
    if monitor is not None and not (isinstance(monitor, str) and monitor):
        raise value_error(
            "monitor is a name in the logs of epochs, or None.",
            received={"monitor": monitor},
            fix='Write for example monitor="val_loss".',
        )
    if not isinstance(mode, str) or mode not in ("auto", "min", "max"):
        raise value_error(
            "mode is 'auto', 'min' or 'max'.",
            received={"mode": mode},
            fix='Write for example mode="min".',
        )
    if mode == "auto":
        is_largest = monitor is not None and any(part in monitor for part in ("acc", "auc", "f1"))
        mode = "max" if is_largest else "min"
    best = None if monitor is None else (monitor, mode)
    return Keep(keep, best, None if keep_every_hours is None else 3600 * keep_every_hours)


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}
