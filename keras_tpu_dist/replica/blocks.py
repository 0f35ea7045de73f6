"""Each replica's part of an array, between the host and the devices of this process."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.processes.arrays import whole
from keras_tpu_dist.training.strategy import Strategy


def own_replicas(strategy: Strategy) -> tuple[int, ...]:
    """The numbers of the replicas that have a device in this process, in their order.

    Args:
        strategy: The strategy.
    """
    return tuple(sorted(set(strategy.placer.own_parts.values())))


def own_blocks(array: jax.Array, strategy: Strategy) -> dict[int, jax.Array]:
    """The parts of an array that lie in this process, by the number of their replica.

    Args:
        array: An array that is split over the strategy's data axes.
        strategy: The strategy.
    """
    parts = strategy.placer.own_parts
    blocks: dict[int, jax.Array] = {}
    for shard in array.addressable_shards:
        blocks.setdefault(parts[shard.device], shard.data)
    return {replica: blocks[replica] for replica in sorted(blocks)}


def every_block(array: jax.Array, axis: int, strategy: Strategy) -> list[np.ndarray]:
    """All replicas' parts of an array on the host, in all processes.

    Args:
        array: The array.
        axis: The dimension that is split over the replicas.
        strategy: The strategy.

    Raises:
        PeerError: If not all processes read it.
    """
    return np.split(whole(array), strategy.num_replicas_in_sync, axis)


def from_blocks(blocks: Mapping[int, Any], axis: int, strategy: Strategy) -> jax.Array:
    """Host arrays of one shape as one array, each on the devices of its replica.

    Args:
        blocks: The arrays by the number of their replica, at least those of this process's.
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
        # Where the blocks are empty, one is as good as the other.
        return hosts[(index[axis].start or 0) // length] if length else first.astype(dtype)

    return jax.make_array_from_callback(tuple(shape), strategy.placer.sharding(axis), part)
