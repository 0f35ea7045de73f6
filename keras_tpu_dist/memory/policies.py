"""Remat policies: their names, and the corresponding functions of JAX."""

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
    """Checks a policy, and returns it as a name or a tuple of names.

    Args:
        policy: A word of `WORDS`, or names in a list or tuple.
    """
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
    """The policy as `jax.checkpoint` takes it.

    Args:
        policy: A checked policy; not `"attention"`, which is no policy of `jax.checkpoint`.
    """
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

    Args:
        primitive: The operation.
        params: Its parameters.
    """
    if primitive.name == "conv_general_dilated":
        return True
    if primitive.name != "dot_general":
        return False
    _, (left, right) = params["dimension_numbers"]
    return not left and not right
