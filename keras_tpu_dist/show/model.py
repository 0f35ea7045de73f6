"""Draws a model: a box for every block, its width by bytes, its colours by mesh axes."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from keras_tpu_dist.common.axes import names_in
from keras_tpu_dist.show.colours import (
    EMPTY,
    FURTHER_AXES,
    NONE,
    ON_COLOUR,
    axis_colours,
    axis_legend,
)
from keras_tpu_dist.show.folding import (
    Repeated,
    children_of,
    families,
    kind_of,
    pattern_of,
    shapes_text,
)
from keras_tpu_dist.show.page import bar, legend
from keras_tpu_dist.show.pictures import Picture, svg_below
from keras_tpu_dist.show.svg import svg_box, svg_document, svg_text
from keras_tpu_dist.show.text import size_text, text_table, text_width, wrapped

_WIDTH, _BAR = 760, 16
_COLUMNS = ("weight", "shape", "layout", "bytes", "a device", "")
# The width of a letter in pixels, and of the narrowest segment.
_LETTER, _THIN = 6.6, 2.0
# On a page, a segment has a label if it is at least this share of the widest box.
_LABELLED = 0.03
# With more boxes, layers of one kind share a box; a box with more weights lists them by kind.
_MOST_BOXES, _MOST_WEIGHTS = 24, 12


@dataclass(frozen=True)
class Box:
    """A block of the drawing.

    Attributes:
        layers: The number of layers of one kind that share the box; `rows` has all their weights.
    """

    words: str
    times: int
    rows: tuple[Any, ...]
    within: str
    layers: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of the weights of one repetition."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the weights of one repetition on one device."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def title(self) -> str:
        """Its layers, how often they repeat, and their bytes."""
        sizes = f"{size_text(self.bytes)}, {size_text(self.bytes_per_device)} a device"
        if self.layers > 1:
            return f"{self.words}, {self.layers} layers: {sizes}"
        if self.times == 1:
            return f"{self.words}: {sizes}"
        return f"{self.words}  x {self.times}, each {sizes}"


@dataclass(frozen=True, repr=False)
class ModelPicture(Picture):
    """A model as boxes: one for every block, its width by bytes, its colours by mesh axes.

    Attributes:
        explanation: The `Explanation` from `strategy.explain` to draw.
    """

    explanation: Any

    def boxes(self) -> list[Box]:
        """The boxes in order, one for equal repeated blocks; if many, one for a kind of layer."""
        e = self.explanation
        above = _common(row.path for row in e.rows)
        boxes: list[Box] = []
        loose: list[Any] = []

        for entry in e.entries():
            if not isinstance(entry, Repeated):
                loose.append(entry)
                continue
            boxes += _layers(loose, above)
            loose = []
            within = _common(row.path for row in entry.rows)
            boxes.append(Box(entry.words, entry.times, entry.rows, within))
        boxes += _layers(loose, above)
        return boxes if len(boxes) <= _MOST_BOXES else _by_kind(_layers(e.rows, above))

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain dicts and lists."""
        return self.explanation.to_dict()

    def legend_entries(self) -> list[tuple[str, str]]:
        """The legend of colours: the axes with their names and sizes, and replicated weights."""
        return axis_legend(self.explanation.mesh)

    def _title(self) -> str:
        return self.explanation.title

    def _colours(self, row: Any) -> list[str]:
        """The colours of the axes that split a weight."""
        of_axes = axis_colours(list(self.explanation.mesh))
        colours = [of_axes.get(name, FURTHER_AXES) for name in dict.fromkeys(names_in(row.axes))]
        return colours or [NONE]

    def __rich__(self):
        keys = Text()
        for colour, words in self.legend_entries():
            keys.append("  ", style=f"on {colour}").append(f" {words}  ")
        bars = Text("█ on one device, █░ in total")
        head = map(Text, self._head(text_width()))
        return Group(*head, self._text_table(), keys, bars)

    def _head(self, width: int) -> list[str]:
        """The lines above the drawing: the title, the sizes, and why weights are missing."""
        e = self.explanation
        parts = (self._title(), e.summary, e.note)
        return [line for part in parts if part for line in wrapped(part, width)]

    def _text_table(self) -> Text:
        """The weights by block, with bars in the colours of their axes."""
        lines = [(box, _text_lines(box)) for box in self.boxes()]
        largest = max((_sum(those) for _, of_box in lines for _, those in of_box), default=1)
        rows: list[tuple[str, ...] | str] = []
        colours = []
        for box, of_box in lines:
            rows.append(box.title)
            for name, those in of_box:
                whole, here = _sum(those), sum(row.bytes_per_device for row in those)
                shapes = shapes_text([row.shape for row in those])
                drawn = size_text(whole), size_text(here), _text_bar(whole, here, largest)
                rows.append((f"  {name}", shapes, those[0].layout, *drawn))
                colours.append(self._colours(those[0])[0])
        text = Text(text_table(_COLUMNS, rows, indent="") if rows else "")
        for drawn_bar, colour in zip(re.finditer("[█▏]+░*", text.plain), colours, strict=True):
            text.stylize(colour, drawn_bar.start(), drawn_bar.end())
        return text

    def _blocks(self) -> list[str]:
        e, boxes = self.explanation, self.boxes()
        largest = max((box.bytes for box in boxes), default=1)
        drawn = "".join(self._html_box(box, largest) for box in boxes)
        return [
            *(f"<p>{html.escape(words)}</p>" for words in (e.summary, e.note) if words),
            *self._html_totals(),
            legend(self.legend_entries()),
            f'<div class="boxes">{drawn}</div>',
        ]

    def _html_totals(self) -> list[str]:
        """Bars of the bytes of all weights and of those on one device, by axes."""
        rows = self.explanation.rows
        whole = sum(row.bytes for row in rows) or 1
        parts: dict[str, list[int]] = {}
        for row in rows:
            words = " and ".join(dict.fromkeys(names_in(row.axes))) or "no axis"
            sums = parts.setdefault(words, [0, 0])
            sums[0] += row.bytes
            sums[1] += row.bytes_per_device
        colour = {words: self._colour_of(words) for words in parts}
        bars = []
        for n, what in enumerate(("all weights", "one device")):
            drawn = [
                (sums[n] / whole, colour[words], f"split over {words}: {size_text(sums[n])}")
                for words, sums in parts.items()
            ]
            size = size_text(sum(sums[n] for sums in parts.values()))
            bars.append(f"<p>{what}: {size}</p>{bar(drawn)}")
        return bars

    def _colour_of(self, words: str) -> str:
        of_axes = axis_colours(list(self.explanation.mesh))
        return of_axes.get(words.split(" and ")[0], NONE)

    def _html_box(self, box: Box, largest: int) -> str:
        parts = []
        for row in box.rows:
            colours = self._colours(row)
            step = 100 / len(colours)
            stops = ",".join(
                f"{c} {n * step:.0f}% {(n + 1) * step:.0f}%" for n, c in enumerate(colours)
            )
            paint = colours[0] if len(colours) == 1 else f"linear-gradient({stops})"
            wide = row.bytes >= _LABELLED * largest
            name = html.escape(row.path.removeprefix(box.within)) if wide else ""
            parts.append(
                f'<i style="flex:{max(row.bytes, 1)} 1 0;background:{paint}" '
                f'title="{html.escape(_words(row))}">{name}</i>'
            )
        width = max(0.5, 100 * box.bytes / max(largest, 1))
        again = " again" if box.times > 1 else ""
        return (
            f'<p>{html.escape(box.title)}</p><div class="box{again}" '
            f'style="width:{width:.2f}%">{"".join(parts)}</div>'
        )

    def svg(self) -> str:
        """The picture as SVG."""
        boxes, parts = self.boxes(), []
        largest = max((box.bytes for box in boxes), default=1)
        y = 18.0
        for n, line in enumerate(self._head(110)):
            parts.append(svg_text(8, y, line, bold=not n))
            y += 18
        for box in boxes:
            y += 20
            parts.append(svg_text(8, y, box.title))
            parts += self._svg_box(box, y + 8, largest)
            y += 44
        below = svg_below(y, self.legend_entries(), [])
        return svg_document(_WIDTH, y + below[0] + 6, [*parts, *below[1]])

    def _svg_box(self, box: Box, y: float, largest: int) -> list[str]:
        room = _WIDTH - 28
        width = max(4.0, room * box.bytes / max(largest, 1))
        parts = [svg_box(8 + d, y + d, width, 30, EMPTY) for d in (8, 4) if box.times > 1]
        x, end = 8.0, 8.0 + width
        for row in box.rows:
            wide = max(_THIN, width * row.bytes / max(box.bytes, 1))
            wide = min(wide, max(0.0, end - x))
            colours = self._colours(row)
            for n, colour in enumerate(colours):
                tall = 30 / len(colours)
                place = (x, y + n * tall, max(0.5, wide - 1), tall)
                parts.append(svg_box(*place, colour, _words(row)))
            name = row.path.removeprefix(box.within)
            if _LETTER * len(name) < wide - 6:
                label = svg_text(x + wide / 2, y + 19, name, "middle", colour=ON_COLOUR)
                parts.append(label.replace("<text ", '<text pointer-events="none" ', 1))
            x += wide
        return parts


def _layers(rows: Sequence[Any], above: str) -> list[Box]:
    """A box for every layer below a path, and one for the weights directly below it."""
    direct = [row for row in rows if "/" not in row.path.removeprefix(above)]
    rest = [row for row in rows if row not in direct]
    boxes = [Box(above.rstrip("/") or direct[0].path, 1, tuple(direct), above)] if direct else []
    for name, those in children_of(rest, lambda row: row.path, above).items():
        boxes.append(Box(f"{above}{name}", 1, tuple(those), f"{above}{name}/"))
    return boxes


def _common(paths: Iterable[str]) -> str:
    """The layers that contain all paths, with a slash at the end, or `""`."""
    names: Sequence[Sequence[str]] = [path.split("/")[:-1] for path in paths]
    shared = []
    for level in zip(*names, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return "".join(f"{name}/" for name in shared)


def _by_kind(boxes: Sequence[Box]) -> list[Box]:
    """Joins the boxes of layers whose names differ only in numbers."""
    kinds: dict[str, list[Box]] = {}
    for box in boxes:
        kinds.setdefault(kind_of(box.words), []).append(box)
    boxes_by_kind = []
    for those in kinds.values():
        rows = tuple(row for box in those for row in box.rows)
        words = pattern_of([box.words for box in those])
        within = _common(map(_path, rows))
        boxes_by_kind.append(
            those[0] if len(those) == 1 else Box(words, 1, rows, within, len(those))
        )
    return boxes_by_kind


def _text_lines(box: Box) -> list[tuple[str, tuple[Any, ...]]]:
    """The weights of a box by name; if many, those with the same name and layout share a line."""
    if len(box.rows) <= _MOST_WEIGHTS:
        return [(row.path.removeprefix(box.within), (row,)) for row in box.rows]
    alike = families(box.rows, _path, lambda row: row.layout, _last)
    return [(_last(rows[0].path), rows) for _, rows in alike]


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _sum(rows: Iterable[Any]) -> int:
    return sum(row.bytes for row in rows)


def _path(row: Any) -> str:
    return row.path


def _text_bar(size: int, here: int, largest: int) -> str:
    """A bar whose length shows the bytes; the part on one device is full."""
    whole = max(1, round(_BAR * size / max(largest, 1)))
    if whole == 1 and here < size:
        return "▏"
    full = min(whole, max(1, math.ceil(whole * here / max(size, 1))))
    return "█" * full + "░" * (whole - full)


def _words(row: Any) -> str:
    """The description of a weight, for a tooltip."""
    sizes = f"{size_text(row.bytes)}, {size_text(row.bytes_per_device)} a device"
    return f"{row.path} {row.shape} {row.layout}: {sizes}; {row.problem or row.reason}"
