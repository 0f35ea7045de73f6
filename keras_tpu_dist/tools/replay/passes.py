"""Finds the pass of the TPU compiler after which a program is wrong."""

import re
import tempfile
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
        The pass, or `None` if no program between the partitioner and the end can be run, or if
        the program is wrong as soon as it is partitioned.
    """
    with tempfile.TemporaryDirectory(prefix="keras_tpu_dist_") as folder:
        compiled.dumped(folder)
        dumps = _dumps_in(folder)
        starts = [n for n, dump in enumerate(dumps) if _partitioned(dump)]
        if not starts:
            return None
        low, high = starts[0], len(dumps) - 1
        tried = 0

        def right(n: int) -> bool | None:
            nonlocal tried
            tried += 1
            try:
                rows = compiled.run(dumps[n].path.read_text(errors="replace"))
            except CannotRun:
                return None
            return None if isinstance(rows, str) else all(row.equal for row in rows)

        known: dict[int, bool] = {}

        def near(n: int) -> int | None:
            """A program that can be run, as near as may be, strictly between the two."""
            for distance in range(_NEAR):
                for at in {n - distance, n + distance}:
                    if low < at < high and at not in known:
                        answer = right(at)
                        if answer is not None:
                            known[at] = answer
                            return at
            return None

        for at in range(low, min(low + _NEAR, high)):
            answer = right(at)
            if answer is not None:
                low = at
                known[at] = answer
                break
        else:
            return None
        if not known[low]:
            return WrongPass("", dumps[low].after, "", tried, "")
        while (at := near((low + high) // 2)) is not None:
            low, high = (at, high) if known[at] else (low, at)
        names = [dump.after for dump in dumps[low + 1 : high + 1]]
        name = names[0] if len(names) == 1 else " or ".join(dict.fromkeys(names))
        return WrongPass(name, dumps[low].after, dumps[high].after, tried, _known(names))


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
