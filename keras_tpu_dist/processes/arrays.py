"""Arrays between the host and devices of several processes."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist.processes.channel import agree


def put(arrays: Sequence[Any], shardings: Sequence[Any]) -> list:
    """Host arrays on the devices; each process transfers only the parts of its own devices.

    All processes hold the same arrays, and nobody compares them, as `jax.device_put` would by a
    collective for each.

    Args:
        arrays: The arrays.
        shardings: Where each of them goes.
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(list(arrays), list(shardings))
    return [_own_parts(array, sharding) for array, sharding in zip(arrays, shardings)]


def whole(array: jax.Array) -> np.ndarray:
    """An array's values, also where parts of it lie on the devices of other processes.

    Args:
        array: The array.

    Raises:
        PeerError: If not all processes read it.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    agree(
        f"reading an array of shape {array.shape} that lies on several hosts",
        fix="Read weights, save and predict in all processes, not in one of them alone; "
        "jax.process_index() == 0 may decide who prints or writes what was read.",
    )
    return np.asarray(_to_everywhere(array.sharding)(array))


def _own_parts(array: Any, sharding: Any) -> jax.Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@functools.lru_cache(maxsize=256)
def _to_everywhere(sharding: NamedSharding) -> Any:
    return jax.jit(_same, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))


def _same(array: jax.Array) -> jax.Array:
    return array
