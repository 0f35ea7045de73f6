"""The result of a dry run: numbers, and their presentation as text."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from keras_tpu_dist.hardware.measured import PublishedRatios, spread_of
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.layout.lint import Finding
from keras_tpu_dist.show.page import Page, Table, TableCell
from keras_tpu_dist.show.text import duration_text, size_text, span_text
from keras_tpu_dist.tools.dryrun.changes import Change
from keras_tpu_dist.tools.dryrun.figures import CollectiveGroup, Estimate
from keras_tpu_dist.tools.dryrun.folded import (
    amount_of,
    exchanges_by_kind,
    layers_by_kind,
    sum_of_layers,
)
from keras_tpu_dist.tools.dryrun.page import (
    VERDICTS,
    html_lines,
    memory_bars,
    page_of,
    remarks,
    said,
)
from keras_tpu_dist.tools.dryrun.state_bytes import StateBytes, total_of
from keras_tpu_dist.tools.hlo import Buffer, ProgramCost
from keras_tpu_dist.tools.hlo.analysis import LayerCost

_FINDINGS_SHOWN = 3
# Rows of tables: the most, and the least share of the whole.
_MOST_ROWS = 12
_LEAST_SHARE = 0.01
# Letters of the compiler's message in a report; it may have thousands of lines.
_MOST_SAID = 300

Row = tuple[str, ...]


@dataclass(frozen=True, repr=False)
class DryRun(Page):
    """The compiler's report on one step of a model on a slice.

    Args:
        mode: `"train"`, `"evaluate"`, `"predict"`, or `"generate"`: then `cost`, `estimate` and
            `tokens` are for one token in every row.
        compiled_for: The slice's name, or `"CPU"` if no TPU compiler is installed: then memory and
            collectives are those of XLA's CPU partitioner, and there are no times.
        mesh: Axis names and sizes.
        batch_size: Rows of all devices together.
        parameters: Number of the model's weights.
        fits: Whether the program fits into HBM; `None` if no limit is known.
        limit_bytes: HBM of one device that programs may use, or `None`.
        total_bytes: HBM that the program needs on one device; if it does not fit, the number in the
            compiler's message, after it tried to save memory.
        memory: The compiler's figures: `arguments`, `outputs`, `aliased`, `temporaries`, `code`,
            and `peak`, the maximum at one time. Empty if the program did not fit and could not be
            sized.
        state: Bytes of weights, optimizer, metrics and inputs on one device, without the padding
            that the compiler adds.
        cost: Operations, bytes, cycles and collectives, by layer.
        estimate: Times, or `None` without a TPU compiler.
        effort: `"quick"` or `"exact"`: how hard the compiler tried.
        tokens: Tokens per batch, 0 if the model reads none.
        error: The compiler's message if the program does not fit.
        sized_on: If the program does not fit, the larger slice that `memory` and `cost` refer to.
        rematerialized: Layers at which the partitioner gathers a whole array, because it cannot
            convert one layout to the other.
        build_seconds: Time to build and lower, in this process.
        compile_seconds: Time of the compiler's processes.
        compile_cpu_seconds: Their CPU time.
        compile_peak_bytes: Their peak memory.
        findings: Mistakes in the layouts, with their fixes; see `TPUStrategy.lint`.
        notes: Assumptions and advice.
        hosts: The number of hosts of the mesh.
        crossings: If the mesh has several hosts, whether its axes cross hosts or slices.
        model_flops: Operations of the matrix products on all devices by the model's formula: those
            of the forward pass, three times for training, or, if parts are frozen, as often as the
            model needs; attention in full, even if it is causal, and without recomputation.
        hidden_flops: Those of `model_flops` that causal masks hide: half of the operations of
            attention with `use_causal_mask=True`.
        peak_flops: Operations per second of one device at its fastest, in bfloat16; `None` without
            a TPU compiler.
        prompt_s: Seconds for the prompts, before the first token; in mode `"generate"`.
        prompt_range: The range of `prompt_s`, like `step_range`.
        token_limit_s: Seconds to read the weights and the whole cache once, the minimum for a
            token; in mode `"generate"`.
        changes: What to change, at most three changes with their effect by a count. Dry-run again
            with one of them to see what the compiler makes of it: `change.of(run)` is the figure.
        steps: Steps of the launch that was compiled; times and operations are of one of them.
        rows: The rows of the data, if you said how many.
        verification: With `verify=True`, the `Verification`: whether the program computes what one
            device does.

    Example:

    >>> run = dry_run(build, strategy, batch_size=1024)  # doctest: +SKIP
    >>> run.fits, run.total_bytes < run.limit_bytes  # doctest: +SKIP
    (True, True)
    """

    mode: str
    compiled_for: str
    mesh: tuple[tuple[str, int], ...]
    batch_size: int
    parameters: int
    fits: bool | None
    limit_bytes: int | None
    total_bytes: int
    memory: dict[str, int]
    state: StateBytes
    cost: ProgramCost | None
    estimate: Estimate | None
    effort: str
    tokens: int
    error: str | None
    sized_on: str | None
    rematerialized: tuple[str, ...]
    build_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float
    compile_peak_bytes: int
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    hosts: int = 1
    crossings: tuple[tuple[str, str], ...] = ()
    model_flops: float = 0.0
    hidden_flops: float = 0.0
    peak_flops: float | None = None
    prompt_s: float | None = None
    prompt_range: tuple[float, float] | None = None
    token_limit_s: float | None = None
    changes: tuple[Change, ...] = ()
    steps: int = 1
    rows: int | None = None
    verification: Any = None

    @property
    def step_range(self) -> tuple[float, float] | None:
        """The least and the most seconds of a step, if its time is estimated.

        For effort "quick" they differ. For "exact" they are equal.
        """
        return None if self.estimate is None else self.estimate.span

    @property
    def epoch_steps(self) -> int | None:
        """The number of steps for all rows of the data, the last one maybe with fewer rows; `None`
        without `rows`."""
        return None if self.rows is None else -(-self.rows // self.batch_size)

    @property
    def epoch_range(self) -> tuple[float, float] | None:
        """The least and the most seconds of these steps; `None` without `rows` or an estimate."""
        if self.epoch_steps is None or self.step_range is None:
            return None
        low, high = self.step_range
        return self.epoch_steps * low, self.epoch_steps * high

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(size for _, size in self.mesh)

    @property
    def spread(self) -> PublishedRatios | None:
        """What published programs like this one took when measured, over their estimates; `None` if
        there is none of its kind, or no estimate."""
        if self.estimate is None or self.compiled_for == "CPU":
            return None
        chip = Topology.parse(self.compiled_for).chip.name
        return spread_of(chip, self.mode, self.estimate.bound, self.effort)

    @property
    def _step_s(self) -> float:
        """Estimated seconds of a step; 0 without an estimate, or if a step does nothing."""
        return 0.0 if self.estimate is None else self.estimate.step

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: `model_flops` over what all devices could do in the time of a
        step.

        References:
            - Chowdhery et al., "PaLM", 2022, appendix B, whose formula counts attention in full
        """
        return self._utilisation(self.model_flops)

    @property
    def mfu_causal(self) -> float | None:
        """`mfu` without `hidden_flops`, as MaxText counts since 2025."""
        return self._utilisation(self.model_flops - self.hidden_flops)

    def _utilisation(self, flops: float) -> float | None:
        if not self._step_s or not self.peak_flops:
            return None
        return flops / (self.devices * self.peak_flops * self._step_s)

    @property
    def samples_per_second(self) -> float | None:
        """Rows per second of all devices, if the step's time is estimated; not in mode
        `"generate"`."""
        if self.mode == "generate":
            return None
        return self.batch_size / self._step_s if self._step_s else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices, if the model reads tokens."""
        if not self._step_s or not self.tokens:
            return None
        return self.tokens / self._step_s

    @property
    def overflow_bytes(self) -> int:
        """How much the program exceeds the HBM of one device; 0 if the compiler accepted it.

        The total may be above the limit even then, because not all of it is needed at one time; see
        `peak_bytes`.
        """
        if self.fits or self.limit_bytes is None:
            return 0
        return max(0, self.total_bytes - self.limit_bytes)

    @property
    def peak_bytes(self) -> int:
        """The maximum that is needed at one time, if the compiler reports it; else 0."""
        return self.memory.get("peak", 0)

    @property
    def breakdown_bytes(self) -> int:
        """The sum of `memory`: `total_bytes`, or the bytes on the slice `sized_on`."""
        return total_of(self.memory)

    @property
    def largest_buffers(self) -> tuple[Buffer, ...]:
        """The largest arrays in HBM."""
        return () if self.cost is None else self.cost.largest_buffers

    def to_dict(self) -> dict[str, object]:
        """Everything as plain data."""
        data: dict[str, Any] = asdict(replace(self, verification=None))
        data["verification"] = self.verification and self.verification.to_dict()
        data["mesh"] = dict(self.mesh)
        data["crossings"] = dict(self.crossings)
        data["samples_per_second"] = self.samples_per_second
        data["tokens_per_second"] = self.tokens_per_second
        data["mfu"] = self.mfu
        data["mfu_causal"] = self.mfu_causal
        data["step_range"] = self.step_range
        data["epoch_steps"] = self.epoch_steps
        data["epoch_range"] = self.epoch_range
        data["ranges"] = _ranges(self)
        data["spread"] = self.spread and asdict(self.spread)
        return data

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        parts = [self._title(), *self._first_lines(), *map(str, self._tables())]
        return "\n".join([*parts, *self._remarks(), *self._last_lines()])

    def _page(self) -> str:
        return page_of(self)

    def _blocks(self) -> list[str]:
        first, last = html_lines(self._first_lines()), html_lines(self._last_lines())
        tables = [table.html() for table in self._tables()]
        return [*first, *memory_bars(self), *tables, *remarks(self), *last, *said(self)]

    @property
    def _of(self) -> str:
        """What the times refer to."""
        return "token" if self.mode == "generate" else "step"

    def _title(self) -> str:
        return f"{self._subject()}: {VERDICTS[self.fits][1]}"

    def _subject(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh)
        on_slice = self.compiled_for != "CPU"
        where = Topology.parse(self.compiled_for).names if on_slice else self.compiled_for
        return (
            f"{self.mode} step, {self.parameters:,} parameters, batch {self.batch_size} on "
            f"{where}, {axes}"
        )

    def _first_lines(self) -> list[str]:
        """Why `fit` runs another step; why it does not fit, and what to change."""
        eager = [
            f"fit does not run this {self._of}: {finding.path}: {finding.words} {finding.fix}"
            for finding in self.findings
            if finding.code == "not-compiled"
        ]
        if self.fits is not False:
            return eager
        needs = f"why: {size_text(self.total_bytes)} of {size_text(self.limit_bytes or 0)} a device"
        parts = [f"weights and optimizer {size_text(self.state.lasting)}"]
        if self.memory:
            parts.append(f"activations and temporaries {size_text(self.memory['temporaries'])}")
        first = (self.error or "").strip().partition("\n")[0]
        said = [f"the compiler says: {first[:_MOST_SAID]} (all of it: run.error)"] if first else []
        return [*eager, f"{needs}: {', '.join(parts)}", *self._advice(), *said]

    def _last_lines(self) -> list[str]:
        return [] if self.fits is False else self._advice()

    def _advice(self) -> list[str]:
        if not self.changes:
            return []
        title = "what to change (counted)"
        return [title, *(f"  {change}" for change in self.changes)]

    def _remarks(self) -> list[str]:
        grave = sum(finding.severity != "info" for finding in self.findings)
        shown = self.findings[: max(grave, _FINDINGS_SHOWN)]  # the gravest come first
        lines = [f"lint: {finding}" for finding in shown]
        if len(shown) < len(self.findings):
            lines.append(f"lint: {len(self.findings) - len(shown)} more; see strategy.lint(model)")
        if self.verification is not None:
            lines.append(f"verified: {str(self.verification).partition(chr(10))[0]}")
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def _tables(self) -> list[Table]:
        tables = [Table("memory per device", (), self._memory_rows())]
        if self.estimate is not None:
            tables.append(Table(f"time per {self._of}", (), self._time_rows()))
        if self.hosts > 1:
            tables.append(Table(f"{self.hosts} hosts", (), self._host_rows()))
        if self.cost is not None and self.cost.collectives:
            header = ("collective", "axes", "net", "MB", "per step", "time", "overlapped", "layer")
            tables.append(Table("collectives", header, collective_rows(self.cost)))
        if self.cost is not None:
            header = ("layer", "GFLOP", "HBM MB", "cycles", "backward", "link")
            title = f"layers by {'cycles' if self.cost.cycles else 'operations'}"
            tables.append(Table(title, header, layer_rows(self.cost)))
        if self.rematerialized:
            rows = [(layer,) for layer in self.rematerialized]
            tables.append(Table("gathered whole between two layouts", ("layer",), rows))
        if self.largest_buffers:
            buffers = [
                (b.shape, TableCell(size_text(b.bytes), b.bytes), b.layer)
                for b in self.largest_buffers[:5]
            ]
            tables.append(Table("largest arrays in HBM", ("array", "size", "layer"), buffers))
        return tables

    def _memory_rows(self) -> list[tuple[str, ...]]:
        rows = [
            ("weights", size_text(self.state.weights)),
            ("optimizer", size_text(self.state.optimizer)),
            ("batch", size_text(self.state.inputs)),
        ]
        if self.memory:
            rows.append(("temporaries and activations", size_text(self.memory["temporaries"])))
            kept = self.memory["outputs"] - self.memory["aliased"]
            rows.append(("new state and outputs", size_text(kept)))
            rows.append(("program", size_text(self.memory["code"])))
        if self.sized_on:
            rows.append((f"the above on {self.sized_on}", size_text(self.breakdown_bytes)))
        rows.append(("total", size_text(self.total_bytes)))
        if self.limit_bytes is not None:
            rows.append(("limit", size_text(self.limit_bytes)))
        above = self.limit_bytes is not None and self.total_bytes > self.limit_bytes
        if self.fits and above and self.peak_bytes:
            rows.append(("of it at one time", size_text(self.peak_bytes)))
        if self.overflow_bytes:
            rows.append(("too much", size_text(self.overflow_bytes)))
        return rows

    def _host_rows(self) -> list[tuple[str, ...]]:
        rows = [("batch that each transfers", size_text(self.state.inputs_per_host))]
        return [*rows, *((f"axis {name}", where) for name, where in self.crossings)]

    def _time_rows(self) -> list[tuple[str, ...]]:
        e = self.estimate
        if e is None:
            return []
        how = f"effort {self.effort}, bound by {e.bound}"
        if self.effort == "quick" and e.span[0] < e.span[1]:
            how = f'bound by {e.bound}; effort="exact" narrows it'
        return [
            ("matrix operations at peak", duration_text(e.compute)),
            ("HBM traffic at full speed", duration_text(e.hbm)),
            ("collectives at full speed", duration_text(e.link)),
            ("of them not overlapped", duration_text(e.exposed_link)),
            *([("of them between slices", duration_text(e.dcn))] if e.dcn else []),
            ("compiler's cycles at the clock", span_text(*e.kernels_span, duration_text)),
            (
                f"{self._of}, estimate",
                f"{e.span_words}, {how}",
            ),
            ("when measured", self._when_measured(e)),
            *self._epoch(),
            *self._rates(),
        ]

    def _epoch(self) -> list[tuple[str, str]]:
        if self.epoch_range is None:
            return []
        what = "an epoch" if self.mode == "train" else self.mode
        seconds = span_text(*self.epoch_range, duration_text)
        return [(f"{what} of {self.rows:,} rows", f"{seconds} in {self.epoch_steps:,} step(s)")]

    def _when_measured(self, e: Estimate) -> str:
        """What published programs like this took: over an exact estimate, or in this one's time."""
        spread = self.spread
        if spread is None:
            return (
                f"not known: at effort {self.effort}, no published {self._of} is bound by {e.bound}"
            )
        span = f"{spread.span} of that"
        if self.effort != "exact":
            span = span_text(e.step * spread.low, e.step * spread.high, duration_text)
        error = f", mean error {spread.error:.1%} (leave one out)" if spread.error else ""
        return f"{span}: {spread.programs}{error}"

    def _why_mfu(self) -> str:
        """Why the model FLOPs utilisation is above what was published, or what the units do."""
        e, mfu = self.estimate, self.mfu
        if e is None or mfu is None:
            return ""
        if mfu > _MFU_IN_DOUBT:
            return _DOUBTS
        if mfu * e.step <= e.compute * _ROUNDED:
            return ""
        if self.hidden_flops:
            return f"{_ABOVE} counts causal attention in full"
        return f"{_ABOVE} counts a gradient of the input" if self.mode == "train" else _FEWER

    def _rates(self) -> Iterator[tuple[str, str]]:
        """Numbers derived from the time of a step, as ranges like the time itself."""
        e = self.estimate
        if e is None or not e.step:
            return

        def span(rate: float, text: Callable[[float], str]) -> str:
            return span_text(*_range_of(e, rate), text)

        yield "matrix units busy", span(e.compute / e.step, _percent)
        if self.mfu and self.mfu_causal:
            yield "model FLOPs utilisation", span(self.mfu, _percent) + self._why_mfu()
            if self.hidden_flops:
                yield "with half of causal attention", span(self.mfu_causal, _percent)
        if self.prompt_range is not None:
            yield "prompts, before the first token", span_text(*self.prompt_range, duration_text)
        if self.token_limit_s is not None:
            low, high = (end / self.token_limit_s for end in e.span)
            times = span_text(low, high, "{:.2f}".format)
            limit = (
                f"{duration_text(self.token_limit_s)}; the {self._of} takes {times} times as long"
            )
            yield "weights and cache read once", limit
        if self.samples_per_second is not None:
            yield "samples per second", span(self.samples_per_second, _whole)
        if self.tokens_per_second:
            each = span(self.tokens_per_second / self.devices, _whole)
            yield "tokens per second", f"{span(self.tokens_per_second, _whole)}, {each} a device"


# MaxText's best published rows are at 72 % (v5p, 32B), and at 39 % with 131,072 tokens a row.
_MFU_IN_DOUBT = 0.75
_DOUBTS = (
    ", more than is published for TPUs: causal attention counts in full, and kernels skip half"
)
# A utilisation so much above the share of busy units is more than rounding.
_ROUNDED = 1.005
_ABOVE = "; more than runs, as the formula"
_FEWER = "; more than runs, as the compiled program has fewer products than the model"


def _range_of(e: Estimate, rate: float) -> tuple[float, float]:
    """A rate at the estimated time of a step, at least and at most."""
    low, high = e.span
    return rate * e.step / high, rate * e.step / low


def _ranges(run: DryRun) -> dict[str, tuple[float, float]]:
    """The least and the most of what follows from the time of a step, for JSON."""
    e = run.estimate
    if e is None:
        return {}
    ranges = {"kernels": e.kernels_span, "step": e.span}
    for name in ("mfu", "mfu_causal", "samples_per_second", "tokens_per_second"):
        value = getattr(run, name)
        if value is not None:
            ranges[name] = _range_of(e, value)
    if run.prompt_range is not None:
        ranges["prompt_s"] = run.prompt_range
    return ranges


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _shown(rows: Sequence[tuple[Row, float]], columns: int, total: Row) -> list[Row]:
    """Rows above one percent of the whole, the number of the others, and the total."""
    whole = sum(amount for _, amount in rows)
    shown = [row for row, amount in rows if amount >= _LEAST_SHARE * whole][:_MOST_ROWS]
    left = len(rows) - len(shown)
    if left:
        shown.append((f"... {left} more", *([""] * (columns - 1))))
    return [*shown, total] if len(rows) > 1 else shown


def collective_rows(cost: ProgramCost) -> list[Row]:
    """Rows of collectives of the same kind, axes, overlap and kind of layer, longest first.

    Args:
        cost: The cost of the program.

    Returns:
        Per row: kind, axes, network, megabytes and runs per step, time, whether it is overlapped,
        layers. The last row has the total.
    """

    def amounts(groups: Sequence[CollectiveGroup]) -> Row:
        moved, seconds = sum(e.bytes for e in groups), sum(e.seconds for e in groups)
        times = f"{sum(e.times for e in groups):g}"
        return f"{moved / 1e6:,.3f}", times, duration_text(seconds) if seconds else "-"

    rows = []
    everything = exchanges_by_kind(cost)
    for e in everything:
        cells = (e.kind, ",".join(e.axes) or "-", e.network, *amounts([e]))
        rows.append(((*cells, "yes" if e.overlapped else "no", e.layer), e.seconds or e.bytes))
    return _shown(rows, 8, ("all", "", "", *amounts(everything), "", ""))


def layer_rows(cost: ProgramCost) -> list[Row]:
    """Layers of the same kind, those with most cycles first, or with most operations.

    Args:
        cost: The cost.

    Returns:
        Per row: layers, billions of operations, megabytes of HBM traffic, cycles, their share in
        the backward pass, time of collectives. The last row has the total.
    """

    def cells(layer: LayerCost) -> Row:
        return (
            layer.layer,
            f"{layer.flops / 1e9:,.3f}",
            f"{layer.hbm_bytes / 1e6:,.1f}",
            f"{layer.cycles:,}" if cost.cycles else "-",
            f"{layer.backward_cycles / layer.cycles:.0%}" if layer.cycles else "-",
            duration_text(layer.link_seconds) if layer.link_seconds else "-",
        )

    rows = [(cells(layer), amount_of(cost, layer)) for layer in layers_by_kind(cost)]
    return _shown(rows, 6, cells(sum_of_layers("all", cost.layers)))
