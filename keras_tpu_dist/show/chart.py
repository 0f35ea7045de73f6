"""A chart of dry runs: step time against memory."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from keras_tpu_dist.show.colours import EMPTY, NONE, ON_COLOUR, distinct
from keras_tpu_dist.show.svg import svg_document, svg_line, svg_text
from keras_tpu_dist.show.text import duration_text, size_text, span_text

_WIDTH, _HEIGHT = 740, 380
_LEFT, _RIGHT, _TOP, _BELOW = 84, 36, 16, 46
_TICKS = 5


@dataclass(frozen=True)
class Point:
    """One dry run.

    Args:
        number: Its number in the table.
        words: Its description.
        group: Its group; every group has a colour.
        bytes: Memory on one device.
        seconds: The range of the step time, or `None` if unknown.
        fits: Whether it fits in memory.
    """

    number: int
    words: str
    group: str
    bytes: int
    seconds: tuple[float, float] | None
    fits: bool


def colours_of(points: Sequence[Point]) -> dict[str, str]:
    """The colours of the groups.

    Args:
        points: The points.
    """
    groups = dict.fromkeys(point.group for point in points)
    return {group: distinct(n) for n, group in enumerate(groups)}


def scatter_svg(points: Sequence[Point], limit: int | None) -> str:
    """Draws step time upwards and memory to the right.

    A range of times is a line with the point in its middle. Points that do not fit in memory are
    hollow; points without a time have a row of their own.

    Args:
        points: The points; at least one has a time.
        limit: HBM of one device, or `None`.
    """
    most_bytes = _above(1.06 * max([*(p.bytes for p in points), limit or 0]), 1024.0)
    most_seconds = _above(1.06 * max(p.seconds[1] if p.seconds else 0.0 for p in points))
    colours = colours_of(points)

    def x(size: float) -> float:
        return _LEFT + size / most_bytes * (_WIDTH - _LEFT - _RIGHT)

    def y(seconds: float | None) -> float:
        if seconds is None:
            return _TOP + 14.0
        return _HEIGHT - _BELOW - seconds / most_seconds * (_HEIGHT - _BELOW - _TOP - 34)

    parts = _axes(x, y, most_bytes, most_seconds)
    if any(p.seconds is None for p in points):
        parts.append(svg_text(_LEFT - 8, y(None) + 4, "no time", "end"))
    if limit is not None:
        line = svg_line((x(limit), _TOP), (x(limit), _HEIGHT - _BELOW), "currentColor", 1.5)
        parts += [line, svg_text(x(limit) - 5, _HEIGHT - _BELOW - 6, "HBM", "end")]
    for point in points:
        colour, middle = colours[point.group], None
        if point.seconds is not None:
            low, high = point.seconds
            middle = (low + high) / 2
            if low < high:
                across = x(point.bytes)
                parts.append(svg_line((across, y(low)), (across, y(high)), colour, 3))
        place = f'cx="{x(point.bytes):.1f}" cy="{y(middle):.1f}" r="10"'
        paint = f'fill="{colour}"' if point.fits else f'fill="{EMPTY}" stroke="{colour}"'
        parts.append(f'<circle {place} {paint} stroke-width="2">{_title(point)}</circle>')
        ink = ON_COLOUR if point.fits else "currentColor"
        number = svg_text(x(point.bytes), y(middle) + 4, str(point.number), "middle", True, ink)
        parts.append(number.replace("<text ", '<text pointer-events="none" ', 1))
    return svg_document(_WIDTH, _HEIGHT, parts)


def _title(point: Point) -> str:
    time = "no time" if point.seconds is None else span_text(*point.seconds, duration_text)
    fits = "" if point.fits else ", too large"
    words = f"{point.number}: {point.words}: {time}, {size_text(point.bytes)}{fits}"
    return f"<title>{html.escape(words)}</title>"


def _axes(x, y, most_bytes: float, most_seconds: float) -> list[str]:
    bottom = _HEIGHT - _BELOW
    parts = []
    for n in range(_TICKS + 1):
        size, seconds = most_bytes * n / _TICKS, most_seconds * n / _TICKS
        across = svg_line((_LEFT, y(seconds)), (_WIDTH - _RIGHT, y(seconds)), NONE, 0.5)
        label = svg_text(_LEFT - 8, y(seconds) + 4, duration_text(seconds), "end")
        below = svg_text(x(size), bottom + 18, size_text(size), "middle")
        parts += [across, label, below]
    words = svg_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, "memory on each device", "middle")
    return [*parts, words, svg_text(6, _TOP - 2, "step")]


def _above(value: float, base: float = 10.0) -> float:
    """The next larger number such that it and a fifth of it are round."""
    if value <= 0:
        return 1.0
    unit = 1.0
    if base != 10.0:
        unit = base ** math.floor(math.log(value, base))
    scale = unit * 10 ** math.floor(math.log10(value / unit))
    return next(
        f * scale for f in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if f * scale >= value * (1 - 1e-9)
    )
