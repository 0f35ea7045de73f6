"""The parts of arrays on every host, if every host writes its own checkpoint."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.checkpoint.manifest import Manifest, Saved

Index = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """The split of an array into a grid of cells, and the processes that hold them.

    Attributes:
        pieces: The number of pieces in every dimension.
        holders: For every cell, in row-major order, the processes that hold it.
    """

    pieces: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    def held_by(self, process: int) -> list[int]:
        """The cells that a process holds.

        Args:
            process: The process.
        """
        return [cell for cell, holders in enumerate(self.holders) if process in holders]

    def index(self, cell: int, shape: Sequence[int]) -> Index:
        """The start and end of a cell in every dimension.

        Args:
            cell: The cell.
            shape: The array's shape.

        Example:

        >>> Layout((2, 1), ((0,), (1,))).index(1, (6, 4))
        ((3, 6), (0, 4))
        """
        places = np.unravel_index(cell, self.pieces) if self.pieces else ()
        steps = [size // pieces for size, pieces in zip(shape, self.pieces)]
        return tuple((int(n) * step, (int(n) + 1) * step) for n, step in zip(places, steps))

    def cells_in(self, index: Index, shape: Sequence[int]) -> list[int]:
        """The cells that a part of the array overlaps.

        Args:
            index: The part.
            shape: The array's shape.
        """
        ranges = []
        for (start, stop), size, pieces in zip(index, shape, self.pieces):
            step = size // pieces
            ranges.append(range(start // step, -(-stop // step)) if step else range(pieces))
        return [_row_major(places, self.pieces) for places in itertools.product(*ranges)]


def _row_major(places: Iterable[int], pieces: Iterable[int]) -> int:
    cell = 0
    for place, number in zip(places, pieces):
        cell = cell * number + place
    return cell


def layout_of(array: Any) -> Layout:
    """The layout of an array over processes.

    An array on the devices of only this process counts as an array that all processes hold.

    Args:
        array: A JAX or NumPy array.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return Layout((1,) * array.ndim, (tuple(range(jax.process_count())),))
    return _layout(array.sharding, array.shape)


@functools.lru_cache(maxsize=4096)
def _layout(sharding: Any, shape: tuple[int, ...]) -> Layout:
    holders: dict[Index, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(bounds(index, shape), set()).add(device.process_index)
    # Devices split every dimension evenly, so the distinct parts are the cells of a grid.
    pieces = tuple(len({index[axis] for index in holders}) for axis in range(len(shape)))
    return Layout(pieces, tuple(tuple(sorted(holders[index])) for index in sorted(holders)))


@functools.lru_cache(maxsize=4096)
def indices_by_process(sharding: Any, shape: tuple[int, ...]) -> dict[int, frozenset[Index]]:
    """The parts of an array on the devices of every process.

    Args:
        sharding: The array's sharding.
        shape: Its shape.
    """
    found: dict[int, set[Index]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(device.process_index, set()).add(bounds(index, shape))
    return {process: frozenset(indices) for process, indices in found.items()}


def bounds(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """Converts JAX's slices to pairs of numbers.

    Args:
        index: A slice for every dimension.
        shape: The array's shape.
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def own_shards(array: Any, layout: Layout) -> list[Any]:
    """The cells of an array that this process holds, in order, as arrays on a device.

    Args:
        array: The array.
        layout: Its layout.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return [array]
    shards = {bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    cells = layout.held_by(jax.process_index())
    return [shards[layout.index(cell, array.shape)] for cell in cells]


@dataclass(frozen=True)
class Parts:
    """The parts of a checkpoint that one process wrote.

    Attributes:
        process: The process.
        processes: The number of processes.
        layouts: The layouts of arrays.
        of: For every array, by key, the number of its layout.
        crc32: For every array, by key, the checksums of the cells that the process holds.
    """

    process: int
    processes: int
    layouts: tuple[Layout, ...]
    of: Mapping[str, int]
    crc32: Mapping[str, Sequence[int]]

    def layout(self, key: str) -> Layout:
        """The layout of an array.

        Args:
            key: Its key.
        """
        return self.layouts[self.of[key]]

    def own_cells(self, key: str) -> Mapping[int, int]:
        """The cells of an array that the process holds, with their positions among them.

        Args:
            key: The array's key.
        """
        return self._own_cells[self.of[key]]

    @functools.cached_property
    def _own_cells(self) -> list[dict[int, int]]:
        held = [layout.held_by(self.process) for layout in self.layouts]
        return [{cell: place for place, cell in enumerate(cells)} for cells in held]

    def covered_without(self, missing: Iterable[int]) -> bool:
        """Whether the remaining processes hold all cells.

        Args:
            missing: The missing processes.
        """
        gone = set(missing)
        sets = {holders for layout in self.layouts for holders in layout.holders}
        return all(not gone.issuperset(holders) for holders in sets)

    def to_json(self) -> dict[str, Any]:
        """Plain data, in which every set of processes appears once."""
        sets = list(dict.fromkeys(held for layout in self.layouts for held in layout.holders))
        number = {holders: i for i, holders in enumerate(sets)}
        return {
            "process": self.process,
            "processes": self.processes,
            "sets": [list(holders) for holders in sets],
            "layouts": [
                {"pieces": list(each.pieces), "holders": [number[held] for held in each.holders]}
                for each in self.layouts
            ],
            "of": dict(self.of),
            "crc32": {key: list(numbers) for key, numbers in self.crc32.items()},
        }


def parts_of(manifest: Manifest) -> Parts:
    """The parts in a manifest, checked: anybody may have written it.

    Args:
        manifest: The manifest.

    Raises:
        ValueError: If they are not valid data of `Parts.to_json`.
    """
    data = manifest.parts
    try:
        sets = [tuple(map(_count, holders)) for holders in data["sets"]]
        layouts = tuple(_checked_layout(each, sets) for each in data["layouts"])
        of = {str(key): _count(number) for key, number in data["of"].items()}
        crc32 = {str(key): [*map(_count, numbers)] for key, numbers in data["crc32"].items()}
        found = Parts(_count(data["process"]), _count(data["processes"]), layouts, of, crc32)
        saved = [each for kind in manifest.arrays.values() for each in kind]
        keys = [each.key for each in saved]
        _expect(len(set(keys)) == len(keys), keys)
        _expect(set(keys) == of.keys() == crc32.keys(), sorted(of))
        for each in saved:
            _check_array(found, each)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{_INVALID}: {error!r:.80}") from error
    return found


_INVALID = "its description of parts is invalid"


def _expect(right: bool, what: Any) -> None:
    if not right:
        raise ValueError(f"{_INVALID}: {what!r:.80}")


def _count(value: Any) -> int:
    _expect(type(value) is int and 0 <= value < 2**32, value)
    return value


def _checked_layout(data: Mapping[str, Any], sets: Sequence[tuple[int, ...]]) -> Layout:
    pieces = tuple(map(_count, data["pieces"]))
    holders = tuple(sets[_count(number)] for number in data["holders"])
    # The list in the file limits the number of cells, so a small file cannot cause much work.
    _expect(all(pieces) and math.prod(pieces) == len(holders) and all(holders), pieces)
    return Layout(pieces, holders)


def _check_array(parts: Parts, saved: Saved) -> None:
    key, shape = saved.key, saved.entry.shape
    layout = parts.layout(key)
    _expect(len(layout.pieces) == len(shape), key)
    _expect(not any(size % pieces for size, pieces in zip(shape, layout.pieces)), key)
    _expect(len(parts.crc32[key]) == len(parts.own_cells(key)), key)
