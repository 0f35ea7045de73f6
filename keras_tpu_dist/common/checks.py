"""Checks of what users pass."""

import operator
from typing import Any, TypeGuard


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
