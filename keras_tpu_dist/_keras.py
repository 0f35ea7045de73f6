"""The one module that touches private names of Keras and JAX: the seam."""

import functools
import inspect
import os
import sys
from collections.abc import Callable

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from jax._src import xla_bridge

if keras.config.backend() != "jax":
    raise ImportError(
        "keras_tpu_dist needs Keras on the JAX backend. Received: "
        f"keras.config.backend()={keras.config.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=jax before keras is imported, or import keras_tpu_dist before keras."
    )


def jax_backend_started() -> bool:
    """Whether JAX has already created its devices, after which they cannot be changed.

    Public replacement: none; `jax.config` refuses some updates after start-up, silently not
    others.
    """
    return xla_bridge.backends_are_initialized()


def install_attention(replacement: Callable[..., object]) -> None:
    """Routes every dot-product attention of Keras's JAX backend through `replacement`.

    `keras.ops.dot_product_attention` looks the function up in the backend's `nn` module at each
    call, so replacing it there reaches the op, its symbolic form, MultiHeadAttention,
    GroupedQueryAttention and libraries built on them. A second call replaces the first.

    Public replacement: a way to register an attention implementation with Keras.

    Args:
        replacement: Called as `replacement(stock, query, key, value, **options)`, where `stock` is
            Keras's own function and `options` are all of its other arguments.

    Raises:
        ImportError: If this Keras has another function, or another signature, at that place.
    """
    module = keras.src.backend.nn
    stock = getattr(module, "dot_product_attention", None)
    stock = getattr(stock, "__wrapped__", stock)
    names = tuple(inspect.signature(stock).parameters) if stock is not None else ()
    if names != ATTENTION_PARAMETERS:
        raise ImportError(
            "keras_tpu_dist replaces keras.src.backend.jax.nn.dot_product_attention, which "
            f"Keras 3.15 has with parameters {ATTENTION_PARAMETERS}. Received: Keras "
            f"{keras.__version__} with {names}. Install keras>=3.15,<3.16, or a newer "
            "keras_tpu_dist."
        )

    @functools.wraps(stock)
    def dot_product_attention(
        query,
        key,
        value,
        bias=None,
        mask=None,
        scale=None,
        is_causal=False,
        flash_attention=None,
        attn_logits_soft_cap=None,
    ):
        return replacement(
            stock,
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
            flash_attention=flash_attention,
            attn_logits_soft_cap=attn_logits_soft_cap,
        )

    module.dot_product_attention = dot_product_attention


ATTENTION_PARAMETERS = (
    "query",
    "key",
    "value",
    "bias",
    "mask",
    "scale",
    "is_causal",
    "flash_attention",
    "attn_logits_soft_cap",
)
