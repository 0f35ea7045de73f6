"""What `Checkpoint` is given: its arguments, and the model."""

import math
import os
from typing import Any

import jax

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.training.membership import is_local


def directory_of(directory: Any) -> str:
    """The directory that `Checkpoint` was given, as text.

    Args:
        directory: See there.

    Raises:
        ValueError: If it is no path, or empty.
    """
    path = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if isinstance(path, str) and path:
        return path
    raise ValueError(
        message(
            "Checkpoint needs a directory.",
            received={"directory": directory},
            fix='Write for example Checkpoint("checkpoints", every_steps=500).',
        )
    )


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
    if every_minutes is not None and not (number and 0 < every_minutes < math.inf):
        wrong["every_minutes"] = every_minutes
    if not isinstance(mode, str) or mode not in ("auto", "min", "max"):
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


def check_hours(keep_every_hours: Any) -> None:
    """Checks the hours of which `Checkpoint` keeps one checkpoint each.

    Args:
        keep_every_hours: See there.

    Raises:
        ValueError: If it is no number above 0.
    """
    hours = keep_every_hours
    number = isinstance(hours, (int, float)) and not isinstance(hours, bool)
    if hours is not None and not (number and 0 < hours < math.inf):
        raise ValueError(
            message(
                "keep_every_hours is a number of hours above 0, or None.",
                received={"keep_every_hours": hours},
                fix="Write for example keep_every_hours=6.",
            )
        )


def check_monitor(monitor: Any) -> None:
    """Checks what `Checkpoint` was given to monitor.

    Args:
        monitor: See there.

    Raises:
        ValueError: If it is no name.
    """
    if monitor is not None and not (isinstance(monitor, str) and monitor):
        raise ValueError(
            message(
                "monitor is a name in the logs of epochs, or None.",
                received={"monitor": monitor},
                fix='Write for example monitor="val_loss".',
            )
        )


def check_loop(fit: Any, rule: str, fix: str, **asked: Any) -> None:
    """Checks that what only the loop of a strategy can do is asked of none but that.

    Args:
        fit: What can be asked of the fit, `None` in stock Keras.
        rule: What needs the loop.
        fix: What to do instead.
        **asked: By name what asks for it; `None` and 0 do not.

    Raises:
        ValueError: If it is asked of stock Keras.
    """
    received = {name: value for name, value in asked.items() if value}
    if fit is None and received:
        rule = f"{rule} the loop of a TPUStrategy."
        fix = f"Build the model in TPUStrategy().scope(), or {fix}."
        raise ValueError(message(rule, received=received | {"strategy": None}, fix=fix))


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


def check_processes(model: Any) -> None:
    """Checks that all processes write a checkpoint together.

    Args:
        model: The model that is about to train.

    Raises:
        NotImplementedError: If it trains on the devices of one of several processes.
    """
    if jax.process_count() > 1 and is_local(model):
        raise NotImplementedError(
            message(
                "Of several processes all write a checkpoint together: Orbax does not write what "
                "lies on the devices of one of them alone.",
                received=f"a fit of model {model.name!r} on the devices of process "
                f"{jax.process_index()}, one of {jax.process_count()}.",
                fix="Make the strategy of all devices, save with keras.callbacks.ModelCheckpoint, "
                "or train it in a program of its own, without ktd.initialize().",
            )
        )
