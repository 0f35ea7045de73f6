"""Turns the measurements of a check into a calibration for dry runs and searches."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.calibration import Calibration
from keras_tpu_dist.hardware.chips import Chip, of_kind
from keras_tpu_dist.tools.checkup.bench import median

# The measurements of a check, by the name of the part.
Figures = Mapping[str, Mapping[str, Any]]

# In the part "step time": the measured time divided by the estimate, by effort.
FACTORS = "measured over estimate"


def chip_of(device_kinds: Sequence[str]) -> Chip:
    """The chip that was checked."""
    chip = of_kind(device_kinds[0])
    if chip is not None and len(set(device_kinds)) == 1:
        return chip
    raise value_error(
        "A calibration needs checks of one kind of TPU.",
        received={"device_kind": list(dict.fromkeys(device_kinds))},
        fix="Check the TPU that you train on, one kind at a time. Measurements on simulated "
        "devices say nothing about a TPU.",
    )


def calibration_of(
    chip: Chip, figures: Figures, others: Iterable[Figures] = (), source: str = ""
) -> Calibration:
    """A calibration with the measured rates; the others stay as in the chip's specification.

    Args:
        others: The measurements of checks of other models on the same chips. With them, the
            factors are the smallest and the largest of all.
        source: See `Calibration`.
    """
    found: dict[str, list[float]] = {}
    for run in (figures, *others):
        for effort, factor in run.get("step time", {}).get(FACTORS, {}).items():
            found.setdefault(effort, []).append(factor)
    spans = {effort: (min(factors), max(factors)) for effort, factors in found.items()}
    return Calibration(
        chip.name,
        {name: median(rates.values()) for name, rates in figures.get("matrix units", {}).items()},
        hbm_bandwidth=_of_memory(figures),
        link_bandwidth=_of_links(figures, "ICI", chip.link_bandwidth),
        dcn_bandwidth=_of_links(figures, "DCN", chip.dcn_bandwidth / chip.devices),
        quick=spans.get("quick"),
        exact=spans.get("exact"),
        source=source,
    )


def _of_memory(figures: Figures) -> float | None:
    rates = figures.get("memory", {}).get("memory", {})
    return median(rates.values()) if rates else None


def _of_links(figures: Figures, network: str, in_table: float) -> float | None:
    """The bandwidth of links: the table's, times the share that the best collective reached."""
    axes = figures.get("links", {}).get("axes", {}).values()
    shares = [
        share
        for axis in axes
        if axis.get("network") == network
        for share in axis["of the table"].values()
    ]
    return in_table * max(shares) if shares and in_table else None
