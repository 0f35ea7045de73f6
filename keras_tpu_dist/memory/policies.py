"""Remat policies: their names, and the corresponding functions of JAX."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from keras_tpu_dist.common.errors import value_error

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
# fmt: off
_CHEAP = {
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "cos", "cosh", "div",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "logistic", "max", "min", "mul", "ne", "neg", "not",
    "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square",
    "sub", "tan", "tanh", "xor", "stop_gradient", "copy", "copy_p", "convert_element_type",
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev",
    "concatenate", "pad", "iota", "real", "imag", "sharding_constraint", "optimization_barrier",
    "shift_left", "shift_right_logical", "shift_right_arithmetic", "bitcast_convert_type",
    "random_bits", "threefry2x32", "rng_bit_generator", "random_wrap", "random_unwrap",
    "random_fold_in", "random_split", "random_seed",
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
