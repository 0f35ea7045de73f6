"""Meshes and layouts compared: each dry-run under a strategy of its own, and ranked."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.common.text import duration_text, html_table, size_text, text_table
from keras_tpu_dist.dryrun.run import Build, DryRun, Progress, run_once
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.strategy import TPUStrategy

logger = logging.getLogger("keras_tpu_dist")


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


@dataclass(frozen=True)
class Comparison:
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

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for c in self.candidates:
            mesh = " x ".join(f"{name} {n}" for name, n in c.mesh)
            if c.run is None:
                rows.append((mesh, c.layout, "error", "", "", (c.error or "")[:100]))
                continue
            step = duration_text(c.run.estimate.step) if c.run.estimate else ""
            bound = c.run.estimate.bound if c.run.estimate else ""
            fits = "fits" if c.run.fits else "too large"
            rows.append((mesh, c.layout, fits, size_text(c.run.total_bytes), step, bound))
        return rows

    _HEADER = ("mesh", "layout", "", "per device", "step", "bound by")

    def __str__(self) -> str:
        return text_table(self._HEADER, self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._HEADER, self._rows())

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
    found = []
    inputs = {"x": x, "y": y, "sample_weight": sample_weight}
    for mesh in meshes:
        for layout in layouts:
            run, error = None, None
            try:
                run = run_once(
                    build,
                    TPUStrategy(mesh, layout, topology=topology),
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
            found.append(Candidate(tuple(mesh.items()), _layout_text(layout), run, error))
    return Comparison(tuple(sorted(found, key=_rank)))


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
