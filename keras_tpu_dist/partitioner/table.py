"""What XLA's partitioner gets wrong, and what is done instead."""

from collections.abc import Callable
from typing import Any

from keras_tpu_dist.partitioner import branches, convolution, scatter, slices

REPAIRS: dict[str, Callable[[Any, Any], list | None]] = {
    name: module.repaired
    for module in (scatter, convolution, slices, branches)
    for name in module.PRIMITIVES
}
