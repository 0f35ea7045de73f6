"""The result of a dry run: numbers, and how they read."""

import json
import math
from dataclasses import asdict, dataclass

from keras_tpu_dist.show.page import Page
from keras_tpu_dist.show.text import duration_text, size_text, text_table
from keras_tpu_dist.dryrun.rows import collective_rows, layer_rows
from keras_tpu_dist.dryrun.state_bytes import StateBytes
from keras_tpu_dist.hardware.torus import Torus
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.hlo import Buffer, ProgramCost
from keras_tpu_dist.layout.lint import Finding

_FINDINGS_SHOWN = 3
# Beyond this the compiler's cycles are not explained by arithmetic or memory traffic.
_KERNEL_FACTOR = 3.0

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
        kernels: The compiler's own cycle estimates, summed, at the chip's clock; hand-written
            kernels, which it does not estimate, at their roofline.
        exposed_link: The part of `link` that the compiler does not overlap.
        dcn: The part of `link` between slices.
        step: The estimate: kernels and exposed collectives one after the other, and never less
            than any of `compute`, `hbm`, `link`.
        bound: What the step spends its time on: `"compute"`, `"HBM"`, `"links"`, or `"kernels"`
            where the compiler's cycles are far more than arithmetic and traffic explain, as in
            loops over many small steps.
    """

    compute: float
    hbm: float
    link: float
    kernels: float
    exposed_link: float
    step: float
    bound: str
    dcn: float = 0.0


def estimate(cost: ProgramCost, topology: Topology) -> Estimate:
    """Estimates a step's time from a compiled program's cost.

    Args:
        cost: What the program costs one device in one step.
        topology: The slice, for its peak rates, HBM bandwidth and clock.

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
    return Estimate(compute, hbm, link, kernels, exposed, step, bound, dcn)


@dataclass(frozen=True)
class DryRun(Page):
    """What a compiler says about one step of a model on a slice.

    Args:
        mode: `"train"`, `"evaluate"` or `"predict"`.
        compiled_for: The slice's name, or `"CPU"` where no TPU compiler is installed: then memory
            and collectives are those of XLA's CPU partitioner, and there are no times.
        mesh: Axis names and sizes.
        batch_size: Rows of all devices together.
        parameters: Number of the model's weights.
        fits: Whether the program fits into HBM; `None` where no limit is known.
        limit_bytes: HBM of one device that programs may use, or `None`.
        total_bytes: HBM that the program needs on one device; of a program that does not fit, what
            the compiler's message states, after it tried to save memory.
        memory: The compiler's own figures: `arguments`, `outputs`, `aliased`, `temporaries`,
            `code`, and `peak`, the most at one time. Empty if the program did not fit and could
            not be sized.
        state: Bytes of weights, optimizer, metrics and inputs on one device, without the padding
            that the compiler adds.
        cost: Operations, bytes, cycles and collectives, by layer.
        estimate: Times, or `None` without a TPU compiler.
        effort: `"quick"` or `"exact"`: how hard the compiler tried.
        tokens: Tokens per batch, 0 if the model reads none.
        error: The compiler's message if the program does not fit.
        sized_on: The larger slice that `memory` and `cost` speak of, for a program that does not
            fit.
        rematerialized: Layers at which the partitioner gathers a whole array because it cannot
            go from one layout to the other.
        build_seconds: Time to build and lower, in this process.
        compile_seconds: Time of the compiler's processes.
        compile_cpu_seconds: Their CPU time.
        compile_peak_bytes: Their peak memory.
        findings: Mistakes in the layouts, each with its fix; see `TPUStrategy.lint`.
        notes: Assumptions and advice.
        hosts: The number of hosts of the mesh.
        crossings: For each axis of a mesh of several hosts, whether it crosses hosts or slices.
        torus: The chips of the slice, and where on them the mesh's devices are; `None` where the
            devices are no TPU slice.
        model_flops: Operations of the matrix products of all devices together by the model's
            formula: those of the forward pass, three times for training; attention in full, even
            if it is causal, and nothing that is computed again.
        peak_flops: Operations per second of one device at its fastest, in bfloat16; `None`
            without a TPU compiler.

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

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(size for _, size in self.mesh)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: `model_flops` over what all devices could do in a step's time.

        References:
            - Chowdhery et al., "PaLM", 2022, appendix B, whose formula counts attention in full
        """
        if self.estimate is None or not self.peak_flops:
            return None
        return self.model_flops / (self.devices * self.peak_flops * self.estimate.step)

    @property
    def samples_per_second(self) -> float | None:
        """Rows per second of all devices, if the step's time is estimated."""
        return None if self.estimate is None else self.batch_size / self.estimate.step

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices, if the model reads tokens."""
        if self.estimate is None or not self.tokens:
            return None
        return self.tokens / self.estimate.step

    @property
    def overflow_bytes(self) -> int:
        """By how much the program exceeds the HBM of one device; 0 where the compiler took it.

        The total may be above the limit even so: not all of it is needed at one time, see
        `peak_bytes`.
        """
        if self.fits or self.limit_bytes is None:
            return 0
        return max(0, self.total_bytes - self.limit_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that is needed at one time, as the compiler says; 0 where it does not."""
        return self.memory.get("peak", 0)

    @property
    def breakdown_bytes(self) -> int:
        """The sum of `memory`: `total_bytes`, or what was needed on the slice `sized_on`."""
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
        return data

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        parts = [self._headline()]
        if self.error:
            parts.append(f"the compiler says: {self.error}")
        for title, header, rows in self._tables():
            parts.append(f"{title}\n{text_table(header, rows)}")
        return "\n".join([*parts, *self._remarks()])

    def _page(self) -> str:
        """Memory by kind, layers by cycles, collectives over the torus, tables."""
        from keras_tpu_dist.dryrun.page import report_page

        return report_page(self)

    def _repr_html_(self) -> str:
        from keras_tpu_dist.dryrun.page import report_fragment

        return report_fragment(self)

    def _headline(self) -> str:
        verdict = {True: "fits", False: "does NOT fit", None: "memory limit unknown"}[self.fits]
        return f"{self._subject()}: {verdict}"

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
            tables.append(("time per step", (), self._time_rows()))
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
        rows = [
            ("matrix operations at peak", duration_text(e.compute)),
            ("HBM traffic at full speed", duration_text(e.hbm)),
            ("collectives at full speed", duration_text(e.link)),
            ("of them not overlapped", duration_text(e.exposed_link)),
            *([("of them between slices", duration_text(e.dcn))] if e.dcn else []),
            ("compiler's cycles at the clock", duration_text(e.kernels)),
            ("step, estimated", f"{duration_text(e.step)}, bound by {e.bound}"),
            ("matrix units busy", f"{e.compute / e.step:.1%}"),
            *([("model FLOPs utilisation", f"{self.mfu:.1%}")] if self.mfu else []),
            ("samples per second", f"{self.samples_per_second:,.0f}"),
        ]
        if self.tokens_per_second:
            each = self.tokens_per_second / self.devices
            rows.append(
                ("tokens per second", f"{self.tokens_per_second:,.0f}, {each:,.0f} a device")
            )
        return rows
