"""The torus of a mesh: which chips exchange along an axis, and over which links."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_tpu_dist.hardware.topology import of_devices

# Along x, y and z.
Place = tuple[int, ...]
# Two chips, and whether the link between them closes a ring.
Link = tuple[Place, Place, bool]


@dataclass(frozen=True)
class Torus:
    """Chips of a slice, and the devices of a mesh on them.

    Args:
        rings: For every side, whether its links close to a ring.
        places: For every device of the mesh, in the mesh's order: slice, x, y, z, and core.
    """

    name: str
    sides: Place
    rings: tuple[bool, ...]
    slices: int
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "Torus | None":
        """The torus of a mesh's devices.

        Returns:
            The torus; `None` if the devices are not a whole slice of TPU chips.
        """
        topology = of_devices(devices)
        if topology is None:
            return None
        sides = (*topology.shape, 1, 1)[:3]
        rings = [topology.wraps(d) for d in range(len(topology.shape))]
        places = tuple(
            (getattr(d, "slice_index", None) or 0, *(*d.coords, 0, 0)[:3], d.core_on_chip)
            for d in devices
        )
        return cls(
            topology.name,
            sides,
            (*rings, False, False)[:3],
            topology.num_slices,
            places,
        )

    def groups(self, mesh: Sequence[tuple[str, int]], axes: Iterable[str]) -> list[list[int]]:
        """Groups of devices that exchange with one another.

        Args:
            axes: The axes along which they exchange; a part of an axis counts as the whole axis.

        Returns:
            The numbers of the devices in every group, for the first slice only.
        """
        along = {name.removesuffix(" (part)") for name in axes}
        kept = [n for n, (name, _) in enumerate(mesh) if name not in along]
        moved = [n for n, (name, _) in enumerate(mesh) if name in along]
        sizes = [size for _, size in mesh]
        ids = np.arange(math.prod(sizes)).reshape(sizes).transpose([*kept, *moved])
        rows = ids.reshape(math.prod(sizes[n] for n in kept), -1).tolist()
        first = [[i for i in row if self.places[i][0] == 0] for row in rows]
        return [row for row in first if row]

    def links(self, group: Iterable[int]) -> Iterator[Link]:
        """The links between chips of a group in the same row of the torus."""
        chips = {self.places[i][1:4] for i in group}
        for side in range(3):
            rows: dict[tuple, list[int]] = {}
            for chip in chips:
                rows.setdefault(chip[:side] + chip[side + 1 :], []).append(chip[side])
            for others, along in rows.items():
                ring = len(along) == self.sides[side] and self.rings[side]
                yield from _row(others, side, range(min(along), max(along) + 1), ring)

    def all_links(self) -> Iterator[Link]:
        """Every link of a slice."""
        for side in range(3):
            others = [range(n) for d, n in enumerate(self.sides) if d != side]
            for rest in itertools.product(*others):
                yield from _row(rest, side, range(self.sides[side]), self.rings[side])


def _row(others: tuple, side: int, along: range, ring: bool) -> Iterator[Link]:
    chips = [(*others[:side], n, *others[side:]) for n in along]
    for one, next_one in itertools.pairwise(chips):
        yield one, next_one, False
    if ring and len(chips) > 2:
        yield chips[-1], chips[0], True
