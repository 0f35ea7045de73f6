"""Pictures of meshes, and of tensors over a mesh: terminal, HTML/SVG, PNG."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keras_tpu_dist.show.page import fragment
from keras_tpu_dist.show.svg import (
    COLOURS,
    ON_COLOUR,
    svg_box,
    svg_document,
    svg_text,
)
from keras_tpu_dist.layout.drawing import (
    PANELS_SHOWN,
    Picture,
    as_plain_text,
    colour_of,
    device_label,
    devices_text,
    draw_mesh,
    draw_tensor,
    slice_text,
)
from keras_tpu_dist.layout.explain import layout_text


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
class TensorPicture(Picture):
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
        for caption, grid in panels[:PANELS_SHOWN]:
            table = Table(title=caption or None, show_header=self.columns is not None)
            table.add_column(f"dim {self.rows}" if self.rows is not None else "")
            for piece in grid[0]:
                table.add_column(self._label(piece, self.columns), justify="center")
            for line in grid:
                cells = [Text(devices_text(p), style=f"black on {colour_of(p)}") for p in line]
                table.add_row(self._label(line[0], self.rows), *cells)
            parts.append(table)
        if len(panels) > PANELS_SHOWN:
            parts.append(Text(f"... {len(panels) - PANELS_SHOWN} more"))
        return Group(*parts)

    def __str__(self):
        return as_plain_text(self)

    def _label(self, piece: Piece, dim: int | None) -> str:
        return "" if dim is None else slice_text(piece.index[dim], self.shape[dim])

    def _index(self, piece: Piece) -> str:
        return f"[{', '.join(slice_text(i, n) for i, n in zip(piece.index, self.shape))}]"

    def _repr_html_(self) -> str:
        return fragment(f"{self.name} {self.shape} {self.layout}", self.svg())

    def svg(self) -> str:
        """The picture as SVG."""
        panels = self.panels()[:PANELS_SHOWN]
        wide = max(len(grid[0]) for _, grid in panels)
        tall = max(len(grid) for _, grid in panels)
        cell_w, cell_h, margin = 110, 34, 100
        panel_w, panel_h = margin + wide * cell_w + 20, tall * cell_h + 56
        across = max(1, min(len(panels), 1000 // panel_w))
        parts = []
        for n, (caption, grid) in enumerate(panels):
            x0, y0 = n % across * panel_w, n // across * panel_h
            parts.append(svg_text(x0 + margin, y0 + 16, caption, bold=True))
            for c, piece in enumerate(grid[0]):
                label = self._label(piece, self.columns)
                parts.append(svg_text(x0 + margin + (c + 0.5) * cell_w, y0 + 36, label, "middle"))
            for r, line in enumerate(grid):
                y = y0 + 42 + r * cell_h
                label = self._label(line[0], self.rows)
                parts.append(svg_text(x0 + margin - 6, y + 21, label, "end"))
                for c, piece in enumerate(line):
                    x = x0 + margin + c * cell_w
                    held = f"{self._index(piece)} on devices {', '.join(map(str, piece.devices))}"
                    box = svg_box(x, y, cell_w - 2, cell_h - 2, colour_of(piece), held)
                    words = devices_text(piece)
                    text = svg_text(x + cell_w / 2, y + 21, words, "middle", colour=ON_COLOUR)
                    parts += [box, text]
        height = -(-len(panels) // across) * panel_h
        return svg_document(across * panel_w, height, parts)

    def figure(self, kind: Any) -> Any:
        """See `Picture`."""
        return draw_tensor(self, kind)


@dataclass(frozen=True)
class MeshPicture(Picture):
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
        labels = [device_label(*device[1:]) for device in self.devices]
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
        for caption, grid in self.panels()[:PANELS_SHOWN]:
            table = Table(title=caption or None)
            table.add_column(names[-2] if len(names) > 1 else "")
            for c in range(len(grid[0])):
                table.add_column(f"{names[-1]}={c}", justify="center")
            for r, line in enumerate(grid):
                table.add_row(str(r) if len(names) > 1 else "", *line)
            parts.append(table)
        return Group(*parts)

    def __str__(self):
        return as_plain_text(self)

    def _repr_html_(self) -> str:
        return fragment(f"mesh {self.axes}", self.svg())

    def svg(self) -> str:
        """The picture as SVG."""
        panels = self.panels()[:PANELS_SHOWN]
        rows, columns = len(panels[0][1]), len(panels[0][1][0])
        names = list(self.axes)
        cell_w, cell_h, margin = 150, 34, 12 + (0 if len(names) < 2 else 8 * (len(names[-2]) + 4))
        tall = rows * cell_h + 62
        parts = []
        for n, (caption, grid) in enumerate(panels):
            y0 = n * tall
            parts.append(svg_text(4, y0 + 16, caption, bold=True))
            for c in range(columns):
                middle = margin + (c + 0.5) * cell_w
                parts.append(svg_text(middle, y0 + 38, f"{names[-1]}={c}", "middle"))
            for r, line in enumerate(grid):
                y = y0 + 46 + r * cell_h
                if len(names) > 1:
                    parts.append(svg_text(margin - 8, y + 20, f"{names[-2]}={r}", "end"))
                for c, label in enumerate(line):
                    x = margin + c * cell_w
                    fill = COLOURS[r % len(COLOURS)]
                    middle = x + cell_w / 2 - 2
                    parts.append(svg_box(x, y, cell_w - 4, cell_h - 4, fill))
                    parts.append(svg_text(middle, y + 20, label, "middle", colour=ON_COLOUR))
        return svg_document(margin + columns * cell_w + 8, len(panels) * tall, parts)

    def figure(self, kind: Any) -> Any:
        """See `Picture`."""
        return draw_mesh(self, kind)


def picture_of_mesh(mesh: Mesh) -> MeshPicture:
    """Draws a mesh: which chip, with its coordinates on the torus, stands where.

    Args:
        mesh: The mesh; coordinates that its devices do not tell are left out.
    """
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


def _coords(device) -> tuple[int, ...] | None:
    coords = getattr(device, "coords", None)
    return None if coords is None else tuple(coords)
