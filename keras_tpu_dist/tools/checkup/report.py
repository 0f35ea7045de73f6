"""The result of a check: correct parts, problems and their fixes."""

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.show.page import Report, Table
from keras_tpu_dist.show.text import duration_text

# The number of problems to show for one part; the others are counted.
_MOST_SHOWN = 4
# The fix for a faulty device.
LEAVE_OUT = (
    "Leave it out, TPUStrategy(devices=[...]), and ask your cloud provider for another host."
)


@dataclass(frozen=True, repr=False)
class Problem(Printed):
    """A problem that a check found.

    Args:
        what: A description that names the device, mesh axis, collective and dtype.
        means: What it means.
        fix: What to do about it.
        devices: The ids of the faulty devices, if known.
        axis: The mesh axis, or `""`.
    """

    what: str
    means: str
    fix: str
    devices: tuple[int, ...] = ()
    axis: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return {**asdict(self), "devices": list(self.devices)}

    def __str__(self) -> str:
        return f"{self.what}\n  means: {self.means}\n  do: {self.fix}"


@dataclass(frozen=True, repr=False)
class CheckPart(Printed):
    """One part of a check.

    Args:
        name: Its name, such as `"products"`.
        words: The result in a line.
        problems: The problems.
        figures: The differences, as plain data.
        left_out: Why the part did not run, or `""`.
        no_time: Whether it did not run because too little time remained.
        seconds: How long it took.
        hangs: Whether it did not finish, so that no other part can run after it.
    """

    name: str
    words: str = ""
    problems: tuple[Problem, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    left_out: str = ""
    no_time: bool = False
    seconds: float = 0.0
    hangs: bool = False

    @property
    def ok(self) -> bool:
        """Whether there are no problems; also true if the part did not run."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return {**asdict(self), "problems": [p.to_dict() for p in self.problems], "ok": self.ok}

    @classmethod
    def of_dict(cls, plain: dict[str, Any]) -> "CheckPart":
        """Restores a part from its `to_dict`.

        Args:
            plain: The dict.
        """
        problems = tuple(
            Problem(**(p | {"devices": tuple(p["devices"])})) for p in plain["problems"]
        )
        own: dict[str, Any] = {one.name: plain[one.name] for one in fields(cls)}
        own["problems"] = problems
        return cls(**own)

    def __str__(self) -> str:
        return f"{self.name}: {self.left_out or self.words}"


@dataclass(frozen=True, repr=False)
class Check(Report):
    """The result of `strategy.check`.

    Args:
        device_kind: The name that the devices report, such as `"TPU v5 lite"` or `"cpu"`.
        platform: `"tpu"`, `"cpu"` or `"gpu"`.
        mesh: Mesh axes and their sizes.
        processes: The number of processes.
        minutes: The time limit.
        seconds: How long it took.
        parts: The parts, in the order in which they ran.
        versions: The versions of Keras, JAX and so on, by name.
    """

    device_kind: str
    platform: str
    mesh: tuple[tuple[str, int], ...]
    processes: int
    minutes: float
    seconds: float
    parts: tuple[CheckPart, ...]
    versions: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """Whether the parts that ran found no problems; see `left_out` for those that did not."""
        return all(part.ok for part in self.parts)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems."""
        return tuple(problem for part in self.parts for problem in part.problems)

    @property
    def left_out(self) -> tuple[CheckPart, ...]:
        """The parts that did not run."""
        return tuple(part for part in self.parts if part.left_out)

    def part(self, name: str) -> CheckPart:
        """A part by its name.

        Args:
            name: The name, such as `"products"`.

        Raises:
            KeyError: If there is none.
        """
        return {part.name: part for part in self.parts}[name]

    def to_dict(self) -> dict[str, Any]:
        """The whole result as plain data, to store or send."""
        return {
            "ok": self.ok,
            "device_kind": self.device_kind,
            "platform": self.platform,
            "mesh": dict(self.mesh),
            "processes": self.processes,
            "minutes": self.minutes,
            "seconds": self.seconds,
            "versions": dict(self.versions),
            "parts": [part.to_dict() for part in self.parts],
        }

    def _title(self) -> str:
        return f"check of {self._devices()}: {self._verdict()}, {self._took()}"

    def _verdict(self) -> str:
        count = len(self.problems)
        words = "all correct" if self.ok else f"{count} problem{'s' if count > 1 else ''}"
        missed = [part for part in self.parts if part.no_time]
        if not missed:
            return words
        names = ", ".join(part.name for part in missed[:_MOST_MISSED])
        more = len(missed) - _MOST_MISSED
        names += f" and {more} more" if more > 0 else ""
        if self.ok:
            words = "nothing wrong so far" if self._ran else "nothing checked"
        return f"{words}, no time for {names}"

    @property
    def _ran(self) -> bool:
        return len(self.left_out) < len(self.parts)

    @property
    def _is_part(self) -> bool:
        """Whether too little time remained for a part."""
        return any(part.no_time for part in self.parts)

    def _took(self) -> str:
        return f"{duration_text(self.seconds)} of {self.minutes:g} min"

    def _devices(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh)
        several = f", {self.processes} processes" if self.processes > 1 else ""
        return f"{math.prod(size for _, size in self.mesh)} {self.device_kind} ({mesh}){several}"

    def _tables(self) -> Iterator[Table]:
        ran = [part for part in self.parts if not part.left_out]
        rows = [(part.name, part.words if part.ok else f"WRONG. {part.words}") for part in ran]
        if rows:
            yield Table("", ("is it correct?", ""), rows)

    def _lines(self) -> Iterator[str]:
        for part in self.parts:
            yield from (f"{part.name}: {problem}" for problem in part.problems[:_MOST_SHOWN])
            if len(part.problems) > _MOST_SHOWN:
                more = len(part.problems) - _MOST_SHOWN
                yield f"{part.name}: and {more} more, in to_dict() and --json"
        for part in self.left_out:
            yield f"left out: {part.name}: {part.left_out}"

    def _heading(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions)
        style = "bad" if not self.ok else "muted" if self._is_part else "good"
        verdict = f'<span class="{style}">{html.escape(self._verdict())}</span>'
        return (
            f"<h1>check of {html.escape(self._devices())}: {verdict}</h1>"
            f'<p class="muted">{html.escape(f"{self._took()}; {versions}")}</p>'
        )


_MOST_MISSED, _MOST_NAMED = 3, 8  # parts that the verdict names, devices that a problem names


def joined(parts: Sequence[CheckPart]) -> CheckPart:
    """Joins the results of one part from several processes.

    Args:
        parts: The results, by process.
    """
    found: dict[Problem, list[int]] = {}
    for process, part in enumerate(parts):
        for problem in part.problems:
            found.setdefault(problem, []).append(process)
    everywhere = len(parts)
    problems = tuple(
        problem if len(who) == everywhere else _of_processes(problem, who)
        for problem, who in found.items()
    )
    first = next((part for part in parts if part.problems), parts[0])
    return replace(
        first,
        problems=problems,
        left_out=next((part.left_out for part in parts if part.left_out), ""),
        no_time=any(part.no_time for part in parts),
        seconds=max(part.seconds for part in parts),
        hangs=any(part.hangs for part in parts),
    )


def _of_processes(problem: Problem, who: list[int]) -> Problem:
    """A problem that only some processes have, with their numbers."""
    return replace(problem, what=f"{counted('process', 'processes', who)}: {problem.what}")


def corrupts(what: str, devices: list[int]) -> Problem:
    """The problem of silent data corruption: a repeated computation gives different bits.

    Args:
        what: The computation.
        devices: The ids of the devices.
    """
    return Problem(
        f"{numbered(devices)}: {what}, computed twice, has different bits",
        "Silent data corruption: the chip or its memory is faulty.",
        LEAVE_OUT,
        tuple(devices),
    )


def numbered(ids: Iterable[int]) -> str:
    """Names devices by their ids.

    Args:
        ids: The ids.

    Example:

    >>> numbered([3]), numbered([5, 1])
    ('device 3', 'devices 1, 5')
    """
    return counted("device", "devices", ids)


def counted(one: str, several: str, ids: Iterable[int]) -> str:
    """Names things by their numbers.

    Args:
        one: The singular.
        several: The plural.
        ids: The numbers.
    """
    every = sorted(ids)
    named = ", ".join(map(str, every[:_MOST_NAMED]))
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return f"{several if len(every) > 1 else one} {named}{more}"
