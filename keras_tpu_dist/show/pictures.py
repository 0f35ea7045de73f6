"""Pictures of meshes, and of tensors over a mesh: terminal, HTML/SVG, PNG."""

import html
import io
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from keras_tpu_dist.common.axes import Axes, entry_names, layout_text, names_in
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.show.colours import (
    EMPTY,
    NONE,
    ON_COLOUR,
    axis_colour,
    axis_colours,
    colours_left_out,
    distinct,
)
from keras_tpu_dist.show.page import Page, delivered, document, file_of
from keras_tpu_dist.show.svg import svg_box, svg_document, svg_text
from keras_tpu_dist.show.text import text_width, wrapped

PANELS_SHOWN = 64


def panels_left_out(panels: Sequence[tuple[str, Any]]) -> str:
    """A note if there are more panels than a picture has room for, or `""`.

    Args:
        panels: All panels with their titles.
    """
    if len(panels) <= PANELS_SHOWN:
        return ""
    first, last = panels[PANELS_SHOWN][0], panels[-1][0]
    return f"{len(panels) - PANELS_SHOWN} of {len(panels)} panels are not drawn: {first} to {last}"


def slice_text(index: tuple[int, int], size: int) -> str:
    """A slice in Python's notation, with `:` for the whole dimension.

    Args:
        index: `(start, stop)` in one dimension.
        size: The number of elements in that dimension.
    """
    return ":" if index == (0, size) else f"{index[0]}:{index[1]}"


def as_plain_text(renderable) -> str:
    """The output of rich, without colours.

    Args:
        renderable: A picture, or anything else that rich can print.
    """
    console = Console(
        width=text_width(), color_system=None, record=True, file=io.StringIO(), force_jupyter=False
    )
    console.print(renderable)
    return console.export_text().rstrip()


def devices_text(piece: Any) -> str:
    """A short form of the devices that hold a piece.

    Args:
        piece: A `Piece`, its device ids in ascending order.
    """
    ids = piece.devices
    if len(ids) > 2 and ids == tuple(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]}-{ids[-1]}"
    shown = ",".join(map(str, ids[:4]))
    return shown if len(ids) <= 4 else f"{shown},... ({len(ids)})"


def device_label(device_id: int, process: int, coords) -> str:
    """The label of a device: its id, its coordinates on the torus and its host.

    Args:
        device_id: JAX's id of the device.
        process: The index of its process; the label has no host for process 0.
        coords: Its coordinates on the torus, or `None` for a device without coordinates.
    """
    place = "" if coords is None else f" @{','.join(map(str, coords))}"
    return f"{device_id}{place}" + (f" host {process}" if process else "")


class Picture(Page):
    """The base class of pictures, as text, HTML and SVG."""

    def __str__(self) -> str:
        return as_plain_text(self)

    def _blocks(self) -> Iterable[str]:
        return [self.svg()]

    def svg(self) -> str:
        """The picture as SVG."""
        raise NotImplementedError

    def _page(self) -> str:
        return document(self._title(), [f"<h1>{html.escape(self._title())}</h1>", *self._blocks()])

    def save(self, path: str) -> None:
        """Writes the picture to a file.

        Args:
            path: The file, which ends with `.svg`, or with `.html` for a page.
        """
        file = file_of(path)
        texts = {".svg": self.svg, ".html": self._page}
        if file.suffix.lower() not in texts:
            raise value_error(
                "A picture is written as an .svg or .html file.",
                received={"path": str(path)},
                fix="Give the file one of these endings; browsers and drawing programs convert it.",
            )
        delivered(texts[file.suffix.lower()](), file)


@dataclass(frozen=True)
class Piece:
    """One distinct piece of a tensor.

    Attributes:
        index: `(start, stop)` in each dimension.
    """

    index: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class TensorPicture(Picture):
    """A picture of the slices of a tensor, and the devices that hold them.

    The last two split dimensions (or the last two dimensions) are the rows and columns of a grid.
    There is one grid for every combination of pieces of the other dimensions, with its slice as
    title.

    Attributes:
        axes: One entry per dimension: the mesh axes that split it.
        note: A warning about the layout, or `""`.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    pieces: tuple[Piece, ...]
    rows: int | None
    columns: int | None
    axes: Axes = ()
    mesh: dict[str, int] = field(default_factory=dict)
    note: str = ""

    def panels(self) -> list[tuple[str, list[list[Piece]]]]:
        """Grids of pieces with their titles, in the order of the other dimensions."""
        others = [d for d in range(len(self.shape)) if d not in (self.rows, self.columns)]
        groups: dict[tuple, dict[tuple, list[Piece]]] = {}
        for piece in self.pieces:
            key = tuple(piece.index[d] for d in others)
            row = piece.index[self.rows] if self.rows is not None else ()
            groups.setdefault(key, {}).setdefault(row, []).append(piece)
        panels = []
        for key, lines in groups.items():
            parts = {d: slice_text(k, self.shape[d]) for d, k in zip(others, key, strict=True)}
            drawn = {self.rows: "rows", self.columns: "columns"}
            names = [parts.get(d) or drawn[d] for d in range(len(self.shape))]
            grid = [sorted(line, key=lambda p: p.index) for _, line in sorted(lines.items())]
            panels.append((f"[{', '.join(names)}]" if others else "", grid))
        return panels

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain dicts and lists."""
        return asdict(self)

    def _title(self) -> str:
        return f"{self.name} {self.shape} {self.layout}"

    def __rich__(self):
        title = f"{self._title()}: {len(self.pieces)} piece(s)"
        parts: list[Any] = [Text(title, style="bold")]
        colours = self._colours()
        for caption, grid in self.panels()[:PANELS_SHOWN]:
            table = Table(show_header=self.columns is not None)
            parts += [Text(caption)] if caption else []
            table.add_column(f"dim {self.rows}" if self.rows is not None else "")
            for piece in grid[0]:
                table.add_column(self._label(piece, self.columns), justify="center")
            for line in grid:
                cells = [Text(devices_text(p), style=f"black on {colours[p]}") for p in line]
                table.add_row(self._label(line[0], self.rows), *cells)
            parts.append(table)
        return Group(*parts, *map(Text, self._left_out()))

    def _left_out(self) -> list[str]:
        shared = colours_left_out(len(self.pieces), "pieces")
        known = panels_left_out(self.panels()), shared, *wrapped(self.note, 70)
        return [words for words in known if words]

    def _colours(self) -> dict[Piece, str]:
        return {piece: distinct(n) for n, piece in enumerate(self.pieces)}

    def _axis_keys(self) -> list[tuple[str, str]]:
        """The colours of the axes that split the tensor, with their words."""
        used = names_in(self.axes)
        return [key for name in self.mesh if name in used for key in _key(name, self.mesh)]

    def _label(self, piece: Piece, dim: int | None) -> str:
        return "" if dim is None else slice_text(piece.index[dim], self.shape[dim])

    def _axis_colour(self, dim: int | None) -> str:
        """The colour of the axis that splits a dimension."""
        entry = self.axes[dim] if dim is not None and dim < len(self.axes) else None
        return axis_colour(entry_names(entry), list(self.mesh))

    def _index(self, piece: Piece) -> str:
        return (
            f"[{', '.join(slice_text(i, n) for i, n in zip(piece.index, self.shape, strict=True))}]"
        )

    def svg(self) -> str:
        """The picture as SVG."""
        panels, colours = self.panels()[:PANELS_SHOWN], self._colours()
        wide = max(len(grid[0]) for _, grid in panels)
        tall = max(len(grid) for _, grid in panels)
        heads = max(len(self._label(piece, self.columns)) for piece in self.pieces)
        held = max(len(devices_text(piece)) for piece in self.pieces)
        beside = max(len(self._label(piece, self.rows)) for piece in self.pieces)
        cell_w, cell_h, margin = _cell_width(110, max(heads, held)), 34, _cell_width(100, beside)
        panel_w, panel_h = margin + wide * cell_w + 20, tall * cell_h + 56
        across = max(1, min(len(panels), 1000 // panel_w))
        parts = []
        for n, (caption, grid) in enumerate(panels):
            x0, y0 = n % across * panel_w, n // across * panel_h
            parts.append(svg_text(x0 + margin, y0 + 16, caption, bold=True))
            for c, piece in enumerate(grid[0]):
                label, colour = self._label(piece, self.columns), self._axis_colour(self.columns)
                parts += svg_label(x0 + margin + c * cell_w, y0 + 22, cell_w - 2, label, colour)
            for r, line in enumerate(grid):
                y = y0 + 42 + r * cell_h
                label, colour = self._label(line[0], self.rows), self._axis_colour(self.rows)
                parts += svg_label(x0 + 4, y + 7, margin - 10, label, colour)
                for c, piece in enumerate(line):
                    x = x0 + margin + c * cell_w
                    title = f"{self._index(piece)} on devices {', '.join(map(str, piece.devices))}"
                    box = svg_box(x, y, cell_w - 2, cell_h - 2, colours[piece], title)
                    words = devices_text(piece)
                    text = svg_text(x + cell_w / 2, y + 21, words, "middle", colour=ON_COLOUR)
                    parts += [box, text]
        height = -(-len(panels) // across) * panel_h
        below = svg_below(height, self._axis_keys(), self._left_out())
        room = _room_below(self._axis_keys(), self._left_out())
        width = max(across * panel_w, 320, room)
        return svg_document(width, height + below[0], [*parts, *below[1]])


@dataclass(frozen=True, repr=False)
class MeshPicture(Picture):
    """A picture of a mesh's devices at their positions.

    Attributes:
        devices: `(indices on the axes, device id, process, chip coordinates or None)` for every
            device.
    """

    axes: dict[str, int]
    devices: tuple[tuple[tuple[int, ...], int, int, tuple[int, ...] | None], ...]

    def panels(self) -> list[tuple[str, list[list[str]]]]:
        """Grids of device labels over the last two axes, with the others as titles."""
        names, sizes = list(self.axes), list(self.axes.values())
        columns = sizes[-1]
        rows = sizes[-2] if len(sizes) > 1 else 1
        labels = [device_label(*device[1:]) for device in self.devices]
        panels = []
        outer = list(itertools.product(*(range(size) for size in sizes[:-2])))
        for n, index in enumerate(outer):
            caption = ", ".join(f"{name}={i}" for name, i in zip(names[:-2], index, strict=True))
            block = labels[n * rows * columns : (n + 1) * rows * columns]
            panels.append((caption, [block[r * columns :][:columns] for r in range(rows)]))
        return panels

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain dicts and lists."""
        return asdict(self)

    def _title(self) -> str:
        return f"mesh {self.axes}"

    def __rich__(self):
        names, colours = list(self.axes), axis_colours(list(self.axes))
        parts: list[Any] = [Text(self._title(), style="bold")]
        for caption, grid in self.panels()[:PANELS_SHOWN]:
            table = Table()
            parts += [Text(caption)] if caption else []
            down = names[-2] if len(names) > 1 else ""
            table.add_column(down, style=f"black on {colours[down]}" if down else "")
            for c in range(len(grid[0])):
                head = Text(f"{names[-1]}={c}", style=f"black on {colours[names[-1]]}")
                table.add_column(head, justify="center")
            for r, line in enumerate(grid):
                table.add_row(str(r) if down else "", *line)
            parts.append(table)
        return Group(*parts, *map(Text, self._left_out()))

    def _left_out(self) -> list[str]:
        return list(filter(None, [panels_left_out(self.panels())]))

    def svg(self) -> str:
        """The picture as SVG."""
        panels = self.panels()[:PANELS_SHOWN]
        rows, columns = len(panels[0][1]), len(panels[0][1][0])
        names, colours = list(self.axes), axis_colours(list(self.axes))
        longest = max(len(label) for _, grid in panels for line in grid for label in line)
        cell_w, cell_h = _cell_width(120, longest), 34
        margin = 12 + (0 if len(names) < 2 else 8 * (len(names[-2]) + 4))
        tall = rows * cell_h + 62
        parts = []
        for n, (caption, grid) in enumerate(panels):
            y0 = n * tall
            parts.append(svg_text(4, y0 + 16, caption, bold=True))
            for c in range(columns):
                words, colour = f"{names[-1]}={c}", colours[names[-1]]
                parts += svg_label(margin + c * cell_w, y0 + 24, cell_w - 4, words, colour)
            for r, line in enumerate(grid):
                y = y0 + 46 + r * cell_h
                if len(names) > 1:
                    words, colour = f"{names[-2]}={r}", colours[names[-2]]
                    parts += svg_label(4, y + 6, margin - 10, words, colour)
                for c, label in enumerate(line):
                    x = margin + c * cell_w
                    parts.append(svg_box(x, y, cell_w - 4, cell_h - 4, EMPTY))
                    parts.append(svg_text(x + cell_w / 2 - 2, y + 20, label, "middle"))
        height = len(panels) * tall
        further = [key for name in names[:-2] for key in _key(name, self.axes)]
        below = svg_below(height, further, self._left_out())
        width = max(margin + columns * cell_w + 8, 320, _room_below(further, self._left_out()))
        return svg_document(width, height + below[0], [*parts, *below[1]])


def _cell_width(least: int, letters: int) -> int:
    """The width of cells, in pixels, in which as many letters have room."""
    return max(least, 7 * letters + 16)


def _key(name: str, mesh: dict[str, int]) -> list[tuple[str, str]]:
    return [(axis_colours(list(mesh))[name], f"{name} {mesh[name]}")]


def svg_label(x: float, y: float, width: float, words: str, colour: str) -> list[str]:
    """The label of a row or a column, in the colour of the mesh axis along it.

    Args:
        x: Its left side, in pixels.
        y: Its top.
        width: Its width.
        words: Its text; without text, nothing is drawn.
        colour: The colour of the axis; `NONE` if no axis splits the dimension.
    """
    if not words:
        return []
    inked = colour != NONE
    text = svg_text(
        x + width / 2, y + 13, words, "middle", colour=ON_COLOUR if inked else "currentColor"
    )
    return [svg_box(x, y, width, 18, colour), text] if inked else [text]


def svg_below(
    top: float, keys: Sequence[tuple[str, str]], lines: Sequence[str]
) -> tuple[float, list[str]]:
    """The legend and the notes below a picture.

    Args:
        top: The lower edge of the picture, in pixels.
        keys: Colours with their words.
        lines: Notes.
    """
    parts, x, y = [], 4.0, top + 8
    for colour, words in keys:
        parts += [svg_box(x, y, 12, 12, colour), svg_text(x + 17, y + 10, words)]
        x += 34 + 7 * len(words)
    y += 22 if keys else 0
    for n, line in enumerate(lines):
        parts.append(svg_text(4, y + 12 + 18 * n, line))
    return y + 18 * len(lines) - top, parts


def _room_below(keys: Sequence[tuple[str, str]], lines: Sequence[str]) -> float:
    """The width that `svg_below` takes, in pixels."""
    return max(sum(34 + 7 * len(words) for _, words in keys), *(8 + 7 * len(w) for w in lines), 0)


def picture_of_mesh(mesh: Mesh) -> MeshPicture:
    """Draws a mesh: the position of every chip, with its coordinates on the torus.

    Args:
        mesh: The mesh; devices without coordinates are drawn without them.
    """
    devices = tuple(
        (index, device.id, device.process_index, _coords(device))
        for index, device in np.ndenumerate(mesh.devices)
    )
    return MeshPicture(dict(mesh.shape), devices)


def picture_of_tensor(name: str, shape: Sequence[int], sharding: NamedSharding) -> TensorPicture:
    """Draws the slices of a tensor, and the devices that hold them.

    Args:
        name: The tensor's name.
        shape: Its shape, of any rank.
        sharding: Its layout.
    """
    shape = tuple(shape)
    holders: dict[tuple, list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        key = tuple(
            slice_.indices(size)[:2]
            for slice_, size in zip(index or (), shape, strict=index is not None)
        )
        holders.setdefault(key, []).append(device.id)
    pieces = tuple(Piece(key, tuple(sorted(holders[key]))) for key in sorted(holders))
    split = [d for d in range(len(shape)) if len({p.index[d] for p in pieces}) > 1]
    whole = [d for d in range(len(shape)) if d not in split]
    drawn = sorted([*whole, *split][-2:])
    rows = drawn[-2] if len(drawn) > 1 else None
    columns = drawn[-1] if drawn else None
    axes = tuple(sharding.spec)
    text = layout_text(axes, len(shape))
    mesh = dict(sharding.mesh.shape)
    return TensorPicture(name, shape, text, pieces, rows, columns, axes, mesh)


def _coords(device) -> tuple[int, ...] | None:
    coords = getattr(device, "coords", None)
    return None if coords is None else tuple(coords)
