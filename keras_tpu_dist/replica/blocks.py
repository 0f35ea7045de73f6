"""Replicas' parts of an array, between the host and the devices of this process."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.errors import runtime_error
from keras_tpu_dist.processes.arrays import whole
from keras_tpu_dist.training.protocol import Strategy


def own_replicas(strategy: Strategy) -> tuple[int, ...]:
    """The numbers of the replicas that have a device in this process, in their order.

    Args:
        strategy: The strategy.
    """
    return tuple(sorted(set(strategy.placer.own_parts.values())))


def own_blocks(array: jax.Array, axis: int, strategy: Strategy) -> dict[int, jax.Array]:
    """The parts of an array on this process's devices, by the number of their replica.

    Args:
        array: An array that is split over the strategy's data axes; of a sequence, over the
            sequence axis as well.
        axis: The dimension that is split over the data axes.
        strategy: The strategy.
    """
    shape = list(array.shape)
    shape[axis] //= strategy.num_replicas_in_sync
    parts = strategy.placer.own_parts
    shards: dict[int, list] = {}
    for shard in array.addressable_shards:
        shards.setdefault(parts[shard.device], []).append(shard)
    return {replica: _whole(shards[replica], tuple(shape), axis) for replica in sorted(shards)}


def _whole(shards: list, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A replica's part, joined if its sequence is split over several devices."""
    first = shards[0].data
    if first.shape == shape:
        return first
    # A mesh axis that splits nothing leaves the same piece on several devices.
    pieces = list({str(shard.index): shard for shard in shards}.values())
    if sum(piece.data.size for piece in pieces) < math.prod(shape):
        raise runtime_error(
            "A process can only read values of replicas that it holds completely.",
            received={"shape": shape, "parts here": [piece.data.shape for piece in pieces]},
            fix="Their sequences are split over processes: call strategy.gather in all.",
        )
    host = np.empty(shape, first.dtype)
    for piece in pieces:
        index = (*piece.index[:axis], slice(None), *piece.index[axis + 1 :])
        host[index] = piece.data
    return jax.device_put(host, shards[0].device)


def every_block(array: jax.Array, axis: int, strategy: Strategy) -> list[np.ndarray]:
    """All replicas' parts of an array on the host, in all processes.

    Args:
        array: The array.
        axis: The dimension that is split over the replicas.
        strategy: The strategy.
    """
    return np.split(whole(array), strategy.num_replicas_in_sync, axis)


def from_blocks(blocks: Mapping[int, Any], axis: int, strategy: Strategy) -> jax.Array:
    """Joins host arrays of one shape into one array, each block on the devices of its replica.

    Args:
        blocks: The arrays by the number of their replica, at least for the replicas of this
            process.
        axis: The dimension along which they are joined.
        strategy: The strategy.
    """
    hosts = {replica: np.asarray(block) for replica, block in blocks.items()}
    first = next(iter(hosts.values()))
    dtype = jax.dtypes.canonicalize_dtype(first.dtype)
    hosts = {replica: host.astype(dtype, copy=False) for replica, host in hosts.items()}
    length, shape = first.shape[axis], list(first.shape)
    shape[axis] *= strategy.num_replicas_in_sync

    def part(index):
        # Empty blocks have no index to tell them apart by, and are all equal.
        return hosts[(index[axis].start or 0) // length] if length else first.astype(dtype)

    return jax.make_array_from_callback(tuple(shape), strategy.placer.sharding(axis), part)
