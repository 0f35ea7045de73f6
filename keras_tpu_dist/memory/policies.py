"""Remat policies: their names, and the corresponding functions of JAX."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.programs.dimensions import ELEMENTWISE

# The policies, and what they keep.
WORDS = {
    "full": "nothing but the layer's inputs",
    "dots": "the products with weights: of dense layers, projections and convolutions",
    "attention": "everything but what attention computes of query, key and value",
}

Policy = str | tuple[str, ...]


def checked_policy(policy: Any) -> Policy:
    """Checks a policy, and returns it as a name or a tuple of names."""
    if isinstance(policy, str) and policy in WORDS:
        return policy
    if isinstance(policy, Sequence) and not isinstance(policy, str):
        names = tuple(policy)
        if names and all(isinstance(name, str) and name for name in names):
            return names
    raise value_error(
        f"A remat policy is one of {', '.join(map(repr, WORDS))}, or a list of the names of "
        "layers whose outputs are kept.",
        received={"policy": policy},
        fix='Write for example remat(layer, "full"), or remat(block, ["attention", "up"]).',
        name=policy if isinstance(policy, str) else None,
        choices=WORDS,
    )


def jax_policy(policy: Policy) -> Callable[..., Any]:
    """The policy as `jax.checkpoint` takes it."""
    if policy == "full":
        return jax.checkpoint_policies.nothing_saveable
    if policy == "dots":
        return keeps_products_of_weights
    return jax.checkpoint_policies.save_only_these_names(*policy)


def keeps_products_of_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keeps matrix products without batch dimensions, and convolutions.

    It is like `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, which does not keep
    convolutions. `dots_saveable` keeps them, but also the logits of attention, which are the
    largest arrays.
    """
    if primitive.name == "conv_general_dilated":
        return True
    if primitive.name != "dot_general":
        return False
    _, (left, right) = params["dimension_numbers"]
    return not left and not right


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
