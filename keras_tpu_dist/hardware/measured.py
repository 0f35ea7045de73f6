"""What programs took whose times were published, over what a dry run estimates for them."""

import math
from dataclasses import dataclass

# Chip, mode, what bounds the step, effort, the ratio, and the model's parameters, with libtpu
# 0.0.41. They are printed by `python benchmarks/published.py --ratios`;
# tests/dryrun/test_measured.py compares them.
RATIOS: tuple[tuple[str, str, str, str, float, int], ...] = (
    ("v5e", "train", "compute", "exact", 1.057, 15831666688),
    ("v5e", "train", "compute", "exact", 0.973, 31663333376),
    ("v5e", "train", "compute", "exact", 1.06, 62802370560),
    ("v5p", "train", "compute", "exact", 0.985, 31663333376),
    ("v5p", "train", "compute", "exact", 0.986, 62802370560),
    ("v5p", "train", "compute", "exact", 0.987, 125079396352),
    ("v5p", "train", "compute", "exact", 1.023, 250158792704),
    ("v5p", "train", "compute", "exact", 0.888, 499268993024),
    ("v5p", "train", "compute", "exact", 0.88, 997485199360),
    ("v4", "train", "compute", "exact", 1.135, 22137083904),
    ("v4", "train", "compute", "exact", 1.145, 52326838272),
    ("v6e", "train", "compute", "exact", 0.911, 8030261248),
    ("v6e", "train", "compute", "exact", 1.088, 8030261248),
    ("v6e", "train", "compute", "exact", 0.79, 68976648192),
    ("tpu7x", "train", "compute", "exact", 0.94, 70553706496),
    ("tpu7x", "train", "links", "exact", 1.675, 8030261248),
    ("v5e", "train", "compute", "exact", 1.032, 15831666688),
    ("v5e", "train", "compute", "quick", 0.337, 15831666688),
    ("v3", "train", "HBM", "quick", 0.638, 25610152),
    ("v6e", "generate", "HBM", "quick", 1.11, 5523972096),
    ("v6e", "generate", "HBM", "quick", 1.094, 5523972096),
    ("v5e", "train", "compute", "quick", 0.374, 15831666688),
)


@dataclass(frozen=True)
class PublishedRatios:
    """How far estimates of programs like one are off.

    Attributes:
        ratios: Measured times over `run.estimate.step`, ascending.
        chip: The chip, or `""` if none of them ran on this one, and others did.
        models: The number of different models among them.
    """

    ratios: tuple[float, ...]
    effort: str
    chip: str
    kind: str
    models: int

    @property
    def low(self) -> float:
        """The smallest ratio."""
        return self.ratios[0]

    @property
    def high(self) -> float:
        """The largest."""
        return self.ratios[-1]

    @property
    def error(self) -> float | None:
        """The mean error of a ratio foretold by the others' geometric mean; `None` for one."""
        errors = self.left_out
        return sum(map(abs, errors)) / len(errors) if errors else None

    @property
    def left_out(self) -> list[float]:
        """The error of each ratio foretold by the geometric mean of all others."""
        logs = [math.log(ratio) for ratio in self.ratios]
        if len(logs) < 2:
            return []
        others = [(sum(logs) - log) / (len(logs) - 1) for log in logs]
        return [math.exp(log - other) - 1 for log, other in zip(logs, others, strict=True)]

    @property
    def programs(self) -> str:
        """What was measured, in words."""
        many = "program" if len(self.ratios) == 1 else "programs"
        where = f"on {self.chip}" if self.chip else "on other chips"
        alike = " of one model" if self.models == 1 < len(self.ratios) else ""
        return f"{len(self.ratios)} published {many} like this{alike}, {where}"

    @property
    def span(self) -> str:
        """The ratios in words."""
        return " to ".join(dict.fromkeys((f"{self.low:.2f}", f"{self.high:.2f}")))


def spread_of(chip: str, mode: str, bound: str, effort: str) -> PublishedRatios | None:
    """The ratios of published programs of a kind, on a chip, or else on any.

    Args:
        mode: `"train"`, `"generate"` and so on.
        bound: What takes most of the step; see `Estimate`.

    Returns:
        The ratios, or `None` if no program of this kind was measured.
    """
    alike = [row for row in RATIOS if row[1:4] == (mode, bound, effort)]
    here = [row for row in alike if row[0] == chip]
    ratios = tuple(sorted(row[4] for row in here or alike))
    kind = f"{mode}, bound by {bound}"
    models = len({row[5] for row in here or alike})
    return PublishedRatios(ratios, effort, chip if here else "", kind, models) if ratios else None
