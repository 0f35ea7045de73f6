"""Whether a TPU core's on-chip memory (VMEM) has room for a time loop as one kernel, and how."""

import dataclasses
import itertools
from collections.abc import Iterator

from keras_tpu_dist.recurrence.cells import BUILT_IN, Cell
from keras_tpu_dist.recurrence.kernel import TILE_ROWS, Kernel

# Values of a tile side by side, on every TPU.
LANES = 128
# Rows the matrix unit takes in the time it takes to load their weights: 128 on every TPU.
MATRIX_ROWS = 128
# By the compiler's schedule four steps an iteration are up to 10 % faster than one, eight no more.
STEPS = 4
# So many steps are one block, without a loop over blocks: 10 to 32 took 0.70 to 0.84 of the cycles
# of several (`benchmarks/recurrent.py tpu --unrolled`, v5e, v5p and v6e, 128 to 512 units).
_WHOLE_STEPS = 32
# With fewer units more than half of what is kept for the backward pass would be padding.
FEWEST_UNITS = 64
_MIB = 2**20
# What the compiler gives to a kernel that does not say what it needs.
_DEFAULT_LIMIT = 16 * _MIB


@dataclasses.dataclass(frozen=True)
class Core:
    """What kernels need to know of a TPU.

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
    """Bytes of on-chip memory that the larger of the two loops takes, at most.

    Weights are there once, or twice without `reread`; states and the blocks of all other arrays
    twice, as one is computed while the next arrives; the values of a step, with those spilled from
    registers, four times.

    Args:
        cell: The recurrence.
        sizes: The layer's.
        parts: Into how many parts the rows are cut.
        steps: Steps in a block.
        reread: As in `Kernel`.
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
    """The kernel and the most steps in one of its blocks, or None if there is no room.

    Three quarters of the memory may be used. Rows are cut into as many parts as there are cores, or
    more if that makes room and leaves the matrix unit full.

    Args:
        cell: The recurrence.
        sizes: The layer's.
        core: The chip's.
        length: The length of time in steps.
        most: The most steps in one iteration, or None for all of a few, else `STEPS`.
        hoist: As in `need`.
        keep: As in `need`.
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
    """How many steps a block may have at most, the fastest first."""
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
    """Why a recurrence cannot be a kernel, whatever the memory; None if it can.

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
