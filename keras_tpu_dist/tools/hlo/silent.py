"""Cycles of kernels for which the TPU compiler states none: scatters, gathers, slices, sorts.

A scatter or a gather of large arrays goes index by index, each with a transfer of its own, so what
it takes is instructions before it is bytes. The constants are the compiler's own schedules, which
`python benchmarks/updates.py` prints beside what is estimated here.
"""

from keras_tpu_dist.hardware.chips import Chip
from keras_tpu_dist.tools.hlo import collectives, cost, traffic
from keras_tpu_dist.tools.hlo.operations import OperationKind, operation
from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program

# What runs beside the main core, and what is no kernel of the compiler.
_NO_KERNELS = (
    OperationKind.HOST,
    OperationKind.START,
    OperationKind.HANDOVER,
    OperationKind.UPDATE,
    OperationKind.DONE,
)
# Cycles of each index of a scatter, and of each tile of it; sixteen at a time are fetched, changed
# and written back.
_SCATTER = {"v2": 60, "v3": 60, "v4": 102, "v5e": 56, "v5p": 102, "v6e": 64, "tpu7x": 73}
_SCATTER_TILE = 4.5
# Of indices in order, which a window of the array on the chip waits for; so may a small array.
_SORTED, _SORTED_UNIQUE, _STAGED = 15.0, 7.5, 6.5
_GATHER, _GATHER_TILE = 7.5, 0.8
_GATHER_ROW, _GATHER_ON_CHIP = 5.5, 2.0
# Of a vector register, in every step of a bitonic network, for each array.
_SORT = 3.3
_REGISTER = 1024


def cycles(program: Program, computation: Computation, instruction: Instruction, chip: Chip) -> int:
    """Cycles of one run of a kernel for which the compiler states none; 0 for all else.

    The larger of the time in which HBM moves its bytes and, if it goes index by index, that of its
    instructions. What runs beside the main core (copies, collectives, a SparseCore) counts nothing.

    Args:
        program: The program, to look up the computations that are called.
        computation: The computation that `instruction` is in.
        instruction: Any instruction.
        chip: What the program was compiled for.
    """
    if computation.thread or not _is_silent(program, computation, instruction):
        return 0
    moved = traffic.hbm_bytes(program, computation, instruction)
    bytes_per_cycle = chip.hbm_bandwidth / chip.devices / chip.clock
    together = chip.cores // chip.devices
    steps = _steps(program, computation, instruction, chip, together)
    return round(max(moved / bytes_per_cycle, steps))


def _is_silent(program: Program, computation: Computation, instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call" or operation(instruction.opcode).kind in _NO_KERNELS:
        return False
    if cost.estimated_cycles(instruction):
        return False
    return collectives.find(program, computation, instruction) is None


def _steps(
    program: Program, computation: Computation, kernel: Instruction, chip: Chip, together: int
) -> float:
    if kernel.opcode == "sort":
        return _sort_steps(kernel) / together
    scoped = traffic.scoped_bytes(kernel)
    found = traffic.by_index(program, computation, kernel)
    if found is None:
        return 0.0
    where, main = found
    indices, window = traffic.indices_and_window(where, main)
    if main.opcode == "gather":
        return indices * _gather_steps(where, main, window) / together
    target = main.shapes[0]
    tiles = target.window_bytes(window) / target.window_bytes((1,) * len(window))
    if scoped >= target.window_bytes(target.dims):
        return indices * _STAGED
    if traffic.is_sorted(main):
        unique = "unique_indices=true" in main.attributes
        return indices * (_SORTED_UNIQUE if unique else _SORTED)
    return indices * (_SCATTER[chip.name] + _SCATTER_TILE * tiles)


def _gather_steps(where: Computation, gather: Instruction, window: tuple[int, ...]) -> float:
    source = where.operands(gather)[0].shapes[0]
    if source.memory_space:
        return _GATHER_ON_CHIP
    one = source.window_bytes((1,) * len(window))
    tiles = source.window_bytes(window) / one
    is_word = source.bytes == 4 * source.size
    return _GATHER_ROW if tiles == 1 and is_word else _GATHER + _GATHER_TILE * tiles


def _sort_steps(sort: Instruction) -> float:
    (axis,) = sort.integers("dimensions") or [0]
    first = sort.shapes[0]
    stages = max(first.dims[axis] - 1, 0).bit_length()
    registers = -(-(first.size // max(first.dims[axis], 1) * 2**stages) // _REGISTER)
    return _SORT * len(sort.shapes) * registers * stages * (stages + 1) / 2
