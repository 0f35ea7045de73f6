"""Compares slices: what a model needs on them, in chips, seconds and money."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.topology import CHIPS, Topology
from keras_tpu_dist.show.page import Page, TableCell, code, document, sortable
from keras_tpu_dist.show.text import duration_text, html_table, span_text, text_width, wrapped
from keras_tpu_dist.strategy import TPUStrategy
from keras_tpu_dist.tools.searches.ranking import Ranking, Tried, cells_of, grouped_table, rank

_CHIP_OF = {name: chip.name for chip in CHIPS.values() for name in (chip.name, *chip.aliases)}
_COLUMNS = (
    "slice",
    "chips",
    "mesh",
    "layout",
    "optimizer",
    "remat",
    "rows",
    "memory",
    "step",
    "rows/s",
    "chips x step",
    "chip-s/1k rows",
    "price/1M",
    "effort",
    "verdict",
)
# The columns of the text, which leaves out what follows from others, and those to leave out in turn
# if the terminal is too narrow.
_IN_TEXT = (
    "slice",
    "mesh",
    "layout",
    "slots",
    "remat",
    "rows",
    "memory",
    "step",
    "chips x step",
    "chip-s/1k rows",
    "price/1M",
)


@dataclass(frozen=True)
class OnSlice:
    """A candidate on a slice.

    Attributes:
        topology: The slice.
        tried: The candidate, with its dry run if there is one.
        price: The price of a chip-hour, or `None`.
    """

    topology: Topology
    tried: Tried
    price: float | None = None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, `None` if the compiler estimates none."""
        run = self.tried.run
        return None if run is None or run.estimate is None else run.estimate.step

    @property
    def chip_seconds(self) -> float | None:
        """Chips times the seconds of a step."""
        return None if self.step_s is None else self.topology.num_chips * self.step_s

    @property
    def chip_seconds_a_row(self) -> float:
        """Chip-seconds for one row; infinite if the step's time is not known."""
        return math.inf if self.chip_seconds is None else self.chip_seconds / self.tried.rows

    @property
    def price_a_row(self) -> float:
        """The price of one row, or its chip-seconds if there is no price."""
        return self.chip_seconds_a_row * (1.0 if self.price is None else self.price / 3600)

    @property
    def fits(self) -> bool:
        """Whether it fits, by the compiler."""
        return self.tried.run is not None and bool(self.tried.run.fits)


@dataclass(frozen=True, repr=False)
class SliceRanking(Page):
    """Candidates on several slices, the cheapest that fits first.

    Attributes:
        rankings: One for every slice.
        prices: The prices of a chip-hour, by the chip's name; empty if none was given.
    """

    rankings: tuple[Ranking, ...]
    prices: tuple[tuple[str, float], ...] = ()

    @property
    def candidates(self) -> tuple[OnSlice, ...]:
        """The compiled candidates of all slices.

        First come those that fit and were compiled as in training, then others that fit, then the
        rest; within these groups, they are sorted by the price of a row, or by its chip-seconds.
        """
        prices = dict(self.prices)
        found = []
        for ranking in self.rankings:
            topology = Topology.parse(ranking.topology)
            price = prices.get(topology.chip.name)
            found += [OnSlice(topology, tried, price) for tried in ranking.compiled]
        return tuple(sorted(found, key=_order))

    @property
    def best(self) -> OnSlice | None:
        """The cheapest that fits: by price, or by chips times seconds; `None` if nothing fits."""
        return next((candidate for candidate in self.candidates if candidate.fits), None)

    @property
    def fastest(self) -> OnSlice | None:
        """The one with most rows a second, or `None` if nothing fits."""
        timed = [candidate for candidate in self.candidates if candidate.fits and candidate.step_s]
        best = [each for each in timed if rank(each.tried)[:2] == rank(timed[0].tried)[:2]]
        return min(best, key=lambda each: each.tried.seconds_a_row, default=None)

    def strategy(self, topology: str | Topology | None = None) -> TPUStrategy:
        """The cheapest strategy, ready to use.

        Args:
            topology: A slice, if you want to dry-run the strategy. Defaults to the attached
                devices.

        Raises:
            ValueError: If none fits.
        """
        best = self.best
        if best is None:
            raise value_error(
                "No tried strategy fits the model into one of the slices.",
                received={"topology": [ranking.topology for ranking in self.rankings]},
                fix="Name larger slices, or give a smaller batch_size.",
            )
        return best.tried.candidate.strategy(topology)

    def to_dict(self) -> dict[str, Any]:
        """The ranking as plain data."""
        return {
            "prices": dict(self.prices),
            "candidates": [
                {
                    "topology": candidate.topology.name,
                    "chips": candidate.topology.num_chips,
                    "strategy": str(candidate.tried.candidate),
                    "rows": candidate.tried.rows,
                    "step_s": candidate.step_s,
                    "chip_seconds": candidate.chip_seconds,
                    "price_per_million_rows": _price_of_a_million(candidate),
                    "fits": candidate.fits,
                    "error": candidate.tried.error,
                }
                for candidate in self.candidates
            ],
            "rankings": [ranking.to_dict() for ranking in self.rankings],
        }

    def __str__(self) -> str:
        alike = len({candidate.tried.rows for candidate in self.candidates}) == 1
        # With prices, these follow from others.
        known = ("chip-s/1k rows", "chips x step") if self.prices else ("chip-s/1k rows",) * alike
        columns = [name for name in _IN_TEXT if name not in known]
        lines = wrapped(self._title(), text_width())
        if self.candidates:
            leave_out = ("memory", "step")
            lines.append(grouped_table(self.candidates, _text_cells, columns, leave_out))
        return "\n".join([*lines, *self._lines()])

    def _title(self) -> str:
        names = ", ".join(ranking.topology for ranking in self.rankings)
        if self.best is None:
            return f"{names}: nothing fits"
        by = "the price of a million rows" if self.prices else "chips x step"
        used = dict.fromkeys(ranking.calibration for ranking in self.rankings)
        measured = [f"calibrated by {words}" for words in used if words]
        ranked = f"{len(self.candidates)} candidates on {names}, ranked by {by}"
        return ", ".join([ranked, *measured])

    def _lines(self) -> list[str]:
        """The choices, as lines to copy."""
        best, fastest = self.best, self.fastest
        if best is None:
            return []
        cheap = "cheapest" if self.prices else "fewest chip-seconds"
        if fastest is None or fastest == best:
            return [f"{best.tried.candidate.line}  # {best.topology.name}: {cheap}, and fastest"]
        return [
            f"{fastest.tried.candidate.line}  # {fastest.topology.name}: fastest",
            f"{best.tried.candidate.line}  # {best.topology.name}: {cheap}",
        ]

    def _table(self) -> tuple[tuple[str, ...], list[list[TableCell]]]:
        """Header and rows, without columns that are empty or follow from others."""
        rows = [_cells(candidate) for candidate in self.candidates]
        alike = len({candidate.tried.rows for candidate in self.candidates}) == 1
        shown = [name for name in _COLUMNS if not (alike and name == "chip-s/1k rows")]
        names = [name for name in shown if any(row[name].text for row in rows)]
        return tuple(names), [[row[name] for name in names] for row in rows]

    def _blocks(self) -> list[str]:
        header, rows = self._table()
        table = html_table(header, [[cell.text for cell in row] for row in rows])
        return [table, *map(code, self._lines())]

    def _page(self) -> str:
        """The choices, all slices in one table, then every slice by itself."""
        header, rows = self._table()
        numbers = {id(tried): n for r in self.rankings for n, tried in enumerate(r.candidates, 1)}
        for row, candidate in zip(rows, self.candidates, strict=True):
            row.insert(
                1, TableCell(str(numbers[id(candidate.tried)]), numbers[id(candidate.tried)])
            )
        header = (*header[:1], *(["point"] if rows else []), *header[1:])
        parts = [f"<h1>{html.escape(self._title())}</h1>", *map(code, self._lines())]
        parts.append(sortable(header, rows))
        for ranking in self.rankings:
            parts += [f"<h2>{html.escape(ranking.topology)}</h2>", *ranking._drawing()]
        return document(self._title(), parts)


def compare_slices(
    rankings: Sequence[Ranking], price: float | Mapping[str, float] | None = None
) -> SliceRanking:
    """Ranks the results of `search` or `compare` for several slices, by chips times seconds or
    price.

    Args:
        rankings: Results of `ktd.search` or `ktd.compare`, for one slice each.
        price: The price of a chip-hour, in any currency: one number, or one for every chip, such as
            `{"v5e": 1.2, "v6e": 2.7}`. Without it, chips times seconds decide.

    Returns:
        A `SliceRanking`, the cheapest that fits first.

    Raises:
        ValueError: If there is no ranking, or a chip has no price.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> found = [ktd.search(build, s, 1024) for s in ("v5e-8", "v6e-8")]  # doctest: +SKIP
    >>> print(ktd.compare_slices(found, price={"v5e": 1.2, "v6e": 2.7}))  # doctest: +SKIP
    """
    listed = isinstance(rankings, Sequence) and not isinstance(rankings, str)
    if not listed or not rankings or not all(isinstance(each, Ranking) for each in rankings):
        raise value_error(
            "Slices are compared by what was found on each.",
            received={"rankings": rankings},
            fix="Write compare_slices([ktd.search(build, 'v5e-8'), ktd.search(build, 'v6e-8')]).",
        )
    chips = [Topology.parse(ranking.topology).chip.name for ranking in rankings]
    return SliceRanking(tuple(rankings), tuple(_prices(price, chips).items()))


def _prices(price: Any, chips: list[str]) -> dict[str, float]:
    if price is None:
        return {}
    given: dict[Any, Any] = (
        dict(price) if isinstance(price, Mapping) else dict.fromkeys(chips, price)
    )
    for name, value in given.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise value_error(
                "The price of a chip is what it costs an hour: a number above 0.",
                received={"price": price},
                fix='Write for example price=1.2, or price={"v5e": 1.2, "v6e": 2.7}.',
            )
        if name not in _CHIP_OF:
            raise value_error(
                "Prices are by the names of chips.",
                received={"price": price},
                fix=f"Use one of: {', '.join(CHIPS)}.",
                name=str(name),
                choices=_CHIP_OF,
            )
    found = {_CHIP_OF[name]: float(value) for name, value in given.items()}
    missing = [chip for chip in chips if chip not in found]
    if missing:
        raise value_error(
            "Each chip that is compared needs a price.",
            received={"price": price, "without a price": missing},
            fix=f'Add "{missing[0]}" to it, or give one number for all.',
        )
    return found


def _order(each: OnSlice) -> tuple[float, ...]:
    return (*rank(each.tried)[:2], each.price_a_row) if each.fits else rank(each.tried)


def _price_of_a_million(each: OnSlice) -> float | None:
    return None if each.price is None or each.step_s is None else 1e6 * each.price_a_row


def _cells(each: OnSlice) -> dict[str, TableCell]:
    """What the table says of a candidate, by column."""
    cells = dict.fromkeys(_COLUMNS, TableCell("")) | cells_of(each.tried)
    chips, price = each.topology.num_chips, _price_of_a_million(each)
    cells["slice"], cells["chips"] = TableCell(each.topology.name), TableCell(str(chips), chips)
    run = each.tried.run
    if run is None or run.step_range is None or not each.step_s:
        return cells
    # Each figure as the range that the step has.
    shares = [end / each.step_s for end in run.step_range]

    def cell(value: float, text: Callable[[float], str], inverse: bool = False) -> TableCell:
        ends = [value / share if inverse else value * share for share in shares]
        return TableCell(span_text(min(ends), max(ends), text), value)

    cells["rows/s"] = cell(each.tried.rows / each.step_s, lambda n: f"{n:,.0f}", inverse=True)
    cells["chips x step"] = cell(chips * each.step_s, duration_text)
    cells["chip-s/1k rows"] = cell(1000 * each.chip_seconds_a_row, _number_text)
    if price is not None:
        cells["price/1M"] = cell(price, _number_text)
    return cells


def _text_cells(each: OnSlice) -> dict[str, str]:
    cells = {name: cell.text for name, cell in _cells(each).items()}
    return {**cells, "slots": cells["optimizer"]}


def _number_text(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
