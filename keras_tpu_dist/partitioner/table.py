"""What XLA's partitioner gets wrong, and what is done instead."""

from collections.abc import Callable
from typing import Any

from keras_tpu_dist.partitioner import convolution, scatter

REPAIRS: dict[str, list[Callable[[Any, Any], Callable | None]]] = {}
for _module in (scatter, convolution):
    for _name in _module.PRIMITIVES:
        REPAIRS.setdefault(_name, []).append(_module.repaired)
