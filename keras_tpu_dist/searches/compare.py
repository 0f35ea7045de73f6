"""Meshes and layouts compared: each dry-run under a strategy of its own, and ranked."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.common.checks import check_callable, check_counts
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.page import Cell, Page, bar, document, fragment, legend, sortable
from keras_tpu_dist.common.progress import stages
from keras_tpu_dist.common.svg import GREY
from keras_tpu_dist.common.text import duration_text, html_table, size_text, text_table
from keras_tpu_dist.dryrun.run import Build, DryRun, Progress, check_how, run_once
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.searches.scatter import Point, colours_of, scatter_svg
from keras_tpu_dist.strategy import TPUStrategy

logger = logging.getLogger("keras_tpu_dist")

_LONGEST_ERROR = 100
# An HBM so many times what the largest candidate takes would press all points to one side.
_FAR = 4
_VERDICT = {True: "fits", False: "too large", None: "limit unknown"}


@dataclass(frozen=True)
class Candidate:
    """One mesh with one layout.

    Args:
        mesh: Axis sizes.
        layout: What was given to `TPUStrategy`, as text.
        run: Its dry run, or `None` if it could not be built.
        error: Why it could not be built.
    """

    mesh: tuple[tuple[str, int], ...]
    layout: str
    run: DryRun | None
    error: str | None = None

    @property
    def mesh_text(self) -> str:
        """The mesh in a line."""
        return " x ".join(f"{name} {n}" for name, n in self.mesh)


@dataclass(frozen=True)
class Comparison(Page):
    """Candidates, the fastest that fits first.

    Args:
        candidates: All of them, ranked.
    """

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate that fits, or `None`."""
        first = self.candidates[0] if self.candidates else None
        return first if first and first.run and first.run.fits else None

    def _page(self) -> str:
        """Step time drawn against memory, and a table."""
        title = f"{len(self.candidates)} candidates"
        head = f"<h1>{title}, the fastest that fits first</h1>"
        table = sortable(("", *self._HEADER, "of the HBM"), self._cells())
        return document(title, [head, *self._drawing(), table])

    def _rows(self, longest: int | None = None) -> list[tuple[str, ...]]:
        rows = []
        for c in self.candidates:
            if c.run is None:
                rows.append((c.mesh_text, c.layout, "error", "", "", (c.error or "")[:longest]))
                continue
            step = duration_text(c.run.estimate.step) if c.run.estimate else ""
            bound = c.run.estimate.bound if c.run.estimate else ""
            memory = size_text(c.run.total_bytes)
            rows.append((c.mesh_text, c.layout, _VERDICT[c.run.fits], memory, step, bound))
        return rows

    def _unbroken_rows(self) -> list[tuple[str, ...]]:
        """The rows for pages, with meshes that stay on one line."""
        return [(mesh.replace(" ", "\N{NO-BREAK SPACE}"), *rest) for mesh, *rest in self._rows()]

    _HEADER = ("mesh", "layout", "", "per device", "step", "bound by")

    def _cells(self) -> list[list[Cell | str]]:
        """The rows with what they are sorted by, numbered as the points are."""
        whole = max((_scale(c.run) for c in self.candidates if c.run), default=1)
        table: list[list[Cell | str]] = []
        for number, (c, row) in enumerate(zip(self.candidates, self._unbroken_rows()), 1):
            cells: list[Cell | str] = [Cell(str(number), number), *row, ""]
            if c.run is not None:
                size, limit = c.run.total_bytes, c.run.limit_bytes
                mark = None if limit is None else limit / whole
                cells[4] = Cell(row[3], size)
                cells[5] = Cell(row[4], c.run.estimate.step if c.run.estimate else None)
                cells[7] = Cell("", size, bar([(size / whole, GREY, row[3])], mark))
            table.append(cells)
        return table

    def _points(self) -> list[Point]:
        return [
            Point(
                number,
                f"{c.mesh_text}, {c.layout}",
                c.layout,
                c.run.total_bytes,
                c.run.estimate.step if c.run.estimate else None,
                c.run.fits is not False,
            )
            for number, c in enumerate(self.candidates, 1)
            if c.run is not None
        ]

    def _drawing(self) -> list[str]:
        points = self._points()
        if not any(point.seconds for point in points):
            why = "no candidate fits" if any(not p.fits for p in points) else "none has times"
            return [f"<p>{why}: step time is not drawn</p>"]
        limits = {c.run.limit_bytes for c in self.candidates if c.run is not None}
        limit = limits.pop() if len(limits) == 1 else None
        far = (limit or 0) > _FAR * max(point.bytes for point in points)
        keys = [(colour, f"layout {name}") for name, colour in colours_of(points).items()]
        said = [f"<p>the HBM, {size_text(limit or 0)}, is far to the right</p>"] if far else []
        return [scatter_svg(points, None if far else limit), legend(keys), *said]

    def __str__(self) -> str:
        return text_table(self._HEADER, self._rows(_LONGEST_ERROR))

    def _repr_html_(self) -> str:
        rows = [(str(n), *row) for n, row in enumerate(self._unbroken_rows(), 1)]
        table = html_table(("", *self._HEADER), rows)
        return fragment("", *self._drawing(), table)

    def to_dict(self) -> dict[str, object]:
        """The candidates as plain data."""
        return {
            "candidates": [
                {
                    "mesh": dict(c.mesh),
                    "layout": c.layout,
                    "error": c.error,
                    "run": c.run.to_dict() if c.run else None,
                }
                for c in self.candidates
            ]
        }


def compare(
    build: Build,
    *,
    topology: str | Topology,
    meshes: Iterable[dict[str, int]],
    layouts: Sequence[Any] = (None,),
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int,
    mode: str = "train",
    timeout: float = 1800.0,
    progress: Progress | None = None,
) -> Comparison:
    """Dry-runs every mesh with every layout and ranks those that fit by estimated step time.

    Args:
        build: As in `dry_run`.
        topology: The slice.
        meshes: Dicts of axis sizes.
        layouts: What `TPUStrategy` takes as `layout`.
        x: As in `dry_run`.
        y: As in `dry_run`.
        sample_weight: As in `dry_run`.
        batch_size: Rows of all devices together.
        mode: As in `dry_run`.
        timeout: As in `dry_run`.
        progress: As in `dry_run`.

    Returns:
        A `Comparison`. A candidate that cannot be built, because its mesh or layout does not fit
        the slice or the model, stands last with its error.

    Raises:
        ValueError: If meshes or layouts are one alone instead of a list.

    Example:

    >>> import keras
    >>> from keras_tpu_dist import compare
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> meshes = [{"data": 8}, {"data": 4, "model": 2}]
    >>> ranked = compare(build, topology="v5e:2x4", meshes=meshes, batch_size=64)  # doctest: +SKIP
    >>> dict(ranked.best.mesh)  # doctest: +SKIP
    {'data': 8}
    """
    meshes, layouts = _listed(meshes, layouts)
    # Before it is tried on each of them, to say it once.
    topology = Topology.parse(topology)
    check_callable("compare", build=build)
    check_counts("compare", 1, batch_size=batch_size)
    check_how(mode, timeout, progress)
    found = []
    inputs = {"x": x, "y": y, "sample_weight": sample_weight}
    pairs = [(mesh, layout) for mesh in meshes for layout in layouts]
    with stages("comparing", len(pairs)) as begin:
        for mesh, layout in pairs:
            text = _layout_text(layout)
            begin(f"{' x '.join(f'{name} {n}' for name, n in mesh.items())}, {text}")
            run, error, sizes = None, None, dict(mesh)
            try:
                strategy = TPUStrategy(mesh, layout, topology=topology)
                sizes = dict(strategy.mesh.shape)
                run = run_once(
                    build,
                    strategy,
                    inputs=inputs,
                    batch_size=batch_size,
                    mode=mode,
                    effort="quick",
                    timeout=timeout,
                    progress=progress,
                    thorough=False,
                )
            except (ValueError, RuntimeError, NotImplementedError) as reason:
                error = str(reason)
                logger.info("mesh %s with layout %s: %s", mesh, layout, error)
            found.append(Candidate(tuple(sizes.items()), text, run, error))
    return Comparison(tuple(sorted(found, key=_rank)))


def _listed(meshes: Any, layouts: Any) -> tuple[list, list]:
    """Meshes and layouts as lists; one alone would be taken apart instead."""
    several = all(
        isinstance(given, Iterable) and not isinstance(given, (str, Mapping))
        for given in (meshes, layouts)
    )
    listed = list(meshes) if several else []
    if (
        not several
        or not listed
        or not list(layouts)
        or not all(isinstance(mesh, Mapping) for mesh in listed)
    ):
        raise ValueError(
            message(
                "A comparison is of a list of meshes, each a dict of axis sizes, and a list of "
                "layouts.",
                received={"meshes": listed or meshes, "layouts": layouts},
                fix='Write for example meshes=[{"data": 8}], layouts=[None, "fsdp"].',
            )
        )
    return listed, list(layouts)


def _scale(run: DryRun) -> int:
    return max(run.total_bytes, run.limit_bytes or 0, 1)


def _rank(candidate: Candidate) -> tuple[int, float]:
    run = candidate.run
    if run is None:
        return 2, 0.0
    if not run.fits:
        return 1, float(run.total_bytes)
    return 0, run.estimate.step if run.estimate else 0.0


def _layout_text(layout: Any) -> str:
    text = "replicated" if layout is None else str(layout)
    return text if len(text) <= 40 else f"{text[:37]}..."
