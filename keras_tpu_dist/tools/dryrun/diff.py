"""Two dry runs side by side."""

from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.show.page import Shown
from keras_tpu_dist.show.text import duration_text, html_table, size_text, span_text, text_table
from keras_tpu_dist.tools.dryrun.run import DryRun

_MOST_LAYERS = 8
_HEADER = ("", "first", "second", "ratio")


@dataclass(frozen=True, repr=False)
class Diff(Shown):
    """Two dry runs side by side.

    Args:
        rows: Name, first, second, and second divided by first.
    """

    rows: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        return text_table(_HEADER, self.rows)

    def _title(self) -> str:
        return ""

    def _blocks(self) -> list[str]:
        return [html_table(_HEADER, self.rows)]


def diff(a: DryRun, b: DryRun) -> Diff:
    """Compares two dry runs: memory, times, operations, and every layer that differs.

    Args:
        a: The first.
        b: The second.

    Returns:
        A `Diff`.

    Raises:
        ValueError: If an argument is not a dry run.

    Example:

    >>> from keras_tpu_dist import diff
    >>> print(diff(first, second))  # doctest: +SKIP
    """
    for name, run in {"a": a, "b": b}.items():
        if not isinstance(run, DryRun):
            raise value_error(
                "diff compares two dry runs.",
                received={name: run},
                fix="Pass the results of ktd.dry_run(...).",
            )
    rows = [
        ("slice", a.compiled_for, b.compiled_for, ""),
        ("mesh", _axes(a), _axes(b), ""),
        ("batch size", str(a.batch_size), str(b.batch_size), ""),
        ("fits", str(a.fits), str(b.fits), ""),
        ("effort", a.effort, b.effort, ""),
        _row("memory per device", a.total_bytes, b.total_bytes, size_text),
        _row("weights", a.state.weights, b.state.weights, size_text),
        _row("optimizer", a.state.optimizer, b.state.optimizer, size_text),
        _row(
            "temporaries", a.memory.get("temporaries", 0), b.memory.get("temporaries", 0), size_text
        ),
    ]
    if a.estimate and b.estimate:
        same = a.effort == b.effort
        rows.append(_of_ranges("step", a.estimate.span, b.estimate.span, same))
        for name in ("compute", "hbm", "link", "exposed_link"):
            times = getattr(a.estimate, name), getattr(b.estimate, name)
            rows.append(_row(name.replace("_", " "), *times, duration_text))
        kernels = a.estimate.kernels_span, b.estimate.kernels_span
        rows.append(_of_ranges("kernels", kernels[0], kernels[1], same))
        rows.append(("bound by", a.estimate.bound, b.estimate.bound, ""))
    if a.cost and b.cost:
        rows.append(_row("operations", a.cost.flops, b.cost.flops, lambda n: f"{n / 1e9:,.3f} G"))
        counts = [sum(c.times for c in cost.collectives) for cost in (a.cost, b.cost)]
        rows.append(_row("collectives per step", counts[0], counts[1], "{:g}".format))
        rows += _layer_rows(a, b)
    return Diff(tuple(rows))


def _layer_rows(a: DryRun, b: DryRun) -> list[tuple[str, str, str, str]]:
    cycles: list[dict[str, int]] = [
        {c.layer: c.cycles for c in run.cost.layers} if run.cost else {} for run in (a, b)
    ]
    names = sorted(
        {*cycles[0], *cycles[1]},
        key=lambda n: (-abs(cycles[0].get(n, 0) - cycles[1].get(n, 0)), n),
    )
    return [
        _row(f"cycles of {n}", cycles[0].get(n, 0), cycles[1].get(n, 0), lambda c: f"{c:,}")
        for n in names[:_MOST_LAYERS]
        if cycles[0].get(n, 0) != cycles[1].get(n, 0)
    ]


def _axes(run: DryRun) -> str:
    return " x ".join(f"{name} {n}" for name, n in run.mesh)


def _row(name: str, a: float, b: float, text: Any) -> tuple[str, str, str, str]:
    return name, text(a), text(b), f"{b / a:.2f}" if a else ""


def _of_ranges(
    name: str, a: tuple[float, float], b: tuple[float, float], same_effort: bool
) -> tuple[str, str, str, str]:
    """Two ranges of time; their ratio is one number if both are too high by the same."""
    ratio = ""
    if a[0]:
        low, high = (b[1] / a[1], b[1] / a[1]) if same_effort else (b[0] / a[1], b[1] / a[0])
        ratio = span_text(low, high, "{:.2f}".format)
    return name, span_text(*a, duration_text), span_text(*b, duration_text), ratio
