"""What a check measured, as dry runs and searches take it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_tpu_dist.checkup.bench import median
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.hardware.calibration import Calibration
from keras_tpu_dist.hardware.chips import Chip, of_kind

# What each part of a check measured, by the part's name.
Figures = Mapping[str, Mapping[str, Any]]

# The name of what the part "step time" has: the measured step over what is estimated, by effort.
FACTORS = "measured over estimate"


def chip_of(device_kinds: Sequence[str]) -> Chip:
    """The chip that was checked.

    Args:
        device_kinds: What the devices of each check call themselves.

    Raises:
        ValueError: If it is none that is known, or there are several.
    """
    chip = of_kind(device_kinds[0])
    if chip is not None and len(set(device_kinds)) == 1:
        return chip
    raise ValueError(
        message(
            "A calibration is of one kind of TPU.",
            received={"device_kind": list(dict.fromkeys(device_kinds))},
            fix="Check the chips that you train on, each kind by itself: what simulated devices "
            "measure says nothing of a TPU.",
        )
    )


def calibration_of(
    chip: Chip, figures: Figures, others: Iterable[Figures] = (), source: str = ""
) -> Calibration:
    """A calibration with what was measured; what was not stays as in the chip's table.

    Args:
        chip: The chip.
        figures: What a check measured.
        others: What checks of other models on the same chips measured: with them the factors are
            the smallest and the largest.
        source: See `Calibration`.
    """
    found: dict[str, list[float]] = {}
    for each in (figures, *others):
        for effort, factor in each.get("step time", {}).get(FACTORS, {}).items():
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
    """What links carry: as much more or less than in the table as the best collective reached."""
    axes = figures.get("links", {}).get("axes", {}).values()
    shares = [
        share
        for axis in axes
        if axis.get("network") == network
        for share in axis["of the table"].values()
    ]
    return in_table * max(shares) if shares and in_table else None
