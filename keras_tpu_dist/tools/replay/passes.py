"""Finds the pass of the TPU compiler after which a program is wrong."""

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keras_tpu_dist.hardware.versions import TPU_FAULTS
from keras_tpu_dist.tools.replay.errors import CannotRun
from keras_tpu_dist.tools.replay.report import Row, WrongPass

# module_0004.jit_call.cl_1.0063.the-pipeline.after_the-pass.before_the-next.txt
_DUMP = re.compile(r"\.(\d+)\.[^/]*?\.?after_([^/]+?)\.before_([^/]+?)\.txt$")
# What comes after all passes that dump a program has no number.
_LAST = 10**9
# A pass behind which the program may be that of one device, with collectives.
_PARTITIONER = re.compile(r"spmd|shardy", re.IGNORECASE)
# A pass whose program cannot be run is left out; the next one in this many places is tried.
_NEAR = 6


class Runs(Protocol):
    """A launch that was compiled."""

    def dumped(self, folder: str) -> None:
        """Writes the program after each pass into a folder."""
        ...

    def run(self, text: str) -> list[Row] | str:
        """Compares the results of a program, or returns why it cannot be run."""
        ...


@dataclass(frozen=True, order=True)
class _Dump:
    """The program after a pass."""

    number: int
    after: str
    path: Path


def _dumps_in(folder: str) -> list[_Dump]:
    """The programs after each pass, of the largest module that `xla_dump_to` wrote, in order."""
    by_module: dict[str, list[_Dump]] = {}
    for path in Path(folder).glob("*.txt"):
        of_module = by_module.setdefault(path.name.split(".")[0], [])
        if found := _DUMP.search(path.name):
            of_module.append(_Dump(int(found[1]), found[2], path))
        elif path.name.endswith(".after_optimizations.txt"):
            of_module.append(_Dump(_LAST, "assignment-of-memory-and-schedule", path))
    return sorted(max(by_module.values(), key=len, default=[]))


def first_wrong(compiled: Runs) -> WrongPass | None:
    """The first pass after which the program computes something else, by halves.

    Returns:
        The pass, or `None` if no program between the partitioner and the end can be run.
    """
    with tempfile.TemporaryDirectory(prefix="keras_tpu_dist_") as folder:
        compiled.dumped(folder)
        dumps = _dumps_in(folder)
        starts = [n for n, dump in enumerate(dumps) if _partitioned(dump)]
        if not starts:
            return None
        # `None` for a program that cannot be run.
        known: dict[int, bool | None] = {}

        def right(n: int) -> bool | None:
            if n not in known:
                try:
                    rows = compiled.run(dumps[n].path.read_text(errors="replace"))
                    known[n] = None if isinstance(rows, str) else all(row.equal for row in rows)
                except CannotRun:
                    known[n] = None
            return known[n]

        def first_runnable(places: Iterable[int]) -> int | None:
            return next((n for n in places if right(n) is not None), None)

        high = len(dumps) - 1
        low = first_runnable(range(starts[0], min(starts[0] + _NEAR, high)))
        if low is None:
            return None
        if not right(low):
            return WrongPass("", dumps[low].after, "", len(known), "")
        while True:
            middle = (low + high) // 2
            near = (
                at for distance in range(_NEAR) for at in (middle - distance, middle + distance)
            )
            at = first_runnable(at for at in near if low < at < high)
            if at is None:
                break
            low, high = (at, high) if right(at) else (low, at)
        names = [dump.after for dump in dumps[low + 1 : high + 1]]
        name = names[0] if len(names) == 1 else " or ".join(dict.fromkeys(names))
        return WrongPass(name, dumps[low].after, dumps[high].after, len(known), _known(names))


def _partitioned(dump: _Dump) -> bool:
    """Whether the program is that of one device."""
    if not _PARTITIONER.search(dump.after):
        return False
    if "spmd-partitioning" in dump.after:
        return True  # its arguments may still have shardings
    head = dump.path.read_text(errors="replace")
    return "sharding={" not in head.split("ENTRY", 1)[-1] or "partition-id" in head


def _known(names: list[str]) -> str:
    for fault in TPU_FAULTS:
        if any(name in fault.passes for name in names):
            return f"{fault.report}: {fault.what}"
    return ""
