"""Checks of what users pass."""

import operator
from typing import Any, TypeGuard

from keras_tpu_dist.common.errors import message


def is_count(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Whether something is a whole number, as Python or NumPy has them, and no truth value.

    Args:
        value: Anything.
        least: The smallest number that counts, if there is one.

    Example:

    >>> import numpy as np
    >>> [is_count(value, 1) for value in (1, np.int32(3), 0, True, 2.0, "2")]
    [True, True, False, False, False, False]
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    try:
        number = operator.index(value)
    except TypeError:
        return False  # an array of several numbers
    return least is None or number >= least


def check_model(model: Any, asked: str) -> None:
    """Raises a `ValueError` for what is no model.

    Args:
        model: What was given.
        asked: What it was given to, as it is called.
    """
    if not hasattr(model, "trainable_variables"):
        raise ValueError(
            message(
                f"{asked} needs a model.",
                received={"model": model},
                fix="Pass a keras.Model.",
            )
        )
