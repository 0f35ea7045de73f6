"""The result of `search`: candidates with the compiler's reports, ranked."""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.chart import Point, colours_of, scatter_svg
from keras_tpu_dist.show.colours import NONE, colours_left_out
from keras_tpu_dist.show.page import (
    Page,
    TableCell,
    bar,
    code,
    definitions,
    document,
    legend,
    table_of_cells,
)
from keras_tpu_dist.show.text import (
    duration_text,
    html_table,
    size_text,
    span_text,
    text_table,
    text_width,
    wrapped,
)
from keras_tpu_dist.strategy import TPUStrategy
from keras_tpu_dist.tools.dryrun.figures import BOUNDS, EFFORTS, Estimate
from keras_tpu_dist.tools.dryrun.run import DryRun
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.tools.searches.forecast import Forecast

_LONGEST_ERROR = 300
# If the HBM is so many times the memory of the largest candidate, it would press all points to one
# side.
_FAR = 4
_VERDICT = {True: "fits", False: "too large", None: "limit unknown"}
# What ranks candidates on several slices, and what it means.
_COSTS = {
    "chip-h/1M": "chips times hours for a million rows",
    "price/1M": "the price of a million rows",
}
# The columns of a page's table, in their order.
_COLUMNS = (
    "slice",
    "mesh",
    "layout",
    "optimizer",
    "remat",
    "rows",
    "memory forecast",
    "step forecast",
    "memory",
    "step",
    *_COSTS,
    "effort",
    "verdict",
    "bound by",
)
# The columns of the text, and those to leave out if the terminal is too narrow. Lines across the
# table have the effort and the verdict.
_IN_TEXT = ("slice", "mesh", "layout", "slots", "remat", "rows", "memory", "step")
_IN_TEXT += (*_COSTS, "bound by")
_LEAVE_OUT = ("bound by", "memory", "step")


@dataclass(frozen=True)
class Tried:
    """A candidate on a slice, its forecast, and its dry run if the compiler has seen it.

    Attributes:
        candidate: The strategy's arguments.
        topology: The slice.
        rows: Rows of all devices together.
        forecast: The forecast in closed form, or `None`.
        run: The dry run, or `None` if it was not compiled; its `effort` is `"exact"` if the search
            compiled it again at its end.
        error: The reason why it could not be built or compiled.
        price: The price of a chip-hour, if it was given.
    """

    candidate: Candidate
    topology: Topology
    rows: int
    forecast: Forecast | None = None
    run: DryRun | None = None
    error: str | None = None
    price: float | None = None

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """Axis names and sizes."""
        return self.candidate.mesh

    @property
    def layout(self) -> str:
        """The layout in words."""
        return self.candidate.layout_text

    @property
    def seconds_a_row(self) -> float:
        """Seconds of all devices for one row: by the compiler, or else by the forecast, or 0."""
        if self.run is not None and self.run.estimate is not None:
            return self.run.estimate.step / self.rows
        return 0.0 if self.forecast is None else self.forecast.step_s / self.rows

    @property
    def chip_hours(self) -> float:
        """Chips times hours for a million rows, by the compiler, or else by the forecast, or 0."""
        return 1e6 * self.seconds_a_row * self.topology.num_chips / 3600

    @property
    def cost(self) -> float:
        """The price of a million rows, or its chip-hours if no price was given."""
        return self.chip_hours * (1.0 if self.price is None else self.price)

    @property
    def memory_bytes(self) -> int:
        """The memory of the compiled program: the maximum at one time if it fits, else the
        total."""
        run = self.run
        if run is None:
            return 0
        above = run.fits and run.limit_bytes is not None and run.total_bytes > run.limit_bytes
        return run.peak_bytes if above and run.peak_bytes else run.total_bytes


def rank(tried: Tried) -> tuple[float, ...]:
    """The sort key of candidates: those that fit, those too large, those that were not compiled.

    Among those that fit, the ones compiled twice come first, then the cheaper per row, which on one
    slice are the faster; among those too large, the smallest comes first.

    Args:
        tried: The candidate.
    """
    run = tried.run
    if run is None:
        return (2.0,)
    if not run.fits:
        return 1.0, float(run.total_bytes)
    return 0.0, float(run.effort != "exact"), tried.cost


@dataclass(frozen=True, repr=False)
class Ranking(Page):
    """Candidates, the best first.

    On one slice the fastest is the best. On several it is the one with the lowest price for a row,
    or with the fewest chip-hours if no prices were given.

    Attributes:
        topologies: The slices.
        compiled: The candidates that the compiler compiled or refused: those that fit, the best
            first, then those too large, then those that could not be built.
        others: The candidates that were not compiled, by forecast.
        seconds: The time of the search.
        model: The model's name, if known.
    """

    topologies: tuple[str, ...]
    compiled: tuple[Tried, ...]
    others: tuple[Tried, ...] = ()
    seconds: float = 0.0
    model: str = ""

    @property
    def candidates(self) -> tuple[Tried, ...]:
        """All of them, ranked."""
        return (*self.compiled, *self.others)

    @property
    def best(self) -> Tried | None:
        """The best that fits, or `None`."""
        first = self.compiled[0] if self.compiled else None
        return first if first is not None and first.run is not None and first.run.fits else None

    def strategy(self, topology: str | Topology | None = None) -> TPUStrategy:
        """The best strategy, ready to use.

        Args:
            topology: A slice, if you want to dry-run the strategy. Defaults to the attached
                devices.

        Raises:
            ValueError: If none fits.
        """
        best = self.best
        if best is None:
            raise value_error(
                "No tried strategy fits the model into the slice.",
                received={"model": self.model, "topology": ", ".join(self.topologies)},
                fix="Search a larger slice, or give a smaller batch_size.",
            )
        return best.candidate.strategy(topology)

    @property
    def limit(self) -> str:
        """The bottleneck of the best candidate, in words."""
        best = self.best
        if best is None or best.run is None or best.run.estimate is None:
            return "nothing fits: there is too little memory for this model and batch"
        e, run = best.run.estimate, best.run
        used = best.memory_bytes / (run.limit_bytes or math.inf)
        parts = [
            f"the matrix units are busy {_shares(e, e.compute)} of the step (effort {run.effort})"
        ]
        if e.exposed_link > 0.1 * e.step:
            parts.append(f"collectives without overlap take {_shares(e, e.exposed_link)}")
        parts.append(f"{used:.0%} of the memory is used")
        return f"bound by {e.bound}: {', '.join(parts)}"

    @property
    def undecided(self) -> str:
        """In words, that the first two are closer than estimates of such programs are right; empty
        if they are not, or if no such program was published."""
        if self.best is None or len(self.compiled) < 2:
            return ""
        first, second = self.compiled[:2]
        one, other = first.run, second.run
        spread = None if one is None else one.spread
        if one is None or other is None or spread is None or spread.error is None:
            return ""
        same_chip = first.topology.chip == second.topology.chip
        if not other.fits or one.effort != other.effort or not same_chip:
            return ""
        ahead = second.cost / first.cost - 1
        if ahead >= spread.error:
            return ""
        return (
            f"the first two differ by {ahead:.1%}, and estimates of published programs like these "
            f"by {spread.error:.1%}: measure both"
        )

    def _title(self) -> str:
        of = f" for model {self.model!r}" if self.model else ""
        compiled = sum(tried.run is not None for tried in self.compiled)
        batch = {tried.rows for tried in self.candidates}
        of += f", batch {min(batch)}" if len(batch) == 1 else ""
        by = f", ranked by {_COSTS[self._cost]}" if self._cost else ""
        return (
            f"{_counted(len(self.candidates))}{of} on {', '.join(self.topologies)}, {compiled} "
            f"compiled in {duration_text(self.seconds)}{by}"
        )

    @property
    def _cost(self) -> str:
        """The column that ranks candidates, or `""` if their steps do."""
        if any(tried.price is not None for tried in self.candidates):
            return "price/1M"
        return "chip-h/1M" if len(self.topologies) > 1 else ""

    def _is_shown(self, column: str) -> bool:
        """Whether a column may tell candidates apart."""
        if column == "slice":
            return len(self.topologies) > 1
        return column not in _COSTS or column == self._cost

    def __str__(self) -> str:
        first = "none fits" if self.best is None else f"the first is {self.limit}"
        lines = [*wrapped(self._title(), text_width()), *wrapped(first, text_width())]
        lines += wrapped(self.undecided, text_width()) if self.undecided else []
        # Of several slices the candidates are too many for a text.
        shown = self.candidates if len(self.topologies) == 1 else self.compiled
        if shown:
            lines.append(_grouped_table(shown, list(filter(self._is_shown, _IN_TEXT))))
        if left := len(self.candidates) - len(shown):
            lines.append(f"... {left} not compiled, which to_html and to_dict list")
        return "\n".join([*lines, *self._line()])

    def _line(self) -> list[str]:
        """The best strategy, as a line to copy."""
        best = self.best
        if best is None:
            return []
        on = f" on {best.topology.name}" if len(self.topologies) > 1 else ""
        return [f"{best.candidate.line}  # batch_size={best.rows}{on}"]

    def _blocks(self) -> list[str]:
        header, rows = self._table()
        table = html_table(header, [[cell.text for cell in row] for row in rows])
        return [*self._drawings(), table, *map(code, self._line())]

    def _page(self) -> str:
        """A plot of step time against memory, and a table."""
        header, rows = self._table()
        for row, tried in zip(rows, self.candidates, strict=True):
            row.append(self._bar(tried))
        of = f" for model {self.model!r}" if self.model else ""
        title = f"{_counted(len(self.candidates))}{of} on {', '.join(self.topologies)}"
        first = f"by {_COSTS[self._cost]}" if self._cost else "the fastest that fits first"
        head = f"<h1>{html.escape(title)}, {first}</h1>"
        table = table_of_cells((*header, "of the HBM"), rows)
        by = [f"<p>{html.escape(self.undecided)}</p>"] if self.undecided else []
        parts = [head, *by, *map(code, self._line()), *self._drawings(), table, self._words()]
        return document(title, parts)

    def _words(self) -> str:
        """What the words of the table mean."""
        runs = [tried.run for tried in self.candidates if tried.run and tried.run.estimate]
        bounds = {run.estimate.bound: None for run in runs if run.estimate}
        efforts = {run.effort: None for run in runs}
        words = [
            *((name, _COSTS[name]) for name in filter(None, [self._cost])),
            *((f"bound by {name}", BOUNDS[name]) for name in bounds),
            *((f"effort {name}", EFFORTS[name]) for name in efforts),
        ]
        return definitions(words) if words else ""

    def to_dict(self) -> dict[str, Any]:
        """The ranking as plain data."""
        return {
            "model": self.model,
            "topologies": list(self.topologies),
            "seconds": self.seconds,
            "undecided": self.undecided,
            "candidates": [
                {
                    "topology": tried.topology.name,
                    "strategy": str(tried.candidate),
                    "mesh": dict(tried.mesh),
                    "layout": tried.layout,
                    "shard_optimizer": tried.candidate.shard_optimizer,
                    "remat": tried.candidate.remat,
                    "rows": tried.rows,
                    "forecast_bytes": tried.forecast and tried.forecast.memory_bytes,
                    "forecast_step_s": tried.forecast and tried.forecast.step_s,
                    "run": tried.run and tried.run.to_dict(),
                    "chip_hours_per_million_rows": tried.chip_hours,
                    "price_per_million_rows": None if tried.price is None else tried.cost,
                    "error": tried.error,
                }
                for tried in self.candidates
            ],
        }

    def _table(self) -> tuple[tuple[str, ...], list[list[TableCell]]]:
        """Header and numbered rows, without empty columns."""
        rows = [_cells(tried) for tried in self.candidates]
        shown = list(filter(self._is_shown, _COLUMNS))
        names = [name for name in shown if any(row[name].text for row in rows)]
        if not rows:
            return tuple(shown[:2]), []
        table = [[row[name] for name in names] for row in rows]
        for number, row in enumerate(table, 1):
            row[0] = TableCell(row[0].text.replace(" ", "\N{NO-BREAK SPACE}"))
            row.insert(0, TableCell(str(number), number))
        return ("", *names), table

    def _bar(self, tried: Tried) -> TableCell:
        """The memory of a compiled candidate as a bar, on one scale for all."""
        if tried.run is None:
            return TableCell("")
        whole = max(_scale(candidate.run) for candidate in self.candidates if candidate.run)
        limit = tried.run.limit_bytes
        mark, share = None if limit is None else limit / whole, tried.memory_bytes / whole
        part = (share, NONE, size_text(tried.memory_bytes))
        return TableCell("", tried.memory_bytes, bar([part], mark))

    def _points(self, topology: str) -> Iterator[Point]:
        for number, tried in enumerate(self.candidates, 1):
            if tried.run is not None and tried.topology.name == topology:
                seconds = tried.run.step_range
                words, fits = (
                    f"{tried.candidate.mesh_text}, {tried.layout}",
                    tried.run.fits is not False,
                )
                yield Point(number, words, tried.layout, tried.memory_bytes, seconds, fits)

    def _drawings(self) -> list[str]:
        """The plot of each slice, below its name if there are several."""
        parts = []
        for topology in self.topologies:
            parts += [f"<h2>{html.escape(topology)}</h2>"] if len(self.topologies) > 1 else []
            parts += self._drawing(topology)
        return parts

    def _drawing(self, topology: str) -> list[str]:
        points = list(self._points(topology))
        if not any(point.seconds for point in points):
            why = "no candidate fits" if any(not p.fits for p in points) else "none has times"
            return [f"<p>{why}: step time is not drawn</p>"]
        limits = {
            tried.run.limit_bytes
            for tried in self.candidates
            if tried.run is not None and tried.topology.name == topology
        }
        limit = limits.pop() if len(limits) == 1 else None
        far = (limit or 0) > _FAR * max(point.bytes for point in points)
        keys = [(colour, f"layout {name}") for name, colour in colours_of(points).items()]
        shared = colours_left_out(len(keys), "layouts")
        beside = [f"<p>{shared}: see the numbers</p>"] if shared else []
        beside += [f"<p>the HBM, {size_text(limit or 0)}, is far to the right</p>"] if far else []
        drawing = scatter_svg(points, None if far else limit)
        return [f'<div class="drawing">{drawing}</div>', legend(keys), *beside]


def _counted(number: int) -> str:
    return f"{number} candidate{'' if number == 1 else 's'}"


def _shares(e: Estimate, seconds: float) -> str:
    """A part of a step in percent of it, as the range that the step has."""
    low, high = (min(1.0, seconds / end) for end in reversed(e.span))
    return span_text(low, high, lambda share: f"{share:.0%}")


def _cells(tried: Tried) -> dict[str, TableCell]:
    """The cells of a candidate in tables, by column."""
    run, forecast, candidate = tried.run, tried.forecast, tried.candidate
    cells = dict.fromkeys(_COLUMNS, TableCell("")) | {
        "slice": TableCell(tried.topology.name),
        "mesh": TableCell(candidate.mesh_text),
        "layout": TableCell(tried.layout),
        "optimizer": TableCell("split" if candidate.shard_optimizer else ""),
        "remat": TableCell(candidate.remat or ""),
        "rows": TableCell(str(tried.rows), tried.rows),
    }
    if forecast is not None:
        memory = int(forecast.memory_bytes)
        cells["memory forecast"] = TableCell(size_text(memory), memory)
        cells["step forecast"] = TableCell(duration_text(forecast.step_s), forecast.step_s)
    if run is None:
        cells["verdict"] = TableCell(tried.error or "not compiled")
        return cells
    cells["memory"] = TableCell(size_text(tried.memory_bytes), tried.memory_bytes)
    cells["effort"], cells["verdict"] = TableCell(run.effort), TableCell(_VERDICT[run.fits])
    if run.estimate is not None:
        cells["step"] = TableCell(run.estimate.span_words, run.estimate.step)
        cells["bound by"] = TableCell(run.estimate.bound)
        # As a range, as the step's time is.
        step = run.estimate.step
        low, high = (end / step if step else 1.0 for end in run.estimate.span)
        for name, cost in _costs(tried).items():
            cells[name] = TableCell(span_text(low * cost, high * cost, _number_text), cost)
    return cells


def _costs(tried: Tried) -> dict[str, float]:
    return dict(zip(_COSTS, (tried.chip_hours, tried.cost), strict=True))


def _number_text(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text_cells(tried: Tried) -> dict[str, str]:
    """The cells of a candidate in text; forecasts if it was not compiled."""
    cells = {name: cell.text for name, cell in _cells(tried).items()}
    if tried.run is None:
        cells["memory"], cells["step"] = cells["memory forecast"], cells["step forecast"]
    if tried.run is None and tried.forecast is not None:
        cells |= {name: _number_text(cost) for name, cost in _costs(tried).items()}
    return {**cells, "slots": cells["optimizer"]}


def _grouped_table(candidates: Sequence[Tried], columns: Sequence[str]) -> str:
    """A table of candidates in the order of their rank, with a line above each group.

    Args:
        columns: The columns, in order; those without text are left out, and "rows" if all of them
            have as many.
    """
    found = [_text_cells(candidate) for candidate in candidates]
    names = [name for name in columns if any(cells[name] for cells in found)]
    if len({cells["rows"] for cells in found}) == 1 and "rows" in names:
        names.remove("rows")
    for name in _LEAVE_OUT:
        # Columns have two spaces between them.
        widths = [2 + max(len(n), *(len(cells[n]) for cells in found)) for n in names]
        if name in names and sum(widths) > text_width():
            names.remove(name)
    rows: list[Sequence[str] | str] = []
    group = ""
    for tried, cells in zip(candidates, found, strict=True):
        if _group(tried) != group:
            group = _group(tried)
            rows.append(group)
        first, *others = (cells[name] for name in names)
        rows.append([f"  {first}", *others])
        if tried.error:
            short = len(tried.error) <= _LONGEST_ERROR
            rows.append("    " + (tried.error if short else f"{tried.error[:_LONGEST_ERROR]}..."))
    return text_table([f"  {names[0]}", *names[1:]], rows, indent="")


def _group(tried: Tried) -> str:
    """What candidates that stand together have in common."""
    if tried.error:
        return "cannot be compiled:"
    if tried.run is None:
        return "not compiled, forecasts:"
    return f"{_VERDICT[tried.run.fits]}, effort {tried.run.effort}:"


def _scale(run: DryRun) -> int:
    return max(run.total_bytes, run.limit_bytes or 0, 1)
