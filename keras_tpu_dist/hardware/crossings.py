"""Which axes of a mesh stay within a host, and which cross hosts or slices."""

from typing import Any

import numpy as np
from jax.sharding import Mesh

HOST, HOSTS, SLICES = "within a host", "across hosts (ICI)", "across slices (DCN)"


def crossings(mesh: Mesh) -> dict[str, str]:
    """Whether the axes of a mesh cross hosts or slices.

    Args:
        mesh: The mesh.

    Returns:
        For every axis with more than one device: `HOST`, `HOSTS` or `SLICES`; for a mesh within one
        host, nothing.
    """
    devices = mesh.devices
    hosts = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    slices = np.vectorize(_slice, otypes=[int])(devices)
    if len(np.unique(hosts)) == 1 and len(np.unique(slices)) == 1:
        return {}
    return {
        name: SLICES if _differs(slices, axis) else HOSTS if _differs(hosts, axis) else HOST
        for axis, name in enumerate(mesh.axis_names)
        if devices.shape[axis] > 1
    }


def crossings_text(mesh: Mesh) -> str:
    """The crossings of a mesh's axes in one line; empty for a mesh within one host.

    Args:
        mesh: The mesh.
    """
    return ", ".join(f"{axis} {where}" for axis, where in crossings(mesh).items())


def num_hosts(mesh: Mesh) -> int:
    """The number of processes that the devices of a mesh belong to.

    Args:
        mesh: The mesh.
    """
    return len({device.process_index for device in mesh.devices.flat})


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _differs(numbers: np.ndarray, axis: int) -> bool:
    return bool(np.any(numbers != np.take(numbers, [0], axis)))
