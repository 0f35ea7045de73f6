"""What one instruction costs: matrix operations, HBM bytes, the compiler's cycles."""

import functools
import re
from collections.abc import Iterator

import numpy as np

from keras_tpu_dist.hlo import kernels
from keras_tpu_dist.hlo.parse import Computation, Instruction, Program

# Views of other buffers, and what only starts or ends something counted elsewhere.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "iota",
    "partition-id",
    "replica-id",
    "after-all",
    "domain",
    "opt-barrier",
    "optimization-barrier",
    "async-start",
    "async-update",
    "async-done",
}
_SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape", "copy", "convert"}
_MOST_POSITIONS = 2**28
_PRECISION_PASSES = {"highest": 6, "high": 3}


def matrix_flops(
    program: Program, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Instruction, str, int, int]]:
    """Multiply-adds times two of the matrix products in an instruction, fusions looked into.

    Additions of zero padding and dilation are not counted, so a transposed convolution costs
    what its forward one does.

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
            # A kernel's first operands may be what tells it which blocks to compute.
            numbers = [o for o in operands if o.shapes and _is_floating(o.shapes[0].dtype)]
            yield instruction, _rate(*(numbers or operands[:2])), estimate, 1
        elif "matmul" in (instruction.attribute("custom_call_target") or ""):
            # the CPU compiler's library call: (rows, depth) times (depth, columns)
            out = instruction.shapes[0]
            depth = operands[0].shapes[0].dims[-1]
            yield instruction, "bfloat16", 2 * out.size * depth, 1


def estimated_cycles(instruction: Instruction) -> int:
    """The compiler's cycle estimate of one run, 0 where it states none.

    Args:
        instruction: Any instruction.
    """
    cycles = instruction.number("estimated_cycles") or 0
    # The compiler writes 2^63-1 where it could not tell.
    return cycles if cycles < 2**60 else 0


def hbm_bytes(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Bytes one run reads from and writes to HBM.

    Slices read what they take, updates in place write what they change, what lies in on-chip
    memory is free.

    Args:
        program: The program, to look up the computations that are called.
        computation: The computation that `instruction` is in.
        instruction: Any instruction. A fusion is one kernel; a loop or a call costs nothing itself.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    if opcode == "custom-call":
        return _custom_call_bytes(computation, instruction)
    if opcode == "fusion":
        return _fusion_bytes(program, computation, instruction)
    operands = computation.operands(instruction)
    out = sum(s.hbm_bytes for s in instruction.shapes)
    if opcode in ("copy-start", "slice-start"):
        # the result repeats the source's shape, a slice's before its own; only the copy is written
        moved = instruction.shapes[1 if opcode == "slice-start" else 0]
        read = moved.bytes if operands[0].shapes[0].memory_space == 0 else 0
        return read + moved.hbm_bytes
    if opcode.endswith("-start"):
        return sum(s.hbm_bytes for o in operands for s in o.shapes)
    if opcode in _SLICES:
        return 2 * out
    if opcode == "dynamic-update-slice":
        return 2 * sum(s.hbm_bytes for s in operands[1].shapes)
    if opcode == "scatter":
        return 3 * sum(s.hbm_bytes for s in operands[-1].shapes)
    return out + sum(s.hbm_bytes for o in operands for s in o.shapes)


def _custom_call_bytes(computation: Computation, instruction: Instruction) -> int:
    if not kernels.is_kernel(instruction):
        return 0  # AllocateBuffer and other markers
    arrays = [s for i in (instruction, *computation.operands(instruction)) for s in i.shapes]
    stated = kernels.stated(instruction, "bytes_accessed")
    if stated:
        # Its author could not know which arrays the compiler would place on the chip.
        return max(stated - sum(s.bytes - s.hbm_bytes for s in arrays), 0)
    return sum(s.hbm_bytes for s in arrays)


def _fusion_bytes(program: Program, computation: Computation, fusion: Instruction) -> int:
    inner = program.computations[fusion.called[0]]
    updates = [_update_of(program, inner, root) for root in _roots(inner)]
    in_place = {target for target, _ in filter(None, updates)}
    total = 0
    for parameter, operand in zip(inner.parameters, computation.operands(fusion)):
        full = sum(s.hbm_bytes for s in operand.shapes)
        if full and parameter.name not in in_place:
            total += min(full, _bytes_taken(program, inner, parameter))
    for update, shape in zip(updates, fusion.shapes):
        if shape.memory_space == 0:
            total += shape.bytes if update is None else 2 * update[1]
    return total


def _roots(inner: Computation) -> list[Instruction]:
    root = inner.root
    if root is None:
        return []
    return inner.operands(root) if root.opcode == "tuple" else [root]


def _update_of(program: Program, inner: Computation, root: Instruction) -> tuple[str, int] | None:
    """The parameter that a root changes in place and the bytes it changes; else `None`."""
    root = _behind_views(inner, root)
    operands = inner.operands(root)
    if root.opcode == "dynamic-update-slice":
        target = _behind_views(inner, operands[0])
        if target.opcode == "parameter":
            return target.name, sum(s.bytes for s in operands[1].shapes)
    elif root.opcode == "fusion":
        nested = program.computations[root.called[0]]
        found = _update_of(program, nested, nested.root) if nested.root is not None else None
        if found is not None:
            position = [p.name for p in nested.parameters].index(found[0])
            target = _behind_views(inner, operands[position])
            if target.opcode == "parameter":
                return target.name, found[1]
    return None


def _behind_views(inner: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _VIEWS:
        operands = inner.operands(instruction)
        if not operands:
            break
        instruction = operands[0]
    return instruction


def _bytes_taken(program: Program, inner: Computation, parameter: Instruction) -> int:
    """Bytes a fused computation reads of a parameter: all, unless it only slices it."""
    if parameter.name not in inner.taken:
        inner.taken[parameter.name] = _taken(program, inner, parameter)
    return inner.taken[parameter.name]


def _taken(program: Program, inner: Computation, parameter: Instruction) -> int:
    whole = sum(s.bytes for s in parameter.shapes)
    if parameter is inner.root:
        return whole
    total = 0
    for user in inner.users.get(parameter.name, []):
        operands = user.operand_names
        if user.opcode == "bitcast":
            total += _bytes_taken(program, inner, user)
        elif user.opcode in _SLICES and operands[0] == parameter.name:
            total += sum(s.bytes for s in user.shapes)
        elif user.opcode == "fusion":
            nested = program.computations[user.called[0]]
            total += sum(
                _bytes_taken(program, nested, nested.parameters[i])
                for i, name in enumerate(operands)
                if name == parameter.name
            )
        else:
            return whole
    return min(total, whole)


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("f", "bf"))


def _rate(*operands: Instruction) -> str:
    """The dtype whose peak rate a product of these operands runs at."""
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
    return list(zip(*(numbers(*n) for n in names)))


@functools.lru_cache(maxsize=4096)
def _positions(
    size: int, kernel: int, out: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Pairs of output and kernel position that meet an element of the input, not padding."""
    few, many = sorted((("out", out, stride), ("kernel", kernel, rhs_dilate)), key=lambda p: p[1])
    if few[1] * many[1] > _MOST_POSITIONS:
        raise ValueError(f"a convolution of {size} by {kernel} gives {out}")
    along = np.arange(many[1], dtype=np.int64) * many[2] - low
    count = 0
    for step in range(few[1]):
        at = along + step * few[2]
        inside = (at >= 0) & (at <= (size - 1) * lhs_dilate) & (at % lhs_dilate == 0)
        count += int(inside.sum())
    return count
