"""The operations and tokens of a model's step, by its formula."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.plain import plain_operations
from keras_tpu_dist.programs.products import operations, products_of


def forward_pass(
    model: keras.Model, batch: tuple, training: bool
) -> tuple[Callable[..., Any], tuple]:
    """The forward pass of a model as a function of its weights and inputs.

    Args:
        batch: `(x, y, sample_weight)` as `jax.ShapeDtypeStruct`.

    Returns:
        `(trainable, non_trainable, x) -> outputs`, and its arguments as `jax.ShapeDtypeStruct`.
    """
    weights = [
        [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in group]
        for group in (model.trainable_variables, model.non_trainable_variables)
    ]

    # Keras passes `training` if the model's call accepts it; `stateless_call` always passes its
    # arguments.
    named = {"training": training} if _keras.call_takes(model, "training") else {}

    def forward(trainable, non_trainable, x):
        return model.stateless_call(trainable, non_trainable, x, **named)[0]

    return forward, (*weights, batch[0])


class ModelFlops(NamedTuple):
    """Operations of a step's matrix products by the model's formula, without recomputation.

    Attributes:
        full: All of them, attention in full.
        hidden: Those of them that causal masks hide: half of attention with `use_causal_mask`.
    """

    full: float
    hidden: float


def model_flops(model: keras.Model, batch: tuple, mode: str) -> ModelFlops:
    """Operations of a step's matrix products by the model's formula, without recomputation."""
    with plain_operations():
        forward, arguments = forward_pass(model, batch, mode == "train")
        trace = jax.make_jaxpr(forward)(*arguments)
    # The gradients need two more products of the same size.
    products, times = products_of(trace, 0), 3 if mode == "train" else 1
    causal = [product for product in products if product.is_causal]
    return ModelFlops(operations(products) * times, operations(causal) * times / 2)


def count_tokens(x: Any) -> int:
    """The tokens of an input of `(batch, time)` whole numbers; 0 for any other, such as pixels."""
    for leaf in jax.tree.leaves(x):
        if np.dtype(leaf.dtype).kind in "iu" and leaf.dtype != np.uint8 and leaf.ndim == 2:
            return math.prod(leaf.shape)
    return 0
