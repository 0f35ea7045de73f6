"""What a rematerialised layer keeps of its forward pass: the words, and what JAX makes of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from keras_tpu_dist.common.errors import message

# Each word, and what it keeps.
WORDS = {
    "full": "nothing but the layer's inputs",
    "dots": "the products with weights: of dense layers, projections and convolutions",
    "attention": "everything but what attention computes of query, key and value",
}

Policy = str | tuple[str, ...]


def checked_policy(policy: Any) -> Policy:
    """A policy as it is kept: a word, or a tuple of names.

    Args:
        policy: A word of `WORDS`, or names in a list or tuple.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(policy, str) and policy in WORDS:
        return policy
    if isinstance(policy, Sequence) and not isinstance(policy, str):
        names = tuple(policy)
        if names and all(isinstance(name, str) and name for name in names):
            return names
    raise ValueError(
        message(
            f"A remat policy is one of {', '.join(map(repr, WORDS))}, or a list of the names of "
            "what is kept.",
            received={"policy": policy},
            fix='Write for example remat(layer, "full"), or remat(block, ["attention", "up"]) to '
            "keep the outputs of the layers with these names.",
            name=policy if isinstance(policy, str) else None,
            choices=WORDS,
        )
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

    As `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, which knows no convolutions;
    `dots_saveable` knows them, but keeps the logits of attention as well, which are the most.

    Args:
        primitive: The operation.
        **params: Its parameters.
    """
    if primitive.name == "conv_general_dilated":
        return True
    if primitive.name != "dot_general":
        return False
    _, (left, right) = params["dimension_numbers"]
    return not left and not right
