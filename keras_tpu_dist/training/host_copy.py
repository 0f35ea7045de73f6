"""A training state in host memory, from which it can be put back on the devices."""

import time
from typing import Any

import jax
import numpy as np


class HostCopy:
    """A training state in host memory; what all devices have alike is there once.

    Args:
        state: The state on the devices.
    """

    def __init__(self, state: Any):
        self._made = time.monotonic()
        leaves, self._treedef = jax.tree.flatten(state)
        self._shardings = [leaf.sharding for leaf in leaves]
        once = [
            leaf.addressable_data(0) if leaf.sharding.is_fully_replicated else leaf
            for leaf in leaves
        ]
        here = [_is_in_host_memory(leaf) for leaf in once]
        away = [leaf for leaf, is_here in zip(once, here) if not is_here]
        places = [leaf.sharding.with_memory_kind("pinned_host") for leaf in away]
        moved = iter(jax.device_put(away, places))
        # 490 small arrays take 24 ms to transfer and 1 ms to copy.
        self._leaves = [
            np.array(leaf) if is_here else next(moved) for leaf, is_here in zip(once, here)
        ]

    @property
    def age_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._made

    def on_devices(self) -> Any:
        """The state as it lay on the devices."""
        return jax.tree.unflatten(self._treedef, map(_spread, self._leaves, self._shardings))


def _is_in_host_memory(leaf: jax.Array) -> bool:
    (device, *others) = leaf.sharding.device_set
    return device.platform == "cpu" and not others


def _spread(copy: jax.Array | np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    if not sharding.is_fully_replicated:
        return jax.device_put(copy, sharding)
    # Not one `device_put`: over several processes that compares values, by a collective. And to a
    # device alone it would be taken for a copy within that device's own memory.
    places = [
        jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
        for device in sharding.addressable_devices
    ]
    each = [jax.device_put(copy, place) for place in places]
    return jax.make_array_from_single_device_arrays(copy.shape, sharding, each)
