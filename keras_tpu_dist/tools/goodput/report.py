"""Reads a goodput file: the share of the time that trained, and where the rest went."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from keras_tpu_dist.common import records
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.phases import (
    BUILD,
    INPUT,
    OTHER,
    REPLAY,
    RESTORE,
    SAVE,
    START,
    TRAIN,
    VALIDATE,
)
from keras_tpu_dist.show.colours import AXES, DISTINCT, NONE
from keras_tpu_dist.show.page import Report, Table, TableCell, bar, legend
from keras_tpu_dist.show.text import duration_text

IDLE = "idle"
# The phases of a run, in the order of the report.
WORDS = {
    TRAIN: "useful steps",
    REPLAY: "steps repeated after a restart",
    INPUT: "devices waited for input",
    BUILD: "building the model in fit, tracing and compiling",
    RESTORE: "finding and loading a checkpoint",
    SAVE: "waiting for checkpoints and files",
    VALIDATE: "evaluate and predict, also within fit",
    START: "from the start of a process to its first fit: imports, joining other processes",
    IDLE: "from a failure to the next start",
    OTHER: "between epochs and fits: callbacks, your own code",
}
_COLOURS = dict(zip(WORDS, (AXES[2], *DISTINCT, NONE), strict=True))
_MOST_STARTS = 20


@dataclass(frozen=True)
class StartOfRun:
    """One start of a run.

    Attributes:
        at: The time of the start, in seconds since 1970.
        processes: The number of processes, if there was a launcher.
        ended: How it ended: `"ended"`, `"failed"`, or `"unknown"`.
    """

    at: float
    seconds: float
    processes: int | None
    step: int | None
    ended: str


@dataclass(frozen=True, repr=False)
class GoodputReport(Report):
    """How a run spent its time, over all its starts.

    Attributes:
        path: The file.
        wall: Seconds from the first line to the last.
        seconds: Seconds by phase, see `WORDS`.
        starts: The starts of the run.
        left_out: The number of invalid lines in the file.
        full: Whether the file has reached its largest size, so that later lines are missing.
    """

    path: str
    wall: float
    seconds: Mapping[str, float]
    starts: tuple[StartOfRun, ...]
    left_out: int = 0
    full: bool = False

    @property
    def trained(self) -> float:
        """The share of the time in useful train steps, from 0 to 1."""
        return self.seconds[TRAIN] / self.wall if self.wall else 0.0

    @property
    def unaccounted(self) -> float:
        """The seconds that are not in the file; negative if it counts some twice."""
        return self.wall - sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """The attributes and properties as plain data."""
        return {
            "path": self.path,
            "wall": self.wall,
            "trained": self.trained,
            "seconds": dict(self.seconds),
            "unaccounted": self.unaccounted,
            "starts": [asdict(start) for start in self.starts],
            "left_out": self.left_out,
            "full": self.full,
        }

    def _title(self) -> str:
        number = len(self.starts)
        starts = "1 start" if number == 1 else f"{number} starts"
        return f"{self.trained:.1%} of {_time_text(self.wall)} trained, in {starts}"

    def _rows(self) -> Iterable[tuple[str, float, float, str]]:
        whole = self.wall or 1.0
        for name, words in WORDS.items():
            if self.seconds[name] or name == TRAIN:
                yield name, self.seconds[name], self.seconds[name] / whole, words
        yield "(unknown)", self.unaccounted, self.unaccounted / whole, "not in the file"

    def _tables(self) -> Iterable[Table]:
        rows = [
            (name, TableCell(f"{s:.1f} s", s), TableCell(f"{share:.1%}", share), words)
            for name, s, share, words in self._rows()
        ]
        yield Table("", ("what", "time", "share", ""), rows)
        if len(self.starts) > 1:
            header = ("start", "processes", "time", "until step", "how it ended")
            of_starts = [
                (
                    TableCell(str(number), number),
                    _counted(start.processes),
                    TableCell(f"{start.seconds:.1f} s", start.seconds),
                    _counted(start.step),
                    start.ended,
                )
                for number, start in enumerate(self.starts, 1)
            ]
            yield Table("", header, of_starts[-_MOST_STARTS:])

    def _lines(self) -> Iterable[str]:
        if len(self.starts) > _MOST_STARTS:
            yield f"note: {len(self.starts) - _MOST_STARTS} earlier start(s) left out"
        if self.full:
            yield f"note: the file is full ({records.MOST_BYTES:,} bytes): later lines are missing"
        if self.left_out:
            yield f"note: {self.left_out} invalid line(s) of the file are ignored"

    def _drawing(self) -> list[str]:
        shown = [(name, share) for name, _, share, _ in self._rows() if name in _COLOURS]
        parts = bar((share, _COLOURS[name], f"{name} {share:.1%}") for name, share in shown)
        return [parts, legend((_COLOURS[name], name) for name, _ in shown)]


def _counted(number: int | None) -> TableCell:
    return TableCell("-") if number is None else TableCell(str(number), number)


def goodput_of(path: str | os.PathLike) -> GoodputReport:
    """Reads a goodput file."""
    try:
        found, left_out = records.read(os.fspath(path))
        full = records.is_full(os.fspath(path))
    except OSError as error:
        raise _no_file(path, str(error)) from error
    if not found:
        raise _no_file(path, f"{left_out} invalid line(s)" if left_out else "no line")
    # If every host has its launcher, only the one of process 0 counts.
    hosts = {record.get("host") for record in found if record["what"] == records.START}
    run = _Run()
    for record in found:
        if record.get("host") in {None, *hosts} or not hosts:
            run.take(record)
    run.close()
    seconds = {name: max(0.0, run.seconds[name]) for name in WORDS}
    wall = 0.0 if run.first is None else run.clock - run.first
    return GoodputReport(os.fspath(path), wall, seconds, tuple(run.starts), left_out, full)


def _no_file(path: Any, found: str) -> ValueError:
    return value_error(
        "The goodput report needs a file of `launch --goodput FILE` or callbacks.Goodput.",
        received={"path": os.fspath(path), "found": found},
        fix="Pass the path of such a file.",
    )


class _Run:
    """Adds up the lines of a file.

    Attributes:
        clock: The end of the counted time, in seconds since 1970.
    """

    def __init__(self):
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.starts: list[StartOfRun] = []
        self.first: float | None = None
        self.clock = 0.0
        self._began: float | None = None
        self._processes: int | None = None
        self._step: int | None = None
        # The phase of the process at its last line; `None` while no process runs.
        self._now: str | None = None

    def take(self, record: Mapping[str, Any]) -> None:
        """Adds a line."""
        what, at = record["what"], record["at"]
        if what == records.LAUNCH:
            self.close()
            self._begin(at)
            self._processes = record.get("processes")
        elif what == records.START:
            self._start(record, at)
        elif what == records.SPENT:
            self._spent(record, at)
        else:
            failed = what == records.FAILED or record.get("code")
            self._over(record, at, "failed" if failed else "ended")

    def close(self) -> None:
        """Adds the last start, if the file does not contain its end."""
        if self._began is not None:
            self._end("unknown")

    def _start(self, record: Mapping[str, Any], at: float) -> None:
        since = min(record.get("since", at), at)
        if self._began is None or self._now is not None:
            # Without a launcher, the previous start ended at some time after its last line.
            self.close()
            self._begin(since)
        else:
            # The time since the launcher started the process.
            self._until(since, START)
        self._now = START

    def _spent(self, record: Mapping[str, Any], at: float) -> None:
        if self._now is None:
            return  # a process was still ending after the launcher had recorded its failure
        for name, seconds in record.get("seconds", {}).items():
            self.seconds[name if name in WORDS else OTHER] += seconds
        self.clock = max(self.clock, at)
        self._now = record.get("now", self._now)
        self._step = record.get("step", self._step)

    def _over(self, record: Mapping[str, Any], at: float, how: str) -> None:
        if self._began is None:
            self._until(at, IDLE)
            return
        # The time after the last line counts for the process's phase, or for its start.
        self._until(at, START if self._now is None else self._now)
        self._step = record.get("step", self._step)
        self._end(how)

    def _begin(self, at: float) -> None:
        if self.first is None:
            self.first = self.clock = at
        self._until(at, IDLE)
        self._began, self._step, self._processes, self._now = at, None, None, None

    def _end(self, how: str) -> None:
        assert self._began is not None
        lasted = self.clock - self._began
        self.starts.append(StartOfRun(self._began, lasted, self._processes, self._step, how))
        self._began = self._now = None

    def _until(self, at: float, what: str) -> None:
        if at > self.clock:
            self.seconds[what if what in WORDS else OTHER] += at - self.clock
            self.clock = at


def _time_text(seconds: float) -> str:
    if seconds < 120:
        return duration_text(seconds)
    if seconds < 3600 - 3:
        return f"{seconds / 60:.1f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"
