"""The result of a dry run: numbers, and their presentation."""

import html
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from keras_tpu_dist.hardware.calibration import Calibration
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.hardware.torus import Torus
from keras_tpu_dist.layout.lint import Finding
from keras_tpu_dist.show.colours import (
    BACKWARD,
    FAINT,
    FORWARD,
    MEMORY,
    NONE,
    colours_left_out,
)
from keras_tpu_dist.show.page import (
    Page,
    TableCell,
    bar,
    definitions,
    document,
    legend,
    sortable,
)
from keras_tpu_dist.show.text import duration_text, html_table, size_text, span_text, text_table
from keras_tpu_dist.show.torus import shown_sides, torus_svg
from keras_tpu_dist.tools.dryrun.state_bytes import StateBytes
from keras_tpu_dist.tools.hlo import Buffer, ProgramCost

if TYPE_CHECKING:
    from keras_tpu_dist.tools.dryrun.measured import Comparison

_FINDINGS_SHOWN = 3
_TOP_LAYERS = 10
# Beyond this factor, arithmetic or memory traffic do not explain the compiler's cycles.
_KERNEL_FACTOR = 3.0
# The cycles of effort "quick" are so many times those of "exact", at least and at most. For the
# measured factors (1.9 to 2.7, and 3.4 in one search) run `python benchmarks/dry_run.py --fit`.
_QUICK_OVER = (1.5, 3.5)
# What bounds a step, in words.
BOUNDS = {
    "compute": "multiplying at the chip's peak takes longest",
    "HBM": "reading and writing the chip's memory takes longest",
    "links": "what chips send to each other takes longest",
    "kernels": "many small operations: their cycles are over 3 times what arithmetic and memory "
    "explain",
}
# What efforts mean for the times.
EFFORTS = {
    "quick": "the compiler tried less hard than for training, which makes its cycles come out too "
    "high: times are ranges, in which those of effort exact were found",
    "exact": "the compiler tried as hard as for training",
}
_ESTIMATE = "computed from the compiled program by the compiler's cycles, not measured"
_WORDS_OF_TILES = (
    ("matrix units busy", "the time of the matrix products at the chip's peak, over the step"),
    (
        "model FLOPs utilisation",
        "the operations of the model's formula, over what all chips could do in the step",
    ),
)
_WORDS_OF_TIMES = (
    ("at peak, at full speed", "as fast as the chip's specification says"),
    ("not overlapped", "collectives for which the chips wait, as nothing else runs meanwhile"),
    ("compiler's cycles", "what the compiler says that each kernel takes, one after the other"),
)
# The class in the page's style, and the words.
_VERDICT = {
    True: ("good", "fits"),
    False: ("bad", "does NOT fit"),
    None: ("muted", "memory limit unknown"),
}

Row = tuple[str, ...]
# title, header, rows
Table = tuple[str, Row, list[Row]]


@dataclass(frozen=True)
class Estimate:
    """How long one step takes on one device, in seconds.

    Args:
        compute: Matrix operations at the chip's peak.
        hbm: HBM traffic at full bandwidth.
        link: Collectives at full link speed.
        kernels: The sum of the compiler's cycle estimates, at the chip's clock; the compiler does
            not estimate hand-written kernels, which count at their roofline.
        exposed_link: The part of `link` that the compiler does not overlap.
        dcn: The part of `link` between slices.
        step: The estimate: kernels and exposed collectives one after the other, and never less than
            any of `compute`, `hbm`, `link`.
        low: The lower end of the range; see `Estimate.span`.
        high: The upper end.
        kernels_low: The lower end of the range of `kernels`; see `Estimate.kernels_span`.
        kernels_high: The upper end.
        bound: What takes most of the step: `"compute"`, `"HBM"`, `"links"`, or `"kernels"` if the
            compiler's cycles are far more than arithmetic and traffic explain, as in loops over
            many small steps.

    `step` is the sum for the compiled program. For effort "quick" that is known to be too high, so
    reports show the range from `low` to `high`. Results of effort "exact" were found in this range
    (`python benchmarks/dry_run.py --fit`). For "exact" both are `step`. With a calibration, they
    are `step` times the measured factors.
    """

    compute: float
    hbm: float
    link: float
    kernels: float
    exposed_link: float
    step: float
    bound: str
    dcn: float = 0.0
    low: float = 0.0
    high: float = 0.0
    kernels_low: float = 0.0
    kernels_high: float = 0.0

    @property
    def span(self) -> tuple[float, float]:
        """From `low` to `high`; `step` twice if no range is known."""
        return (self.low, self.high) if self.high else (self.step, self.step)

    @property
    def kernels_span(self) -> tuple[float, float]:
        """The range of `kernels`; itself twice where none is known."""
        low, high = self.kernels_low, self.kernels_high
        return (low, high) if high else (self.kernels, self.kernels)


def estimate(
    cost: ProgramCost,
    topology: Topology,
    effort: str = "exact",
    calibration: Calibration | None = None,
) -> Estimate:
    """Estimates a step's time from a compiled program's cost.

    Args:
        cost: The program's cost on one device in one step.
        topology: The slice, for its peak rates, HBM bandwidth and clock.
        effort: `"quick"` or `"exact"`: how hard the compiler tried.
        calibration: The measurements; `topology` already has their rates.

    References:
        - Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for
          multicore architectures", CACM 52(4), 2009
    """
    compute = sum(flops / topology.peak_flops(rate) for rate, flops in cost.flops_by_rate)
    hbm = cost.hbm_bytes / topology.hbm_bandwidth
    link = cost.link_seconds
    # the compiler estimates no cycles for hand-written kernels: they count at their roofline
    by_hand = max(
        cost.kernel_flops / topology.peak_flops(), cost.kernel_bytes / topology.hbm_bandwidth
    )
    kernels = cost.cycles / topology.chip.clock + by_hand
    exposed = cost.exposed_link_seconds
    bounds = {"compute": compute, "HBM": hbm, "links": link}
    bound = max(bounds, key=bounds.__getitem__)
    if kernels > _KERNEL_FACTOR * max(bounds.values()):
        bound = "kernels"
    step = max(kernels + exposed, *bounds.values())
    dcn = sum(c.total_seconds for c in cost.collectives if c.network == "DCN")
    factor = None if calibration is None else calibration.factor(effort)
    least = most = kernels
    if effort == "quick":
        least, most = ((kernels - by_hand) / share + by_hand for share in reversed(_QUICK_OVER))
    if factor is not None:
        low, high = (step * end for end in factor)
    elif effort == "quick":
        # An "exact" program has less traffic, so the traffic of this one is no lower bound; and it
        # may overlap collectives.
        low = max(least, compute, link)
        high = max(most + exposed, *bounds.values())
    else:
        low = high = step
    return Estimate(
        compute,
        hbm,
        link,
        kernels,
        exposed,
        step,
        bound,
        dcn,
        low=low,
        high=high,
        kernels_low=least,
        kernels_high=most,
    )


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
        torus: The chips of the slice, and the places of the mesh's devices on them; `None` if the
            devices are not a TPU slice.
        model_flops: Operations of the matrix products on all devices by the model's formula: those
            of the forward pass, three times for training; attention in full, even if it is causal,
            and without recomputation.
        peak_flops: Operations per second of one device at its fastest, in bfloat16; `None` without
            a TPU compiler.
        prompt_s: Seconds for the prompts, before the first token; in mode `"generate"`.
        prompt_range: The range of `prompt_s`, like `step_range`.
        token_limit_s: Seconds to read the weights and the whole cache once, the minimum for a
            token; in mode `"generate"`.
        calibration: The measurements on such chips that were used, in words; empty if none.

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
    torus: Torus | None = None
    model_flops: float = 0.0
    peak_flops: float | None = None
    prompt_s: float | None = None
    prompt_range: tuple[float, float] | None = None
    token_limit_s: float | None = None
    calibration: str = ""

    @property
    def step_range(self) -> tuple[float, float] | None:
        """The least and the most seconds of a step, if its time is estimated.

        For effort "quick" they differ. For "exact" they are equal, unless there is a calibration.
        """
        return None if self.estimate is None else self.estimate.span

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(size for _, size in self.mesh)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: `model_flops` over what all devices could do in the time of a
        step.

        References:
            - Chowdhery et al., "PaLM", 2022, appendix B, whose formula counts attention in full
        """
        if self.estimate is None or not self.peak_flops:
            return None
        return self.model_flops / (self.devices * self.peak_flops * self.estimate.step)

    @property
    def samples_per_second(self) -> float | None:
        """Rows per second of all devices, if the step's time is estimated; not in mode
        `"generate"`."""
        if self.mode == "generate":
            return None
        return None if self.estimate is None else self.batch_size / self.estimate.step

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices, if the model reads tokens."""
        if self.estimate is None or not self.tokens:
            return None
        return self.tokens / self.estimate.step

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
        m = self.memory
        if not m:
            return 0
        return m["arguments"] + m["outputs"] - m["aliased"] + m["temporaries"] + m["code"]

    @property
    def largest_buffers(self) -> tuple[Buffer, ...]:
        """The largest arrays in HBM."""
        return () if self.cost is None else self.cost.largest_buffers

    def to_dict(self) -> dict[str, object]:
        """Everything as plain data."""
        data = asdict(self)
        data["mesh"] = dict(self.mesh)
        data["crossings"] = dict(self.crossings)
        data["samples_per_second"] = self.samples_per_second
        data["tokens_per_second"] = self.tokens_per_second
        data["mfu"] = self.mfu
        data["step_range"] = self.step_range
        data["ranges"] = _ranges(self)
        return data

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def compare(self, profile: Any) -> "Comparison":
        """Compares a profile with this estimate, by layer and kind of collective.

        Args:
            profile: The `callbacks.Profile` of a fit, its directory, or a result of `read_profile`.

        Returns:
            A `Comparison`, with `to_html` and `to_dict`.

        Raises:
            ValueError: If there is no profile.

        Example:

        >>> run = strategy.dry_run(model, batch_size=1024)  # doctest: +SKIP
        >>> print(run.compare("profile"))  # doctest: +SKIP
        """
        # That module imports this one.
        from keras_tpu_dist.tools.dryrun.measured import compare

        return compare(self, profile)

    def __str__(self) -> str:
        parts = [self._title()]
        if self.error:
            parts.append(f"the compiler says: {self.error}")
        for title, header, rows in self._tables():
            parts.append(f"{title}\n{text_table(header, rows)}")
        return "\n".join([*parts, *self._remarks()])

    def _page(self) -> str:
        """Memory by kind, layers by cycles, collectives over the torus, tables."""

        return document(self._subject(), [*_head(self), *_sections(self)])

    def _blocks(self) -> list[str]:

        # A notebook runs no script, so tables cannot be sorted there.
        error = [f"<p>the compiler says: {html.escape(self.error)}</p>"] if self.error else []
        tables = [
            f"<p>{html.escape(title)}</p>{html_table(header, rows)}"
            for title, header, rows in self._tables()
        ]
        return [*error, *memory_bars(self), *tables, *_remarks(self)]

    @property
    def _of(self) -> str:
        """What the times refer to."""
        return "token" if self.mode == "generate" else "step"

    def _title(self) -> str:
        return f"{self._subject()}: {_VERDICT[self.fits][1]}"

    def _subject(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh)
        return (
            f"{self.mode} step, {self.parameters:,} parameters, batch {self.batch_size} on "
            f"{self.compiled_for} ({axes})"
        )

    def _remarks(self) -> list[str]:
        grave = sum(finding.severity != "info" for finding in self.findings)
        shown = self.findings[: max(grave, _FINDINGS_SHOWN)]  # the gravest come first
        lines = [f"lint: {finding}" for finding in shown]
        if len(shown) < len(self.findings):
            lines.append(f"lint: {len(self.findings) - len(shown)} more; see strategy.lint(model)")
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def _tables(self) -> list[Table]:
        tables: list[Table] = [("memory per device", (), self._memory_rows())]
        if self.estimate is not None:
            tables.append((f"time per {self._of}", (), self._time_rows()))
        if self.hosts > 1:
            tables.append((f"{self.hosts} hosts", (), self._host_rows()))
        if self.cost is not None and self.cost.collectives:
            header = ("collective", "axes", "net", "MB", "per step", "time", "overlapped", "layer")
            tables.append(("collectives", header, collective_rows(self.cost)))
        if self.cost is not None:
            header = ("layer", "GFLOP", "HBM MB", "cycles", "backward", "link")
            title = f"layers by {'cycles' if self.cost.cycles else 'operations'}"
            tables.append((title, header, layer_rows(self.cost)))
        if self.rematerialized:
            rows: list[Row] = [(layer,) for layer in self.rematerialized]
            tables.append(("gathered whole between two layouts", ("layer",), rows))
        if self.largest_buffers:
            buffers: list[Row] = [
                (b.shape, size_text(b.bytes), b.layer) for b in self.largest_buffers[:5]
            ]
            tables.append(("largest arrays in HBM", ("array", "size", "layer"), buffers))
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
        return [
            ("matrix operations at peak", duration_text(e.compute)),
            ("HBM traffic at full speed", duration_text(e.hbm)),
            ("collectives at full speed", duration_text(e.link)),
            ("of them not overlapped", duration_text(e.exposed_link)),
            *([("of them between slices", duration_text(e.dcn))] if e.dcn else []),
            ("compiler's cycles at the clock", span_text(*e.kernels_span, duration_text)),
            (
                f"{self._of}, estimate",
                f"{_step_text(e)}, effort {self.effort}, bound by {e.bound}",
            ),
            *_rates(self),
        ]


def _step_text(e: Estimate) -> str:
    return span_text(*e.span, duration_text)


def _over(e: Estimate, amount: float) -> tuple[float, float]:
    """An amount of a step in each second, at least and at most."""
    return amount / e.span[1], amount / e.span[0]


def _ranges(run: DryRun) -> dict[str, tuple[float, float]]:
    """The least and the most of what follows from the time of a step, for JSON."""
    e = run.estimate
    if e is None:
        return {}
    found = {"kernels": e.kernels_span, "step": e.span}
    for name in ("mfu", "samples_per_second", "tokens_per_second"):
        value = getattr(run, name)
        if value is not None:
            found[name] = _over(e, value * e.step)
    if run.prompt_range is not None:
        found["prompt_s"] = run.prompt_range
    return found


def _rates(run: DryRun) -> Iterator[tuple[str, str]]:
    """Numbers derived from the time of a step, as ranges like the time itself."""
    e = run.estimate
    if e is None:
        return

    def over(amount: float, text: Callable[[float], str]) -> str:
        return span_text(*_over(e, amount), text)

    yield "matrix units busy", over(e.compute, _percent)
    if run.mfu:
        yield "model FLOPs utilisation", over(run.mfu * e.step, _percent)
    if run.prompt_range is not None:
        yield "prompts, before the first token", span_text(*run.prompt_range, duration_text)
    if run.token_limit_s is not None:
        low, high = (end / run.token_limit_s for end in e.span)
        times = span_text(low, high, "{:.2f}".format)
        limit = f"{duration_text(run.token_limit_s)}; the {run._of} takes {times} times as long"
        yield "weights and cache read once", limit
    if run.samples_per_second is not None:
        yield "samples per second", over(run.samples_per_second * e.step, _whole)
    if run.tokens_per_second:
        amount = run.tokens_per_second * e.step
        each = over(amount / run.devices, _whole)
        yield "tokens per second", f"{over(amount, _whole)}, {each} a device"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives with the same kind, axes, network, overlap and layer.

    Args:
        kind: `"all-reduce"` and so on.
        axes: The mesh axes that they cross.
        network: `"ICI"` or `"DCN"`.
        overlapped: Whether the compiler overlaps them with other work.
        layer: The Keras layer they come from.
        bytes: Bytes of their arrays in one step.
        times: How often they run in one step; see `Collective`.
        seconds: Their time in one step at the links' full speed.
    """

    kind: str
    axes: tuple[str, ...]
    network: str
    overlapped: bool
    layer: str
    bytes: float
    times: float
    seconds: float


def exchanges(cost: ProgramCost) -> Iterator[CollectiveGroup]:
    """A program's collectives in groups, the longest first.

    Args:
        cost: The cost of the program.
    """
    grouped: dict[tuple, list] = {}
    for c in cost.collectives:
        key = (c.kind, c.axes, c.network, c.asynchronous, c.layer)
        total = grouped.setdefault(key, [0, 0, 0.0])
        total[0] += c.bytes * c.times
        total[1] += c.times
        total[2] += c.total_seconds
    for key, total in sorted(grouped.items(), key=lambda item: (-item[1][2], -item[1][0])):
        yield CollectiveGroup(*key, *total)


def collective_rows(cost: ProgramCost, limit: int = 12) -> list[tuple[str, ...]]:
    """Rows of collectives, in groups with the same kind, axes, layer and overlap, longest first.

    Args:
        cost: The cost of the program.
        limit: The maximal number of rows; if there are more, a last row has the number left out.

    Returns:
        Per row: kind, axes, network, megabytes and runs per step, time, whether it is overlapped,
        layer.
    """
    rows = [
        (
            e.kind,
            ",".join(e.axes) or "-",
            e.network,
            f"{e.bytes / 1e6:,.3f}",
            f"{e.times:g}",
            duration_text(e.seconds) if e.seconds else "-",
            "yes" if e.overlapped else "no",
            e.layer,
        )
        for e in exchanges(cost)
    ]
    if len(rows) > limit:
        rows = [*rows[:limit], (f"... {len(rows) - limit} more", *([""] * 7))]
    return rows


def layer_rows(cost: ProgramCost) -> list[tuple[str, ...]]:
    """The layers with most cycles, or with most operations if there are no cycles.

    Args:
        cost: The cost, whose layers are in that order.

    Returns:
        Per row: layer, billions of operations, megabytes of HBM traffic, cycles, their share in the
        backward pass, time of collectives. A last row has the number of layers left out.
    """
    rows = [
        (
            c.layer,
            f"{c.flops / 1e9:,.3f}",
            f"{c.hbm_bytes / 1e6:,.1f}",
            f"{c.cycles:,}" if cost.cycles else "-",
            f"{c.backward_cycles / c.cycles:.0%}" if c.cycles else "-",
            duration_text(c.link_seconds) if c.link_seconds else "-",
        )
        for c in cost.layers[:_TOP_LAYERS]
    ]
    if len(cost.layers) > _TOP_LAYERS:
        rows.append((f"... {len(cost.layers) - _TOP_LAYERS} more", "", "", "", "", ""))
    return rows


def kinds_of_memory(run: DryRun) -> list[tuple[str, int]]:
    """The contents of one device's HBM, in bytes by kind.

    Args:
        run: The dry run. If it does not fit, the kinds are those on the slice that it was sized on,
            or of the state alone.
    """
    s, m = run.state, run.memory
    kinds = [("weights", s.weights), ("optimizer", s.optimizer), ("batch", s.inputs)]
    if m:
        rest = m["arguments"] - sum(size for _, size in kinds)
        kinds += [
            ("other state, padding", max(0, rest)),
            ("temporaries and activations", m["temporaries"]),
            ("new state and outputs", max(0, m["outputs"] - m["aliased"])),
            ("program", m["code"]),
        ]
    return [(name, size) for name, size in kinds if size]


def memory_bars(run: DryRun) -> Iterator[str]:
    """A bar with all kinds of memory against the HBM, and the meaning of its colours.

    Args:
        run: The dry run.
    """
    kinds = kinds_of_memory(run)
    whole = max(sum(size for _, size in kinds), run.total_bytes, run.limit_bytes or 0, 1)
    parts = [(size / whole, MEMORY[name], f"{name}: {size_text(size)}") for name, size in kinds]
    missing = run.total_bytes - sum(size for _, size in kinds)
    if missing > 0:
        parts.append((missing / whole, NONE, f"of no known kind: {size_text(missing)}"))
    limit = run.limit_bytes
    yield bar(parts, None if limit is None else limit / whole)
    words = [(colour, text) for _, colour, text in parts]
    yield legend(words)
    against = f" of {size_text(limit)} (the line)" if limit is not None else ""
    where = f"; by kind as on {run.sized_on}" if run.sized_on else ""
    yield f"<p>{html.escape(f'{size_text(run.total_bytes)}{against} on each device{where}')}</p>"


def _head(run: DryRun) -> Iterator[str]:
    verdict, words = _VERDICT[run.fits]
    yield f'<h1>{html.escape(run._subject())}: <span class="{verdict}">{words}</span></h1>'
    if run.error:
        yield f'<p class="bad">the compiler says: {html.escape(run.error)}</p>'
    limit = f" of {size_text(run.limit_bytes)}" if run.limit_bytes is not None else ""
    tiles = [("HBM on each device", f"{size_text(run.total_bytes)}{limit}")]
    if run.estimate is not None:
        e = run.estimate
        tiles += [
            (f"{run._of}, estimate of effort {run.effort}", _step_text(e)),
            ("bound by", e.bound),
            *_rates(run),
        ]
    inner = "".join(f"<div><b>{html.escape(b)}</b>{html.escape(a)}</div>" for a, b in tiles)
    yield f'<div class="tiles">{inner}</div>'
    yield _explained(run, (name for name, _ in tiles))


def _sections(run: DryRun) -> Iterator[str]:
    yield "<h2>Memory on each device</h2>"
    yield from memory_bars(run)
    yield from _kinds(run)
    if run.estimate is not None:
        yield f"<h2>Time of a {run._of}</h2>"
        yield from _times(run)
    if run.cost is not None:
        yield f"<h2>Layers by {'cycles' if run.cost.cycles else 'operations'}</h2>"
        yield from _layers(run)
        yield "<h2>Collectives</h2>"
        yield from _collectives(run)
    for title, header, rows in run._tables():
        if title.startswith(("largest", "gathered")) or title.endswith("hosts"):
            yield f"<h2>{html.escape(title[:1].upper() + title[1:])}</h2>{html_table(header, rows)}"
    yield from ["<h2>Notes</h2>", *_remarks(run)] if run._remarks() else []


def _kinds(run: DryRun) -> Iterator[str]:
    kinds = kinds_of_memory(run)
    largest = max((size for _, size in kinds), default=1)
    limit = run.limit_bytes
    rows = [
        (
            name,
            TableCell(size_text(size), size),
            TableCell(f"{size / limit:.2%}", size) if limit else "-",
            TableCell("", size, bar([(size / largest, MEMORY[name], size_text(size))])),
        )
        for name, size in kinds
    ]
    yield sortable(("kind", "bytes", "of the HBM", "against the largest"), rows)


def _times(run: DryRun) -> Iterator[str]:
    e = run.estimate
    if e is None:
        return
    one = [
        ("matrix operations at peak", e.compute),
        ("HBM traffic at full speed", e.hbm),
        ("collectives at full speed", e.link),
        ("of them not overlapped", e.exposed_link),
        ("of them between slices", e.dcn),
    ]
    times = [(name, s, s) for name, s in one if s or name != "of them between slices"]
    times.append(("compiler's cycles at the clock", *e.kernels_span))
    times.append((f"{run._of}, estimate of effort {run.effort}", *e.span))
    longest = max(high for _, _, high in times) or 1.0
    rows = [
        (
            name,
            TableCell(span_text(low, high, duration_text), high),
            TableCell("", high, bar(_range_bar(name, low / longest, high / longest))),
        )
        for name, low, high in times
    ]
    yield sortable(("what", "time", "against the longest"), rows)
    yield definitions(_WORDS_OF_TIMES)


def _range_bar(name: str, low: float, high: float) -> list[tuple[float, str, str]]:
    """A bar up to the least, and lighter from there to the most."""
    rest = [(high - low, FAINT, f"{name}, at most")] if high > low else []
    return [(low, NONE, f"{name}, at least" if rest else name), *rest]


def _explained(run: DryRun, tiles: Iterable[str]) -> str:
    """What the words of the tiles mean."""
    e, shown = run.estimate, set(tiles)
    if e is None:
        return ""
    words = [
        (f"effort {run.effort}", EFFORTS[run.effort]),
        ("estimate", _ESTIMATE),
        (f"bound by {e.bound}", BOUNDS[e.bound]),
        *((word, meaning) for word, meaning in _WORDS_OF_TILES if word in shown),
    ]
    if run.calibration:
        words.append(("calibration", f"rates and factors that were measured: {run.calibration}"))
    return definitions(words)


def _layers(run: DryRun) -> Iterator[str]:
    cost = run.cost
    if cost is None:
        return
    amounts = [c.cycles if cost.cycles else c.flops for c in cost.layers]
    largest = max([*amounts, 1])
    if cost.cycles:
        yield legend([(FORWARD, "forward and update"), (BACKWARD, "backward")])
    rows = []
    for c, amount in zip(cost.layers, amounts):
        back = c.backward_cycles if cost.cycles else 0
        parts = [
            ((amount - back) / largest, FORWARD, f"{amount - back:,}"),
            (back / largest, BACKWARD, f"backward {back:,}"),
        ]
        rows.append(
            (
                c.layer,
                TableCell("", amount, bar(parts)),
                TableCell(f"{c.cycles:,}" if cost.cycles else "-", c.cycles),
                TableCell(f"{back / c.cycles:.0%}" if c.cycles else "-", back / max(1, c.cycles)),
                TableCell(f"{c.flops / 1e9:,.3f}", c.flops),
                TableCell(size_text(c.hbm_bytes), c.hbm_bytes),
                TableCell(duration_text(c.link_seconds) if c.link_seconds else "-", c.link_seconds),
            )
        )
    header = ("layer", "share", "cycles", "backward", "GFLOP", "HBM traffic", "collectives")
    yield sortable(header, rows)


def _collectives(run: DryRun) -> Iterator[str]:
    found = [] if run.cost is None else list(exchanges(run.cost))
    if not found:
        yield "<p>none: no device waits for another</p>"
        return
    if run.torus is not None:
        yield from _panels(run, run.torus, found)
    rows = [
        (
            e.kind,
            ", ".join(e.axes) or "-",
            e.network,
            TableCell(size_text(e.bytes), e.bytes),
            TableCell(f"{e.times:g}", e.times),
            TableCell(duration_text(e.seconds) if e.seconds else "-", e.seconds),
            "yes" if e.overlapped else "no",
            e.layer,
        )
        for e in found
    ]
    header = ("collective", "axes", "network", "bytes", "per step", "time", "overlapped", "layer")
    yield sortable(header, rows)


def _panels(run: DryRun, torus: Torus, found: list[CollectiveGroup]) -> Iterator[str]:
    """One drawing of the torus for each set of axes that collectives cross."""
    by_axes: dict[tuple[str, ...], list[CollectiveGroup]] = {}
    for each in found:
        if each.axes:
            by_axes.setdefault(each.axes, []).append(each)
    if not by_axes:
        return
    yield (
        '<p class="muted">Chips of one colour exchange with each other over links of that colour; '
        "thick grey ones lead past other chips, dashed ends close a ring. Rest the mouse on a chip "
        "to see its group.</p>"
    )
    most = max(sum(e.bytes for e in group) for group in by_axes.values())
    figures = []
    for axes, group in by_axes.items():
        svg = torus_svg(torus, run.mesh, axes, sum(e.bytes for e in group) / max(1, most))
        figures.append(f"<figure>{_caption(run, torus, axes, group)}{svg}</figure>")
    yield f'<div class="panels">{"".join(figures)}</div>'


def _caption(run: DryRun, torus: Torus, axes: tuple[str, ...], group: list[CollectiveGroup]) -> str:
    size = dict(run.mesh)
    names = " x ".join(f"{a} {size.get(a, '')}".strip() for a in axes)
    kinds: dict[tuple[str, str], list] = {}
    for e in group:
        total = kinds.setdefault((e.kind, e.network), [0, 0, 0.0])
        total[0] += e.times
        total[1] += e.bytes
        total[2] += e.seconds
    lines = [
        f"{times:g} {kind} over {network}, {size_text(moved)} per step"
        + (f", {duration_text(seconds)} at full speed" if seconds else "")
        for (kind, network), (times, moved, seconds) in kinds.items()
    ]
    shown = shown_sides(torus.sides)
    if shown != torus.sides:
        part, whole = ("x".join(map(str, sides)) for sides in (shown, torus.sides))
        lines.append(f"drawn: {part} of {whole} chips")
    if torus.slices > 1:
        lines.append(f"drawn: one of {torus.slices} slices")
    lines += filter(None, [colours_left_out(len(torus.groups(run.mesh, axes)), "groups")])
    inner = "".join(f"<br>{html.escape(line)}" for line in lines)
    return f"<figcaption><b>axis {html.escape(names)}</b>{inner}</figcaption>"


def _remarks(run: DryRun) -> list[str]:
    return [f"<p>{html.escape(remark)}</p>" for remark in run._remarks()]
