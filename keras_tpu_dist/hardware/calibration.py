"""Rates and factors measured on a chip, which replace those of its specification."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from keras_tpu_dist.common.checks import checked_path, known_words, knows_words, one_of
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.hardware.chips import CHIPS
from keras_tpu_dist.hardware.topology import Topology

# A file is a few hundred bytes.
_MOST_BYTES = 64 * 1024
_RATES = ("hbm_bandwidth", "link_bandwidth", "dcn_bandwidth")
_FACTORS = ("quick", "exact")
_DTYPES = ("bfloat16", "float8", "int8")

Span = tuple[float, float]


@knows_words
@dataclass(frozen=True, repr=False)
class Calibration(Printed):
    """Rates and factors that were measured on one kind of chip.

    For everything that you leave out, the chip's specification applies, or this package's fit.

    Args:
        chip: The chip's short name, such as `"v5e"`.
        peak_flops: Measured operations per second of one JAX device, by dtype: `"bfloat16"`,
            `"float8"` or `"int8"`.
        hbm_bandwidth: Measured HBM bytes per second of one JAX device.
        link_bandwidth: Measured bytes per second of one inter-chip link in one direction.
        dcn_bandwidth: Measured bytes per second that one JAX device sends to other slices.
        quick: A measured step divided by what a dry run of effort "quick", with the rates above,
            adds up to for it (`run.estimate.step`): the smallest and the largest of several
            models, or one number.
        exact: Likewise for effort "exact".
        source: Where and when you measured, in a few words, for the reports.

    Raises:
        ValueError: If the chip is unknown, or a value is not a finite number above 0.

    Example:

    >>> from keras_tpu_dist.hardware.calibration import Calibration
    >>> measured = Calibration("v5e", {"bfloat16": 1.8e14}, exact=(1.0, 1.3), source="our v5e-8")
    >>> str(measured)
    'our v5e-8 (v5e: peak_flops, exact)'
    """

    chip: Annotated[str, one_of(*CHIPS)]
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    hbm_bandwidth: float | None = None
    link_bandwidth: float | None = None
    dcn_bandwidth: float | None = None
    quick: Span | float | None = None
    exact: Span | float | None = None
    source: str = ""

    def __post_init__(self):
        for name in _RATES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _positive(name, getattr(self, name)))
        object.__setattr__(self, "peak_flops", _by_dtype(self.peak_flops))
        for name in _FACTORS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _span(name, getattr(self, name)))

    def __str__(self) -> str:
        named = [f.name for f in fields(self) if f.name not in ("chip", "source")]
        has = ", ".join(name for name in named if getattr(self, name))
        return f"{self.source or 'a calibration'} ({self.chip}: {has or 'nothing measured'})"

    @known_words
    def factor(self, effort: Annotated[str, one_of(*_FACTORS)]) -> Span | None:
        """The least and the largest ratio of a measured step to a dry run's estimate.

        Args:
            effort: `"quick"` or `"exact"`.

        Returns:
            Both, or `None` if none was measured.
        """
        span = self.quick if effort == "quick" else self.exact
        return span if isinstance(span, tuple) else None

    def applied(self, topology: str | Topology) -> Topology:
        """A slice whose chip has the measured rates.

        Args:
            topology: The slice.

        Raises:
            ValueError: If it has another chip.
        """
        topology = Topology.parse(topology)
        chip = topology.chip
        if chip.name != self.chip:
            raise value_error(
                "A calibration is only valid for the chip that it was measured on.",
                received={"calibration of": self.chip, "topology": topology.name},
                fix=f"Leave calibration out, or measure on {chip.name}.",
            )
        flops = tuple((k, v * chip.devices) for k, v in self.peak_flops.items())
        per_device = chip.devices
        return replace(
            topology,
            chip=replace(
                chip,
                flops=tuple({**dict(chip.flops), **dict(flops)}.items()),
                hbm_bandwidth=_chosen(self.hbm_bandwidth, per_device, chip.hbm_bandwidth),
                dcn_bandwidth=_chosen(self.dcn_bandwidth, per_device, chip.dcn_bandwidth),
                link_bandwidth=_chosen(self.link_bandwidth, 1, chip.link_bandwidth),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The measurements, as plain data."""
        return {k: v for k, v in asdict(self).items() if v not in (None, {}, "")}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file for `load`.

        Args:
            path: The file.
        """
        file = checked_path("Calibration.save", "Name a file, such as v5e.json.", path=path)
        Path(file).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Reads a file from `save`. It only reads numbers and texts, and runs no code.

        Args:
            path: The file.

        Raises:
            ValueError: If the file does not exist, or has an unknown name or an invalid value.
        """
        file = checked_path("Calibration.load", "Name a file, such as v5e.json.", path=path)
        data = _read(file)
        known = [f.name for f in fields(cls)]
        unknown = sorted(str(key) for key in data if key not in known)
        if unknown or "chip" not in data:
            raise value_error(
                "The file of a calibration has the chip, and the measurements by name.",
                received={"file": file, "unknown": unknown, "chip": data.get("chip")},
                fix=f"Use only {', '.join(known)}.",
                name=unknown[0] if unknown else None,
                choices=known,
            )
        return cls(**data)


def checked_calibration(calibration: Any) -> Calibration | None:
    """A calibration, one read from a file, or `None`.

    Args:
        calibration: A `Calibration`, the path of its file, or `None`.
    """
    if calibration is None or isinstance(calibration, Calibration):
        return calibration
    if isinstance(calibration, (str, os.PathLike)):
        return Calibration.load(calibration)
    raise value_error(
        "calibration takes measurements on a chip.",
        received={"calibration": calibration},
        fix="Pass a Calibration, or the path of a file that Calibration.save wrote.",
    )


def calibrated(topology: str | Topology, calibration: Any) -> tuple[Topology, Calibration | None]:
    """A slice with measured rates, and the measurements, if there are any."""
    measured, named = checked_calibration(calibration), Topology.parse(topology)
    return (named if measured is None else measured.applied(named)), measured


def published(topology: Topology) -> Topology:
    """A slice whose chip has the rates of its specification, without measurements."""
    return replace(topology, chip=CHIPS.get(topology.chip.name, topology.chip))


def _chosen(measured: float | None, devices: int, specified: float) -> float:
    return specified if measured is None else measured * devices


def _read(file: str) -> dict[str, Any]:
    try:
        with Path(file).open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
        data = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise value_error(
            "A calibration is read from a JSON file.",
            received=f"{file!r}, which cannot be read: {error}.",
            fix="Name a file that Calibration.save wrote.",
        ) from None
    if isinstance(data, dict):
        return data
    raise value_error(
        f"A calibration's file is one JSON object of at most {_MOST_BYTES // 1024} KiB.",
        received={"file": file},
        fix="Name a file that Calibration.save wrote.",
    )


def _positive(name: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and 0 < value < math.inf:
        return float(value)
    raise value_error(
        f"{name} of a calibration is a finite number above 0.",
        received={name: value},
        fix="Leave out what you did not measure.",
    )


def _by_dtype(rates: Any) -> dict[str, float]:
    if isinstance(rates, Mapping) and all(name in _DTYPES for name in rates):
        return {name: _positive(f"peak_flops[{name!r}]", rate) for name, rate in rates.items()}
    raise value_error(
        "peak_flops of a calibration has operations per second by dtype.",
        received={"peak_flops": rates},
        fix=f"Use a dict with some of: {', '.join(_DTYPES)}.",
    )


def _span(name: str, value: Any) -> Span:
    several = isinstance(value, (tuple, list))
    ends = list(value) if several else [value, value]
    if len(ends) == 2:
        low, high = (_positive(name, end) for end in ends)
        if low <= high:
            return low, high
    raise value_error(
        f"{name} of a calibration is one factor, or the smallest and the largest.",
        received={name: value},
        fix=f"Write for example {name}=(0.4, 0.6).",
    )
