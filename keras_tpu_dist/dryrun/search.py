"""Questions that take several dry runs: the largest batch, the best mesh, two plans compared."""

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.text import duration_text, html_table, size_text, text_table
from keras_tpu_dist.dryrun.run import Build, DryRun, Progress, run_once
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.strategy import TPUStrategy

logger = logging.getLogger("keras_tpu_dist")


# No guess is more than this many times what is known to fit.
_LARGEST_STEP = 256


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits, and how it was found.

    Args:
        batch_size: Rows of all devices together; 0 if not even the smallest fits.
        run: The dry run of that batch, or of the smallest one if none fits.
        tried: Batch size, whether it fits, and bytes on one device (0 if unknown), in order.
    """

    batch_size: int
    run: DryRun
    tried: tuple[tuple[int, bool, int], ...]

    def __str__(self) -> str:
        rows = [(str(b), "fits" if ok else "too large", size_text(n)) for b, ok, n in self.tried]
        return (
            f"largest batch on {self.run.compiled_for}: {self.batch_size}, "
            f"found with {len(self.tried)} compilation(s)\n"
            + text_table(("batch size", "", "per device"), rows)
        )


def largest_batch(
    build: Build,
    strategy: TPUStrategy,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    mode: str = "train",
    remat: str | None = None,
    effort: str = "quick",
    tolerance: float = 0.05,
    max_compiles: int = 8,
    timeout: float = 1800.0,
    progress: Progress | None = None,
) -> LargestBatch:
    """Finds the largest batch whose step fits, by asking the compiler.

    Memory grows almost in proportion to the batch, so two compilations predict the answer, a
    third usually confirms it, and bisection closes what is left. Quick compilations state a peak
    memory within 6 % of what training would need, but up to three times too much for recurrent
    layers and convolutions: leave that much room, or ask for `effort="exact"`.

    Args:
        build: As in `dry_run`; a function if `remat` is given.
        strategy: A `TPUStrategy` with a `topology`.
        x: As in `dry_run`.
        y: As in `dry_run`.
        sample_weight: As in `dry_run`.
        mode: As in `dry_run`.
        remat: Builds the model inside of `keras.RematScope(mode=remat)`, which recomputes
            activations instead of keeping them: `"full"`, `"activations"` and so on.
        effort: `"quick"` or `"exact"`, as in `dry_run`.
        tolerance: Stop when a larger batch that was refused, or the memory that is left, is within
            this fraction of the answer.
        max_compiles: Stop after so many compilations in any case.
        timeout: As in `dry_run`.
        progress: As in `dry_run`.

    Returns:
        A `LargestBatch`. Sizes are multiples of the number of parts that the batch is split into.

    Raises:
        ValueError: If the strategy has no topology, or `remat` is given with a built model.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> from keras_tpu_dist.dryrun.search import largest_batch
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> strategy = ktd.TPUStrategy(topology="v5e:2x4")
    >>> print(largest_batch(build, strategy))  # doctest: +SKIP
    """
    limit = _checked_topology(strategy).hbm_bytes
    unit = strategy.num_replicas_in_sync
    build = build if remat is None else _rematerialized(build, remat)
    inputs = {"x": x, "y": y, "sample_weight": sample_weight}
    runs: dict[int, DryRun] = {}

    def fits(parts: int) -> bool:
        runs[parts] = run_once(
            build,
            strategy,
            inputs=inputs,
            batch_size=parts * unit,
            mode=mode,
            effort=effort,
            timeout=timeout,
            progress=progress,
            thorough=False,
        )
        return bool(runs[parts].fits)

    low, high = 0, None
    guess: int | None = 1
    while guess is not None and len(runs) < max_compiles:
        if fits(guess):
            low = guess
        else:
            high = guess
        guess = _next_guess(runs, low, high, limit, tolerance)
    tried = tuple((p * unit, bool(r.fits), r.total_bytes) for p, r in runs.items())
    return LargestBatch(low * unit, runs[low or min(runs)], tried)


def _next_guess(
    runs: dict[int, DryRun], low: int, high: int | None, limit: int, tolerance: float
) -> int | None:
    """The number of parts to try next, or `None` when the answer is known well enough."""
    if low == 0:
        return None
    if high is not None and high - low <= max(1, tolerance * low):
        return None
    fitting = sorted(p for p, run in runs.items() if run.fits)
    if len(fitting) == 1:
        fixed = runs[low].state.weights + runs[low].state.optimizer
        room = max(0, limit - fixed) / max(1, runs[low].total_bytes - fixed)
        # a small batch is mostly padding; a quarter of what it predicts is safe, and tells more
        predicted = low + int(low * (room - 1) / 4)
    else:
        # the steepest: near the limit the compiler saves memory, which makes it look flat there
        slopes = [
            (runs[b].total_bytes - runs[a].total_bytes) / (b - a)
            for a, b in itertools.pairwise(fitting)
        ]
        room = int((limit - runs[low].total_bytes) / max(1e-9, *slopes))
        if high is None and room < tolerance * low:
            return None
        predicted = low + room * (2 if slopes[-1] < max(slopes) / 2 else 1)
    predicted = min(predicted, _LARGEST_STEP * low)
    step = max(1, math.ceil(tolerance * low))
    if high is None:
        return max(low + step, predicted)
    if not low + step <= predicted < high or len(runs) > 4:
        predicted = (low + high) // 2
    return min(max(predicted, low + 1), high - 1)


def _rematerialized(build: Build, remat: str) -> Build:
    if isinstance(build, keras.Model):
        raise ValueError(
            message(
                "Rematerialization is decided when layers are made.",
                received={"build": build.name, "remat": remat},
                fix="Give the function that builds the model.",
            )
        )

    def build_in_scope() -> keras.Model:
        with keras.RematScope(mode=remat):
            return build()

    return build_in_scope


def _checked_topology(strategy: TPUStrategy) -> Topology:
    if strategy.topology is None:
        raise ValueError(
            message(
                "Finding the largest batch needs a slice whose memory is known.",
                received={"strategy": strategy},
                fix='Use TPUStrategy(mesh, layout, topology="v5e:2x4").',
            )
        )
    return strategy.topology


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
    >>> from keras_tpu_dist.dryrun.search import compare
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


@dataclass(frozen=True)
class Diff:
    """Two dry runs side by side.

    Args:
        rows: Name, first, second, and second divided by first.
    """

    rows: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        return text_table(("", "first", "second", "ratio"), self.rows)

    def _repr_html_(self) -> str:
        return html_table(("", "first", "second", "ratio"), self.rows)


def diff(a: DryRun, b: DryRun) -> Diff:
    """Compares two dry runs: memory, times, operations, and each layer that differs.

    Args:
        a: The first.
        b: The second.

    Returns:
        A `Diff`.

    Example:

    >>> from keras_tpu_dist.dryrun.search import diff
    >>> print(diff(first, second))  # doctest: +SKIP
    """
    rows = [
        ("slice", a.compiled_for, b.compiled_for, ""),
        ("mesh", _axes(a), _axes(b), ""),
        ("batch size", str(a.batch_size), str(b.batch_size), ""),
        ("fits", str(a.fits), str(b.fits), ""),
        _row("memory per device", a.total_bytes, b.total_bytes, size_text),
        _row("weights", a.state.weights, b.state.weights, size_text),
        _row("optimizer", a.state.optimizer, b.state.optimizer, size_text),
        _row(
            "temporaries", a.memory.get("temporaries", 0), b.memory.get("temporaries", 0), size_text
        ),
    ]
    if a.estimate and b.estimate:
        for name in ("step", "compute", "hbm", "link", "exposed_link", "kernels"):
            times = getattr(a.estimate, name), getattr(b.estimate, name)
            rows.append(_row(name.replace("_", " "), *times, duration_text))
        rows.append(("bound by", a.estimate.bound, b.estimate.bound, ""))
    if a.cost and b.cost:
        rows.append(_row("operations", a.cost.flops, b.cost.flops, lambda n: f"{n / 1e9:,.3f} G"))
        counts = [sum(c.times for c in cost.collectives) for cost in (a.cost, b.cost)]
        rows.append(_row("collectives per step", counts[0], counts[1], str))
        rows += _layer_rows(a, b)
    return Diff(tuple(rows))


def _layer_rows(a: DryRun, b: DryRun, limit: int = 8) -> list[tuple[str, str, str, str]]:
    cycles: list[dict[str, int]] = [
        {c.layer: c.cycles for c in run.cost.layers} if run.cost else {} for run in (a, b)
    ]
    names = sorted(
        {*cycles[0], *cycles[1]},
        key=lambda n: -abs(cycles[0].get(n, 0) - cycles[1].get(n, 0)),
    )
    return [
        _row(f"cycles of {n}", cycles[0].get(n, 0), cycles[1].get(n, 0), lambda c: f"{c:,}")
        for n in names[:limit]
        if cycles[0].get(n, 0) != cycles[1].get(n, 0)
    ]


def _axes(run: DryRun) -> str:
    return " x ".join(f"{name} {n}" for name, n in run.mesh)


def _row(name: str, a: float, b: float, text: Any) -> tuple[str, str, str, str]:
    return name, text(a), text(b), f"{b / a:.2f}" if a else ""
