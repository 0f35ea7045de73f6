"""Which attention runs, and on which share of the arrays each device runs it."""

import functools
import logging
import math
from collections.abc import Callable, Sequence

import jax
import jax.export
import jax.numpy as jnp
import keras
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from keras_tpu_dist import _keras
from keras_tpu_dist.attention.xla import xla_attention
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.once import say_once
from keras_tpu_dist.common.plain import only_plain_operations
from keras_tpu_dist.hardware.chips import WITHOUT_KERNELS
from keras_tpu_dist.memory.again import attention_again
from keras_tpu_dist.partitioner import in_compiled_code

# Blocks are at least 128 x 128: below a quarter of useful work XLA's own program wins.
_MOST_PADDING = 4


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mesh: Mesh,
    data_axes: Sequence[str],
    head_axes: Sequence[str] | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
    platform: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention on a mesh: a flash kernel on each TPU's share, XLA's attention elsewhere.

    The batch is split over `data_axes` and padded inside where it does not divide; heads are
    split over `head_axes`. Where there are fewer key/value heads than devices on the head axes,
    each device gets the one it needs. The kernel has no bias (JAX's other flash kernel has, but
    takes it, and returns its gradient, as `(batch, heads, time, source)`, the buffer that a flash
    kernel is there to avoid), needs float32 or bfloat16 and TPU v4 or later, and computes whole
    blocks of 128: what it cannot do, or does worse, goes to XLA, logged once with the reason. It
    has first derivatives in reverse only; `keras.config.disable_flash_attention()` gives the rest.

    Args:
        query: `(batch, time, heads, width)`.
        key: `(batch, source, kv_heads, width)`; `kv_heads` divides `heads`.
        value: `(batch, source, kv_heads, value_width)`.
        mesh: The mesh of the computation.
        data_axes: Mesh axes that split the batch; may be empty.
        head_axes: Mesh axes that may split the heads; default: all that are not in `data_axes`.
            Axes that do not divide the number of heads are left out.
        bias: Added to the logits; broadcastable to `(batch, heads, time, source)`.
        mask: True where a query may see a key; broadcastable to `(batch, heads, time, source)`,
            or `(batch, time, source)`.
        scale: Factor of the logits; default `1 / sqrt(width)`.
        is_causal: Whether query `i` sees only keys `0..i`; combines with `mask`.
        flash_attention: True: the kernel or an error. False: XLA. None: the kernel where it can,
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
    symbolic = any(map(jax.export.is_symbolic_dim, (*query.shape, *key.shape)))
    if symbolic or not _takes_kernel(flash_attention, query, key, bias, mesh, platform):
        # with symbolic sizes Keras only asks for the shape of the result
        split = (lambda x: x) if symbolic else lambda x: _split_batch(x, mesh, tuple(data_axes))
        return xla_attention(
            *map(split, (query, key, value)),
            bias=bias,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
            soft_cap=attn_logits_soft_cap,
        )
    from keras_tpu_dist.attention.kernel import flash_attention as kernel  # starts Pallas

    # The kernel has no scale. One rounding of the query, as in Keras's own einsum attention.
    query = (query.astype(jnp.float32) * scale).astype(dtype)
    local = functools.partial(
        kernel,
        is_causal=is_causal,
        soft_cap=attn_logits_soft_cap,
        interpret=interpret,
    )
    if head_axes is None:
        head_axes = [name for name in mesh.axis_names if name not in data_axes]
    return _on_shares(local, query, key, value, mask, mesh, tuple(data_axes), tuple(head_axes))


def _takes_kernel(flash_attention, query, key, bias, mesh: Mesh, platform: str | None) -> bool:
    """Decides, says why not, and refuses an order that cannot be carried out."""
    if only_plain_operations():
        return False
    if flash_attention is None:
        flash_attention = keras.config.is_flash_attention_enabled()
    if flash_attention is False:
        return False
    reason = _why_not_kernel(query, key, bias, mesh, platform)
    if flash_attention and reason is not None:
        raise ValueError(
            message(
                "flash_attention=True asks for the TPU flash kernel, which cannot compute this: "
                f"{reason}.",
                received={"query.shape": query.shape, "query.dtype": query.dtype.name},
                fix="Leave flash_attention=None, which takes XLA attention here.",
            )
        )
    if reason is not None:
        _say(reason, logging.WARNING)
        return False
    wasteful = None if flash_attention else _why_wasteful(query, key)
    if wasteful is not None:
        _say(wasteful)
    return wasteful is None


def _platform(mesh: Mesh) -> str:
    """The mesh's, not the process's: a dry run compiles for TPUs that are not here."""
    return mesh.devices.flat[0].platform


def _check_shapes(query, key, value) -> None:
    shapes = {"query.shape": query.shape, "key.shape": key.shape, "value.shape": value.shape}
    if not all(len(shape) == 4 for shape in shapes.values()):
        raise ValueError(
            message(
                "Attention takes query, key and value of rank 4, (batch, time, heads, width).",
                received=shapes,
                fix="Split the heads into their own dimension, or add a batch dimension.",
            )
        )
    (b, _, n, h), (kb, s, k, kh), (vb, vs, vk, _) = shapes.values()
    if (b, h) != (kb, kh) or (kb, s, k) != (vb, vs, vk) or n % k:
        raise ValueError(
            message(
                "Query, key and value must agree in batch and width, key and value in length and "
                "heads, and the key heads must divide the query heads.",
                received=shapes,
                fix="Give (batch, time, heads, width), (batch, source, kv_heads, width) and "
                "(batch, source, kv_heads, value_width).",
            )
        )


def _rank4(name: str, array, shape: tuple[int, int, int, int]) -> jax.Array:
    """Brings a mask or bias to rank 4, as NumPy broadcasts, or from `(batch, time, source)`."""
    array = jnp.asarray(array)
    full = array.reshape((1,) * (4 - array.ndim) + array.shape) if array.ndim < 4 else array
    if array.ndim == 3 and array.shape[0] == shape[0] and array.shape[0] not in (1, shape[1]):
        full = array[:, None]
    if full.ndim != 4 or any(have not in (1, want) for have, want in zip(full.shape, shape)):
        raise ValueError(
            message(
                f"The {name} must be broadcastable to (batch, heads, time, source) = {shape}.",
                received={f"{name}.shape": array.shape},
                fix="Add dimensions of size 1 where it does not vary.",
            )
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


def _why_wasteful(query, key) -> str | None:
    from keras_tpu_dist.attention.kernel import tiling

    time, source = query.shape[1], key.shape[1]
    if tiling(time).padded * tiling(source).padded > _MOST_PADDING * time * source:
        return f"{time} queries and {source} keys would be mostly padding in the kernel's blocks"
    return None


def _say(reason: str, level: int = logging.INFO) -> None:
    say_once(f"attention runs as plain XLA operations: {reason}", level)


def _dividing_axes(axes: Sequence[str], mesh: Mesh, number: int) -> tuple[str, ...]:
    """The axes, in order, whose sizes together divide `number`."""
    chosen, size = [], 1
    for axis in axes:
        if mesh.shape[axis] > 1 and number % (size * mesh.shape[axis]) == 0:
            chosen.append(axis)
            size *= mesh.shape[axis]
    return tuple(chosen)


def _size(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _on_shares(
    local: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    mesh: Mesh,
    data_axes: tuple[str, ...],
    head_axes: tuple[str, ...],
) -> jax.Array:
    """Runs `local` on each device's share: batch over the data axes, heads over the head axes."""
    context = jax.sharding.get_abstract_mesh()
    taken = set(context.manual_axes)  # strategy.run() has already split these
    data_axes = tuple(axis for axis in data_axes if axis not in taken)
    head_axes = _dividing_axes(
        [axis for axis in head_axes if axis not in taken], mesh, query.shape[2]
    )
    free = set(mesh.axis_names) - taken
    if not free:
        return local(query, key, value, mask)
    batch = query.shape[0]
    short = -batch % _size(data_axes, mesh)
    repeats = math.lcm(key.shape[2], _size(head_axes, mesh)) // key.shape[2]
    query, key, value = (_more_rows(x, short) for x in (query, key, value))
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    spec = P(data_axes or None, None, head_axes or None, None)
    arguments, specs = [query, key, value], [spec] * 3
    if mask is not None:
        arguments.append(_more_rows(mask, short) if mask.shape[0] > 1 else mask)
        rows = data_axes if arguments[-1].shape[0] > 1 else ()
        heads = head_axes if mask.shape[1] > 1 else ()
        specs.append(P(rows or None, heads or None, None, None))
    mapped = jax.shard_map(
        local if mask is not None else functools.partial(local, mask=None),
        mesh=context if taken else mesh,
        in_specs=tuple(specs),
        out_specs=spec,
        axis_names=free,
        check_vma=False,  # pallas_call does not say over which axes its results vary
    )
    return jax.jit(mapped)(*arguments)[:batch]


def _split_batch(x: jax.Array, mesh: Mesh, data_axes: tuple[str, ...]) -> jax.Array:
    """Keeps the batch split where XLA partitions: a split bias or weight may pull it elsewhere."""
    if not in_compiled_code() or jax.sharding.get_abstract_mesh().manual_axes:
        return x
    rest = (P.UNCONSTRAINED,) * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(
        x, jax.sharding.NamedSharding(mesh, P(data_axes or None, *rest))
    )


def _more_rows(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, rows), *((0, 0),) * (x.ndim - 1))) if rows else x


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
        **{"bias": bias, "mask": mask, "scale": scale, "is_causal": is_causal},
        **{"flash_attention": flash_attention, "attn_logits_soft_cap": attn_logits_soft_cap},
    }
    strategy = keras.distribution.distribution()
    mesh = getattr(strategy, "mesh", None)
    data_axes = getattr(strategy, "data_axes", None)
    attention = functools.partial(stock, **options)
    if isinstance(mesh, Mesh) and data_axes is not None and _platform(mesh) == "tpu":
        query, key, value = (jnp.asarray(x) for x in (query, key, value))
        heads = getattr(strategy, "head_axes", None)
        attention = functools.partial(
            dot_product_attention, mesh=mesh, data_axes=data_axes, head_axes=heads, **options
        )
    return attention_again(attention)(query, key, value)


_keras.route_attention(_under_strategy)
