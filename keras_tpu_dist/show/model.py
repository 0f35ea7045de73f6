"""A picture of a model: its variables, coloured by the mesh axes that split them."""

import html
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from keras_tpu_dist.common.axes import entry_names, layout_text
from keras_tpu_dist.show.page import legend
from keras_tpu_dist.show.pictures import Picture
from keras_tpu_dist.show.svg import COLOURS, FAINT, GREY, ON_COLOUR, svg_box, svg_document, svg_text
from keras_tpu_dist.show.text import size_text


@dataclass(frozen=True)
class ModelPicture(Picture):
    """A model's variables as a table coloured by the mesh axes that split them.

    Attributes:
        explanation: The `Explanation` of `strategy.explain` that is drawn.
    """

    explanation: Any

    def colours(self) -> dict[str, str]:
        """The colour of each mesh axis; grey for what a layout takes for one, and is none."""
        names = enumerate(self.explanation.mesh)
        return defaultdict(lambda: GREY, {name: COLOURS[i % len(COLOURS)] for i, name in names})

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain dicts and lists."""
        return self.explanation.to_dict()

    def _title(self) -> str:
        return f"{self.explanation.model} on {self.explanation.mesh}"

    def __rich__(self):
        e, colours = self.explanation, self.colours()
        table = Table(title=Text(self._title()))
        for name in ("variable", "shape", "bytes", "per device", "reason"):
            table.add_column(name, overflow="fold")
        for row in e.rows:
            shape = Text("(")
            for d, size in enumerate(row.shape):
                entry = row.axes[d] if d < len(row.axes) else None
                shape.append(", " if d else "")
                shape.append(dimension_text(size, entry), style=rich_style(entry, colours))
            table.add_row(
                Text(row.path),
                shape.append(")"),
                size_text(row.bytes),
                size_text(row.bytes_per_device),
                Text(row.reason),
            )
        keys = Text("axes: ")
        for name, size in e.mesh.items():
            keys.append(f"{name} {size}", style=f"black on {colours[name]}").append("  ")
        return Group(table, keys, Text(f"weights and optimizer: {self._total()}"))

    def _total(self) -> str:
        e = self.explanation
        return f"{size_text(e.bytes)} in all, {size_text(e.bytes_per_device)} per device"

    def legend_entries(self) -> list[tuple[str, str]]:
        """What colours mean: of each axis its name and size, and of what no axis splits."""
        axes = [(self.colours()[name], f"{name} {n}") for name, n in self.explanation.mesh.items()]
        return [*axes, (GREY, "whole on every device")]

    def _blocks(self) -> Iterable[str]:
        e, colours = self.explanation, self.colours()
        rows = []
        for row in e.rows:
            shape = ", ".join(
                html_dimension(size, row.axes[d] if d < len(row.axes) else None, colours)
                for d, size in enumerate(row.shape)
            )
            cells = (
                html.escape(row.path),
                f"({shape})",
                size_text(row.bytes),
                size_text(row.bytes_per_device),
                html.escape(row.reason),
            )
            marks = ("", "", ' class="n"', ' class="n"', "")
            line = "".join(f"<td{mark}>{cell}</td>" for cell, mark in zip(cells, marks))
            rows.append(f"<tr>{line}</tr>")
        head = "<th>variable</th><th>shape</th><th>bytes</th><th>per device</th><th>reason</th>"
        table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
        total = f"<p>weights and optimizer: {self._total()}</p>"
        return [legend(self.legend_entries()[:-1]), table, total]

    def svg(self) -> str:
        """The picture as SVG: one bar per variable, as long as its share of a device."""
        e, colours = self.explanation, self.colours()
        largest = max((row.bytes for row in e.rows), default=1)
        parts, x = [], 8.0
        for colour, words in [*self.legend_entries(), (FAINT, "in all")]:
            parts += [svg_box(x, 6, 12, 12, colour), svg_text(x + 17, 16, words)]
            x += 34 + 7 * len(words)
        for n, row in enumerate(e.rows):
            y = 30 + n * 24
            parts.append(svg_text(292, y + 15, row.path[-44:], "end"))
            names = [n for entry in row.axes for n in entry_names(entry)]
            for size, fill in (
                (row.bytes, FAINT),
                (row.bytes_per_device, colours[names[0]] if names else GREY),
            ):
                parts.append(svg_box(300, y, max(2.0, 300 * size / largest), 20, fill))
            share = f"{layout_text(row.axes)}  {size_text(row.bytes_per_device)}"
            if row.bytes != row.bytes_per_device:
                share += f" of {size_text(row.bytes)}"
            parts.append(svg_text(610, y + 15, share))
        return svg_document(max(900.0, x), 38 + 24 * len(e.rows), parts)

    def figure(self, kind: Any) -> Any:
        """See `Picture`."""
        e, colours = self.explanation, self.colours()
        figure = kind(figsize=(8, 0.26 * len(e.rows) + 0.8))
        axes = figure.add_subplot()
        places = range(len(e.rows))
        fills = []
        for row in e.rows:
            names = [name for entry in row.axes for name in entry_names(entry)]
            fills.append(colours[names[0]] if names else GREY)
        axes.barh(places, [row.bytes for row in e.rows], color="#e8e8e8")
        axes.barh(places, [row.bytes_per_device for row in e.rows], color=fills)
        axes.set_yticks(places, [f"{r.path}  {layout_text(r.axes)}" for r in e.rows], fontsize=6)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(lambda bytes_, _: size_text(bytes_))
        axes.set_xlabel("in all (light), on one device (colour of the axis)", fontsize=7)
        axes.tick_params(axis="x", labelsize=6)
        largest = max([row.bytes for row in e.rows], default=1)
        step = 2 ** max(0, math.ceil(math.log2(max(largest, 1) / 6)))
        axes.set_xticks(range(0, largest + step, step))
        for colour, words in self.legend_entries():
            axes.fill([], [], color=colour, label=words)
        axes.legend(fontsize=6, loc="best")
        axes.set_title(self._title(), fontsize=9)
        return figure


def dimension_text(size: int, entry) -> str:
    """A dimension and the axes that split it.

    Args:
        size: The number of elements in the dimension.
        entry: What splits it: a mesh axis, a tuple of them, or `None`.
    """
    return f"{size}/{'+'.join(entry_names(entry))}" if entry_names(entry) else str(size)


def rich_style(entry, colours) -> str:
    """The style of a dimension by the axis that splits it.

    Args:
        entry: What splits it: a mesh axis, a tuple of them, or `None`.
        colours: From the name of a mesh axis to its colour.

    Returns:
        The style, by the first axis if there are several; `""` for a dimension that is not split.
    """
    return f"black on {colours[entry_names(entry)[0]]}" if entry_names(entry) else ""


def html_dimension(size: int, entry, colours) -> str:
    """A dimension as HTML, in the colour of its axis.

    Args:
        size: The number of elements in the dimension.
        entry: What splits it: a mesh axis, a tuple of them (the first gives the colour), or `None`.
        colours: From the name of a mesh axis to its colour.
    """
    text = html.escape(dimension_text(size, entry))
    if not entry_names(entry):
        return text
    style = f"background:{colours[entry_names(entry)[0]]};color:{ON_COLOUR};padding:0 .2em"
    return f'<span style="{style}">{text}</span>'
