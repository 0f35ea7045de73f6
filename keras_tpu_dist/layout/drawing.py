"""How pictures of layouts are drawn: as text, HTML, SVG, and figures of matplotlib."""

import html
import io
import math
import os
from typing import Any

from rich.console import Console

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.show.page import delivered, file_of
from keras_tpu_dist.show.svg import COLOURS, GREY, ON_COLOUR
from keras_tpu_dist.show.text import size_text
from keras_tpu_dist.common.axes import entry_names
from keras_tpu_dist.layout.explain import layout_text

PANELS_SHOWN = 64


def slice_text(index: tuple[int, int], size: int) -> str:
    """A slice as Python writes it; the whole dimension as `:`.

    Args:
        index: `(start, stop)` in one dimension.
        size: The number of elements in that dimension.
    """
    return ":" if index == (0, size) else f"{index[0]}:{index[1]}"


def as_plain_text(renderable) -> str:
    """What rich would print, without colours.

    Args:
        renderable: A picture, or anything else that rich can print.
    """
    console = Console(width=120, color_system=None, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text().rstrip()


def devices_text(piece: Any) -> str:
    """The devices that hold a piece, in few words.

    Args:
        piece: A `Piece`, its device ids in ascending order.
    """
    ids = piece.devices
    if len(ids) > 2 and ids == tuple(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]}-{ids[-1]}"
    shown = ",".join(map(str, ids[:4]))
    return shown if len(ids) <= 4 else f"{shown},... ({len(ids)})"


def colour_of(piece: Any) -> str:
    """The colour of the piece on its first device.

    Args:
        piece: A `Piece`.
    """
    return COLOURS[piece.devices[0] % len(COLOURS)]


def device_label(device_id: int, process: int, coords) -> str:
    """A device with its place on the torus and its host.

    Args:
        device_id: The id that JAX gives the device.
        process: The index of the process that drives it; the host is not named for process 0.
        coords: Its coordinates on the torus, or `None` for a device without them.
    """
    place = "" if coords is None else f" @{','.join(map(str, coords))}"
    return f"{device_id}{place}" + (f" host {process}" if process else "")


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


class Picture:
    """What the pictures of layouts have in common."""

    def svg(self) -> str:
        """The picture as SVG."""
        raise NotImplementedError

    def figure(self, kind: Any) -> Any:
        """The picture as a figure of matplotlib.

        Args:
            kind: The class `Figure`.
        """
        raise NotImplementedError

    def save(self, path: str) -> None:
        """Writes a PNG (needs matplotlib), or an SVG by that ending.

        Args:
            path: The file to write; any ending but `.svg` is left to matplotlib.

        Raises:
            ValueError: If its folder is missing, or its ending names no format.
            ImportError: If the file is no `.svg` and matplotlib is not installed.
        """
        file = file_of(path)
        if file.suffix.lower() == ".svg":
            delivered(self.svg(), file)
            return
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                message(
                    "Pictures other than .svg are drawn by matplotlib, which is not installed.",
                    received={"path": str(path)},
                    fix='Install it with pip install "keras_tpu_dist[plot]", or save an .svg.',
                )
            ) from error
        try:
            self.figure(Figure).savefig(file, dpi=150, bbox_inches="tight")
        except ValueError as error:
            raise ValueError(
                message(
                    "A picture is written in a format that matplotlib knows.",
                    received=f"path={os.fspath(path)!r}: {error}.",
                    fix="Give the file the ending .png or .svg.",
                )
            ) from error


def _grids(figure_type, panels, title, label, colour):
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


def draw_tensor(picture: Any, figure_type):
    """A `TensorPicture` as a figure of matplotlib.

    Args:
        picture: The picture; at most `PANELS_SHOWN` of its grids are drawn.
        figure_type: `matplotlib.figure.Figure`, passed in so that an `.svg` needs no matplotlib.
    """
    title = f"{picture.name} {picture.shape} {picture.layout}"

    def label(piece):
        parts = [slice_text(i, n) for i, n in zip(piece.index, picture.shape)]
        return f"[{', '.join(parts)}]\ndevice {devices_text(piece)}"

    panels = picture.panels()[:PANELS_SHOWN]
    return _grids(figure_type, panels, title, label, lambda _, piece: colour_of(piece))


def draw_mesh(picture: Any, figure_type):
    """A `MeshPicture` as a figure of matplotlib.

    Args:
        picture: The picture; at most `PANELS_SHOWN` of its grids are drawn.
        figure_type: `matplotlib.figure.Figure`, passed in so that an `.svg` needs no matplotlib.
    """
    return _grids(
        figure_type,
        picture.panels()[:PANELS_SHOWN],
        f"mesh {picture.axes}",
        str,
        lambda row, _: COLOURS[row % len(COLOURS)],
    )


def draw_model(picture: Any, figure_type):
    """A `ModelPicture` as a figure of matplotlib.

    Args:
        picture: The picture; all of its variables are drawn.
        figure_type: `matplotlib.figure.Figure`, passed in so that an `.svg` needs no matplotlib.
    """
    e, colours = picture.explanation, picture.colours()
    figure = figure_type(figsize=(8, 0.26 * len(e.rows) + 0.8))
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
    for colour, words in picture.legend_entries():
        axes.fill([], [], color=colour, label=words)
    axes.legend(fontsize=6, loc="best")
    axes.set_title(f"{e.model} on {e.mesh}", fontsize=9)
    return figure
