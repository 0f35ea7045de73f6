"""Pictures of meshes, of tensors over a mesh, and of models: terminal, HTML/SVG, PNG."""

import html
import io
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.text import size_text
from keras_tpu_dist.layout.explain import Explanation, layout_text
from keras_tpu_dist.layout.rules import entry_names

# Ten colours that stay apart for colour-blind readers (Okabe-Ito, then its lighter kin).
_COLOURS = (
    *("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#8fa8ff"),
    *("#d55e00", "#cc79a7", "#999999", "#b3de69", "#bc80bd"),
)
_PANELS_SHOWN = 64


@dataclass(frozen=True)
class Piece:
    """One distinct piece of a tensor.

    Attributes:
        index: `(start, stop)` in each dimension.
        devices: Ids of the devices that hold it.
    """

    index: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class TensorPicture:
    """Which device holds which slice of a tensor.

    The last two dimensions that are split (or the last two) make a grid, as rows and columns; each
    combination of pieces of the other dimensions is a grid of its own, with its slice as title.

    Attributes:
        name: The tensor's name.
        shape: Its shape.
        layout: Its layout as text.
        pieces: Its pieces, in order.
        rows: The dimension drawn downwards, or `None`.
        columns: The dimension drawn to the right, or `None`.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    pieces: tuple[Piece, ...]
    rows: int | None
    columns: int | None

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
            parts = {d: slice_text(k, self.shape[d]) for d, k in zip(others, key)}
            names = [parts.get(d, "·") for d in range(len(self.shape))]
            grid = [sorted(line, key=lambda p: p.index) for _, line in sorted(lines.items())]
            panels.append((f"[{', '.join(names)}]" if others else "", grid))
        return panels

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain dicts and lists."""
        return asdict(self)

    def __rich__(self):
        title = f"{self.name} {self.shape} {self.layout}: {len(self.pieces)} piece(s)"
        parts: list[Any] = [Text(title, style="bold")]
        panels = self.panels()
        for caption, grid in panels[:_PANELS_SHOWN]:
            table = Table(title=caption or None, show_header=self.columns is not None)
            table.add_column(f"dim {self.rows}" if self.rows is not None else "")
            for piece in grid[0]:
                table.add_column(self._label(piece, self.columns), justify="center")
            for line in grid:
                cells = [Text(_devices_text(p), style=f"black on {_colour(p)}") for p in line]
                table.add_row(self._label(line[0], self.rows), *cells)
            parts.append(table)
        if len(panels) > _PANELS_SHOWN:
            parts.append(Text(f"... {len(panels) - _PANELS_SHOWN} more"))
        return Group(*parts)

    def __str__(self):
        return _plain(self)

    def _label(self, piece: Piece, dim: int | None) -> str:
        return "" if dim is None else slice_text(piece.index[dim], self.shape[dim])

    def _repr_html_(self) -> str:
        title = html.escape(f"{self.name} {self.shape} {self.layout}")
        return f"<p><b>{title}</b></p>{self.svg()}"

    def svg(self) -> str:
        """The picture as SVG."""
        panels = self.panels()[:_PANELS_SHOWN]
        wide = max(len(grid[0]) for _, grid in panels)
        tall = max(len(grid) for _, grid in panels)
        cell_w, cell_h, margin = 110, 34, 100
        panel_w, panel_h = margin + wide * cell_w + 20, tall * cell_h + 56
        across = max(1, min(len(panels), 1000 // panel_w))
        parts = []
        for n, (caption, grid) in enumerate(panels):
            x0, y0 = n % across * panel_w, n // across * panel_h
            parts.append(_svg_text(x0 + margin, y0 + 16, caption, bold=True))
            for c, piece in enumerate(grid[0]):
                label = self._label(piece, self.columns)
                parts.append(_svg_text(x0 + margin + (c + 0.5) * cell_w, y0 + 36, label, "middle"))
            for r, line in enumerate(grid):
                y = y0 + 42 + r * cell_h
                label = self._label(line[0], self.rows)
                parts.append(_svg_text(x0 + margin - 6, y + 21, label, "end"))
                for c, piece in enumerate(line):
                    x = x0 + margin + c * cell_w
                    parts.append(
                        f'<rect x="{x}" y="{y}" width="{cell_w - 2}" height="{cell_h - 2}" '
                        f'rx="3" fill="{_colour(piece)}"/>'
                    )
                    middle = x + cell_w / 2
                    parts.append(_svg_text(middle, y + 21, _devices_text(piece), "middle"))
        height = -(-len(panels) // across) * panel_h
        return _svg(across * panel_w, height, parts)

    def save(self, path: str) -> None:
        """Writes a PNG (needs matplotlib), or an SVG by that ending."""
        _save(self, path, _draw_tensor)


@dataclass(frozen=True)
class MeshPicture:
    """The devices of a mesh at their places.

    Attributes:
        axes: Axis sizes.
        devices: `(index on each axis, device id, process, chip coordinates or None)` of each.
    """

    axes: dict[str, int]
    devices: tuple[tuple[tuple[int, ...], int, int, tuple[int, ...] | None], ...]

    def panels(self) -> list[tuple[str, list[list[str]]]]:
        """Grids of device labels over the last two axes, with the others as titles."""
        names, sizes = list(self.axes), list(self.axes.values())
        columns = sizes[-1]
        rows = sizes[-2] if len(sizes) > 1 else 1
        labels = [_device_label(*device[1:]) for device in self.devices]
        panels = []
        outer = list(itertools.product(*(range(size) for size in sizes[:-2])))
        for n, index in enumerate(outer):
            caption = ", ".join(f"{name}={i}" for name, i in zip(names, index))
            block = labels[n * rows * columns : (n + 1) * rows * columns]
            panels.append((caption, [block[r * columns :][:columns] for r in range(rows)]))
        return panels

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain dicts and lists."""
        return asdict(self)

    def __rich__(self):
        names = list(self.axes)
        parts: list[Any] = [Text(f"mesh {self.axes}", style="bold")]
        for caption, grid in self.panels()[:_PANELS_SHOWN]:
            table = Table(title=caption or None)
            table.add_column(names[-2] if len(names) > 1 else "")
            for c in range(len(grid[0])):
                table.add_column(f"{names[-1]}={c}", justify="center")
            for r, line in enumerate(grid):
                table.add_row(str(r) if len(names) > 1 else "", *line)
            parts.append(table)
        return Group(*parts)

    def __str__(self):
        return _plain(self)

    def _repr_html_(self) -> str:
        return f"<p><b>mesh {html.escape(str(self.axes))}</b></p>{self.svg()}"

    def svg(self) -> str:
        """The picture as SVG."""
        panels = self.panels()[:_PANELS_SHOWN]
        rows, columns = len(panels[0][1]), len(panels[0][1][0])
        cell_w, cell_h = 150, 34
        parts = []
        for n, (caption, grid) in enumerate(panels):
            y0 = n * (rows * cell_h + 40)
            parts.append(_svg_text(4, y0 + 16, caption, bold=True))
            for r, line in enumerate(grid):
                for c, label in enumerate(line):
                    x, y = c * cell_w + 4, y0 + 24 + r * cell_h
                    colour = _COLOURS[r % len(_COLOURS)]
                    parts.append(
                        f'<rect x="{x}" y="{y}" width="{cell_w - 4}" height="{cell_h - 4}" '
                        f'rx="3" fill="{colour}"/>'
                    )
                    parts.append(_svg_text(x + cell_w / 2, y + 20, label, "middle"))
        return _svg(columns * cell_w + 8, len(panels) * (rows * cell_h + 40), parts)

    def save(self, path: str) -> None:
        """Writes a PNG (needs matplotlib), or an SVG by that ending."""
        _save(self, path, _draw_mesh)


@dataclass(frozen=True)
class ModelPicture:
    """A model's variables as a table coloured by the mesh axes that split them.

    Attributes:
        explanation: What is drawn.
    """

    explanation: Explanation

    def colours(self) -> dict[str, str]:
        """The colour of each mesh axis."""
        return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(self.explanation.mesh)}

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain dicts and lists."""
        return self.explanation.to_dict()

    def __rich__(self):
        e, colours = self.explanation, self.colours()
        table = Table(title=f"{e.model} on {e.mesh}")
        for name in ("variable", "shape", "bytes", "per device", "reason"):
            table.add_column(name, overflow="fold")
        for row in e.rows:
            shape = Text("(")
            for d, size in enumerate(row.shape):
                entry = row.axes[d] if d < len(row.axes) else None
                shape.append(", " if d else "")
                shape.append(_dimension_text(size, entry), style=_style(entry, colours))
            table.add_row(
                row.path,
                shape.append(")"),
                size_text(row.bytes),
                size_text(row.bytes_per_device),
                row.reason,
            )
        total = f"{size_text(e.bytes)} in all, {size_text(e.bytes_per_device)} per device"
        return Group(table, Text(f"weights and optimizer: {total}"))

    def __str__(self):
        return _plain(self)

    def _repr_html_(self) -> str:
        e, colours = self.explanation, self.colours()
        rows = []
        for row in e.rows:
            shape = ", ".join(
                _html_dimension(size, row.axes[d] if d < len(row.axes) else None, colours)
                for d, size in enumerate(row.shape)
            )
            cells = (
                html.escape(row.path),
                f"({shape})",
                size_text(row.bytes),
                size_text(row.bytes_per_device),
                html.escape(row.reason),
            )
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        head = "<th>variable</th><th>shape</th><th>bytes</th><th>per device</th><th>reason</th>"
        title = html.escape(f"{e.model} on {e.mesh}")
        return f"<p><b>{title}</b></p><table><tr>{head}</tr>{''.join(rows)}</table>"

    def svg(self) -> str:
        """The picture as SVG: one bar per variable, as long as its share of a device."""
        e, colours = self.explanation, self.colours()
        largest = max((row.bytes for row in e.rows), default=1)
        parts = []
        for n, row in enumerate(e.rows):
            y = 8 + n * 24
            parts.append(_svg_text(292, y + 15, row.path[-44:], "end"))
            for size, colour in ((row.bytes, "#e8e8e8"), (row.bytes_per_device, None)):
                names = [n for entry in row.axes for n in entry_names(entry)]
                fill = colour or (colours[names[0]] if names else "#bbbbbb")
                width = max(2.0, 300 * size / largest)
                parts.append(
                    f'<rect x="300" y="{y}" width="{width:.1f}" height="20" fill="{fill}"/>'
                )
            share = f"{layout_text(row.axes)}  {size_text(row.bytes_per_device)}"
            parts.append(_svg_text(610, y + 15, share))
        return _svg(860, 16 + 24 * len(e.rows), parts)

    def save(self, path: str) -> None:
        """Writes a PNG (needs matplotlib), or an SVG by that ending."""
        _save(self, path, _draw_model)


Picture = TensorPicture | MeshPicture | ModelPicture


def picture_of_mesh(mesh: Mesh) -> MeshPicture:
    """Draws a mesh: which chip, with its coordinates on the torus, stands where."""
    devices = tuple(
        (index, device.id, device.process_index, _coords(device))
        for index, device in np.ndenumerate(mesh.devices)
    )
    return MeshPicture(dict(mesh.shape), devices)


def picture_of_tensor(name: str, shape: Sequence[int], sharding: NamedSharding) -> TensorPicture:
    """Draws which device holds which slice of a tensor.

    Args:
        name: The tensor's name.
        shape: Its shape, of any rank.
        sharding: Its layout.

    Returns:
        The picture.

    Example:

    >>> import jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    >>> picture = picture_of_tensor("kernel", (8, 6), NamedSharding(mesh, P(None, "model")))
    >>> [piece.devices for piece in picture.pieces]
    [(0, 2, 4, 6), (1, 3, 5, 7)]
    """
    shape = tuple(shape)
    holders: dict[tuple, list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        key = tuple(slice_.indices(size)[:2] for slice_, size in zip(index or (), shape))
        holders.setdefault(key, []).append(device.id)
    pieces = tuple(Piece(key, tuple(sorted(holders[key]))) for key in sorted(holders))
    split = [d for d in range(len(shape)) if len({p.index[d] for p in pieces}) > 1]
    whole = [d for d in range(len(shape)) if d not in split]
    drawn = sorted([*whole, *split][-2:])
    rows = drawn[-2] if len(drawn) > 1 else None
    columns = drawn[-1] if drawn else None
    axes = tuple(sharding.spec)
    return TensorPicture(name, shape, layout_text(axes), pieces, rows, columns)


def slice_text(index: tuple[int, int], size: int) -> str:
    """A slice as Python writes it; the whole dimension as `:`."""
    return ":" if index == (0, size) else f"{index[0]}:{index[1]}"


def _plain(renderable) -> str:
    console = Console(width=120, color_system=None, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text().rstrip()


def _devices_text(piece: Piece) -> str:
    ids = piece.devices
    if len(ids) > 2 and ids == tuple(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]}-{ids[-1]}"
    shown = ",".join(map(str, ids[:4]))
    return shown if len(ids) <= 4 else f"{shown},... ({len(ids)})"


def _colour(piece: Piece) -> str:
    return _COLOURS[piece.devices[0] % len(_COLOURS)]


def _coords(device) -> tuple[int, ...] | None:
    coords = getattr(device, "coords", None)
    return None if coords is None else tuple(coords)


def _device_label(device_id: int, process: int, coords) -> str:
    place = "" if coords is None else f" @{','.join(map(str, coords))}"
    return f"{device_id}{place}" + (f" host {process}" if process else "")


def _dimension_text(size: int, entry) -> str:
    return f"{size}/{'+'.join(entry_names(entry))}" if entry_names(entry) else str(size)


def _style(entry, colours) -> str:
    return f"black on {colours[entry_names(entry)[0]]}" if entry_names(entry) else ""


def _html_dimension(size: int, entry, colours) -> str:
    text = html.escape(_dimension_text(size, entry))
    if not entry_names(entry):
        return text
    return f'<span style="background:{colours[entry_names(entry)[0]]};color:#000">{text}</span>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def _svg_text(x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text {place} fill="#222"{weight}>{html.escape(text)}</text>'


def _save(picture, path: str, draw) -> None:
    if str(path).endswith(".svg"):
        with open(path, "w", encoding="utf-8") as file:
            file.write(picture.svg())
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            message(
                "A PNG is drawn by matplotlib, which is not installed.",
                received={"path": str(path)},
                fix='Install it with pip install "keras_tpu_dist[plot]", or save an .svg.',
            )
        ) from error
    figure = draw(picture, Figure)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _draw_grids(figure_type, panels, title, label, colour):
    across = min(len(panels), 4)
    down = -(-len(panels) // across)
    rows = max(len(grid) for _, grid in panels)
    columns = max(len(grid[0]) for _, grid in panels)
    size = (across * (0.9 * columns + 0.8), down * (0.45 * rows + 0.7) + 0.4)
    figure = figure_type(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10)
    for n, (caption, grid) in enumerate(panels):
        axes = figure.add_subplot(down, across, n + 1)
        axes.set_title(caption, fontsize=8)
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)
        axes.axis("off")
        for r, line in enumerate(grid):
            for c, cell in enumerate(line):
                box = {"facecolor": colour(r, cell), "edgecolor": "white"}
                axes.fill([c, c + 1, c + 1, c], [r, r, r + 1, r + 1], **box)
                axes.text(c + 0.5, r + 0.5, label(cell), ha="center", va="center", fontsize=6)
    return figure


def _draw_tensor(picture: TensorPicture, figure_type):
    title = f"{picture.name} {picture.shape} {picture.layout}"

    def label(piece):
        parts = [slice_text(i, n) for i, n in zip(piece.index, picture.shape)]
        return f"[{', '.join(parts)}]\ndevice {_devices_text(piece)}"

    panels = picture.panels()[:_PANELS_SHOWN]
    return _draw_grids(figure_type, panels, title, label, lambda _, piece: _colour(piece))


def _draw_mesh(picture: MeshPicture, figure_type):
    return _draw_grids(
        figure_type,
        picture.panels()[:_PANELS_SHOWN],
        f"mesh {picture.axes}",
        str,
        lambda row, _: _COLOURS[row % len(_COLOURS)],
    )


def _draw_model(picture: ModelPicture, figure_type):
    e, colours = picture.explanation, picture.colours()
    figure = figure_type(figsize=(8, 0.26 * len(e.rows) + 0.8))
    axes = figure.add_subplot()
    places = range(len(e.rows))
    fills = []
    for row in e.rows:
        names = [name for entry in row.axes for name in entry_names(entry)]
        fills.append(colours[names[0]] if names else "#bbbbbb")
    axes.barh(places, [row.bytes for row in e.rows], color="#e8e8e8")
    axes.barh(places, [row.bytes_per_device for row in e.rows], color=fills)
    axes.set_yticks(places, [f"{r.path}  {layout_text(r.axes)}" for r in e.rows], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("bytes: in all (grey), on one device (colour of the axis)", fontsize=7)
    axes.set_title(f"{e.model} on {e.mesh}", fontsize=9)
    return figure
