"""The bytes of arrays."""

import math
from typing import Any

import numpy as np


def bytes_of(array: Any) -> int:
    """The bytes of a whole array: of anything with a shape, and with a dtype or its name."""
    # NumPy knows bfloat16 and similar dtypes after JAX is imported.
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def bytes_per_device(array: Any) -> int:
    """The bytes of the part of an array that one device holds; of all of it without a sharding.

    Args:
        array: Its shape, dtype and, if it is split, its sharding.
    """
    shape = array.sharding.shard_shape(array.shape) if array.sharding else array.shape
    return math.prod(shape) * np.dtype(array.dtype).itemsize
