"""The arguments of `Checkpoint`."""

from typing import Any

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message


def check_arguments(every_steps, every_minutes, every_epochs, keep, mode) -> None:
    """Checks what `Checkpoint` was given.

    Args:
        every_steps: See there.
        every_minutes: See there.
        every_epochs: See there.
        keep: See there.
        mode: See there.

    Raises:
        ValueError: If one is of no such kind.
    """
    counts = {"every_steps": every_steps, "every_epochs": every_epochs, "keep": keep}
    wrong: dict[str, Any] = {
        n: v for n, v in counts.items() if v is not None and not is_count(v, 1)
    }
    number = isinstance(every_minutes, (int, float)) and not isinstance(every_minutes, bool)
    if every_minutes is not None and not (number and every_minutes > 0):
        wrong["every_minutes"] = every_minutes
    if mode not in ("auto", "min", "max"):
        wrong["mode"] = mode
    if wrong:
        raise ValueError(
            message(
                "every_steps, every_epochs and keep are whole numbers of at least 1, every_minutes "
                "is above 0, mode is 'auto', 'min' or 'max'.",
                received=wrong,
                fix="Write for example Checkpoint(directory, every_steps=500, keep=3).",
            )
        )


def direction(monitor: str | None, mode: str) -> str:
    """Whether a metric is best where it is smallest or largest: `"min"` or `"max"`.

    Args:
        monitor: Its name.
        mode: What the user said, `"auto"` to go by the name.

    Example:

    >>> direction("val_accuracy", "auto")
    'max'
    """
    if mode != "auto":
        return mode
    return "max" if any(part in str(monitor) for part in ("acc", "auc", "f1")) else "min"
