"""What groups of devices that talk at once share: the links across a cut of the torus."""

import functools
import math

import numpy as np

from keras_tpu_dist.hardware.compile_only import CompileOnlyDevice
from keras_tpu_dist.hardware.topology import Topology

Groups = tuple[tuple[int, ...], ...]


def seconds_per_byte(
    topology: Topology, devices: tuple[CompileOnlyDevice, ...], kind: str, groups: Groups
) -> float:
    """Least time of a collective of one byte, by what has to cross some cut of the torus.

    A cut takes a run of planes out of the slice, along any of its dimensions. What a group has on
    one side and needs on the other crosses it, whatever the algorithm, and that of all groups
    crosses the same links.

    Args:
        topology: The slice.
        devices: The mesh's devices, flattened.
        kind: `"all-reduce"` and so on.
        groups: Who takes part together, all at once: positions in `devices`. Those of other slices
            than the first's have links of their own, and are left out.

    Returns:
        Seconds per byte of the whole array: what is reduced, or what is gathered.

    References:
        - Thompson, "Area-time complexity for VLSI", 1979, for bounds by what crosses a cut.
    """
    slices = {devices[i].slice_index for i in groups[0]}
    inside = [group for group in groups if {devices[i].slice_index for i in group} == slices]
    slowest = 0.0
    for axis, side in enumerate(topology.shape):
        links = topology.link_bandwidth * math.prod(topology.shape) / side
        along = np.array([[devices[i].coords[axis] for i in group] for group in inside])
        for within, places in _runs(side, topology.wraps(axis)):
            crossing = _crossing(kind, within[along])
            slowest = max(slowest, crossing / (places * links))
    return slowest


@functools.lru_cache(maxsize=64)
def _runs(side: int, wraps: bool) -> list[tuple[np.ndarray, int]]:
    """Runs of planes: which of `side` are in it, and at how many places it can be left."""
    found = []
    for first in range(side):
        for end in range(first + 1, side + 1):
            places = (first > 0 or wraps) + (end < side or wraps)
            if end - first < side and places:
                planes = np.arange(side)
                found.append(((planes >= first) & (planes < end), places))
    return found


def _crossing(kind: str, within: np.ndarray) -> float:
    """Bytes that all groups send over a cut, the more of its two directions, per byte of the whole.

    Args:
        kind: `"all-reduce"` and so on.
        within: Whether a device lies on the one side, as `(groups, members)`.
    """
    size = within.shape[1]
    here = within.sum(1)
    there = size - here
    apart = (here > 0) & (there > 0)
    if kind in ("all-to-all", "ragged-all-to-all"):
        return float((here * there).sum() / size)
    if kind in ("collective-permute", "collective-broadcast"):
        source = within[:, 0]
        return float(max((source & apart).sum(), (~source & apart).sum()))
    if kind == "all-reduce":
        return float(apart.sum())
    # Gathered, one side's parts are sent; scattered, sums for the other's.
    return float(max(here[apart].sum(), there[apart].sum()) / size)
