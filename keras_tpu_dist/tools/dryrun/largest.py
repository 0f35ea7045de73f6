"""Finds the largest batch that fits, with few compilations."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from keras_tpu_dist.common.errors import runtime_error
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.tools.dryrun.report import DryRun

# No guess is larger than this many times a batch that is known to fit.
_LARGEST_STEP = 256
# The answer is within this fraction of a larger batch that was refused, or of the memory left.
_TOLERANCE = 0.05
_MOST_COMPILES = 8


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits, and how it was found.

    Args:
        batch_size: Rows of all devices together; 0 if not even the smallest fits.
        run: The dry run of that batch, or of the smallest one if none fits.

    Attributes:
        batch_size: Rows of all devices together; 0 if not even the smallest fits.
        run: The dry run of that batch, or of the smallest one if none fits.
        compilations: How many batches were compiled.
    """

    batch_size: int
    run: DryRun
    compilations: int


def find_largest(run_with: Callable[[int], DryRun], unit: int, limit: int) -> Largest:
    """Finds the largest batch that compiles.

    Memory grows almost in proportion to the batch. So two compilations predict the result, a third
    one usually confirms it, and bisection closes the remaining gap.

    Args:
        run_with: Returns the dry run of a batch size.
        unit: The number of parts that the batch is split into; sizes are multiples of it.
        limit: Bytes that a program may use on one device.

    Raises:
        RuntimeError: If libtpu is not installed.
    """
    runs: dict[int, DryRun] = {}
    low, high = 0, None
    guess: int | None = 1
    with stages("largest batch", _MOST_COMPILES) as begin:
        while guess is not None and len(runs) < _MOST_COMPILES:
            begin(f"does {guess * unit} fit?")
            runs[guess] = run_with(guess * unit)
            if _verdict(runs[guess]):
                low = guess
            else:
                high = guess
            guess = _next_guess(runs, low, high, limit)
    return Largest(low * unit, runs[low or min(runs)], len(runs))


def _next_guess(runs: dict[int, DryRun], low: int, high: int | None, limit: int) -> int | None:
    """The number of parts to try next, or `None` when the answer is precise enough."""
    if low == 0:
        return None
    if high is not None and high - low <= max(1, _TOLERANCE * low):
        return None
    fitting = sorted(p for p, run in runs.items() if run.fits)
    if len(fitting) == 1:
        fixed = runs[low].state.lasting
        room = max(0, limit - fixed) / max(1, runs[low].total_bytes - fixed)
        # a small batch is mostly padding; a quarter of the prediction is safe, and more informative
        predicted = low + int(low * (room - 1) / 4)
    else:
        # the steepest slope: near the limit the compiler saves memory, so memory seems to grow
        # slowly
        slopes = [
            (runs[b].total_bytes - runs[a].total_bytes) / (b - a)
            for a, b in itertools.pairwise(fitting)
        ]
        room = int((limit - runs[low].total_bytes) / max(1e-9, *slopes))
        if high is None and room < _TOLERANCE * low:
            return None
        predicted = low + room * (2 if slopes[-1] < max(slopes) / 2 else 1)
    predicted = min(predicted, _LARGEST_STEP * low)
    step = max(1, math.ceil(_TOLERANCE * low))
    if high is None:
        return max(low + step, predicted)
    if not low + step <= predicted < high or len(runs) > 4:
        predicted = (low + high) // 2
    return min(max(predicted, low + 1), high - 1)


def _verdict(run: DryRun) -> bool:
    if run.fits is None:
        raise runtime_error(
            "Only the TPU compiler can find the largest batch that fits.",
            received="libtpu, which contains that compiler, is not installed.",
            fix="pip install 'jax[tpu]'.",
        )
    return run.fits
