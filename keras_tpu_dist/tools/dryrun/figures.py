"""Figures of a compiled step: the estimate of its time, and its collectives in groups."""

from collections.abc import Iterator
from dataclasses import dataclass

from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.text import duration_text, span_text
from keras_tpu_dist.tools.hlo import ProgramCost

# Beyond this factor, arithmetic or memory traffic do not explain the compiler's cycles.
_KERNEL_FACTOR = 3.0
# The cycles of effort "quick" are so many times those of "exact", at least and at most. For the
# measured factors (1.9 to 2.7, and 3.4 in one search) run `python benchmarks/dry_run.py --fit`.
_QUICK_OVER = (1.5, 3.5)
# Hand-written kernels, for which the compiler has no estimate, reach this share of their roofline
# by their schedules: usually, and at least. `python benchmarks/kernels.py`: attention 0.35 to 0.75,
# recurrent layers 0.66 to 1.0, but 0.2 for 128 units, whose steps are too short.
_OF_ROOFLINE, _LEAST_OF_ROOFLINE = 0.65, 0.35
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


@dataclass(frozen=True)
class Estimate:
    """How long one step takes on one device, in seconds.

    Args:
        compute: Matrix operations at the chip's peak.
        hbm: HBM traffic at full bandwidth.
        link: Collectives at full link speed.
        kernels: The sum of the compiler's cycle estimates, at the chip's clock; the compiler does
            not estimate hand-written kernels, which count at a share of their roofline.
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
    (`python benchmarks/dry_run.py --fit`). For "exact" both are `step`.
    """

    compute: float
    hbm: float
    link: float
    kernels: float
    exposed_link: float
    step: float
    bound: str
    dcn: float
    low: float
    high: float
    kernels_low: float
    kernels_high: float

    @property
    def span(self) -> tuple[float, float]:
        """From `low` to `high`."""
        return self.low, self.high

    @property
    def span_words(self) -> str:
        """`span` in words."""
        return span_text(*self.span, duration_text)

    @property
    def kernels_span(self) -> tuple[float, float]:
        """The range of `kernels`."""
        return self.kernels_low, self.kernels_high


def estimate(cost: ProgramCost, topology: Topology, effort: str = "exact") -> Estimate:
    """Estimates a step's time from a compiled program's cost.

    Args:
        cost: The program's cost on one device in one step.
        topology: The slice, for its peak rates, HBM bandwidth and clock.
        effort: `"quick"` or `"exact"`: how hard the compiler tried.

    References:
        - Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for
          multicore architectures", CACM 52(4), 2009
    """
    compute = sum(flops / topology.peak_flops(rate) for rate, flops in cost.flops_by_rate)
    hbm = cost.hbm_bytes / topology.hbm_bandwidth
    link = cost.link_seconds
    roofline = max(
        cost.kernel_flops / topology.peak_flops(), cost.kernel_bytes / topology.hbm_bandwidth
    )
    cycles = cost.cycles / topology.chip.clock
    kernels = cycles + roofline / _OF_ROOFLINE
    exposed = cost.exposed_link_seconds
    bounds = {"compute": compute, "HBM": hbm, "links": link}
    bound = max(bounds, key=bounds.__getitem__)
    times_too_high = _QUICK_OVER if effort == "quick" else (1.0, 1.0)
    # What quick effort is off by is no reason to blame small operations.
    if cycles / times_too_high[1] + roofline / _OF_ROOFLINE > _KERNEL_FACTOR * max(bounds.values()):
        bound = "kernels"
    step = max(kernels + exposed, *bounds.values())
    dcn = sum(c.total_seconds for c in cost.collectives if c.network == "DCN")
    least = cycles / times_too_high[1] + roofline
    most = cycles / times_too_high[0] + roofline / _LEAST_OF_ROOFLINE
    # An "exact" program has less traffic: the traffic of a quick one is no lower bound; and it may
    # overlap collectives.
    quick = effort == "quick"
    low = max(least, compute, link) if quick else max(least + exposed, *bounds.values())
    high = max(most + exposed, *bounds.values())
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
