"""The computations of one instruction: matrix operations, and the compiler's cycle estimate."""

import re
from collections.abc import Iterator

import numpy as np

from keras_tpu_dist.tools.hlo import kernels
from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program

_PRECISION_PASSES = {"highest": 6, "high": 3}


def matrix_flops(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Instruction, str, int, int]]:
    """Multiply-adds times two for the matrix products in an instruction, including fusions.

    Additions of zero padding and dilation do not count, so a transposed convolution costs the same
    as its forward one.

    Args:
        program: The program, to look up the computations that are called.
        computation: The computation that `instruction` is in.
        instruction: Any instruction; one without a matrix product yields nothing.

    Yields:
        The product's instruction, the dtype of its operands, its operations, and the passes
        the matrix unit makes over it (more than one for precision `"high"` and `"highest"`).
    """
    if instruction.opcode == "fusion":
        for name in instruction.called:
            inner = program.computations[name]
            for i in inner:
                yield from matrix_flops(program, inner, i)
    elif instruction.opcode in ("dot", "convolution"):
        operands = computation.operands(instruction)
        if len(operands) == 2:
            count = _dot if instruction.opcode == "dot" else _convolution
            passes = _passes(instruction)
            dtype = _rate(operands[0], operands[1])
            yield instruction, dtype, count(operands, instruction), passes
    elif instruction.opcode == "custom-call":
        operands = computation.operands(instruction)
        estimate = kernels.flops(instruction, operands)
        if estimate:
            # A kernel's first operands may select the blocks to compute.
            numbers = [
                o for o in operands if o.shapes and o.shapes[0].dtype.startswith(("f", "bf"))
            ]
            yield instruction, _rate(*(numbers or operands[:2])), estimate, 1
        elif "matmul" in (instruction.attribute("custom_call_target") or ""):
            # the CPU compiler's library call: (rows, depth) times (depth, columns)
            out = instruction.shapes[0]
            depth = operands[0].shapes[0].dims[-1]
            yield instruction, "bfloat16", 2 * out.size * depth, 1


def estimated_cycles(instruction: Instruction) -> int:
    """The compiler's cycle estimate for one run, 0 if it reports none.

    Args:
        instruction: Any instruction.
    """
    cycles = instruction.number("estimated_cycles") or 0
    # The compiler writes 2^63-1 if it has no estimate.
    return cycles if cycles < 2**60 else 0


def _rate(*operands: Instruction) -> str:
    """The dtype whose peak rate applies to a product of these operands."""
    dtypes = {o.shapes[0].dtype for o in operands if o.shapes}
    if dtypes <= {"s8", "u8"}:
        return "int8"
    if all(d.startswith("f8") for d in dtypes):
        return "float8"
    return "bfloat16"


def _passes(instruction: Instruction) -> int:
    precision = instruction.attribute("operand_precision") or ""
    names = re.findall(r"\w+", precision)
    return max((_PRECISION_PASSES.get(n, 1) for n in names), default=1)


def _dot(operands: list[Instruction], dot: Instruction) -> int:
    dims = operands[0].shapes[0].dims
    depth = 1
    for axis in dot.integers("lhs_contracting_dims") or []:
        depth *= dims[axis]
    return 2 * dot.shapes[0].size * depth


def _convolution(operands: list[Instruction], convolution: Instruction) -> int:
    labels = convolution.attribute("dim_labels") or ""
    lhs_labels, _, rest = labels.partition("_")
    rhs_labels, _, out_labels = rest.partition("->")
    lhs, rhs = (o.shapes[0].dims for o in operands)
    out = convolution.shapes[0].dims
    window = _window(convolution.attribute("window"), sum(c.isdigit() for c in rhs_labels))
    count = 2 * rhs[rhs_labels.index("i")]
    count *= out[out_labels.index("b")] * out[out_labels.index("f")]
    for axis, (stride, low, lhs_dilate, rhs_dilate) in enumerate(window):
        sizes = (
            lhs[lhs_labels.index(str(axis))],
            rhs[rhs_labels.index(str(axis))],
            out[out_labels.index(str(axis))],
        )
        count *= _positions(*sizes, stride, low, lhs_dilate, rhs_dilate)
    return count


def _window(text: str | None, rank: int) -> list[tuple[int, int, int, int]]:
    """Stride, low padding, input dilation and kernel dilation of each spatial dimension."""
    fields = dict(part.split("=") for part in (text or "{}").strip("{}").split())

    def numbers(name: str, default: int) -> list[int]:
        if name not in fields:
            return [default] * rank
        return [int(n.split("_")[0]) for n in fields[name].split("x")]

    names = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
    return list(zip(*(numbers(*n) for n in names), strict=True))


def _positions(
    size: int, kernel: int, out: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Pairs of output and kernel positions that read an element of the input, and not padding."""
    few, many = sorted((("out", out, stride), ("kernel", kernel, rhs_dilate)), key=lambda p: p[1])
    along = np.arange(many[1], dtype=np.int64) * many[2] - low
    count = 0
    for step in range(few[1]):
        at = along + step * few[2]
        inside = (at >= 0) & (at <= (size - 1) * lhs_dilate) & (at % lhs_dilate == 0)
        count += int(inside.sum())
    return count
