"""Which devices of a slice form a replica: contiguous blocks of the torus."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_tpu_dist.common.checks import checked_arguments, checked_constructor, is_count
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.common.tensorflow_names import TensorFlowNames
from keras_tpu_dist.hardware.topology import Topology

_SHAPES_NAMED = 12
_REPLICAS_SHOWN = 16


@checked_constructor
@dataclass(frozen=True, repr=False)
class DeviceAssignment(Printed, TensorFlowNames):
    """Maps the logical devices of every replica to the devices of a slice.

    Create one with `DeviceAssignment.build` or `DeviceAssignment.from_order`, and pass it as
    `TPUStrategy(mesh=...)`. The batch is then split over the replicas. The logical devices 0, 1,
    ... of a replica share its work by `strategy.split_to_logical_devices`,
    `strategy.assign_to_logical_device`, or layouts over the axis `"logical"`.

    Args:
        topology: The slice.
        order: For every replica, the positions of its logical devices in `topology.devices()`.
        block: `(x, y, z, cores)` of a replica's block, or `None` for a custom order.

    References:
        - tensorflow.org/api_docs/python/tf/tpu/experimental/DeviceAssignment, which has the same
          terms.

    Example:

    >>> print(DeviceAssignment.build("v5e:2x4", computation_shape=(2, 2)))
    2 replica(s) of 4 logical device(s) on v5e:2x4, each a block of 2x2
      replica 0 on host 0: (0,0,0,0) (0,1,0,0) (1,0,0,0) (1,1,0,0)
      replica 1 on host 0: (0,2,0,0) (0,3,0,0) (1,2,0,0) (1,3,0,0)
    """

    topology: Topology
    order: tuple[tuple[int, ...], ...]
    block: tuple[int, int, int, int] | None = None

    def __post_init__(self):
        order = self.order
        rows = isinstance(order, tuple) and len(order) > 0
        rows = rows and all(isinstance(row, tuple) and len(row) > 0 for row in order)
        counts = rows and all(is_count(place, 0) for row in order for place in row)
        if not (isinstance(self.topology, Topology) and counts):
            raise value_error(
                "An assignment needs a slice, and an order with the positions of the devices "
                "of "
                "every replica.",
                received={"topology": self.topology, "order": order},
                fix="Create one with DeviceAssignment.build or DeviceAssignment.from_order.",
            )

    @classmethod
    @checked_arguments
    def build(
        cls,
        topology: Topology | str | Sequence[Any] | None = None,
        computation_shape: Sequence[int] | None = None,
        num_replicas: int | None = None,
    ) -> "DeviceAssignment":
        """Divides a slice into equal blocks of neighbours, one for every replica.

        Replicas are numbered along the torus, x fastest, then y, z and slice. In a block the
        logical devices are in row-major order of `(x, y, z, core)`. So if `partition_dimensions`
        has the shape of the block, neighbouring parts are on neighbouring chips.

        Args:
            topology: A `Topology`; a slice's name, for a slice without its chips; or devices.
                Defaults to the attached devices. Devices other than TPUs have no coordinates and
                form a line.
            computation_shape: The chips of one replica along x, y and, if the torus has it, z. If a
                chip has two devices (v2, v3, tpu7x), one more entry says how many of them; by
                default, all. `(x, y, z, cores)` works on every chip. `None`: one device.
            num_replicas: How many of the blocks to use, from the first. Defaults to all of them.

        Returns:
            The `DeviceAssignment`.

        Raises:
            ValueError: If the shape has another number of entries, is not positive or does not tile
                the slice, or if there are fewer blocks than replicas.

        Example:

        >>> pairs = DeviceAssignment.build("v5e:2x4", computation_shape=(1, 2))
        >>> pairs.num_replicas, pairs.num_cores_per_replica
        (4, 2)
        >>> pairs.coordinates(replica=1, logical_core=1)
        (1, 1, 0, 0)
        """
        chosen = _topology(topology)
        block = _checked_block(chosen, computation_shape)
        rows = _blocks(chosen, block)
        wanted = len(rows) if num_replicas is None else num_replicas
        if not is_count(wanted, 1) or wanted > len(rows):
            raise value_error(
                f"{chosen} holds {len(rows)} blocks of {_text(_written(chosen, block))}.",
                received={"num_replicas": num_replicas},
                fix=f"Ask for 1 to {len(rows)} replicas, or for smaller blocks.",
            )
        return cls(chosen, tuple(tuple(map(int, row)) for row in rows[:wanted]), block)

    @classmethod
    def from_order(
        cls, order: Any, topology: Topology | str | Sequence[Any] | None = None
    ) -> "DeviceAssignment":
        """Creates an assignment from the replicas as you list them.

        Args:
            order: `(replicas, logical devices)` of devices or of their ids, or
                `(replicas, logical devices, 4)` of coordinates `(x, y, z, core)`.
            topology: As in `build`.

        Returns:
            The `DeviceAssignment`.

        Raises:
            ValueError: If the replicas differ in size, or a device is unknown or occurs twice.

        Example:

        >>> crossed = DeviceAssignment.from_order([[0, 3], [1, 2]], "v5e:2x2")
        >>> crossed.coordinates(replica=0, logical_core=1)
        (1, 1, 0, 0)
        """
        chosen = _topology(topology)
        rows = [list(row) if _is_list(row) else row for row in order] if _is_list(order) else []
        lengths = [len(row) if isinstance(row, list) else "no list" for row in rows]
        if not rows or lengths[0] in (0, "no list") or len(set(lengths)) > 1:
            raise value_error(
                "An order has the same number of devices for every replica, at least one.",
                received={"devices per replica": lengths},
                fix="Write for example [[0, 1], [2, 3]].",
            )
        places = _places_by_name(chosen)
        found = [[_place(entry, places, chosen) for entry in row] for row in rows]
        flat = list(itertools.chain.from_iterable(found))
        twice = sorted({place for place in flat if flat.count(place) > 1})
        if twice:
            raise value_error(
                "A device can occur in an order only once.",
                received={"twice": [chosen.devices()[place] for place in twice]},
                fix="Name every device once.",
            )
        return cls(chosen, tuple(map(tuple, found)))

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.order)

    @property
    def num_cores_per_replica(self) -> int:
        """The number of logical devices in a replica."""
        return len(self.order[0])

    @property
    def computation_shape(self) -> tuple[int, ...] | None:
        """The chips of a replica's block, and the devices of a chip if it has two."""
        if self.block is None:
            return None
        return _written(self.topology, self.block)

    @property
    def core_assignment(self) -> np.ndarray:
        """Coordinates, `(replicas, logical devices, 4)` of `(x, y, z, core)`."""
        return _coordinates(self.topology)[np.array(self.order)][..., 1:]

    @property
    def devices(self) -> np.ndarray:
        """The devices, `(replicas, logical devices)`."""
        everything = self.topology.devices()
        grid = np.empty((self.num_replicas, self.num_cores_per_replica), dtype=object)
        for index, place in np.ndenumerate(np.array(self.order)):
            grid[index] = everything[place]
        return grid

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """`(x, y, z, core)` of a logical device.

        Args:
            replica: The replica, counted from 0.
            logical_core: The logical device, counted from 0 within its replica.

        Raises:
            ValueError: If there is no such replica or logical device.
        """
        self._check(replica, logical_core)
        return tuple(map(int, self.core_assignment[replica, logical_core]))

    @checked_arguments
    def tpu_device(self, replica: int = 0, logical_core: int = 0) -> Any:
        """The JAX device of a logical device. See `coordinates`."""
        self._check(replica, logical_core)
        return self.topology.devices()[self.order[replica][logical_core]]

    def __str__(self) -> str:
        shape = self.computation_shape
        blocks = "" if shape is None else f", each a block of {_text(shape)}"
        lines = [
            f"{self.num_replicas} replica(s) of {self.num_cores_per_replica} logical device(s) "
            f"on {self.topology}{blocks}"
        ]
        for replica, row in enumerate(self.core_assignment[:_REPLICAS_SHOWN]):
            places = " ".join(f"({','.join(map(str, place))})" for place in row)
            processes = {device.process_index for device in self.devices[replica]}
            hosts = ", ".join(map(str, sorted(processes)))
            lines.append(f"  replica {replica} on host {hosts}: {places}")
        if self.num_replicas > _REPLICAS_SHOWN:
            lines.append(f"  and {self.num_replicas - _REPLICAS_SHOWN} more")
        return "\n".join(lines)

    def _check(self, replica: int, logical_core: int) -> None:
        known = is_count(replica, 0) and is_count(logical_core, 0)
        if not known or not (
            replica < self.num_replicas and logical_core < self.num_cores_per_replica
        ):
            raise value_error(
                "Logical devices are counted from 0 within their replica.",
                received={"replica": replica, "logical_core": logical_core},
                fix=f"There are replicas 0 to {self.num_replicas - 1} with logical devices 0 "
                f"to {self.num_cores_per_replica - 1}.",
            )


def _topology(given: Topology | str | Sequence[Any] | None) -> Topology:
    if isinstance(given, Topology | str):
        return Topology.parse(given)
    return Topology.attached(given)


def _sides(topology: Topology) -> tuple[int, int, int, int]:
    x, y, z = (*topology.shape, 1, 1)[:3]
    return (x, y, z, topology.chip.devices)


def _coordinates(topology: Topology) -> np.ndarray:
    """`(devices, 5)` of `(slice, x, y, z, core)`, in the order of `topology.devices()`."""
    x, y, z, cores = _sides(topology)
    slices, k, j, i, core = np.indices((topology.num_slices, z, y, x, cores))
    return np.stack([slices, i, j, k, core], axis=-1).reshape(-1, 5)


def _checked_block(topology: Topology, shape: Sequence[int] | None) -> tuple[int, int, int, int]:
    dims, per_chip = topology.chip.dims, topology.chip.devices
    entries = (1, 1, 1, 1) if shape is None else tuple(shape) if _is_list(shape) else ()
    counted = all(is_count(n, 1) for n in entries)
    if len(entries) not in (dims, dims + 1, 4) or not counted:
        names = ("x", "y", "z")[:dims]
        raise value_error(
            f"A computation shape on {topology} is ({', '.join(names)}) in chips, optionally "
            f"followed "
            "by the cores of a chip, all positive.",
            received={"computation_shape": shape},
            fix=f"Write for example computation_shape={_tiling(topology)[0]}.",
        )
    entries = tuple(map(int, entries))
    chips, cores = entries[:3], entries[3:]
    if len(entries) != 4:
        chips = (*entries[:dims], 1, 1)[:3]
        cores = entries[dims:] or (per_chip,)
    block = (chips[0], chips[1], chips[2], cores[0])
    if any(side % part for side, part in zip(_sides(topology), block, strict=True)):
        near = _tiling(topology, math.prod(block))
        raise value_error(
            "Blocks must tile the slice: each side of it must be a multiple of the block's.",
            received={"topology": topology.name, "computation_shape": shape},
            fix=f"Use one of: {', '.join(map(str, near))}.",
        )
    return block


def _tiling(topology: Topology, size: int | None = None) -> list[tuple[int, ...]]:
    """Shapes that tile, those with this number of devices first, then the nearest ones."""
    sides = _sides(topology)
    parts = [[n for n in range(1, side + 1) if side % n == 0] for side in sides]
    blocks = list(itertools.product(*parts))
    if size is not None:
        blocks.sort(key=lambda b: abs(math.log(math.prod(b) / size)))
    return [_written(topology, block) for block in blocks[:_SHAPES_NAMED]]


def _written(topology: Topology, block: tuple[int, ...]) -> tuple[int, ...]:
    """A block as users write it: with cores only if a chip has two."""
    return block[: topology.chip.dims] + (block[3:] if topology.chip.devices > 1 else ())


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _blocks(topology: Topology, block: tuple[int, int, int, int]) -> np.ndarray:
    """`(blocks, devices of a block)`: positions in the order of `topology.devices()`."""
    x, y, z, cores = _sides(topology)
    i, j, k, core = block
    grid = np.arange(topology.num_devices).reshape(
        topology.num_slices, z // k, k, y // j, j, x // i, i, cores // core, core
    )
    # slice, then the blocks along z, y, x and core; within one x, y, z, core: the last runs fastest
    return grid.transpose(0, 1, 3, 5, 7, 6, 4, 2, 8).reshape(-1, math.prod(block))


def _places_by_name(topology: Topology) -> dict[Any, int]:
    """Maps a device, its id or its coordinates to its position."""
    places: dict[Any, int] = {}
    for position, device in enumerate(topology.devices()):
        places[device] = places[int(device.id)] = position
        if topology.num_slices == 1:
            places[tuple(map(int, _coordinates(topology)[position][1:]))] = position
    return places


def _place(entry: Any, places: dict[Any, int], topology: Topology) -> int:
    try:
        if _is_list(entry):
            return places[tuple(map(int, entry))]
        return places[int(entry) if isinstance(entry, np.integer) else entry]
    except (KeyError, TypeError, ValueError):
        raise value_error(
            f"Every device of an order must be one of {topology}.",
            received={"device": entry},
            fix="Use devices, their ids, or coordinates (x, y, z, core) of one slice.",
        ) from None


def _is_list(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str)


def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors of a number, ascending; `(1,)` for 1: 12 has `(2, 2, 3)`.

    Args:
        number: A positive integer.
    """
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors) or (1,)
