"""Which values of a block the loop keeps for the backward pass."""

import math
from typing import Any

from keras_tpu_dist.programs.dimensions import ELEMENTWISE

# Operations that a compiler would rather recompute: keeping a result reads and writes as much as
# recomputing it, and they are fused with the operation before or after.
# A value that the model names is kept.
# fmt: off
_CHEAP = (ELEMENTWISE - {"name"}) | {
    "bitcast_convert_type", "broadcast_in_dim", "concatenate", "expand_dims", "iota",
    "optimization_barrier", "pad", "random_bits", "random_fold_in", "random_seed", "random_split",
    "random_unwrap", "random_wrap", "reshape", "rev", "rng_bit_generator", "squeeze",
    "threefry2x32", "transpose",
}
# fmt: on


# A slice is small if it is at most one part in so many of its operand.
_SMALL = 8


def keeps_costly_values(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Keeps the values that a compiler with a view of the whole program would keep.

    The compiler cannot decide what a loop keeps for the backward pass: those values are written to
    memory. So element-wise operations are recomputed, and with them norms, up to their sums, and
    activations. For random numbers, the results of comparisons are kept, a byte each, and not the
    bits.
    """
    if primitive.name == "slice":
        # A small part is kept instead of the whole, such as the sums of flash attention.
        sizes = (
            b - a for a, b in zip(params["start_indices"], params["limit_indices"], strict=True)
        )
        return _SMALL * math.prod(sizes) <= math.prod(inputs[0].shape)
    return primitive.name not in _CHEAP
