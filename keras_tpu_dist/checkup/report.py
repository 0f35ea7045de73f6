"""The result of a check: what is right, what is wrong and what to do, what was measured."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.show.page import Page, document
from keras_tpu_dist.show.text import duration_text, html_table, text_table

RIGHT, FAST = "right", "fast"
# Problems of one part that are shown; the others are counted.
_MOST_SHOWN = 4


@dataclass(frozen=True, repr=False)
class Problem(Printed):
    """Something that is wrong here.

    Args:
        what: What was found; it names the device, mesh axis, collective and dtype.
        means: What it means.
        fix: What to do about it.
        devices: The numbers of the devices that are to blame, if that is known.
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
        kind: `"right"` or `"fast"`.
        words: What was found, in a line.
        problems: What is wrong.
        figures: What was measured, as plain data.
        left_out: Why the part did not run, or `""`.
        seconds: How long it took.
    """

    name: str
    kind: str
    words: str = ""
    problems: tuple[Problem, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    left_out: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; a part that did not run found nothing."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return {**asdict(self), "problems": [p.to_dict() for p in self.problems], "ok": self.ok}

    @classmethod
    def of_dict(cls, plain: dict[str, Any]) -> "CheckPart":
        """The part that `to_dict` made plain.

        Args:
            plain: What it gave.
        """
        problems = tuple(
            Problem(**(p | {"devices": tuple(p["devices"])})) for p in plain["problems"]
        )
        own: dict[str, Any] = {each.name: plain[each.name] for each in fields(cls)}
        own["problems"] = problems
        return cls(**own)

    def __str__(self) -> str:
        return f"{self.name}: {self.left_out or self.words}"


@dataclass(frozen=True, repr=False)
class Check(Page):
    """What `strategy.check` found.

    Args:
        device_kind: What the devices call themselves, such as `"TPU v5 lite"` or `"cpu"`.
        platform: `"tpu"`, `"cpu"` or `"gpu"`.
        mesh: Mesh axes and their sizes.
        processes: How many processes took part.
        minutes: The time that was given.
        seconds: The time that it took.
        parts: The parts, in the order in which they ran.
        versions: Versions of what computes, by name.
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
        """Whether nothing is wrong in what ran."""
        return all(part.ok for part in self.parts)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong."""
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
        """All of it as plain data, to keep and to send."""
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

    def __str__(self) -> str:
        lines = [self._title(), *self._table(RIGHT), *self._table(FAST)]
        for part in self.parts:
            lines += _problem_lines(part)
        return "\n".join([*lines, *self._rest()])

    def _title(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh)
        several = f", {self.processes} processes" if self.processes > 1 else ""
        count = len(self.problems)
        verdict = "right" if self.ok else f"{count} problem{'s' if count > 1 else ''}"
        number = 1
        for _, size in self.mesh:
            number *= size
        took = f"{duration_text(self.seconds)} of {self.minutes:g} min"
        return f"check of {number} {self.device_kind} ({mesh}){several}: {verdict}, {took}"

    def _rows(self, kind: str) -> list[tuple[str, str]]:
        ran = [part for part in self.parts if part.kind == kind and not part.left_out]
        return [(part.name, part.words if part.ok else f"WRONG. {part.words}") for part in ran]

    def _table(self, kind: str) -> list[str]:
        rows = self._rows(kind)
        return [text_table((_HEADS[kind], ""), rows)] if rows else []

    def _rest(self) -> list[str]:
        return [f"left out: {part.name}: {part.left_out}" for part in self.left_out]

    def _blocks(self) -> list[str]:
        blocks = [
            html_table((_HEADS[k], ""), self._rows(k)) for k in (RIGHT, FAST) if self._rows(k)
        ]
        if self.problems:
            rows = [(p.what, p.means, p.fix) for p in self.problems]
            blocks.insert(0, html_table(("what is wrong", "what it means", "what to do"), rows))
        return blocks + [f"<p>{html.escape(line)}</p>" for line in self._rest()]

    def _page(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions)
        head = f"<h1>{html.escape(self._title())}</h1><p>{html.escape(versions)}</p>"
        return document(self._title(), [head, *self._blocks()])


_HEADS = {RIGHT: "is it right?", FAST: "is it fast?"}


def _problem_lines(part: CheckPart) -> list[str]:
    lines = [f"{part.name}: {problem}" for problem in part.problems[:_MOST_SHOWN]]
    more = len(part.problems) - _MOST_SHOWN
    return lines + ([f"{part.name}: and {more} more, in to_dict() and --json"] if more > 0 else [])


def joined(parts: Sequence[CheckPart]) -> CheckPart:
    """The same part as several processes found it, as one.

    Args:
        parts: That of each process.
    """
    problems = tuple(dict.fromkeys(p for part in parts for p in part.problems))
    left_out = next((part.left_out for part in parts if part.left_out), "")
    first = next((part for part in parts if part.problems), parts[0])
    return CheckPart(
        first.name,
        first.kind,
        first.words,
        problems,
        first.figures,
        left_out,
        max(part.seconds for part in parts),
    )


def numbered(ids: Iterable[int], most: int = 8) -> str:
    """Devices by their numbers, in words.

    Args:
        ids: The numbers.
        most: How many of them are named.

    Example:

    >>> numbered([3]), numbered([5, 1])
    ('device 3', 'devices 1, 5')
    """
    every = sorted(ids)
    named = ", ".join(map(str, every[:most]))
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return f"device{'s' if len(every) > 1 else ''} {named}{more}"
