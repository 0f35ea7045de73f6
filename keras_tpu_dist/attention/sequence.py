"""Flash attention with queries split along time: gathers keys, and balances causal work.

With a causal mask, late positions cost more than early ones. To balance the load, every device gets
one early and one late piece, `i` and `2 n - 1 - i` of `2 n`; two permutations exchange the pieces
before and after.

References:
    - Pieces from both ends: https://arxiv.org/abs/2407.21783, section 3.3.2
    - Keys gathered instead of passed on in a ring: the same place
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from keras_tpu_dist.attention.kernel import (
    LANES,
    KeysUpTo,
    block_sizes,
    blocks_computed,
    blocks_scope,
    heads_first,
    segment_ids,
    tiling,
)

# For a decoder of 131,072 tokens on v5e:4x4, a quarter of the gathers is overlapped with four
# groups and none with one (benchmarks/sequence.py --effort exact).
_GROUPS = 4


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The queries that every device of an axis computes.

    Attributes:
        balanced: Whether every device has an early and a late piece; otherwise pieces are in order.
    """

    devices: int
    time: int
    balanced: bool

    @classmethod
    def of(cls, devices: int, time: int) -> "Pieces":
        """The pieces of a sequence: balanced if they fill the kernel's smallest block.

        Args:
            devices: The number of devices, which divides `time`.
            time: The number of queries.
        """
        return cls(devices, time, time % (2 * devices) == 0 and time // (2 * devices) >= LANES)

    @property
    def rows(self) -> int:
        """The number of queries of one device."""
        return self.time // self.devices

    def positions(self, device: int) -> np.ndarray:
        """The queries that a device computes, in its order; shape `(rows,)`, int32.

        Args:
            device: Its number on the axis.
        """
        if not self.balanced:
            return np.arange(device * self.rows, (device + 1) * self.rows, dtype=np.int32)
        size = self.rows // 2
        ends = (device, 2 * self.devices - 1 - device)
        pieces = sorted(ends, key=lambda piece: piece % 2)  # as the two permutations bring them
        return np.concatenate([np.arange(p * size, (p + 1) * size, dtype=np.int32) for p in pieces])

    def _destinations(self, first: int) -> list[tuple[int, int]]:
        pieces = ((i, 2 * i + first) for i in range(self.devices))
        return [(i, min(p, 2 * self.devices - 1 - p)) for i, p in pieces]

    def brought(self, x: jax.Array, axis: str) -> jax.Array:
        """A device's queries in the order of its computation, from those that it holds.

        Args:
            x: `(batch, rows, ...)`, within a `shard_map`.
            axis: The axis of the devices.
        """
        return self._moved(x, axis, [self._destinations(i) for i in (0, 1)])

    def returned(self, x: jax.Array, axis: str) -> jax.Array:
        """Undoes `brought`.

        Args:
            x: `(batch, rows, ...)`, within a `shard_map`.
            axis: The axis of the devices.
        """
        return self._moved(x, axis, [[(b, a) for a, b in self._destinations(i)] for i in (0, 1)])

    def _moved(self, x: jax.Array, axis: str, ways: list) -> jax.Array:
        if not self.balanced:
            return x
        halves = zip(jnp.split(x, 2, axis=1), ways, strict=True)
        return jnp.concatenate([jax.lax.ppermute(h, axis, way) for h, way in halves], axis=1)


def causal_mask(pieces: Pieces, source: int) -> KeysUpTo:
    """The causal mask for the queries of all devices, padded to whole blocks on every device."""
    # Padded rows only see the first key.
    padding = (0, tiling(pieces.rows).padded - pieces.rows)
    every = (pieces.positions(i) for i in range(pieces.devices))
    last = [np.pad(np.minimum(rows, source - 1), padding) for rows in every]
    return KeysUpTo(np.concatenate(last), tiling(source).padded)


def groups_of_heads(kv_heads: int) -> int:
    """The number of groups of heads for gathering keys, so that one is sent while another is
    computed.

    Args:
        kv_heads: Number of heads of the keys on one device.
    """
    return math.gcd(kv_heads, _GROUPS)


def gathered(local: Callable[..., jax.Array], axis: str | None) -> Callable[..., jax.Array]:
    """Attention within a `shard_map` that gathers keys and values, some heads at a time.

    Their gradients are reduce-scattered. Without an axis, they are whole already.

    Args:
        local: `(query, key, value, mask)`, with all keys and values.
        axis: The axis that splits them along time.
    """
    whole = (lambda x: x) if axis is None else functools.partial(all_of, axis=axis)

    def attention(query, key, value, mask=None):
        groups = groups_of_heads(key.shape[2])
        parts = (jnp.split(x, groups, axis=2) for x in (query, key, value))
        masks = [mask] * groups
        if mask is not None and mask.shape[1] > 1:
            masks = jnp.split(mask, groups, axis=1)
        outputs = [
            local(q, whole(k), whole(v), m) for q, k, v, m in zip(*parts, masks, strict=True)
        ]
        return jnp.concatenate(outputs, axis=2)

    return attention


def all_of(x: jax.Array, axis: str) -> jax.Array:
    """Gathers the parts of all devices of an axis, in the order of time.

    Args:
        x: `(batch, time, ...)`, within a `shard_map`.
        axis: The axis.
    """
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def causal_kernel(
    pieces: Pieces, source: int, heads: int, soft_cap: float | None, interpret: bool
) -> Any:
    """The kernel of a causal sequence, with what each device skips.

    Args:
        pieces: Which queries each device computes.
        source: Number of keys.
        heads: Number of query heads that are computed at a time.
        soft_cap: `cap * tanh(logits / cap)`, or `None`.
        interpret: Run the kernel's program in plain JAX, on any platform, for tests.
    """
    return splash.make_splash_mha(
        splash.MultiHeadMask([causal_mask(pieces, source)] * heads),
        head_shards=1,
        q_seq_shards=pieces.devices,
        block_sizes=block_sizes(tiling(pieces.rows).block, tiling(source).block),
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )


def kernel_specs(kernel: Any, mesh: Mesh, axis: str):
    """How a kernel is split over the devices, as `shard_map` takes it.

    Args:
        kernel: The kernel.
        mesh: The mesh.
        axis: The axis that splits queries along time.
    """
    return kernel.manual_sharding_spec(NamedSharding(mesh, P(None, axis)))


def causal_local(
    kernel: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    valid: jax.Array | None = None,
    *,
    pieces: Pieces,
    axis: str,
    split_keys: bool,
) -> jax.Array:
    """Causal attention of one device's queries, within a `shard_map`.

    Args:
        kernel: The device's part of what `causal_kernel` made.
        query: `(batch, rows, heads, width)`, scaled.
        key: `(batch, source, kv_heads, width)`, or a device's part of it.
        value: `(batch, source, kv_heads, value_width)`, likewise.
        valid: Which keys may be seen, `(batch, source)`, or `None` for all.
        pieces: Which queries each device computes.
        axis: The axis that splits queries along time.
        split_keys: Whether it splits keys and values too.

    Returns:
        `(batch, rows, heads, value_width)`.
    """

    def attend(query, key, value, _):
        return _attend(kernel, query, key, value, valid, pieces)

    attention = gathered(attend, axis if split_keys else None)
    return pieces.returned(attention(pieces.brought(query, axis), key, value), axis)


def _attend(kernel, query, key, value, valid, pieces: Pieces) -> jax.Array:
    rows, columns = tiling(pieces.rows), tiling(key.shape[1])
    arrays: list[Any] = [heads_first(query, rows.padded)]
    arrays += [heads_first(x, columns.padded) for x in (key, value)]
    if valid is not None:
        arrays.append(segment_ids(valid, arrays[0], columns.padded))
    source = key.shape[1]
    blocks = blocks_computed(causal_mask(pieces, source), pieces.rows, source, pieces.devices)
    with jax.named_scope(blocks_scope(*blocks)):
        output = jnp.asarray(jax.vmap(kernel)(*arrays))
    return jnp.swapaxes(output[:, :, : pieces.rows], 1, 2)
