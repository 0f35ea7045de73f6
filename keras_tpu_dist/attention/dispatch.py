"""Chooses the attention to run, and the share of the arrays for every device."""

import contextvars
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import Mesh

from keras_tpu_dist import _keras
from keras_tpu_dist.attention.time import split, symbolic
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.plain import CAUSAL, only_plain_operations
from keras_tpu_dist.common.setting import setting
from keras_tpu_dist.hardware.chips import WITHOUT_KERNELS, of_kind
from keras_tpu_dist.memory.again import attention_again


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
    that are wider or narrower than the keys. If a row's mask hides every key, the row weighs all
    keys equally, as there and in Keras. The arguments are those of `dot_product_attention`; `bias`
    and `mask` have rank 4.

    Args:
        query: `(batch, time, heads, width)`.
        key: `(batch, source, kv_heads, width)`; `kv_heads` divides `heads`.
        value: `(batch, source, kv_heads, value_width)`.
        bias: Broadcastable to `(batch, heads, time, source)`, rank 4, or `None`.
        mask: Boolean, broadcastable to `(batch, heads, time, source)`, rank 4, or `None`.
        scale: Factor of the logits.
        is_causal: Whether query `i` sees only keys `0..i`.
        soft_cap: `cap * tanh(logits / cap)` before the bias is added, or `None`.
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


# How often the called layer repeats the heads of its keys and values: Keras's grouped-query
# attention repeats them before it calls attention, and the kernel reads every head once.
_repeats: contextvars.ContextVar[int] = contextvars.ContextVar("repeats", default=1)
# Of fewer scores than those of so many queries and keys, or no more keys than one block has, XLA
# takes fewer cycles, forward and gradients, by the compiler's schedules: `python
# benchmarks/attention.py --short --chips v4 v5e v5p v6e tpu7x`, and docs/attention.md.
_FEWEST_TOKENS = {"v4": 384, "v5e": 256, "v5p": 384, "v6e": 384, "tpu7x": 512}
_FEWEST_ELSEWHERE = 256
# The same with a mask of keys, such as one for padding, and heads narrower than a block.
_FEWEST_MASKED = {"v5e": 257}
_BLOCK = 128
# With a single query, or a few, blocks of 128 x 128 are mostly padding.
_MOST_PADDING = 4


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mesh: Mesh,
    data_axes: Sequence[str],
    time_axis: str | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
    platform: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention on a mesh: a flash kernel for the share of every TPU, otherwise XLA's attention.

    The batch is split over `data_axes`, and padded inside if it is not divisible; heads are split
    over the other axes that divide their number. If there are fewer key/value heads than devices on
    these, every device gets the one it needs. Queries may also be split along time; keys and values
    are then gathered.
    The kernel has no bias. (JAX's other flash kernel has one, but takes it, and returns its
    gradient, as `(batch, heads, time, source)`, the very buffer that a flash kernel avoids.) It
    needs float32 or bfloat16 and TPU v4 or later, and computes whole blocks of 128. XLA computes
    everything that the kernel cannot do, or does worse, such as short sequences; the reason is
    logged once. The kernel has only first derivatives, in reverse mode; for others, call
    `keras.config.disable_flash_attention()`.

    Args:
        query: `(batch, time, heads, width)`.
        key: `(batch, source, kv_heads, width)`; `kv_heads` divides `heads`.
        value: `(batch, source, kv_heads, value_width)`.
        mesh: The mesh of the computation.
        data_axes: Mesh axes that split the batch; may be empty.
        time_axis: The mesh axis that splits queries along time if it divides them, or `None`.
        bias: Added to the logits; broadcastable to `(batch, heads, time, source)`.
        mask: True if a query may see a key; broadcastable to `(batch, heads, time, source)`, or
            `(batch, time, source)`.
        scale: Factor of the logits; default `1 / sqrt(width)`.
        is_causal: Whether query `i` sees only keys `0..i`; combines with `mask`.
        flash_attention: True: the kernel, or an error. False: XLA. None: the kernel if possible,
            unless `keras.config.disable_flash_attention()` was called.
        attn_logits_soft_cap: `cap * tanh(logits / cap)`, after the scale, before the bias.
        platform: Platform to compute for; default: that of the mesh's devices.
        interpret: Run the kernel's program in plain JAX on any platform, for tests.

    Returns:
        `(batch, time, heads, value_width)`.

    Raises:
        ValueError: If the shapes do not fit, or `flash_attention=True` and the kernel cannot
            compute this.

    Example:

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    >>> x = jax.numpy.ones((8, 16, 4, 32))
    >>> dot_product_attention(x, x, x, mesh=mesh, data_axes=("data",), is_causal=True).shape
    (8, 16, 4, 32)
    """
    _check_shapes(query, key, value)
    dtype = jnp.result_type(query, key, value)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    mask = None if mask is None else _rank4("mask", mask, shape).astype(bool)
    bias = None if bias is None else _rank4("bias", bias, shape)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    where: dict[str, Any] = {"mesh": mesh, "data_axes": data_axes, "time_axis": time_axis}
    options: dict[str, Any] = {"is_causal": is_causal, "soft_cap": attn_logits_soft_cap}
    if symbolic(query, key) or not _takes_kernel(
        flash_attention, query, key, bias, mask, mesh, platform
    ):
        parts = split(query, key, value, **where)
        return xla_attention(*parts, bias=bias, mask=mask, scale=scale, **options)
    from keras_tpu_dist.attention.shares import on_shares  # starts Pallas

    # The kernel has no scale. One rounding of the query, as in Keras's own einsum attention.
    query = (query.astype(jnp.float32) * scale).astype(dtype)
    return on_shares(query, key, value, mask, interpret=interpret, **where, **options)


def _takes_kernel(
    flash_attention, query, key, bias, mask, mesh: Mesh, platform: str | None
) -> bool:
    """Whether the kernel runs; logs the reason if not, and raises if it was explicitly
    requested."""
    if only_plain_operations():
        return False
    if flash_attention is None:
        flash_attention = keras.config.is_flash_attention_enabled()
    if flash_attention is False:
        return False
    reason = _why_not_kernel(query, key, bias, mesh, platform)
    if flash_attention and reason is not None:
        raise value_error(
            "flash_attention=True asks for the TPU flash kernel, which cannot compute this: "
            f"{reason}.",
            received={"query.shape": query.shape, "query.dtype": query.dtype.name},
            fix="Leave flash_attention=None, which takes XLA attention here.",
        )
    if reason is not None:
        _say(reason, logging.WARNING)
        return False
    wasteful = None if flash_attention else _why_wasteful(query, key, mask, mesh)
    if wasteful is not None:
        _say(wasteful)
    return wasteful is None


def _platform(mesh: Mesh) -> str:
    """The platform of the mesh, not of the process: a dry run compiles for TPUs that you don't
    have."""
    return mesh.devices.flat[0].platform


def _check_shapes(query, key, value) -> None:
    shapes = {"query.shape": query.shape, "key.shape": key.shape, "value.shape": value.shape}
    if not all(len(shape) == 4 for shape in shapes.values()):
        raise value_error(
            "Attention takes query, key and value of rank 4, (batch, time, heads, width).",
            received=shapes,
            fix="Split the heads into their own dimension, or add a batch dimension.",
        )
    (b, _, n, h), (kb, s, k, kh), (vb, vs, vk, _) = shapes.values()
    if (b, h) != (kb, kh) or (kb, s, k) != (vb, vs, vk) or n % k:
        raise value_error(
            "Query, key and value must agree in batch and width, key and value in length and "
            "heads, and the key heads must divide the query heads.",
            received=shapes,
            fix="Give (batch, time, heads, width) and two of (batch, source, kv_heads, width).",
        )


def _rank4(name: str, array, shape: tuple[int, int, int, int]) -> jax.Array:
    """Brings a mask or bias to rank 4, as NumPy broadcasts, or from `(batch, time, source)`."""
    array = jnp.asarray(array)
    full = array.reshape((1,) * (4 - array.ndim) + array.shape) if array.ndim < 4 else array
    if array.ndim == 3 and array.shape[0] == shape[0] and array.shape[0] not in (1, shape[1]):
        full = array[:, None]
    if full.ndim != 4 or any(
        have not in (1, want) for have, want in zip(full.shape, shape, strict=True)
    ):
        raise value_error(
            f"The {name} must be broadcastable to (batch, heads, time, source) = {shape}.",
            received={f"{name}.shape": array.shape},
            fix="Add dimensions of size 1 where it does not vary.",
        )
    return full


def _why_not_kernel(query, key, bias, mesh: Mesh, platform: str | None) -> str | None:
    chip = mesh.devices.flat[0].device_kind
    if (platform or _platform(mesh)) != "tpu":
        return f"the mesh's devices are of platform {platform or _platform(mesh)!r}, not 'tpu'"
    if chip in WITHOUT_KERNELS:
        return f"Pallas kernels need TPU v4 or later, these are {chip}"
    if bias is not None:
        return "the kernel has no bias"
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the kernel computes in float32 or bfloat16, not {query.dtype.name}"
    if 0 in (*query.shape, *key.shape):
        return "a dimension is empty"
    return None


def _why_wasteful(query, key, mask, mesh: Mesh) -> str | None:
    from keras_tpu_dist.attention.kernel import tiling

    time, source = query.shape[1], key.shape[1]
    chip = of_kind(mesh.devices.flat[0].device_kind)
    name = chip.name if chip else ""
    fewest = _FEWEST_TOKENS.get(name, _FEWEST_ELSEWHERE)
    if mask is not None and mask.shape[2] == 1 and query.shape[3] < _BLOCK:
        fewest = _FEWEST_MASKED.get(name, fewest)
    if time * source < fewest**2 or source <= _BLOCK:
        return f"of {time} queries and {source} keys XLA computes it in fewer cycles"
    if tiling(time).padded * tiling(source).padded > _MOST_PADDING * time * source:
        return f"{time} queries and {source} keys would be mostly padding in the kernel's blocks"
    return None


def _say(reason: str, level: int = logging.INFO) -> None:
    log_once(f"attention runs as plain XLA operations: {reason}", level)


def _under_strategy(
    stock: Callable[..., jax.Array],
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
    """Keras's attention under a strategy with a mesh, on TPU; elsewhere Keras's own, unchanged."""
    options = {
        "bias": bias,
        "mask": mask,
        "scale": scale,
        "is_causal": is_causal,
        "flash_attention": flash_attention,
        "attn_logits_soft_cap": attn_logits_soft_cap,
    }
    strategy = keras.distribution.distribution()
    mesh = getattr(strategy, "mesh", None)
    data_axes = getattr(strategy, "data_axes", None)
    time_axis = getattr(strategy, "sequence_axis", None)
    attention = functools.partial(stock, **options)
    if isinstance(mesh, Mesh) and data_axes is not None:
        where = {"mesh": mesh, "data_axes": data_axes, "time_axis": time_axis}
        query, key, value = (jnp.asarray(x) for x in (query, key, value))
        if _platform(mesh) == "tpu":
            key, value = _own_heads(query, key), _own_heads(query, value)
            attention = functools.partial(dot_product_attention, **where, **options)
        elif time_axis is not None:
            query, key, value = split(query, key, value, **where)
    if is_causal and only_plain_operations():
        attention = jax.named_scope(CAUSAL)(attention)
    return attention_again(attention)(query, key, value)


def _own_heads(query: jax.Array, array: jax.Array) -> jax.Array:
    """Keys or values without the repetition by Keras for the query heads that share them."""
    repeats = _repeats.get()
    if repeats == 1 or array.ndim != 4 or array.shape[2] != query.shape[2]:
        return array
    return array[:, :, ::repeats]


def _grouped(stock: Callable[..., tuple], layer, *args, **kwargs) -> tuple:
    with setting(_repeats, layer.num_repeats):
        return stock(layer, *args, **kwargs)


_keras.route_attention(_under_strategy)
_keras.route_grouped_attention(_grouped)
