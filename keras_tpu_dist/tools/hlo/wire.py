"""The links between a mesh's devices: who has which, and how long an array takes over them."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keras_tpu_dist.hardware.compile_only import CompileOnlyDevice
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.programs.device_groups import Groups


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
        groups: The groups of devices that compute it at once: positions in `devices`. Groups of
            other slices than the first's have links of their own, and are left out.

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
        within: Whether a device is on the one side, as `(groups, members)`.
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


# "the die-to-die interface is six times faster than a 1D ICI link", cloud.google.com/tpu/docs/tpu7x
_ON_CHIP_LINKS = 6


# "Each hop over an ICI link has some intrinsic overhead regardless of the data volume. This is
# typically around 1us." jax-ml.github.io/scaling-book/sharding, which also shows a profile: three
# hops of 32 kB each on v5e in 8 us.
_HOP_S = 1e-6


# compared by identity, so that caching by it stays cheap for thousands of devices
@dataclass(frozen=True, eq=False)
class Wire:
    """The devices of a mesh in the order in which the program numbers them.

    Args:
        axes: Mesh axis names and sizes, in mesh order.
        devices: The mesh's devices, flattened; empty if their links are unknown.
        topology: The slice they belong to, or `None`.
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[CompileOnlyDevice, ...] = ()
    topology: Topology | None = None

    @classmethod
    def of(
        cls,
        axes: Mapping[str, int],
        devices: Sequence[CompileOnlyDevice] = (),
        topology: Topology | None = None,
    ) -> "Wire":
        """Makes a `Wire` of a mesh's axis sizes and devices.

        Args:
            axes: From the names of the mesh axes to their sizes, in mesh order.
            devices: The mesh's devices, flattened; empty if their links are unknown.
            topology: The slice they belong to, or `None`.
        """
        return cls(tuple(axes.items()), tuple(devices), topology)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    @functools.cached_property
    def first_slice(self) -> tuple[int, ...]:
        """Positions of the first slice's devices, which a program for several slices numbers."""
        if not self.devices:
            return tuple(range(self.size))
        first = self.devices[0].slice_index
        return tuple(i for i, d in enumerate(self.devices) if d.slice_index == first)

    def crossing_axes(self) -> tuple[str, ...]:
        """Mesh axes along which the slice changes."""
        numbers = np.array([d.slice_index for d in self.devices])
        grid = numbers.reshape([size for _, size in self.axes])
        return tuple(
            name for axis, (name, _) in enumerate(self.axes) if np.ptp(grid, axis=axis).any()
        )


def sent_bytes(kind: str, whole: int, size: int) -> float:
    """Bytes each of `size` devices sends, at least, for an array of `whole` bytes.

    Args:
        kind: `"all-reduce"` and so on.
        whole: Bytes of the whole array: what is reduced, or what is gathered.
        size: Devices that take part together; fewer than two send nothing.

    References:
        - Chan et al., "Collective communication: theory, practice, and experience", 2007
    """
    if size < 2:
        return 0.0
    if kind == "all-reduce":
        return 2 * whole * (size - 1) / size
    if kind in ("collective-permute", "collective-broadcast"):
        return float(whole)
    return whole * (size - 1) / size


def seconds_over(wire: Wire, kind: str, whole: float, axes: Sequence[str]) -> float:
    """Time of a collective over mesh axes at the links' full speed.

    Args:
        wire: The mesh.
        kind: `"all-reduce"` and so on.
        whole: Bytes of the whole array: what is reduced, or what is gathered.
        axes: The mesh axes that it crosses; those of size 1 cost nothing.

    Returns:
        Seconds; 0 where the links are unknown.
    """
    names = _crossed(wire, axes)
    return seconds_of(wire, kind, whole, _groups_over(wire, names))[1] if names else 0.0


def latency_over(wire: Wire, kind: str, axes: Sequence[str]) -> float:
    """`latency_of` over mesh axes."""
    names = _crossed(wire, axes)
    return latency_of(wire, kind, _groups_over(wire, names)) if names else 0.0


def _crossed(wire: Wire, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name, size in wire.axes if name in axes and size > 1)


@functools.lru_cache(maxsize=1024)
def _groups_over(wire: Wire, names: tuple[str, ...]) -> Groups:
    sizes = [size for _, size in wire.axes]
    crossed = [i for i, (name, _) in enumerate(wire.axes) if name in names]
    kept = [i for i in range(len(sizes)) if i not in crossed]
    rows = np.arange(wire.size).reshape(sizes).transpose([*kept, *crossed])
    return tuple(map(tuple, rows.reshape(-1, math.prod(sizes[i] for i in crossed)).tolist()))


def seconds_of(wire: Wire, kind: str, whole: float, groups: Groups) -> tuple[str, float]:
    """The network that groups talk over, and the least time that their collective takes there.

    Args:
        wire: The mesh.
        kind: `"all-reduce"` and so on.
        whole: Bytes of the whole array: what is reduced, or what is gathered.
        groups: Who takes part together, all at once; for a permute, the pairs.

    Returns:
        `"ICI"` or `"DCN"`, and seconds; 0 where the links are unknown. What a device sends over
        its own links, or, if that is more, what all groups send over links that they share.
    """
    network, bandwidth = bandwidth_of(wire, groups)
    if not bandwidth:
        return network, 0.0
    if network == "DCN":
        return network, _sent_to_slices(wire, kind, whole, groups[0]) / bandwidth
    seconds = sent_bytes(kind, int(whole), len(groups[0])) / bandwidth
    return network, max(seconds, whole * _shared(wire, kind, groups))


@functools.lru_cache(maxsize=1024)
def latency_of(wire: Wire, kind: str, groups: Groups) -> float:
    """The least time of a collective of however few bytes: a microsecond for each hop.

    Args:
        groups: Who takes part together; for a permute, the pairs.

    Returns:
        Seconds; 0 between slices, or where the links are unknown.

    References:
        - Austin et al., "How to Scale Your Model", part 3, 2025: a gather along an axis of a
          torus takes half as many hops as the axis is long, or one less than that without
          wraparound; axes add up; an all-reduce is a scatter of sums and a gather.
    """
    topology = wire.topology
    if topology is None or not wire.devices:
        return 0.0
    # All groups of most collectives look alike; the pairs of a permute do not.
    farthest = groups if kind == "collective-permute" else groups[:1]
    hops = max(_hops([wire.devices[i] for i in group], topology) for group in farthest)
    return hops * _HOP_S * (2 if kind == "all-reduce" else 1)


def _hops(members: Sequence[CompileOnlyDevice], topology: Topology) -> int:
    """How far the two devices of a group are apart that are farthest from each other."""
    if len({d.slice_index for d in members}) > 1:
        return 0
    hops = 0
    for axis, side in enumerate(topology.shape):
        places = sorted({d.coords[axis] for d in members})
        apart = [b - a for a, b in itertools.combinations(places, 2)]
        if topology.wraps(axis):
            apart = [min(along, side - along) for along in apart]
        hops += max(apart, default=0)
    return hops


def _sent_to_slices(wire: Wire, kind: str, whole: float, group: tuple[int, ...]) -> float:
    """Bytes that the devices of one slice send to others, together with what others also have.

    Sums are made and arrays gathered within a slice first. What is sent from each to each, or from
    one to one, is a device's own: all of a slice send theirs.
    """
    slices = len({wire.devices[i].slice_index for i in group})
    per_slice = len(group) / slices
    if kind in ("all-to-all", "ragged-all-to-all"):
        return per_slice * whole * (len(group) - per_slice) / len(group)
    if kind == "collective-permute":
        return per_slice * whole
    return sent_bytes(kind, int(whole), slices)


@functools.lru_cache(maxsize=1024)
def _shared(wire: Wire, kind: str, groups: Groups) -> float:
    topology = wire.topology
    return 0.0 if topology is None else seconds_per_byte(topology, wire.devices, kind, groups)


@functools.lru_cache(maxsize=1024)
def bandwidth_of(wire: Wire, groups: Groups) -> tuple[str, float]:
    """The network a group uses and the bytes per second one of its devices can send on it.

    The best case, so that times are lower bounds: no other group uses its links, and every torus
    dimension that it extends along gives two if it closes to a ring, else one.

    Args:
        wire: The mesh.
        groups: Who talks to whom; the first group stands for all.
    """
    topology = wire.topology
    if topology is None or not wire.devices:
        return "ICI", 0.0
    members = [wire.devices[i] for i in groups[0]]
    if len({d.slice_index for d in members}) > 1:
        # the devices of one slice share the work of a collective between slices
        per_slice = len(members) / len({d.slice_index for d in members})
        return "DCN", topology.dcn_bandwidth * per_slice
    links = 0
    for axis, side in enumerate(topology.shape):
        along = len({d.coords[axis] for d in members})
        if along > 1:
            links += 2 if along == side and topology.wraps(axis) else 1
    if not links:
        return "ICI", _ON_CHIP_LINKS * topology.link_bandwidth
    cores = len({d.core_on_chip for d in members})
    return "ICI", links * topology.link_bandwidth * cores / topology.chip.devices
