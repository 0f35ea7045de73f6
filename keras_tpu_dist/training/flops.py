"""The operations and tokens of a model's step, by its formula."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.plain import plain_operations
from keras_tpu_dist.programs.products import operations_of_training, products_of


def forward_pass(
    model: keras.Model, batch: tuple, training: bool
) -> tuple[Callable[..., Any], tuple]:
    """The forward pass of a model as a function of its weights and inputs.

    Args:
        model: The model, built.
        batch: `(x, y, sample_weight)` as `jax.ShapeDtypeStruct`.
        training: Whether it runs as in training.

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


# Of a product whose two operands have gradients.
_PASSES = 3


def model_flops(model: keras.Model, batch: tuple, mode: str) -> ModelFlops:
    """Operations of a step's matrix products by the model's formula, without recomputation.

    For training, the products of a model that is trained as a whole count three times, as
    published formulas count them. Of a model with frozen weights, those count that it needs: a
    product with a frozen kernel has no gradient of the kernel, and one before all trained weights
    has none.

    Args:
        model: The model, built.
        batch: `(x, y, sample_weight)` as `jax.ShapeDtypeStruct`.
        mode: `"train"`, `"evaluate"` or `"predict"`.
    """
    with plain_operations():
        forward, arguments = forward_pass(model, batch, mode == "train")
        trace = jax.make_jaxpr(forward)(*arguments)
    trained, others, _ = arguments
    products = products_of(trace, 0, len(trained) if mode == "train" else 0)
    if mode == "train" and not any(map(_may_be_frozen, others)):
        products = [replace(product, passes=_PASSES) for product in products]
    causal = [product for product in products if product.is_causal]
    return ModelFlops(operations_of_training(products), operations_of_training(causal) / 2)


def _may_be_frozen(variable: Any) -> bool:
    """Whether a variable that is not trained may be a kernel, which statistics are not."""
    return len(variable.shape) > 1 and np.dtype(variable.dtype).kind not in "bui"


def count_tokens(x: Any) -> int:
    """The tokens of an input of `(batch, time)` whole numbers; 0 for any other, such as pixels.

    Args:
        x: Arrays or their shapes, in any structure. Only the first such array counts.
    """
    for leaf in jax.tree.leaves(x):
        if np.dtype(leaf.dtype).kind in "iu" and leaf.dtype != np.uint8 and leaf.ndim == 2:
            return math.prod(leaf.shape)
    return 0
