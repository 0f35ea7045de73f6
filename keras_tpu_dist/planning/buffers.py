"""What a training step holds in memory between its operations, read off its trace.

The compiler writes the results of products and reductions, and computes what works element by
element where it is used, so that of it only what it is made of is held.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_tpu_dist.planning.operations import ENTER, Operation, Program, Value, program_of
from keras_tpu_dist.planning.origins import BATCH, Origin, Origins

# What is written to memory; all else is computed where it is used.
_WRITTEN = frozenset(
    [
        *("all_gather", "all_to_all", "cond", "custom_call", "dynamic_update_slice", "gather"),
        *("pallas_call", "ppermute", "psum", "ragged_dot", "rng_bit_generator", "scan", "sort"),
        *("stack", "top_k", "unstack", "while"),
    ]
)
_WRITTEN_BEGIN = ("arg", "conv_", "cum", "dot_", "reduce_", "scatter", "select_and_", "fft")
_HANDED_ON = frozenset(["optimization_barrier", ENTER])
# What reads operands that are computed while it runs, as reductions do.
_COMPUTING = frozenset(["dot_general", "conv_general_dilated"])
# What puts the weights of a loop together, or takes their gradients apart.
_STACKING = frozenset(["scan", "stack", "unstack"])
# What is made of several values is held itself where it is so much smaller.
_SMALLER = 0.6


@dataclass(frozen=True)
class Buffer:
    """An array that is held for a while.

    Attributes:
        shape: Its shape, of all devices together.
        itemsize: Bytes of an element.
        origins: What its dimensions are.
        born: The operation that writes it.
        dies: The last that reads it; of gradients, which the optimizer reads, the last of all.
        gradient: Whose gradient it is, or the first of the weights that it is stacked of or for;
            or `None`.
        once_whole: Whether a gradient is whole when it is written, and scattered then.
    """

    shape: tuple[int, ...]
    itemsize: int
    origins: Origins
    born: int
    dies: int
    gradient: int | None = None
    once_whole: bool = False


def buffers_of(trace: Any, num_weights: int, rows: int) -> tuple[Buffer, ...]:
    """What is held while a traced program runs, without its inputs.

    Args:
        trace: The program, such as one that returns gradients; its first inputs are the weights,
            and its results the gradients of the first of them.
        num_weights: How many weights there are.
        rows: The batch's rows.
    """
    program = program_of(trace, num_weights, rows)
    first = _held(program.operations, frozenset())
    # Where all that a small result is made of is held as long in any case, it need not be.
    needless = frozenset(
        id(v) for v, roots in first if roots and all(r.dies >= v.dies for r in roots)
    )
    for operation in program.operations:
        for v in operation.results:
            v.roots, v.born, v.dies = (), -1, -1
    held = _held(program.operations, needless)
    gradients, stacked = _gradients(program), _stacked(program.operations)
    return tuple(
        Buffer(
            *(v.shape, v.itemsize, v.origins, v.born, max(v.born, v.dies)),
            gradient=gradients.get(v, stacked.get(v)),
            once_whole=v not in stacked,
        )
        for v, _ in held
    )


def _gradients(program: Program) -> dict[Value, int]:
    """What is held for the results, until the optimizer has read it."""
    found: dict[Value, int] = {}
    for number, (weight, result) in enumerate(zip(program.inputs, program.outputs)):
        for root in () if result is None else result.roots:
            # A product may have made it transposed.
            if math.prod(root.shape) == math.prod(weight.shape):
                found[root] = number
                root.dies = len(program.operations)
                if root.shape == weight.shape and any(root.origins):
                    root.origins = weight.origins
    return found


def _stacked(operations: Sequence[Operation]) -> dict[Value, int]:
    """What is stacked without rows of the batch, and the weight that it has the form of."""
    found = {}
    for operation in operations:
        for value in operation.results if operation.name in _STACKING else ():
            weights = [{w for w, _ in o} for o in value.origins if o]
            alike = set.intersection(*weights) if len(weights) > 1 else set()
            if alike and BATCH[0] not in alike:
                found[value] = min(alike)
    return found


def peak_bytes(
    buffers: Sequence[Buffer],
    parts: Callable[[frozenset[Origin]], float],
    scattered: Callable[[int], float],
) -> float:
    """The most that is held at a time on one device.

    Args:
        buffers: What is held.
        parts: In how many parts a mesh splits a dimension.
        scattered: In how many parts more the gradient of a weight is held.
    """
    changes = [0.0] * (max((b.dies for b in buffers), default=0) + 2)
    sizes: dict[tuple, float] = {}
    for buffer in buffers:
        kind = (buffer.shape, buffer.itemsize, buffer.origins)
        if kind not in sizes:
            dims = [size / parts(origins) for size, origins in zip(buffer.shape, buffer.origins)]
            sizes[kind] = _tiled(dims) * buffer.itemsize
        size = sizes[kind]
        if buffer.gradient is not None:
            part = size / scattered(buffer.gradient)
            if buffer.once_whole:
                changes[buffer.born] += size - part
                changes[buffer.born + 1] -= size - part
            size = part
        changes[buffer.born] += size
        changes[buffer.dies + 1] -= size
    held = most = 0.0
    for change in changes:
        held += change
        most = max(most, held)
    return most


def _tiled(dims: Sequence[float]) -> float:
    """Elements of an array as it lies in memory, in tiles of 8 times 128.

    The compiler chooses which two dimensions those are.

    References:
        - https://openxla.org/xla/tiled_layout
    """
    long = [size for size in dims if size > 1]
    if not long:
        return 1.0
    wide = [math.ceil(size / 128) * 128 / size for size in long]
    high = [math.ceil(size / 8) * 8 / size for size in long]
    pairs = (w * h for i, w in enumerate(wide) for j, h in enumerate(high) if i != j)
    return math.prod(long) * min(pairs, default=wide[0])


def _held(
    operations: Sequence[Operation], needless: frozenset[int]
) -> list[tuple[Value, tuple[Value, ...]]]:
    """The values that are held, each with what it would be computed of where it is used."""
    held: list[tuple[Value, tuple[Value, ...]]] = []
    for place, operation in enumerate(operations):
        if _is_written(operation.name):
            for value in operation.operands:
                _write_out(operation, value, place, held)
        for number, value in enumerate(operation.results):
            roots = _roots(operation, number)
            if roots is None or (id(value) not in needless and _is_held(operation, value, roots)):
                value.roots, value.born = (value,), place
                held.append((value, roots or ()))
                _narrow(operation, value)
            else:
                value.roots = roots
    for place, operation in enumerate(operations):
        for value in operation.operands:
            for root in () if value is None else value.roots:
                root.dies = max(root.dies, place)
    return held


def _is_written(name: str) -> bool:
    return name in _WRITTEN or name.startswith(_WRITTEN_BEGIN)


def _roots(operation: Operation, number: int) -> tuple[Value, ...] | None:
    """What a result is computed of where it is used, `None` for one that is written."""
    if _is_written(operation.name):
        return None
    operands = operation.operands
    if operation.name in _HANDED_ON and len(operands) == len(operation.results):
        operands = operands[number : number + 1]
    return tuple(dict.fromkeys(r for v in operands if v is not None for r in v.roots))


def _is_held(operation: Operation, value: Value, roots: tuple[Value, ...]) -> bool:
    if operation.name in _HANDED_ON or len(roots) < 2:
        return False
    return value.size_bytes < _SMALLER * sum(r.size_bytes for r in roots)


def _write_out(operation: Operation, value: Value | None, place: int, held: list) -> None:
    """Operands of kernels and loops are written, where they are more than what they are of."""
    if value is None or not value.roots or value.roots == (value,):
        return
    if operation.name in _COMPUTING or operation.name.startswith("reduce"):
        return
    if value.size_bytes > sum(r.size_bytes for r in value.roots):
        value.roots, value.born = (value,), place
        held.append((value, ()))


def _narrow(operation: Operation, value: Value) -> None:
    """A result that is only converted is written converted."""
    if not _is_written(operation.name) or len(value.readers) != 1:
        return
    (reader,) = value.readers
    if reader.name == "convert_element_type":
        value.itemsize = min(value.itemsize, reader.results[0].itemsize)
