"""What a `Checkpoint` does."""

from dataclasses import dataclass

from keras_tpu_dist.checkpoint.keeping import Keep


@dataclass(frozen=True)
class SaveWhen:
    """When a fit saves, besides its end. `None` for an interval that does not count.

    Attributes:
        every_epochs: Epochs between two checkpoints; 1 if no other interval is given.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    every_epochs: int | None = None

    def __post_init__(self):
        if (self.every_steps, self.every_minutes, self.every_epochs) == (None, None, None):
            object.__setattr__(self, "every_epochs", 1)


@dataclass(frozen=True)
class CheckpointOptions:
    """The arguments of `Checkpoint`; see there."""

    path: str
    when: SaveWhen
    keep: Keep
    asynchronous: bool = True
    resume: bool = True
    overwrite: bool = False
    only: str | None = None
    base: str | None = None


def keep_of(
    keep: int | None, monitor: str | None, mode: str, keep_every_hours: float | None
) -> Keep:
    """Which checkpoints stay, by the arguments of `Checkpoint`.

    Example:

    >>> keep_of(2, "val_accuracy", "auto", 6)
    Keep(newest=2, best=('val_accuracy', 'max'), every_s=21600)
    """
    if mode == "auto":
        is_largest = monitor is not None and any(part in monitor for part in ("acc", "auc", "f1"))
        mode = "max" if is_largest else "min"
    best = None if monitor is None else (monitor, mode)
    return Keep(keep, best, None if keep_every_hours is None else 3600 * keep_every_hours)
