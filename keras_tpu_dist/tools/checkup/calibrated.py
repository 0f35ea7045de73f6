"""Turns the measurements of a check into a calibration for dry runs and searches."""

from collections.abc import Mapping
from typing import Any

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.calibration import Calibration
from keras_tpu_dist.hardware.chips import Chip, of_kind
from keras_tpu_dist.tools.checkup.bench import median

# The measurements of a check, by the name of the part.
Figures = Mapping[str, Mapping[str, Any]]


def chip_of(device_kind: str) -> Chip:
    """The chip that was checked."""
    chip = of_kind(device_kind)
    if chip is not None:
        return chip
    raise value_error(
        "A calibration needs a check of a TPU.",
        received={"device_kind": device_kind},
        fix="Check the TPU that you train on: simulated devices say nothing about it.",
    )


def calibration_of(chip: Chip, figures: Figures, source: str) -> Calibration:
    """A calibration with the measured rates; the others stay as in the chip's specification."""
    return Calibration(
        chip.name,
        {name: median(rates.values()) for name, rates in figures.get("matrix units", {}).items()},
        hbm_bandwidth=_of_memory(figures),
        link_bandwidth=_of_links(figures, "ICI", chip.link_bandwidth),
        dcn_bandwidth=_of_links(figures, "DCN", chip.dcn_bandwidth / chip.devices),
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
