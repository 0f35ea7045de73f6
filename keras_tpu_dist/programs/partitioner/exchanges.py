"""Finds exchanges of a partitioned program within branches that only some devices take."""

import contextvars
import functools
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from keras_tpu_dist.common.setting import setting

# The scope around a branch that one logical device takes; see `keras_tpu_dist.logical.assign`.
ONE_DEVICE = "on_one_device"

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_BRANCH = re.compile(rf" conditional\(.*op_name=\"[^\"]*{ONE_DEVICE}/cond\"")
_NAME = re.compile(r"%([\w.-]+)")
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-broadcast|ragged-all-to-all|"
    r"collective-permute|send|recv)(?:-start)?\("
)
# [2,4]<=[4,2]T(1,0): groups of devices, as the rows of a table of all
_TABLE = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"replica_groups=\{(\{[\d,{}]+\})\}")
# mesh['data'=4,'logical'=2] {'data'}
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'=(\d+)")


_whole_rows: contextvars.ContextVar[bool] = contextvars.ContextVar("whole_rows", default=False)


def rows_are_whole() -> bool:
    """Whether branches that only some devices take have all rows on every device.

    Their `shard_map` is then over all axes, so the partitioner exchanges nothing in it.
    """
    return _whole_rows.get()


def with_whole_rows(function: Callable) -> Callable:
    """A function whose branches have whole rows."""

    @functools.wraps(function)
    def whole(*args):
        with setting(_whole_rows, True):
            return function(*args)

    return whole


def exchanged_in_branches(text: str, sizes: Mapping[str, int], taken: frozenset[str]) -> list[str]:
    """Collectives in a branch that not all of their devices take: these would wait for ever.

    A collective is correct there if all its devices take the same branch, that is, devices at the
    same position on the axes that choose the branch. A permute waits for all devices, whatever it
    sends.
    on the axes that choose the branch. A permute waits for all devices, whatever it sends.
    """
    places = _places(sizes, taken)
    bodies = _computations(text)
    found: list[str] = []
    for name in _reached(bodies):
        for line in bodies[name]:
            kind = _COLLECTIVE.search(line)
            if kind and (kind[1] in _OF_ALL or not _alike(line, places)):
                found.append(line.strip())
    return found


_OF_ALL = ("collective-permute", "send", "recv")


def _places(sizes: Mapping[str, int], taken: frozenset[str]) -> np.ndarray:
    """For each device, the number of its branch."""
    shape = tuple(sizes.values())
    own = [size if name in taken else 1 for name, size in sizes.items()]
    branches = np.arange(int(np.prod(own))).reshape(own)
    return np.broadcast_to(branches, shape).reshape(-1)


def _computations(text: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    body: list[str] = []
    for line in text.splitlines():
        if not line.startswith(" ") and (start := _COMPUTATION.match(line)):
            body = bodies[start[1]] = []
        else:
            body.append(line)
    return bodies


def _reached(bodies: Mapping[str, list[str]]) -> Iterator[str]:
    """The computations of such branches, and all that they call."""
    lines = [line for body in bodies.values() for line in body if _BRANCH.search(line)]
    seen: set[str] = set()
    while lines:
        for name in _NAME.findall(lines.pop()):
            if name in bodies and name not in seen:
                seen.add(name)
                lines += bodies[name]
                yield name


def _alike(line: str, places: np.ndarray) -> bool:
    """Whether the devices in a group of an exchange always take the same branch."""
    groups = _groups(line, len(places))
    return groups is not None and all(len(set(places[group])) == 1 for group in groups)


def _groups(line: str, devices: int) -> list[list[int]] | None:
    """The groups of devices of a collective; `None` if they cannot be read."""
    if table := _TABLE.search(line):
        shape = (int(table[1]), int(table[2]))
        return _ordered(table[3], table[4]).reshape(shape).tolist()
    if lists := _LISTS.search(line):
        return [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", lists[1])]
    if mesh := _MESH.search(line):
        axes = _AXIS.findall(mesh[1])
        names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
        joined = re.findall(r"'([^']+)'", mesh[4])
        if set(joined) <= set(names) and ":" not in mesh[4]:
            order = _ordered(mesh[2], mesh[3]) if mesh[2] else np.arange(devices)
            last = [names.index(name) for name in joined]
            first = [i for i in range(len(names)) if i not in last]
            together = int(np.prod([sizes[i] for i in last]))
            table = order.reshape(sizes).transpose(first + last)
            return table.reshape(-1, together).tolist()
    return None


def _ordered(sizes: str, transposed: str | None) -> np.ndarray:
    """The numbers of devices in the order that XLA writes as `[4,2]T(1,0)`."""
    shape = [int(size) for size in sizes.split(",")]
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    if transposed:
        numbers = numbers.transpose([int(axis) for axis in transposed.split(",")])
    return numbers
