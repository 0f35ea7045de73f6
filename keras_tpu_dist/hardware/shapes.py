"""The shapes of TPU slices that exist."""

import functools
import itertools
import math
import operator
from typing import Any

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.hardware.chips import Chip

# No job has had more than 50.
_MOST_SLICES = 1000


@functools.cache
def shapes(chip: Chip) -> frozenset[tuple[int, ...]]:
    """Every shape of a chip: those listed and, in three dimensions, whole cubes of 4x4x4."""
    found = set(chip.shapes)
    if chip.dims == 3:
        # v5p and tpu7x pods are no cubes; no side of either exceeds 36.
        sides = range(4, 37, 4)
        found |= {s for s in itertools.product(sides, repeat=3) if math.prod(s) <= chip.pod}
    return frozenset(found)


def listed_shapes(chip: Chip) -> list[tuple[int, ...]]:
    """One shape per number of chips: the most cubic one, sides ascending.

    Args:
        chip: The TPU generation.

    Returns:
        The shapes, smallest first, of the numbers of chips that are powers of two.
    """
    best: dict[int, tuple[int, ...]] = {}
    for shape in sorted(shapes(chip), key=lambda s: (max(s) - min(s), s)):
        in_order = list(shape) == sorted(shape) or shape in chip.shapes
        if in_order and _is_standard_size(math.prod(shape)):
            best.setdefault(math.prod(shape), shape)
    return [best[n] for n in sorted(best)]


def checked_slices(slices: Any, chip: Chip, name: object) -> int:
    """A number of slices of a chip.

    Args:
        slices: The number.
        chip: The TPU generation.
        name: What was given as the slice's name.

    Raises:
        ValueError: If it is no number, or if slices of the chip cannot be joined.
    """
    counted = is_count(slices, 1) and slices <= _MOST_SLICES
    if not counted or (slices > 1 and not chip.dcn_bandwidth):
        raise ValueError(
            message(
                f"The number of slices must be at least 1, at most {_MOST_SLICES}, and 1 on TPU v2 "
                "and v3, which cannot be joined over the data-centre network.",
                received={"topology": str(name), "num_slices": slices},
                fix="Write num_slices=1, or a v4 or later chip.",
            )
        )
    return operator.index(slices)


def _is_standard_size(chips: int) -> bool:
    return chips & (chips - 1) == 0
