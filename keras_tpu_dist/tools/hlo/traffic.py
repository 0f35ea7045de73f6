"""Bytes an instruction moves to and from HBM: slices, updates in place, tiles and their padding."""

import math
import re
from dataclasses import dataclass

from keras_tpu_dist.tools.hlo import kernels
from keras_tpu_dist.tools.hlo.operations import Counted, operation
from keras_tpu_dist.tools.hlo.parse import LANES, Computation, Instruction, Program, Shape

_VIEWS = {"bitcast", "reshape", "transpose", "copy", "convert"}
# The compiler's kernel for an update that starts anywhere goes in blocks of at most so many rows.
_MOST_ROWS = 512

_ALIAS = re.compile(r'"indices":\["(\d+)","(\d+)"\]')
_OUTPUT_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\d*\}")
_KNOWN_BITS = re.compile(r'"zeroes":"(\d+)"')
_SCOPED = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)


def hbm_bytes(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Bytes one run reads from and writes to HBM.

    Slices read what they take and updates in place move what they change, in whole tiles where
    the compiler's kernels do; arrays count with the padding of their tiles; arrays in on-chip
    memory are free.

    Args:
        program: The program, to look up the computations that are called.
        computation: The computation that `instruction` is in.
        instruction: Any instruction. A fusion is one kernel; a loop or a call costs nothing itself.
    """
    counted = operation(instruction.opcode).counted
    if counted is Counted.NOTHING:
        return 0
    if counted is Counted.KERNEL:
        return _custom_call_bytes(computation, instruction)
    if counted is Counted.FUSION:
        return _fusion_bytes(program, computation, instruction)
    operands = computation.operands(instruction)
    out = sum(s.hbm_bytes for s in instruction.shapes)
    if counted is Counted.TRANSFER:
        # the result repeats the source's shape, a slice's before its own; only the copy is written
        moved = instruction.shapes[1 if instruction.opcode == "slice-start" else 0]
        read = moved.window_bytes(moved.dims) if operands[0].shapes[0].memory_space == 0 else 0
        return read + moved.hbm_bytes
    if counted is Counted.SLICE:
        return out + _slice_bytes(operands[0].shapes[0], instruction) + _all(operands[1:])
    if counted is Counted.CHANGED:
        targets = len(instruction.shapes)
        scoped = scoped_bytes(instruction)
        moved = [_update_bytes(computation, instruction, k, scoped) for k in range(targets)]
        return sum(moved) + _all(operands[targets:])
    return (0 if counted is Counted.READ else out) + _all(operands)


def _all(operands: list[Instruction]) -> int:
    return sum(s.hbm_bytes for o in operands for s in o.shapes)


# --- hand-written kernels --------------------------------------------------------------------


def _custom_call_bytes(computation: Computation, instruction: Instruction) -> int:
    """What its author states; else what it is given, and as much of what it updates in place."""
    if not kernels.is_kernel(instruction):
        return 0  # AllocateBuffer and other markers
    operands = computation.operands(instruction)
    arrays = [s for i in (instruction, *operands) for s in i.shapes]
    stated = kernels.stated(instruction, "bytes_accessed")
    if stated:
        # Its author could not know which arrays the compiler would place on the chip.
        return max(stated - sum(s.bytes - s.hbm_bytes for s in arrays if s.memory_space), 0)
    aliases = _OUTPUT_ALIAS.findall(instruction.attribute("output_to_operand_aliasing") or "")
    outputs = {int(output or 0) for output, _ in aliases}
    inputs = {int(operand) for _, operand in aliases}
    given = [s for k, o in enumerate(operands) if k not in inputs for s in o.shapes]
    made = [s for k, s in enumerate(instruction.shapes) if k not in outputs]
    most = max(sum(s.window_bytes(s.dims) for s in side) for side in (given, made))
    changed = [instruction.shapes[k].hbm_bytes for k in outputs]
    moved = sum(s.hbm_bytes for s in (*given, *made))
    return moved + sum(2 * min(whole, most) for whole in changed)


# --- fusions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Changed:
    """A parameter that a root of a fusion changes in place, and the updates that do it."""

    parameter: Instruction
    updates: tuple[tuple[Computation, Instruction, int], ...]


def _fusion_bytes(program: Program, computation: Computation, fusion: Instruction) -> int:
    inner = program.computations[fusion.called[0]]
    operands = computation.operands(fusion)
    aliases = _aliases(fusion, operands)
    total, in_place = 0, set()
    for number, ((root, k), shape) in enumerate(zip(_roots(inner), fusion.shapes, strict=True)):
        changed = _changed(program, inner, root, k)
        if changed is None or not _is_in_place(changed, number, aliases):
            total += shape.hbm_bytes
            continue
        for where, update, which in changed.updates:
            in_place.add(update)
            if shape.memory_space == 0:
                total += _update_bytes(where, update, which, scoped_bytes(fusion))
    for parameter, operand in zip(inner.parameters, operands, strict=True):
        full = sum(s.hbm_bytes for s in operand.shapes)
        if full:
            total += min(full, _bytes_taken(program, inner, parameter, in_place))
    return total


def _roots(inner: Computation) -> list[tuple[Instruction, int]]:
    """What a fusion returns, as an instruction and which of its results."""
    root = inner.root
    if root is None:
        return []
    if root.opcode == "tuple":
        return [(o, 0) for o in inner.operands(root)]
    return [(root, k) for k in range(len(root.shapes))]


def _aliases(fusion: Instruction, operands: list[Instruction]) -> set[tuple[int, int]] | None:
    """Pairs of operand and result that share a buffer; `None` if the compiler does not say."""
    _, stated, lists = fusion.attributes.partition('"aliasing_operands":')
    if not stated:
        return None
    return {(int(a), int(b) - len(operands)) for a, b in _ALIAS.findall(lists)}


def _is_in_place(changed: _Changed, result: int, aliases: set[tuple[int, int]] | None) -> bool:
    return aliases is None or (int(changed.parameter.operands), result) in aliases


def _changed(program: Program, inner: Computation, root: Instruction, k: int) -> _Changed | None:
    updates: list[tuple[Computation, Instruction, int]] = []
    at = _behind_views(inner, root)
    while True:
        if operation(at.opcode).counted is Counted.CHANGED:
            updates.append((inner, at, k))
            at = inner.operands(at)[k]
        elif at.opcode == "fusion" and len(at.shapes) == 1:
            nested = program.computations[at.called[0]]
            found = nested.root and _changed(program, nested, nested.root, 0)
            if not found:
                return None
            updates.extend(found.updates)
            at = inner.operands(at)[int(found.parameter.operands)]
        else:
            break
        at, k = _behind_views(inner, at), 0
    return _Changed(at, tuple(updates)) if updates and at.opcode == "parameter" else None


def _behind_views(inner: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _VIEWS:
        operands = inner.operands(instruction)
        if not operands:
            break
        instruction = operands[0]
    return instruction


def _bytes_taken(
    program: Program, inner: Computation, parameter: Instruction, in_place: set[Instruction]
) -> int:
    """Bytes a fused computation reads of a parameter: all, unless it only slices it.

    Args:
        in_place: Updates that change the parameter they update.
    """
    whole = sum(s.window_bytes(s.dims) for s in parameter.shapes)
    if parameter is inner.root:
        return whole
    total = 0
    for user in inner.users.get(parameter.name, []):
        operands = user.operand_names
        if user.opcode in _VIEWS:
            total += _bytes_taken(program, inner, user, in_place)
        elif operation(user.opcode).counted is Counted.SLICE and operands[0] == parameter.name:
            total += _slice_bytes(parameter.shapes[0], user)
        elif user in in_place and operands.count(parameter.name) == 1:
            # What an update reads of its target is counted with what it writes.
            total += 0 if parameter.name in operands[: len(user.shapes)] else whole
        elif user.opcode == "fusion":
            nested = program.computations[user.called[0]]
            total += sum(
                _bytes_taken(program, nested, nested.parameters[i], in_place)
                for i, name in enumerate(operands)
                if name == parameter.name
            )
        elif user.opcode != "tuple":
            return whole
    return min(total, whole)


# --- slices and updates ----------------------------------------------------------------------


def _slice_bytes(source: Shape, taken: Instruction) -> int:
    """Bytes read of an array by a slice or a gather of it."""
    if source.memory_space:
        return 0
    out = taken.shapes[0]
    if taken.opcode != "gather":
        return source.window_bytes(out.dims, whole_tiles=False)
    window = tuple(taken.integers("slice_sizes") or [])
    rows = out.size // max(math.prod(window), 1)
    return rows * source.window_bytes(window, whole_tiles=False)


def _update_bytes(computation: Computation, update: Instruction, k: int, scoped: int) -> int:
    """Bytes an update moves of the array that it changes, read and written."""
    target = update.shapes[k]
    if target.memory_space:
        return 0
    if update.opcode == "scatter":
        whole = target.window_bytes(target.dims)
        if scoped >= whole or (is_sorted(update) and not computation.thread):
            return 2 * whole
        indices, window = indices_and_window(computation, update, k)
        return 2 * min(indices * target.window_bytes(window), whole)
    # Of a dynamic-update-slice: written, and read too where it may start within a tile.
    zeroes = [int(z) for z in _KNOWN_BITS.findall(update.attributes)]
    dims, inside = list(computation.operands(update)[1].shapes[0].dims), False
    for axis, tile in target.tiles.items():
        known = zeroes[axis] if axis < len(zeroes) else 0
        if dims[axis] == target.dims[axis] or known & (tile - 1) == tile - 1:
            continue
        inside = True
        if dims[axis] == 1 and tile < LANES:
            continue
        # It goes in blocks, and one more, as neither end need be at a block's.
        block = -(-min(dims[axis], max(tile, _MOST_ROWS)) // tile) * tile
        dims[axis] = min((-(-dims[axis] // block) + 1) * block, target.dims[axis])
    moved = target.window_bytes(tuple(dims))
    return 2 * moved if inside else moved


def by_index(
    program: Program, computation: Computation, kernel: Instruction
) -> tuple[Computation, Instruction] | None:
    """The scatter or gather that a kernel is, fusions looked into, and the computation it is in.

    Args:
        program: The program, to look up the computations that are called.
        computation: The computation that `kernel` is in.
        kernel: Any instruction.
    """
    where, at = computation, kernel
    while at.opcode == "fusion":
        where = program.computations[at.called[0]]
        if where.root is None:
            return None
        at = _behind_views(where, where.root)
    return (where, at) if at.opcode in ("scatter", "gather") else None


def indices_and_window(
    computation: Computation, scatter: Instruction, k: int = 0
) -> tuple[int, tuple[int, ...]]:
    """How many indices a scatter or a gather has, and the part of the array that each is of.

    Args:
        computation: The computation that it is in.
        scatter: The scatter or the gather.
        k: Which of the arrays, of a scatter that updates several.
    """
    if scatter.opcode == "gather":
        window = tuple(scatter.integers("slice_sizes") or [])
        return scatter.shapes[0].size // max(math.prod(window), 1), window
    target = scatter.shapes[k]
    updates = computation.operands(scatter)[len(scatter.shapes) + 1 + k].shapes[0]
    given = iter(scatter.integers("update_window_dims") or [])
    inserted = {
        *(scatter.integers("inserted_window_dims") or []),
        *(scatter.integers("input_batching_dims") or []),
    }
    window = tuple(
        1 if axis in inserted else updates.dims[next(given)] for axis in range(len(target.dims))
    )
    return updates.size // max(math.prod(window), 1), window


def is_sorted(scatter: Instruction) -> bool:
    """Whether the indices of a scatter are known to be in order.

    The main core's kernel then streams all of the array through the chip, however few indices
    there are: it reads and writes one window after the other.

    Args:
        scatter: The scatter.
    """
    return "indices_are_sorted=true" in scatter.attributes


def scoped_bytes(instruction: Instruction) -> int:
    """On-chip memory that a kernel of the compiler works in, beside its operands; 0 if unsaid.

    Args:
        instruction: The kernel.
    """
    found = _SCOPED.search(instruction.attributes)
    return int(found[1]) if found else 0
