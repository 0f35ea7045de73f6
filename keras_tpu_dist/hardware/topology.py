"""TPU slices by name: shape, chips, memory, speeds, and devices that you need not own."""

import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.checks import checked_arguments, checked_constructor, is_count
from keras_tpu_dist.common.errors import did_you_mean, message, value_error
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.common.tensorflow_names import TensorFlowNames
from keras_tpu_dist.hardware.chips import CHIPS as CHIPS
from keras_tpu_dist.hardware.chips import Chip, of_kind, simulated_chip
from keras_tpu_dist.hardware.compile_only import CompileOnlyDevice

# No job has had more than 50. A mistyped number would describe millions of devices.
_MOST_SLICES = 1000


@functools.cache
def shapes(chip: Chip) -> frozenset[tuple[int, ...]]:
    """Every shape of a chip: the listed ones and, in three dimensions, whole cubes of 4x4x4."""
    found = set(chip.shapes)
    if chip.dims == 3:
        # v5p and tpu7x pods are not cubes; no side of either exceeds 36.
        sides = range(4, 37, 4)
        found |= {s for s in itertools.product(sides, repeat=3) if math.prod(s) <= chip.pod}
    return frozenset(found)


def listed_shapes(chip: Chip) -> list[tuple[int, ...]]:
    """One shape per number of chips: the most cubic one, sides ascending.

    Args:
        chip: The TPU generation.

    Returns:
        The shapes, smallest first, of the numbers of chips that are powers of two.
    """
    best: dict[int, tuple[int, ...]] = {}
    for shape in sorted(shapes(chip), key=lambda s: (max(s) - min(s), s)):
        chips, in_order = math.prod(shape), list(shape) == sorted(shape) or shape in chip.shapes
        if in_order and chips & (chips - 1) == 0:
            best.setdefault(chips, shape)
    return [best[n] for n in sorted(best)]


def checked_slices(slices: Any, chip: Chip, name: object) -> int:
    """Checks a number of slices for a chip.

    Args:
        slices: The number.
        chip: The TPU generation.
        name: The slice's name as given.
    """
    counted = is_count(slices, 1) and slices <= _MOST_SLICES
    if not counted or (slices > 1 and not chip.dcn_bandwidth):
        raise value_error(
            f"The number of slices must be at least 1, at most {_MOST_SLICES}, and 1 on TPU v2 "
            "and v3, which cannot be joined over the data-centre network.",
            received={"topology": str(name), "num_slices": slices},
            fix="Write num_slices=1, or a v4 or later chip.",
        )
    return operator.index(slices)


_CHIP_BY_SPELLING = {alias: c for c in CHIPS.values() for alias in (c.name, *c.aliases)}
# "v5e:4x4", "v5e-4x4", "v5litepod-16", "v4:2x2x1"; "4*v5e:16x16" joins four slices.
_NAME = re.compile(
    r"(?:(?P<slices>\d+)\s*[*]\s*)?(?P<chip>[a-z0-9]+)[:-](?P<size>\d+(?:x\d+){0,2})"
)
_LONGEST_NAME = 100


@checked_constructor
@dataclass(frozen=True, repr=False)
class Topology(Printed, TensorFlowNames):
    """A TPU slice, or several slices of one kind joined by the data-centre network.

    Create one with `Topology.parse` from a name, or with `Topology.attached` from the attached
    devices.

    Args:
        chip: The TPU generation.
        shape: Chips along the sides of the torus, `(x, y)` or `(x, y, z)`; `(n,)` for the line of
            simulated devices.
        num_slices: Number of such slices.
        given_chips_per_host: Chips of one host if they are not Google's usual ones, or `None`.

    Example:

    >>> from keras_tpu_dist.hardware.topology import Topology
    >>> pod = Topology.parse("v5litepod-256")
    >>> pod.name, pod.num_chips, pod.num_hosts
    ('v5e:16x16', 256, 64)
    >>> len(pod.devices())
    256
    """

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1
    given_chips_per_host: int | None = None
    _attached: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self):
        shape = isinstance(self.shape, tuple) and 1 <= len(self.shape) <= 3
        sides = shape and all(is_count(side, 1) for side in self.shape)
        hosts = self.given_chips_per_host
        counted = is_count(self.num_slices, 1) and (hosts is None or is_count(hosts, 1))
        if not (isinstance(self.chip, Chip) and sides and counted):
            raise value_error(
                "A slice has a chip, and counts for its shape, slices and chips per host.",
                received={"chip": self.chip, "shape": self.shape}
                | {"num_slices": self.num_slices, "given_chips_per_host": hosts},
                fix='Create one by name: Topology.parse("v5e:4x4").',
            )

    @classmethod
    def attached(cls, devices: Sequence[Any] | None = None) -> "Topology":
        """The slice that devices form: a torus of TPU chips, or a line of simulated devices.

        Args:
            devices: The devices of whole slices. Defaults to `jax.devices()`.

        Returns:
            The `Topology`; its `devices()` are these, in torus order.

        Raises:
            ValueError: If the devices are only part of a slice, so that its torus is unknown.

        Example:

        >>> import jax
        >>> here = Topology.attached()
        >>> here.num_devices == len(here.devices()) == len(jax.devices())
        True
        """
        found = _listed(jax.devices() if devices is None else devices)
        topology = of_devices(found) if found else None
        is_tpu = bool(found) and found[0].platform == "tpu"
        if not found or (is_tpu and topology is None):
            raise value_error(
                "The torus is only known from the devices of whole slices.",
                received={"devices": found},
                fix="Pass all devices of the slice, or choose the order yourself with "
                "DeviceAssignment.from_order.",
            )
        if topology is None:
            hosts = len({device.process_index for device in found})
            chip = simulated_chip(
                found[0].platform, found[0].device_kind, max(1, len(found) // hosts)
            )
            return cls(chip, (len(found),), _attached=tuple(found))
        return replace(topology, _attached=tuple(sorted(found, key=_torus_order)))

    def stood_in_by(self, devices: Sequence[Any]) -> "Topology":
        """This slice with other devices in place of its own, so that a laptop can run its
        assignments.

        Args:
            devices: As many devices as the slice has, such as simulated ones. The first one
                replaces the device at the origin, the next its neighbour along x.

        Returns:
            The `Topology`, whose `devices()` are these.

        Raises:
            ValueError: If their number is not that of the slice.
        """
        devices = _listed(devices)
        if len(devices) != self.num_devices:
            raise value_error(
                "The devices must be as many as the slice has.",
                received={"topology": self.name, "of": self.num_devices, "got": len(devices)},
                fix=f"Pass {self.num_devices} devices, for example after "
                f"keras_tpu_dist.simulate({self.num_devices}).",
            )
        return replace(self, _attached=tuple(devices))

    @property
    def is_described(self) -> bool:
        """Whether the slice has no chips attached: you can compile for its devices, not run on
        them."""
        return not self._attached

    @classmethod
    def parse(
        cls,
        name: "str | Topology",
        *,
        num_slices: int | None = None,
        chips_per_host: int | None = None,
    ) -> "Topology":
        """Parses a slice's name, in any of the usual spellings.

        Args:
            name: `"v5e:4x4"` (shape in chips), or an accelerator type: `"v5litepod-16"`, `"v5e-16"`
                and `"v6e-256"` count chips, `"v4-8"`, `"v5p-128"`, `"v3-32"` and `"tpu7x-8"` count
                TensorCores, as Google's names do. `"4*v5e:16x16"` joins four slices.
            num_slices: Number of slices, instead of the prefix.
            chips_per_host: Chips of one host, if they are not Google's usual ones: v5e and v6e
                slices of up to 8 chips are one host, all other hosts have 4 chips. Eight v5e chips
                in two machines of 4 are `Topology.parse("v5e-8", chips_per_host=4)`.
        Returns:
            The `Topology`.

        Raises:
            ValueError: If the name, the chip or the shape is unknown, or no host of this slice can
                have this number of chips.

        Example:

        >>> from keras_tpu_dist.hardware.topology import Topology
        >>> str(Topology.parse("v5p-128"))
        'v5p:4x4x4'
        """
        if isinstance(name, Topology):
            if num_slices in (None, name.num_slices) and chips_per_host is None:
                return name
            slices = name.num_slices if num_slices is None else num_slices
            hosts = name.given_chips_per_host if chips_per_host is None else chips_per_host
            slices = checked_slices(slices, name.chip, name)
            return cls(name.chip, name.shape, slices, _checked_host(hosts, name.shape, name))
        text = str(name).strip().lower() if isinstance(name, str) else ""
        match = _NAME.fullmatch(text) if len(text) <= _LONGEST_NAME else None
        if match is None:
            raise ValueError(_unknown(name))
        chip = _CHIP_BY_SPELLING.get(match["chip"])
        if chip is None:
            raise ValueError(_unknown(name))
        size = tuple(int(n) for n in match["size"].split("x"))
        shape = _shape_of_size(chip, size[0], name) if len(size) == 1 else size
        if shape not in shapes(chip):
            raise ValueError(_unknown(name, chip))
        slices = int(match["slices"] or 1) if num_slices is None else num_slices
        per_host = _checked_host(chips_per_host, shape, name)
        return cls(chip, shape, checked_slices(slices, chip, name), per_host)

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads back."""
        prefix = f"{self.num_slices}*" if self.num_slices > 1 else ""
        return f"{prefix}{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def names(self) -> str:
        """Both spellings, `"v5e-8 (v5e:2x4)"`; the name alone if there is no accelerator type."""
        counted = self.chip.cores if self.chip.counts == "cores" else 1
        usual = listed_shapes(self.chip)
        if self.num_slices > 1 or self.shape not in usual:
            return self.name
        return f"{self.chip.name}-{math.prod(self.shape) * counted} ({self.name})"

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.num_slices

    @property
    def num_devices(self) -> int:
        """JAX devices of all slices: chips, or TensorCores if those are separate devices."""
        return self.num_chips * self.chip.devices

    @property
    def chips_per_host(self) -> int:
        """Chips attached to one host.

        References:
            - docs.cloud.google.com/tpu/docs/v5e and .../v6e: machine types with 1, 4 and 8 chips,
              those with 8 for slices of one host
        """
        if self.given_chips_per_host is not None:
            return self.given_chips_per_host
        chips = math.prod(self.shape)
        return chips if chips <= self.chip.one_host_chips else self.chip.chips_per_host

    @property
    def num_hosts(self) -> int:
        """Hosts of all slices, in hosts of `chips_per_host` chips."""
        return self.num_chips // self.chips_per_host

    @property
    def hbm_bytes(self) -> int:
        """The HBM of one JAX device that the compiler may use."""
        return self.chip.device_hbm_bytes

    @property
    def hbm_bandwidth(self) -> float:
        """HBM bytes per second of one JAX device."""
        return self.chip.hbm_bandwidth / self.chip.devices

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second of one inter-chip link, in one direction."""
        return self.chip.link_bandwidth

    @property
    def dcn_bandwidth(self) -> float:
        """Bytes per second that one JAX device can send to other slices."""
        return self.chip.dcn_bandwidth / self.chip.devices

    @checked_arguments
    def peak_flops(self, dtype: str = "bfloat16") -> float:
        """Peak operations per second of one JAX device.

        A dtype without its own rate runs at that of bfloat16: the TPU compiler multiplies float32
        operands in bfloat16 unless an option changes that.

        Args:
            dtype: The operands' dtype: `"bfloat16"`, or `"int8"` or `"float8"` if the chip has it.
        """
        rates = dict(self.chip.flops)
        return rates.get(dtype, rates["bfloat16"]) / self.chip.devices

    def wraps(self, axis: int) -> bool:
        """Whether the torus closes along dimension `axis`.

        Two-dimensional slices close along sides of 16 (v2 and v3: 16 or 32). Three-dimensional
        slices close along all sides if they consist of cubes of 4x4x4, which switches join; smaller
        ones are open lines.

        Args:
            axis: The dimension, from 0: x, y, z.

        References:
            - "How to Scale Your Model", chapter 2, jax-ml.github.io/scaling-book/tpus
            - "All 4x4x4 and larger slices (one cube) have full 3D torus",
              docs.cloud.google.com/tpu/docs/v5p
        """
        if not is_count(axis, 0) or axis >= len(self.shape):
            raise value_error(
                f"A dimension of {self.name} is a number below {len(self.shape)}.",
                received={"axis": axis},
                fix="Write 0 for x, 1 for y, 2 for z.",
            )
        side = self.shape[axis]
        if self.chip.dims == 1:
            return False
        return side >= 16 if self.chip.dims == 2 else all(n % 4 == 0 for n in self.shape)

    def coordinates(self) -> list[tuple[int, int, int]]:
        """Chip coordinates `(x, y, z)` of one slice, x fastest."""
        x, y, z = (*self.shape, 1, 1)[:3]
        return [(i, j, k) for k, j, i in itertools.product(range(z), range(y), range(x))]

    def devices(self) -> list[Any]:
        """The devices of the slice, in torus order (x fastest, then y, z, slice).

        If the slice has no chips attached, you can use the devices for `jax.sharding.Mesh`,
        lowering and dry runs, but they cannot hold data.

        Returns:
            A list of `num_devices` `CompileOnlyDevice`, or of the attached devices.
        """
        return list(self._attached or _devices(self))

    def libtpu_arguments(self) -> dict[str, object]:
        """Arguments of `jax.experimental.topologies.get_topology_desc` for this slice."""
        arguments: dict[str, object] = {
            "platform": "tpu",
            "topology_name": f"{self.chip.name}:{'x'.join(map(str, self.shape))}",
        }
        if self.chip.devices < self.chip.cores:
            arguments["chip_config_name"] = "megacore"
        if math.prod(self.shape) == 1:
            arguments["chips_per_host_bounds"] = [1, 1, 1]
        if self.num_slices > 1:
            arguments["num_slices"] = self.num_slices
        return arguments

    def to_dict(self) -> dict[str, object]:
        """The slice as plain data."""
        return {
            "name": self.name,
            "chip": self.chip.name,
            "shape": list(self.shape),
            "num_slices": self.num_slices,
            "num_chips": self.num_chips,
            "num_devices": self.num_devices,
            "num_hosts": self.num_hosts,
            "hbm_bytes": self.hbm_bytes,
            "peak_flops": self.peak_flops(),
            "hbm_bandwidth": self.hbm_bandwidth,
            "link_bandwidth": self.link_bandwidth,
        }

    def __str__(self) -> str:
        return self.name


def _listed(devices: Any) -> list[Any]:
    listed = isinstance(devices, Iterable) and not isinstance(devices, str)
    found = list(devices) if listed else []
    if not listed or not all(hasattr(device, "device_kind") for device in found):
        raise value_error(
            "The devices of a slice are a list of jax.Device objects.",
            received={"devices": devices},
            fix="Pass for example jax.devices().",
        )
    return found


def devices(name: str | Topology) -> list[CompileOnlyDevice]:
    """The described devices of a slice, by name.

    See `Topology.parse` and `Topology.devices`.
    """
    return Topology.parse(name).devices()


def of_devices(mesh_devices: object) -> Topology | None:
    """The slice that devices belong to, if they are a whole slice of known TPU devices.

    Args:
        mesh_devices: An iterable or array of JAX devices or `CompileOnlyDevice`.

    Returns:
        The `Topology`, or `None` if the devices are not TPUs or only part of a slice.
    """
    found = list(np.asarray(mesh_devices, dtype=object).flat)
    chip = of_kind(found[0].device_kind)
    if chip is None:
        return None
    sides = tuple(max(d.coords[i] for d in found) + 1 for i in range(3))
    slices = len({getattr(d, "slice_index", 0) for d in found})
    topology = Topology(chip, sides[: chip.dims], slices)
    if topology.num_devices != len(found):
        return None
    per_host = max(1, topology.num_chips // len({d.process_index for d in found}))
    usual = per_host == topology.chips_per_host
    return topology if usual else replace(topology, given_chips_per_host=per_host)


def all_names() -> list[str]:
    """Canonical names of every slice with an accelerator type, chip by chip, smallest first."""
    return [Topology(chip, shape).name for chip in CHIPS.values() for shape in listed_shapes(chip)]


@functools.lru_cache(maxsize=32)
def _devices(topology: Topology) -> tuple[CompileOnlyDevice, ...]:
    return tuple(_describe(topology))


def _torus_order(device: Any) -> tuple[int, ...]:
    x, y, z = (*device.coords, 0, 0)[:3]
    return (getattr(device, "slice_index", None) or 0, z, y, x, device.core_on_chip)


def _describe(topology: Topology) -> Iterator[CompileOnlyDevice]:
    chip = topology.chip
    hosts_per_slice = topology.num_hosts // topology.num_slices
    # libtpu puts the 2x2 chips of a plane on one host, hosts in torus order.
    block = topology.shape[:2] if hosts_per_slice == 1 else _HOST_BLOCKS[topology.chips_per_host]
    hosts_x, hosts_y = (
        max(1, side // of) for side, of in zip(topology.shape[:2], block, strict=True)
    )
    for slice_index in range(topology.num_slices):
        # joined slices number their devices from 100000, 200000, ..., as libtpu does
        first_id = 100_000 * (slice_index + 1) if topology.num_slices > 1 else 0
        for position, (x, y, z) in enumerate(topology.coordinates()):
            host = x // block[0] + hosts_x * (y // block[1] + hosts_y * z)
            host = 0 if hosts_per_slice == 1 else host
            for core in range(chip.devices):
                yield CompileOnlyDevice(
                    id=first_id + position * chip.devices + core,
                    process_index=host + slice_index * hosts_per_slice,
                    coords=(x, y, z),
                    core_on_chip=core,
                    device_kind=chip.device_kind,
                    slice_index=slice_index,
                )


# Chips of one host in the x-y plane of a slice with several hosts.
_HOST_BLOCKS = {1: (1, 1), 4: (2, 2)}


def _checked_host(chips: Any, shape: tuple[int, ...], name: object) -> int | None:
    whole = math.prod(shape)
    if chips is None or (is_count(chips, 1) and chips == whole):
        return chips
    block = _HOST_BLOCKS.get(chips) if is_count(chips, 1) else None
    if block is None or any(side % of for side, of in zip(shape[:2], block, strict=True)):
        fitting = sorted({1, 4 if all(side % 2 == 0 for side in shape[:2]) else 1, whole})
        raise value_error(
            "A host of a slice has 1 or 4 chips, unless the slice has only one host.",
            received={"topology": str(name), "chips_per_host": chips},
            fix=f"Write chips_per_host= one of {', '.join(map(str, fitting))}, or leave it out.",
        )
    return chips


def _shape_of_size(chip: Chip, size: int, name: object) -> tuple[int, ...]:
    """The shape of an accelerator type such as `v4-8`: the most cubic one with that many chips."""
    chips, rest = divmod(size, chip.cores) if chip.counts == "cores" else (size, 0)
    fitting = [s for s in shapes(chip) if math.prod(s) == chips and not rest]
    if not fitting:
        raise ValueError(_unknown(name, chip))
    return min(fitting, key=lambda s: (max(s) - min(s), s))


def _unknown(name: object, chip: Chip | None = None) -> str:
    """The message for a slice that does not exist: the nearest name comes first."""
    chips = [chip] if chip else list(CHIPS.values())
    known = [Topology(c, shape).name for c in chips for shape in listed_shapes(c)]
    types = [
        f"{alias}-{math.prod(shape) * (c.cores if c.counts == 'cores' else 1)}"
        for c in chips
        for shape in listed_shapes(c)
        for alias in (c.name, *c.aliases)
    ]
    hint = did_you_mean(str(name)[:_LONGEST_NAME], [*known, *types]).strip()
    cubes = ", or any sides that are multiples of 4" if chip and chip.dims == 3 else ""
    slices = f"Use one of: {', '.join(known)}{cubes}" if chip else f"Use one of {', '.join(CHIPS)}"
    return message(
        f"{hint} The topology must be a TPU slice that exists.".strip(),
        received={"topology": name if len(str(name)) <= _LONGEST_NAME else f"{name!r:.80}..."},
        fix=f"{slices}{'' if chip else ' with a shape, such as v5e:4x4'}; or an accelerator type "
        "such as 'v5litepod-16' or 'v4-8'. `ktd topologies` lists them.",
    )
