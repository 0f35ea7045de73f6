"""Flash attention on one device's share: JAX's splash kernel, exact for every mask.

References:
    - The kernel:
      https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention
    - FlashAttention-2, https://arxiv.org/abs/2307.08691
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

LANES = 128  # a block of keys must fill whole vector registers
_BLOCKS = (512, 384, 256, 128)
# One more block is assumed to cost as much as this many rows. This is an estimate, not measured on
# a chip; it only weighs padding against small blocks.
_ROWS_PER_STEP = 64


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a sequence is divided: its padded length, and the block size, which divides it."""

    padded: int
    block: int


@functools.lru_cache(maxsize=256)
def tiling(length: int) -> Tiling:
    """Chooses the block size with the least cost for padding and for many small blocks.

    Args:
        length: Sequence length, at least 1.
    """
    options = (Tiling(-(-length // block) * block, block) for block in _BLOCKS)
    return min(options, key=lambda t: t.padded * (1 + _ROWS_PER_STEP / t.block))


class KeysUpTo(splash.Mask):
    """Each query sees the keys up to one, computed inside the kernel instead of read from memory.

    The kernel skips blocks that this mask empties, and calls `mask_function` for the others. Equal
    masks must have equal hashes: the kernel caches by mask.

    Args:
        last: For each query, the last key that it sees; int32.
        columns: The number of keys, padded.
    """

    def __init__(self, last: np.ndarray, columns: int):
        self.q_sequence, self._columns = last, columns
        self._key = last.tobytes(), columns

    @property
    def shape(self) -> tuple[int, int]:
        """The number of queries and of keys."""
        return len(self.q_sequence), self._columns

    def mask_function(self, last, columns):
        """Which keys are seen, by the entries of `q_sequence` and the numbers of keys."""
        return last >= columns

    def __eq__(self, other):
        return isinstance(other, KeysUpTo) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    def __getitem__(self, index) -> np.ndarray:
        last = self.q_sequence[index[0]]
        columns = np.arange(*index[1].indices(self._columns))
        # Most blocks of a long sequence are all or nothing.
        if columns[0] > last.max():
            return np.zeros((len(last), len(columns)), bool)
        if columns[-1] <= last.min():
            return np.ones((len(last), len(columns)), bool)
        return last[:, None] >= columns[None, :]


def static_mask(time: int, source: int, is_causal: bool) -> KeysUpTo:
    """The mask of padded keys, and of causality."""
    rows = np.arange(tiling(time).padded) if is_causal else np.full(tiling(time).padded, source)
    return KeysUpTo(np.minimum(rows, source - 1, dtype=np.int32), tiling(source).padded)


def blocks_computed(mask: KeysUpTo, time: int, source: int, devices: int = 1) -> tuple[int, int]:
    """The number of blocks that a mask leaves, and that of all blocks.

    Args:
        time: The queries of each device, not padded.
        source: The keys, likewise.
        devices: The number of devices that share the mask's queries; the busiest one counts.
    """
    down, across = tiling(time).block, tiling(source).block
    last = mask.q_sequence.reshape(devices, -1, down).max(axis=2)
    most = np.sum(last // across + 1, axis=1).max()
    return int(most), last.shape[1] * (mask.shape[1] // across)


def block_sizes(rows: int, columns: int) -> splash.BlockSizes:
    """The kernel's blocks.

    Args:
        rows: Queries in a block.
        columns: Keys in a block.
    """
    # Not the fused backward kernel: it keeps one dq per key block, in the input's dtype.
    of_rows = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), rows)
    of_columns = dict.fromkeys(("block_kv", "block_kv_dkv", "block_kv_dq"), columns)
    return splash.BlockSizes(**of_rows, **of_columns)


def heads_first(x: jax.Array, length: int) -> jax.Array:
    """`(batch, time, heads, width)` to `(batch, heads, length, width)`, zeros behind.

    Args:
        x: The array.
        length: `time`, padded.
    """
    x = jnp.swapaxes(x, 1, 2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))


def _static_kernel(make, heads: int, time: int, source: int, is_causal: bool):
    computed = static_mask(time, source, is_causal)
    is_whole = not is_causal and computed.shape[1] == source
    mask = splash.FullMask(computed.shape) if is_whole else computed
    kernel = make(splash.MultiHeadMask([mask] * heads))

    def named(*arguments):
        with jax.named_scope(blocks_scope(*blocks_computed(computed, time, source))):
            return kernel(*arguments)

    return named


def blocks_scope(computed: int, blocks: int) -> str:
    """The scope from which profiles and dry runs know how many blocks a kernel computes.

    Args:
        computed: Number of blocks that the kernel computes.
        blocks: Number of all blocks.
    """
    return f"blocks_{computed}_of_{blocks}"


def _pad_dense(mask: jax.Array, rows: int, columns: int) -> jax.Array:
    """Pads a mask, and lets every row that sees nothing see the first key.

    The kernel skips blocks that a mask empties. A row that never runs divides by zero, and its NaN
    would reach the gradients of keys and values. The results of such rows are replaced.
    """
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, rows - mask.shape[2]), (0, columns - mask.shape[3])))
    blind = ~jnp.any(mask, axis=-1, keepdims=True)
    return mask | (blind & (jnp.arange(columns) == 0))


def seen_by_row(valid: jax.Array, time: int, is_causal: bool) -> jax.Array:
    """Whether each row sees a key, `(batch, time)`.

    Args:
        valid: Which keys may be seen, `(batch, source)`.
        time: Number of queries.
        is_causal: Whether query `i` sees only keys `0..i`.
    """
    if not is_causal:
        return jnp.broadcast_to(jnp.any(valid, axis=1)[:, None], (valid.shape[0], time))
    so_far = jax.lax.cummax(valid.astype(jnp.int32), axis=1) > 0
    return so_far[:, np.minimum(np.arange(time), valid.shape[1] - 1)]


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    is_causal: bool,
    soft_cap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Attention without a `(time, source)` buffer per head, for arrays on one device.

    Lengths are padded to whole blocks inside. The mask is passed in the cheapest form for its
    shape: a mask of keys only (`time` is 1) as segment ids, a mask of queries only (`source` is 1)
    not at all, any other as one boolean matrix per batch row, shared by the heads that share it. A
    row that sees no key gets the mean of all values, as in XLA attention.

    Args:
        query: `(batch, time, heads, width)`, float32 or bfloat16, already scaled.
        key: `(batch, source, kv_heads, width)`; `kv_heads` divides `heads`.
        value: `(batch, source, kv_heads, value_width)`.
        mask: Boolean, rank 4, each dimension 1 or that of `(batch, heads, time, source)`, or
            `None`.
        is_causal: Whether query `i` sees only keys `0..i`.
        soft_cap: `cap * tanh(logits / cap)`, or `None`.
        interpret: Run the kernel's program in plain JAX, on any platform, for tests.

    Returns:
        `(batch, time, heads, value_width)` in the dtype of `query`.
    """
    time, source, heads = query.shape[1], key.shape[1], query.shape[2]
    rows, columns = tiling(time), tiling(source)
    make = functools.partial(
        splash.make_splash_mha,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=block_sizes(rows.block, columns.block),
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )
    arrays = (
        heads_first(query, rows.padded),
        heads_first(key, columns.padded),
        heads_first(value, columns.padded),
    )
    sees = None
    if mask is None or mask.shape[3] == 1:
        output = jax.vmap(_static_kernel(make, heads, time, source, is_causal))(*arrays)
        sees = mask
    elif mask.shape[1] == mask.shape[2] == 1:
        output, sees = _with_key_mask(make, arrays, mask[:, 0, 0], time, is_causal)
    else:
        # A mask of keys that differs over heads is a matrix for each of them.
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], time, source))
        output, sees = _with_dense_mask(make, arrays, mask, is_causal)
    output = jnp.swapaxes(jnp.asarray(output)[:, :, :time], 1, 2)
    return output if sees is None else mean_where_blind(output, sees, value)


def mean_where_blind(output: jax.Array, sees: jax.Array, value: jax.Array) -> jax.Array:
    """The output, with the mean of all values for rows that see no key, as from XLA attention.

    Args:
        output: `(batch, time, heads, value_width)`.
        sees: Whether a row sees a key, broadcastable to `(batch, heads, time, 1)`.
        value: `(batch, source, kv_heads, value_width)`.
    """
    mean = jnp.mean(value.astype(jnp.float32), axis=1, keepdims=True).astype(output.dtype)
    mean = jnp.repeat(mean, output.shape[2] // value.shape[2], axis=2)
    return jnp.where(jnp.swapaxes(sees, 1, 2), output, mean)


def _with_key_mask(make, arrays, valid: jax.Array, time: int, is_causal: bool):
    """A mask of keys by segments: hidden keys are in another segment than all queries."""
    query, key = arrays[0], arrays[1]
    valid = jnp.broadcast_to(valid, (query.shape[0], valid.shape[1]))
    segments = segment_ids(valid, query, key.shape[2])
    source = valid.shape[1]
    kernel = _static_kernel(make, query.shape[1], time, source, is_causal)
    output = jax.vmap(kernel)(*arrays, segments)
    return output, seen_by_row(valid, time, is_causal)[:, None, :, None]


def segment_ids(valid: jax.Array, query: jax.Array, columns: int) -> splash.SegmentIds:
    """Segments that keep queries from keys that they may not see.

    Args:
        valid: Which keys may be seen, `(batch, source)`.
        query: `(batch, heads, rows, width)`.
        columns: Number of keys, padded.
    """
    hidden = ((0, 0), (0, columns - valid.shape[1]))
    return splash.SegmentIds(
        q=jnp.ones((query.shape[0], query.shape[2]), jnp.int32),
        kv=jnp.pad(valid.astype(jnp.int32), hidden),
    )


def _with_dense_mask(make, arrays, mask: jax.Array, is_causal: bool):
    """One boolean matrix per batch row.

    With several blocks the kernel runs row by row and skips those that the row's mask empties;
    with a single block there is nothing to skip, and all rows go in one launch.
    """
    query, key = arrays[0], arrays[1]
    if is_causal:
        mask = mask & jnp.tril(jnp.ones(mask.shape[2:], bool))
    sees = jnp.any(mask, axis=-1, keepdims=True)
    mask = _pad_dense(mask, query.shape[2], key.shape[2])

    def one_row(mask, query, key, value):
        kernel = make(mask)
        # The kernel's constructor converts this flag to an array, which cannot be read inside a
        # jit.
        info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
        if info.block_mask.shape[1:] != (1, 1):
            kernel.fwd_mask_info = info
            return kernel(query, key, value)
        kernel.dq_mask_info = _no_skipping(kernel.dq_mask_info)
        kernel.dkv_mask_info = _no_skipping(kernel.dkv_mask_info)
        kernel.fwd_mask_info = _no_skipping(info)
        with jax.named_scope(blocks_scope(1, 1)):
            return kernel(query, key, value)

    if mask.shape[0] == 1:
        return jax.vmap(functools.partial(one_row, mask[0]))(*arrays), sees
    return jax.vmap(one_row)(mask, *arrays), sees


def _no_skipping(info):
    """Block numbers that are the same for every batch row, so that rows need no loop."""
    heads = info.block_mask.shape[0]
    return info._replace(
        block_mask=jnp.ones((heads, 1, 1), jnp.int32),
        data_next=jnp.zeros((heads, 1, 1), jnp.int32),
        mask_next=jnp.arange(heads, dtype=jnp.int32).reshape(heads, 1, 1),
    )
