"""Finds exchanges of a partitioned program within branches that only some devices take."""

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.setting import setting
from keras_tpu_dist.programs.device_groups import replica_groups

# The scope around a branch that one logical device takes; see `keras_tpu_dist.logical.assign`.
ONE_DEVICE = "on_one_device"

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_BRANCH = re.compile(rf" conditional\(.*op_name=\"[^\"]*{ONE_DEVICE}/cond\"")
_NAME = re.compile(r"%([\w.-]+)")
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-broadcast|ragged-all-to-all|"
    r"collective-permute|send|recv)(?:-start)?\("
)
_GROUPS = re.compile(r"replica_groups=(mesh.*?\{[^}]*\}|\{\{.*?\}\}|\S+)")


_whole_rows: contextvars.ContextVar[bool] = contextvars.ContextVar("whole_rows", default=False)


def rows_are_whole() -> bool:
    """Whether branches that only some devices take have all rows on every device.

    Their `shard_map` is then over all axes, so the partitioner exchanges nothing in it.
    """
    return _whole_rows.get()


def with_whole_rows(function: Callable) -> Callable:
    """A function whose branches have whole rows.

    Args:
        function: A function of arrays that is traced.
    """

    @functools.wraps(function)
    def whole(*args):
        with whole_rows():
            return function(*args)

    return whole


def whole_rows() -> contextlib.AbstractContextManager[bool]:
    """A context in which branches are traced with whole rows."""
    return setting(_whole_rows, True)


def check_no_exchange(text: str, sizes: Mapping[str, int], taken: frozenset[str]) -> None:
    """Raises a `ValueError` if devices would wait for ever. See `exchanged_in_branches`."""
    found = exchanged_in_branches(text, sizes, taken)
    if found:
        raise value_error(
            "In an assigned layer, devices must not exchange data with devices that skip it.",
            received=f"a layer in whose branch of the program there is: {found[0][:300]}",
            fix="Remove the assignment with keras_tpu_dist.assign(layer, None), or assign inner "
            "layers that have no shard_map of their own.",
        )


def exchanged_in_branches(text: str, sizes: Mapping[str, int], taken: frozenset[str]) -> list[str]:
    """Collectives in a branch that not all of their devices take: these would wait for ever.

    A collective is correct there if all its devices take the same branch, that is, devices at the
    same position on the axes that choose the branch. A permute waits for all devices, whatever it
    sends.

    Args:
        text: The compiled program.
        sizes: The mesh axes and their sizes.
        taken: The axes that choose the branch.
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
    found = _GROUPS.search(line)
    # Without groups that can be read, all devices are one.
    groups = replica_groups(found[1] if found else "", len(places))
    return all(len(set(places[list(group)])) == 1 for group in groups)
