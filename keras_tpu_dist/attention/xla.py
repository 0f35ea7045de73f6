"""Attention in plain operations that XLA partitions by itself."""

import jax
import jax.numpy as jnp


def xla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None,
    mask: jax.Array | None,
    scale: float | jax.Array,
    is_causal: bool,
    soft_cap: float | None,
) -> jax.Array:
    """Attention by two einsums and a softmax in float32.

    `jax.nn.dot_product_attention` is the same computation, but has no soft cap and refuses values
    that are wider or narrower than the keys. A row whose mask hides every key weighs all keys
    alike, as there and in Keras.

    Args:
        query: `(batch, time, heads, width)`.
        key: `(batch, source, kv_heads, width)`; `kv_heads` divides `heads`.
        value: `(batch, source, kv_heads, value_width)`.
        bias: Broadcastable to `(batch, heads, time, source)`, rank 4, or `None`.
        mask: Boolean, broadcastable to `(batch, heads, time, source)`, rank 4, or `None`.
        scale: Factor of the logits.
        is_causal: Whether query `i` sees only keys `0..i`.
        soft_cap: `cap * tanh(logits / cap)` before the bias is added, or `None`.

    Returns:
        `(batch, time, heads, value_width)` in the dtype of `query`.
    """
    batch, time, heads, width = query.shape
    source, kv_heads = key.shape[1:3]
    groups = heads // kv_heads
    logits = jnp.einsum(
        "btkgh,bskh->bkgts",
        query.reshape(batch, time, kv_heads, groups, width),
        key,
        preferred_element_type=jnp.promote_types(query.dtype, jnp.float32),
    )
    logits = logits.reshape(batch, heads, time, source) * jnp.asarray(scale, logits.dtype)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    visible = mask
    if is_causal:
        causal = jnp.tril(jnp.ones((time, source), bool))
        visible = causal if mask is None else mask & causal
    if visible is not None:
        logits = jnp.where(visible, logits, -0.7 * jnp.finfo(logits.dtype).max)
    weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    output = jnp.einsum(
        "bkgts,bskh->btkgh",
        weights.reshape(batch, kv_heads, groups, time, source),
        value,
    )
    return output.reshape(batch, time, heads, value.shape[-1]).astype(query.dtype)
