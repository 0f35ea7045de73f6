"""Which variant of the gradient runs where, by a stated rule."""

import dataclasses
import functools

from keras_tpu_dist.recurrence.cells import Cell
from keras_tpu_dist.recurrence.checks import check_segment
from keras_tpu_dist.recurrence.kernel import Kernel
from keras_tpu_dist.recurrence.on_chip import (
    FEWEST_UNITS,
    MATRIX_ROWS,
    Core,
    Sizes,
    fitted,
    unfit,
)

# Measured on two cores with 128 rows of 256 units: segments of 4 steps made a train step of LSTM
# 1.4 times as fast as Keras's, where all steps at once were 0.8 times as fast.
ROWS_IN_CACHE = 512
# Measured with 1 to 256 rows: products with a kernel of 16 MiB are up to twice as fast with the
# weight first, of 4 MiB as fast or faster, of less, which a core's own cache holds, slower
# (`benchmarks/recurrent.py order`).
WEIGHT_FIRST_BYTES = 2**22
# A sixteenth of the memory of the smallest TPU core that XLA still serves (v5e: 16 GB).
KEPT_BYTES = 2**30
# A hundred steps of ten units take the TPU compiler 8 s, a loop over them 1 s.
UNROLLED_STEPS = 128


@dataclasses.dataclass(frozen=True)
class Variant:
    """A choice for one layer on one device, with its reason.

    Args:
        keep: Whether the forward pass keeps the activations' inputs.
        early: Whether the backward pass works out its coefficients before its loop.
        hoist: Whether the input of all steps is projected before the loop.
        unroll: Steps per iteration of the compiled loop.
        segment: Steps that are run and differentiated together, or None for all.
        recompute: With segments, whether only the states between them are kept.
        reason: Why.
        kernel: The kernel that the loop is, or None for the compiler's loop.
        turn: Whether one of the loops multiplies with a transposed copy of the recurrent kernel.
        weight_first: Whether the loops' products take the weight first.
        unrolled: Whether there is no loop, and every step has arrays of its own.
    """

    keep: bool
    early: bool
    unroll: int
    segment: int | None
    reason: str
    recompute: bool = True
    hoist: bool = True
    kernel: Kernel | None = None
    turn: bool = False
    weight_first: bool = False
    unrolled: bool = False

    def __str__(self):
        kept = "activations' inputs kept" if self.keep else "activations' inputs rebuilt"
        if self.unrolled:
            return f"no loop, every step with arrays of its own, {kept}: {self.reason}"
        when = "before" if self.early else "inside"
        inside = "recomputed" if self.recompute else "kept"
        cut = f", segments of {self.segment} steps ({inside})" if self.segment else ""
        projected = "before" if self.hoist else "inside"
        loop = "one kernel, " if self.kernel else ""
        first = ", products with the weight first" if self.weight_first else ""
        return (
            f"{loop}{kept}, coefficients {when} the backward loop, input projected {projected} the "
            f"loop, {self.unroll} step(s) an iteration{cut}{first}: {self.reason}"
        )

    def to_dict(self):
        """The choice as plain values."""
        return dataclasses.asdict(self)


def choose(
    cell: Cell,
    *,
    platform: str,
    batch: int,
    steps: int,
    units: int,
    features: int | None = None,
    unroll: bool | int = False,
    segment: int | str | None = None,
    directions: int = 1,
    core: Core | str = "nothing is known of the chip",
) -> Variant:
    """The variant for a layer.

    The rule. What the user asked for with `segment` is done. On CPU, time is run and differentiated
    in segments of `ROWS_IN_CACHE` rows, with everything kept, and one loop multiplies with a
    transposed copy of the recurrent kernel, because a product that transposes it reads it up to
    twice as slowly: the backward loop, or, where a kernel of `WEIGHT_FIRST_BYTES` or more comes
    first in the loops' products, the forward one. Elsewhere all steps are differentiated together,
    and the activations' inputs are kept from the forward pass if that takes at most `KEPT_BYTES` on
    a device, else rebuilt. On TPU nothing else is written to memory for the loops: coefficients are
    worked out inside the backward loop, and the input is projected inside the forward loop where
    that costs the matrix unit less time than the projection of all steps costs HBM (`_hoisted`).
    There the loop is one kernel if its weights, states and a few steps fit the core's on-chip
    memory (`on_chip.fitted`), with `unroll=True` too, as it is faster. Where it cannot be,
    `unroll=True` means no loop and nothing stacked over time, which is also chosen for cells of
    fewer than `FEWEST_UNITS` units over at most `UNROLLED_STEPS` steps: a loop of the compiler's
    takes several times as long to start its kernels as they take to run.

    Args:
        cell: The recurrence.
        platform: "cpu", "gpu" or "tpu".
        batch: Rows on one device.
        steps: Length of time.
        units: Size of the state.
        features: Size of the input, or None if it is not known.
        unroll: True for no loop of the compiler's, False for the rule's choice, or the number of
            steps per iteration.
        segment: As `check_segment` accepts.
        directions: 2 where two directions run in one loop; their input is projected before it.
        core: What a kernel would run on, or why there can be none.

    Returns:
        The choice and its reason.

    Example:

    >>> from keras_tpu_dist.recurrence import LSTM, choose
    >>> choose(LSTM(), platform="tpu", batch=8, steps=64, units=1024).keep
    True
    """
    per_iteration = steps if unroll is True else max(int(unroll), 1)
    on_cpu, on_tpu = platform == "cpu", platform == "tpu"
    first = on_cpu and 4 * cell.gates * units**2 >= WEIGHT_FIRST_BYTES
    made = functools.partial(Variant, turn=on_cpu, weight_first=first)
    asked = check_segment(segment, steps)
    if on_cpu and asked is None and unroll is not True:
        cached = max(ROWS_IN_CACHE // max(batch, 1), 4)
        if cached < steps:
            return made(
                keep=True,
                early=True,
                unroll=min(cached, 8) if unroll is False and cached <= 8 else per_iteration,
                segment=cached,
                reason=f"on CPU about {ROWS_IN_CACHE} rows at a time stay in cache",
                recompute=False,
            )
    if isinstance(asked, int):
        variant = made(
            keep=True,
            early=True,
            unroll=per_iteration,
            segment=asked,
            reason="asked for; inside a segment memory is short-lived, so nothing is rebuilt",
        )
    else:
        kept = 4 * steps * batch * units * (cell.gates + 1)
        variant = made(
            keep=cell.states_suffice or kept <= KEPT_BYTES,
            early=cell.states_suffice or not on_tpu,
            unroll=per_iteration,
            segment=None,
            reason=_why_kept(cell, kept),
            hoist=not on_tpu
            or directions == 2
            or _hoisted(batch, features, 4 * steps * batch * units * cell.gates),
        )
    if not on_tpu:
        return variant
    variant, left = _as_kernel(cell, variant, Sizes(batch, units, features), steps, unroll, core)
    why = (
        _why_unrolled(unroll, units, steps) if left and asked is None and directions == 1 else None
    )
    if why is None:
        return variant
    reason = f"{variant.reason}; {why}"
    return dataclasses.replace(variant, unrolled=True, unroll=steps, early=False, reason=reason)


def _why_kept(cell: Cell, size: int) -> str:
    if cell.states_suffice:
        return "the states give the slopes"
    if size <= KEPT_BYTES:
        return "kept inputs save one product of all steps"
    return f"{size / 2**30:.1f} GiB would have to be kept"


def _why_unrolled(unroll: bool | int, units: int, steps: int) -> str | None:
    """Why there is no loop where there can be no kernel, or None if there is one."""
    if unroll is True:
        return "unroll=True asks for no loop"
    if unroll is False and units < FEWEST_UNITS and steps <= UNROLLED_STEPS:
        return f"{units} units are computed sooner than a loop starts its kernels"
    return None


def _as_kernel(
    cell: Cell, variant: Variant, sizes: Sizes, length: int, unroll: bool | int, core: Core | str
) -> tuple[Variant, bool]:
    """The variant as one kernel; or with the reason why it is none, and whether it is none."""
    without = core if isinstance(core, str) else unfit(cell, sizes.units)
    most = None if isinstance(unroll, bool) else unroll
    for hoist in dict.fromkeys([variant.hoist, True]):
        if isinstance(core, str) or without:
            break
        fit = fitted(cell, sizes, core, length=length, most=most, hoist=hoist, keep=variant.keep)
        if fit is not None:
            kernel, steps = fit
            made = dataclasses.replace(
                variant, kernel=kernel, unroll=steps, hoist=hoist, early=False
            )
            return made, False
    if not isinstance(core, str):
        without = without or f"{core.vmem_bytes // 2**20} MiB on the chip are too few"
    return dataclasses.replace(variant, reason=f"{variant.reason}; no kernel, as {without}"), True


# Multiplications a TPU v5e's core does while HBM moves one byte, 65536 a cycle and 546 bytes a
# cycle (197 TFLOP/s, 819 GB/s, 1.5 GHz).
MULTIPLICATIONS_PER_BYTE = 120
# A quarter of the on-chip memory of a TPU v5e: what is smaller usually stays there.
ON_CHIP_BYTES = 2**25


def _hoisted(batch: int, features: int | None, projection: int) -> bool:
    """Whether projecting the input of all steps before the loop is faster on TPU.

    In front of the loop a projection of so many bytes is written to HBM and read again, 8 bytes for
    every row and gate, unless it stays on the chip. Inside the loop it always does, but a step of
    fewer rows than the matrix unit takes leaves it idle for the rest of them, once for every
    feature.

    References:
        https://cloud.google.com/tpu/docs/v5e for the speeds.
    """
    idle = max(MATRIX_ROWS - batch, 0)
    small = projection <= ON_CHIP_BYTES
    return small or features is None or idle * features > 8 * batch * MULTIPLICATIONS_PER_BYTE
