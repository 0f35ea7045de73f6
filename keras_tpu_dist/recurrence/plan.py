"""Chooses the variant of the gradient, by a documented rule.

One variant is the time loop as one kernel, if it fits into a TPU core's on-chip memory (VMEM).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.recurrence.cells import BUILT_IN, Cell
from keras_tpu_dist.recurrence.kernel import TILE_ROWS, Kernel


def check_unroll(unroll: bool | int) -> bool | int:
    """Raises a `ValueError` for an invalid `unroll`.

    Args:
        unroll: True for all steps, False to leave the number open, or the number of steps in one
            iteration of the compiled loop.
    """
    if isinstance(unroll, bool):
        return unroll
    if not is_count(unroll, 1):
        raise value_error(
            "`unroll` must be True (all steps), False (one step) or a positive integer, the "
            "number of steps in one iteration of the compiled loop.",
            received={"unroll": unroll},
            fix="Write unroll=4, or leave it out.",
        )
    return unroll


def check_segment(segment: int | str | None, steps: int | None = None) -> int | str | None:
    """Raises a `ValueError` for an invalid `segment`; resolves "auto" if the length is known.

    Args:
        segment: None, "auto", or the number of steps between kept states.
        steps: The length of time, if known.

    Returns:
        The segment as given, or, for "auto" with known `steps`, about the square root of it: states
        at the ends of the segments and one segment's gates then take about equal memory.

    References:
        Chen et al., "Training deep nets with sublinear memory cost",
        https://arxiv.org/abs/1604.06174.
    """
    if segment is None:
        return None
    if segment == "auto":
        return segment if steps is None else _near_root(steps)
    if not is_count(segment, 1):
        raise value_error(
            "`segment` must be None, 'auto' or a positive integer, the number of steps between "
            "kept states.",
            received={"segment": segment},
            fix="Write segment='auto'.",
        )
    if steps is not None and segment > steps:
        raise value_error(
            "`segment` must not be longer than the sequence.",
            received={"segment": segment, "timesteps": steps},
            fix=f"Write segment='auto', which here means {_near_root(steps)}.",
        )
    return segment


def _near_root(steps: int) -> int:
    """A divisor of `steps` within a factor of two of its root, else the root rounded up."""
    root = math.isqrt(steps - 1) + 1
    near = [d for d in range((root + 1) // 2, 2 * root + 1) if steps % d == 0]
    return min(near, key=lambda d: abs(d - root)) if near else root


# Values of a tile side by side, on every TPU.
LANES = 128
# Rows that the matrix unit processes in the time it takes to load weights: 128 on every TPU.
MATRIX_ROWS = 128
# In the compiler's schedule, four steps an iteration are up to 10 % faster than one; eight are not.
STEPS = 4
# Up to so many steps are one block, without a loop over blocks: 10 to 32 steps took 0.70 to 0.84 of
# the cycles of several blocks (`benchmarks/recurrent.py tpu --unrolled`, v5e, v5p and v6e, 128 to
# 512 units).
_WHOLE_STEPS = 32
# With fewer units, more than half of the memory kept for the backward pass would be padding.
FEWEST_UNITS = 64
_MIB = 2**20
# The compiler's limit for a kernel that does not set one.
_DEFAULT_LIMIT = 16 * _MIB


@dataclasses.dataclass(frozen=True)
class Core:
    """The properties of a TPU core that kernels depend on.

    Args:
        vmem_bytes: On-chip memory of one core.
        cores: Cores that run one program together.
    """

    vmem_bytes: int
    cores: int = 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One layer on one device.

    Args:
        batch: Rows.
        units: Size of the state.
        features: Size of the input, or None if it is not known.
    """

    batch: int
    units: int
    features: int | None = None


def padded(size: int) -> int:
    """The next multiple of a tile's width.

    Args:
        size: Number of values side by side, such as units or features.
    """
    return -(-size // LANES) * LANES


def need(
    cell: Cell, sizes: Sizes, *, parts: int, steps: int, reread: bool, hoist: bool, keep: bool
) -> int:
    """Bytes of on-chip memory that the larger of the two loops needs, at most.

    Weights are stored once, or twice without `reread`. States and the blocks of all other arrays
    are stored twice, because one is computed while the next arrives. The values of a step, with
    those spilled from registers, count four times.

    Args:
        cell: The recurrence.
        sizes: The layer's sizes.
        parts: The number of parts of the rows.
        steps: Steps in a block.
        reread: See `Kernel`.
        hoist: Whether the input is projected before the loop.
        keep: Whether the activations' inputs are kept.
    """
    rows = -(-sizes.batch // (parts * TILE_ROWS)) * TILE_ROWS
    units, features = padded(sizes.units), padded(sizes.features or 1)
    gates = cell.gates * units
    kept = gates + units
    forwards = (gates if hoist else features) + 3 * units + (kept if keep else 0)
    backwards = (kept if keep else features) + 2 * units + kept
    weights = 2 * gates * (units + (0 if hoist and keep else features))
    weights *= 1 if reread or steps == 1 else 2
    state = 4 * cell.num_states * units
    return weights + 4 * rows * (2 * steps * max(forwards, backwards) + state + 4 * gates)


def fitted(
    cell: Cell,
    sizes: Sizes,
    core: Core,
    *,
    length: int,
    most: int | None,
    hoist: bool,
    keep: bool,
) -> tuple[Kernel, int] | None:
    """The kernel and the maximal number of steps in its blocks, or None if there is no room.

    Three quarters of the memory may be used. Rows are divided into as many parts as there are
    cores, or more if that makes room and leaves the matrix unit full.

    Args:
        cell: The recurrence.
        sizes: The layer's sizes.
        core: The chip's core.
        length: The length of time in steps.
        most: The maximal number of steps in one iteration; None for all of a few, else `STEPS`.
        hoist: See `need`.
        keep: See `need`.
    """
    for steps in _steps_of_blocks(length, most):
        for parts, reread in itertools.product(_cuts(sizes.batch, core.cores), (False, True)):
            how = {"steps": steps, "parts": parts, "reread": reread, "hoist": hoist, "keep": keep}
            size = need(cell, sizes, **how)
            if size <= core.vmem_bytes * 3 // 4:
                limit = min(max(size + size // 4, _DEFAULT_LIMIT), core.vmem_bytes)
                return Kernel(parts, reread, limit), steps
    return None


def _steps_of_blocks(length: int, most: int | None) -> Iterator[int]:
    """Maximal numbers of steps in a block, the fastest first."""
    if most is None and length <= _WHOLE_STEPS:
        yield length
    steps = most or STEPS
    while steps:
        yield steps
        steps //= 2


def _cuts(rows: int, cores: int) -> Iterator[int]:
    parts = cores if rows % (cores * TILE_ROWS) == 0 else 1
    yield parts
    while rows % (2 * parts * MATRIX_ROWS) == 0:
        parts *= 2
        yield parts


def unfit(cell: Cell, units: int) -> str | None:
    """The reason why a recurrence cannot be a kernel, whatever the memory; None if it can.

    Args:
        cell: The recurrence.
        units: Size of the state.
    """
    functions = {cell.activation, getattr(cell, "recurrent_activation", cell.activation)}
    other = [f.name for f in functions if f not in BUILT_IN.values()]
    if other:
        return f"activation {other[0]!r} is none of {', '.join(BUILT_IN)}"
    if units < FEWEST_UNITS:
        return f"of {units} units most of a tile's {LANES} values would be padding"
    return None


# A sixteenth of the memory of the smallest TPU core that XLA still serves (v5e: 16 GB).
KEPT_BYTES = 2**30
# The TPU compiler takes 8 s for a hundred steps of ten units, and 1 s for a loop over them.
UNROLLED_STEPS = 128


@dataclasses.dataclass(frozen=True, repr=False)
class Variant(Printed):
    """A choice for one layer on one device, with its reason.

    Args:
        keep: Whether the forward pass keeps the activations' inputs.
        unroll: Steps per iteration of the compiled loop.
        segment: Steps between states that are kept, or None for all steps.
        reason: The reason.
        hoist: Whether the input of all steps is projected before the loop.
        kernel: The kernel for the loop, or None for a compiled loop.
        unrolled: Whether there is no loop, and every step has separate arrays.
    """

    keep: bool
    unroll: int
    segment: int | None
    reason: str
    hoist: bool = True
    kernel: Kernel | None = None
    unrolled: bool = False

    def __str__(self):
        kept = "activations' inputs kept" if self.keep else "activations' inputs rebuilt"
        if self.unrolled:
            return f"no loop, every step with arrays of its own, {kept}: {self.reason}"
        cut = f", segments of {self.segment} steps" if self.segment else ""
        projected = "before" if self.hoist else "inside"
        if self.kernel:
            loop = f"one kernel for all steps, in blocks of {self.unroll}"
        else:
            loop = f"a compiled loop, {self.unroll} step(s) an iteration"
        return f"{loop}, {kept}, input projected {projected} the loop{cut}: {self.reason}"

    def to_dict(self):
        """The choice as plain data."""
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

    The rule: `segment` of the user applies; otherwise all steps are differentiated together. The
    activations' inputs are kept from the forward pass if that takes at most `KEPT_BYTES` on a
    device; otherwise they are rebuilt. On CPU and GPU the rest is one compiled loop forwards and
    one backwards. On TPU nothing else is written to memory for the loops: the input is projected
    inside the forward loop if that costs the matrix unit less time than the projection of all steps
    costs HBM (`_hoisted`). The loop is one kernel if its weights, states and a few steps fit the
    core's on-chip memory (`fitted`), also with `unroll=True`, because it is faster. If it cannot be
    a kernel, `unroll=True` means no loop and nothing stacked over time. That is also chosen for
    cells of fewer than `FEWEST_UNITS` units over at most `UNROLLED_STEPS` steps: a compiled loop
    takes several times as long to start its kernels as they take to run.

    Args:
        cell: The recurrence.
        platform: "cpu", "gpu" or "tpu".
        batch: Rows on one device.
        steps: Length of time.
        units: Size of the state.
        features: Size of the input, or None if it is not known.
        unroll: True for no compiled loop, False for the rule's choice, or the number of steps per
            iteration.
        segment: See `check_segment`.
        directions: 2 if two directions run in one loop; their input is projected before it.
        core: The core that a kernel would run on, or the reason why there can be none.
    """
    per_iteration = steps if unroll is True else max(int(unroll), 1)
    on_tpu = platform == "tpu"
    asked = check_segment(segment, steps)
    if isinstance(asked, int):
        variant = Variant(
            keep=True,
            unroll=per_iteration,
            segment=asked,
            reason="asked for; inside a segment memory is short-lived, so nothing is rebuilt",
        )
    else:
        kept = 4 * steps * batch * units * (cell.gates + 1)
        variant = Variant(
            keep=cell.states_suffice or kept <= KEPT_BYTES,
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
        if unroll is True and variant.kernel is not None:
            reason = f"{variant.reason}; unroll=True: the kernel is faster than separate steps"
            return dataclasses.replace(variant, reason=reason)
        return variant
    reason = f"{variant.reason}; {why}"
    return dataclasses.replace(variant, unrolled=True, unroll=steps, reason=reason)


def _why_kept(cell: Cell, size: int) -> str:
    if cell.states_suffice:
        return "the states give the slopes"
    if size <= KEPT_BYTES:
        return "kept inputs save one product of all steps"
    return f"{size / 2**30:.1f} GiB would have to be kept"


def _why_unrolled(unroll: bool | int, units: int, steps: int) -> str | None:
    """The reason for no loop if there can be no kernel, or None if there is a loop."""
    if unroll is True:
        return "unroll=True asks for no loop"
    if unroll is False and units < FEWEST_UNITS and steps <= UNROLLED_STEPS:
        return f"{units} units are computed sooner than a loop starts its kernels"
    return None


def _as_kernel(
    cell: Cell, variant: Variant, sizes: Sizes, length: int, unroll: bool | int, core: Core | str
) -> tuple[Variant, bool]:
    """The variant as one kernel; or with the reason why it cannot be one, and True."""
    without = core if isinstance(core, str) else unfit(cell, sizes.units)
    most = None if isinstance(unroll, bool) else unroll
    for hoist in dict.fromkeys([variant.hoist, True]):
        if isinstance(core, str) or without:
            break
        fit = fitted(cell, sizes, core, length=length, most=most, hoist=hoist, keep=variant.keep)
        if fit is not None:
            kernel, steps = fit
            return dataclasses.replace(variant, kernel=kernel, unroll=steps, hoist=hoist), False
    if not isinstance(core, str):
        without = without or f"{core.vmem_bytes // 2**20} MiB on the chip are too few"
    return dataclasses.replace(variant, reason=f"{variant.reason}; no kernel, as {without}"), True


# Multiplications that a TPU v5e's core computes while HBM moves one byte: 65536 and 546 bytes a
# cycle (197 TFLOP/s, 819 GB/s, 1.5 GHz).
MULTIPLICATIONS_PER_BYTE = 120
# A quarter of the on-chip memory of a TPU v5e: smaller arrays usually stay there.
ON_CHIP_BYTES = 2**25


def _hoisted(batch: int, features: int | None, projection: int) -> bool:
    """Whether projecting the input of all steps before the loop is faster on TPU.

    Before the loop, the projection is written to HBM and read again, 8 bytes for every row and
    gate, unless it stays on the chip. Inside the loop it always does; but if a step has fewer rows
    than the matrix unit takes, the unit is idle for the rest of them, once for every feature.

    References:
        https://cloud.google.com/tpu/docs/v5e for the speeds.
    """
    idle = max(MATRIX_ROWS - batch, 0)
    small = projection <= ON_CHIP_BYTES
    return small or features is None or idle * features > 8 * batch * MULTIPLICATIONS_PER_BYTE
