"""The memory that a training step holds between its operations, from its trace, for any mesh.

The compiler writes results of products and reductions to memory. It computes element-wise results
where they are used, so only their inputs are held. A mesh splits an activation as it splits the
weights that produced it. So the trace is also read for the origin of every dimension, once, before
any mesh is known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.programs.calls import rank
from keras_tpu_dist.programs.dimensions import dimensions, regrouped
from keras_tpu_dist.programs.graph import ENTER, Atom, graph_of

# The origin of a dimension: the batch, or a weight's number and its dimension.
Origin = tuple[int, int]
BATCH: Origin = (-1, 0)
# The origins of every dimension of a value.
Origins = tuple[frozenset[Origin], ...]

_NONE: frozenset[Origin] = frozenset()


def origins_of(equation: Any, operands: Sequence[Origins | None], number: int) -> Origins:
    """The origins of a result's dimensions.

    Args:
        equation: The equation.
        operands: The origins of the operands; `None` for constants.
        number: The number of the result.
    """
    shape = tuple(getattr(equation.outvars[number].aval, "shape", ()))
    ndims = map(rank, equation.invars)
    known = [(_NONE,) * n if o is None else o for n, o in zip(ndims, operands, strict=True)]
    moved = dimensions(equation)
    if moved is None:
        return _by_size(equation, known, shape)
    found = [_NONE] * len(shape)
    for step in moved.mapped:
        if step.result == number:
            origins = known[step.operand][step.dimension]
            same = equation.invars[step.operand].aval.shape[step.dimension] == shape[step.to]
            # Rows stay rows, however many of them are taken.
            found[step.to] |= origins if same else origins & {BATCH}
    rule = _RULES.get(equation.primitive.name)
    if rule is not None:
        rule(equation, known, found)
    return tuple(found)


def origins_back(equation: Any, made: Sequence[Origins]) -> list[Origins]:
    """The origins of operands' dimensions, derived from those of the results.

    Args:
        equation: The equation.
        made: The origins of the results.
    """
    shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in equation.invars]
    asked = [tuple(frozenset([(-2 - n, d)]) for d in range(len(s))) for n, s in enumerate(shapes)]
    found: dict[Origin, frozenset[Origin]] = {}
    for number, origins in enumerate(made):
        for takes, known in zip(origins_of(equation, asked, number), origins, strict=True):
            for place in takes:
                found[place] = found.get(place, _NONE) | known
    return [
        tuple(found.get((-2 - n, d), _NONE) for d in range(len(s))) for n, s in enumerate(shapes)
    ]


def weight_origins(number: int, ndim: int) -> Origins:
    """The origins of a weight's own dimensions.

    Args:
        number: The number of the weight.
        ndim: The number of its dimensions.
    """
    return tuple(frozenset([(number, d)]) for d in range(ndim))


def batch_origins(shape: Sequence[int], rows: int) -> Origins:
    """The origins of the dimensions of a model's input.

    Args:
        shape: Its shape.
        rows: The number of rows in the batch; they are the first dimension.
    """
    batch = frozenset([BATCH])
    return tuple(batch if d == 0 and size == rows else _NONE for d, size in enumerate(shape))


def _dot(equation: Any, operands: list[Origins], found: list[frozenset[Origin]]) -> None:
    _, shared = equation.params["dimension_numbers"]
    left, right = operands
    for to, (a, b) in enumerate(zip(*shared, strict=True)):
        found[to] = _shared(left, right, a, b)


def _shared(left: Origins, right: Origins, a: int, b: int) -> frozenset[Origin]:
    """The origin of a dimension of both operands, such as experts: that of the weight, which is
    fixed."""
    rows = [any(BATCH in o for o in operand) for operand in (left, right)]
    if rows == [True, False] and right[b]:
        return right[b]
    if rows == [False, True] and left[a]:
        return left[a]
    return left[a] | right[b]


def _convolution(equation: Any, operands: list[Origins], found: list[frozenset[Origin]]) -> None:
    """Features are those of the kernel; with groups, features of the image too."""
    numbers = equation.params["dimension_numbers"]
    found[numbers.out_spec[0]] = operands[0][numbers.lhs_spec[0]]
    found[numbers.out_spec[1]] = operands[1][numbers.rhs_spec[0]]


def _reshape(equation: Any, operands: list[Origins], found: list[frozenset[Origin]]) -> None:
    """If dimensions are joined or divided, the first of the new ones is the split one."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    found[:] = [_NONE] * len(after)
    for old, new in regrouped(before, after):
        first = next((d for d in new if after[d] > 1), new[0])
        found[first] = _NONE.union(*(operands[0][d] for d in old))


def _squeeze(equation: Any, operands: list[Origins], found: list[frozenset[Origin]]) -> None:
    if found and any(BATCH in operands[0][d] for d in equation.params["dimensions"]):
        # One row per device, on many devices.
        found[0] |= {BATCH}


def _by_size(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    """For unknown operations: origins of a dimension of the same size at the same place, or
    anywhere."""
    known = [
        (tuple(atom.aval.shape), origins)
        for atom, origins in zip(equation.invars, operands, strict=True)
        if any(origins)
    ]
    found = [
        _NONE.union(*(o[d] for s, o in known if len(s) == len(shape) and s[d] == size))
        for d, size in enumerate(shape)
    ]
    alike = any(s == tuple(shape) for s, _ in known)
    if alike or math.prod(shape) == 1:
        return tuple(found)
    for d, size in enumerate(shape):
        places = (
            o
            for s, origins in known
            for n, o in zip(s, origins, strict=True)
            if n == size > 1 and o
        )
        found[d] = found[d] or next((o for o in places if o not in found), _NONE)
    batch = any(BATCH in o for _, origins in known for o in origins)
    if batch and not any(BATCH in o for o in found):
        found[0] |= {BATCH}
    return tuple(found)


# Origins besides those of the dimensions that become dimensions of the result.
_RULES = {
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "reshape": _reshape,
    "squeeze": _squeeze,
}


@dataclass(eq=False)
class Value:
    """What is known of a value of a program.

    Attributes:
        seen: Its shape in the trace; within a `shard_map`, that on one device.
        parts: The number of devices that share the array of which `seen` is a part.
        shape: Its global shape.
        roots: The values held for it: itself, or the values it is computed from where it is used.
    """

    seen: tuple[int, ...]
    itemsize: int
    parts: int = 1
    origins: Origins = ()
    shape: tuple[int, ...] = ()
    readers: list["Operation"] = field(default_factory=list)
    roots: tuple["Value", ...] = ()
    born: int = -1
    dies: int = -1

    @property
    def size_bytes(self) -> int:
        """The bytes of the global array."""
        return math.prod(self.shape) * self.itemsize

    def comes_from(self, origins: Origins) -> None:
        """Adds origins to its dimensions.

        Args:
            origins: Those of every dimension.
        """
        self.origins, self.shape = origins, self.seen
        if self.parts > 1:
            rows = next((d for d, o in enumerate(origins) if BATCH in o), None)
            whole = [s * self.parts if d == rows else s for d, s in enumerate(self.seen)]
            self.shape = tuple(whole)


@dataclass(eq=False)
class Operation:
    """An operation of a program, with its values; `None` for constants.

    Attributes:
        body: For every result, the value that the body of a loop computes. The origins of gradients
            are rather those of the weights that the loop reads.
    """

    name: str
    equation: Any
    operands: list[Value | None]
    results: list[Value]
    body: list[Value | None]


class _Values(dict[Atom, Value]):
    """The values of a program, by their atoms."""

    def __missing__(self, atom: Atom) -> Value:
        dtype = getattr(atom.aval, "dtype", None)
        plain = dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
        value = Value(atom.shape, np.dtype(dtype).itemsize if plain else 4, atom.devices)
        value.comes_from((_NONE,) * len(atom.shape))
        return self.setdefault(atom, value)

    def of(self, atoms: Sequence[Atom]) -> list[Value | None]:
        """Those of some atoms; `None` for constants."""
        return [self[atom] if atom.constant is None else None for atom in atoms]


@dataclass(frozen=True)
class TracedProgram:
    """A program with the origins of its values.

    Attributes:
        outputs: Its results; `None` for constants.
    """

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value | None]


def program_of(trace: Any, num_weights: int, rows: int) -> TracedProgram:
    """Reads a trace for the origins of its values.

    Args:
        trace: The trace; its first inputs are the weights.
        num_weights: The number of weights.
        rows: The number of rows in the batch.
    """
    graph, values = graph_of(trace, bodies=True), _Values()
    inputs = [values[atom] for atom in graph.inputs]
    for number, value in enumerate(inputs):
        weight = number < num_weights
        ndim = len(value.seen)
        value.comes_from(
            weight_origins(number, ndim) if weight else batch_origins(value.seen, rows)
        )
    operations = [
        Operation(
            read.name,
            read.equation,
            values.of(read.operands),
            [values[atom] for atom in read.results],
            values.of(read.body),
        )
        for read in graph.operations
    ]
    for operation in operations:
        _read(operation)
    for operation in reversed(operations):
        _read_back(operation)
    return TracedProgram(inputs, operations, values.of(graph.outputs))


def _read_back(operation: Operation) -> None:
    """Derives the origins of operands without any, such as counters, from the results."""
    if operation.body or not any(
        v is not None and v.parts == 1 and not all(v.origins) for v in operation.operands
    ):
        return
    made = [v.origins for v in operation.results]
    if operation.name == ENTER:
        # A loop takes slices of operands.
        ndim = len(operation.operands[0].seen) if operation.operands[0] else 0
        known = [((_NONE,) * (ndim - len(made[0])) + made[0])]
    else:
        known = origins_back(operation.equation, made)
    for value, origins in zip(operation.operands, known, strict=True):
        if value is not None and value.parts == 1 and len(origins) == len(value.seen):
            value.comes_from(
                tuple(o or back for o, back in zip(value.origins, origins, strict=True))
            )


def _read(operation: Operation) -> None:
    """Sets the origins of the results, and the readers of the operands."""
    origins = [None if v is None else v.origins for v in operation.operands]
    for number, value in enumerate(operation.results):
        made = operation.body[number] if number < len(operation.body) else None
        if made is not None and any(BATCH in o for o in made.origins):
            stacked = (frozenset(),) * (len(value.seen) - len(made.seen))
            value.comes_from((*stacked, *made.origins))
        elif operation.name != ENTER:
            value.comes_from(origins_of(operation.equation, origins, number))
        elif origins[0] is not None and (value.parts == 1 or any(BATCH in o for o in origins[0])):
            # Code for one device gets whole weights.
            value.comes_from(origins[0][len(origins[0]) - len(value.seen) :])
    for value in operation.operands:
        if value is not None:
            value.readers.append(operation)


# Operations whose results are written to memory; all others are computed where they are used.
# fmt: off
_WRITTEN = frozenset(
    [
        "all_gather", "all_to_all", "cond", "custom_call", "custom_linear_solve",
        "dynamic_update_slice", "gather", "pallas_call", "ppermute", "psum", "ragged_dot",
        "rng_bit_generator", "scan", "sort", "stack", "top_k", "unstack", "while",
    ]
)
# fmt: on
_WRITTEN_BEGIN = ("arg", "conv_", "cum", "dot_", "reduce_", "scatter", "select_and_", "fft")
# Gradients of tables, which add up rows, are not counted: with them, the forecast orders the memory
# of a ranking model worse (`python benchmarks/search.py --recorded`).
_NOT_COUNTED = "scatter-"
_HANDED_ON = frozenset(["optimization_barrier", ENTER])
# Operations that compute their operands while they run, as reductions do.
_COMPUTING = frozenset(["dot_general", "conv_general_dilated"])
# Operations that stack the weights of a loop, or take their gradients apart.
_STACKING = frozenset(["scan", "stack", "unstack"])
# A result of several values is held itself if it is smaller than them by this factor. Without this
# rule, the forecast of ViT's memory correlates with the compiler's by 0.73 instead of 0.94.
_SMALLER = 0.6


@dataclass(frozen=True)
class HeldArray:
    """An array that is held for some time.

    Attributes:
        shape: Its global shape.
        dies: The last operation that reads it; for gradients, which the optimizer reads, the very
            last one.
        gradient: The weight that it is the gradient of, or the first of the weights that it is
            stacked from or for; or `None`.
        once_whole: Whether a gradient is whole when it is written, and scattered afterwards.
    """

    shape: tuple[int, ...]
    itemsize: int
    origins: Origins
    born: int
    dies: int
    gradient: int | None = None
    once_whole: bool = False


def buffers_of(trace: Any, num_weights: int, rows: int) -> tuple[HeldArray, ...]:
    """The arrays that are held while a traced program runs, without its inputs.

    Args:
        trace: The program, such as one that returns gradients. Its first inputs are the weights,
            and its results are the gradients of the first of them.
        num_weights: The number of weights.
        rows: The number of rows in the batch.
    """
    program = program_of(trace, num_weights, rows)
    # Twice: the first pass holds every result that saves memory. A result all of whose inputs are
    # held as long in any case saves nothing: it is left out of the second.
    first = _held(program.operations, frozenset())
    needless = frozenset(
        id(v) for v, roots in first if roots and all(r.dies >= v.dies for r in roots)
    )
    for operation in program.operations:
        for v in operation.results:
            v.roots, v.born, v.dies = (), -1, -1
    held = _held(program.operations, needless)
    gradients, stacked = _gradients(program), _stacked(program.operations)
    return tuple(
        HeldArray(
            shape=v.shape,
            itemsize=v.itemsize,
            origins=v.origins,
            born=v.born,
            dies=max(v.born, v.dies),
            gradient=gradients.get(v, stacked.get(v)),
            once_whole=v not in stacked,
        )
        for v, _ in held
    )


def _gradients(program: TracedProgram) -> dict[Value, int]:
    """The values that are held for the results, until the optimizer has read them."""
    found: dict[Value, int] = {}
    # The gradients are those of the first inputs, the weights.
    for number, (weight, result) in enumerate(zip(program.inputs, program.outputs, strict=False)):
        for root in () if result is None else result.roots:
            # A product may have computed it transposed.
            if math.prod(root.shape) == math.prod(weight.shape):
                found[root] = number
                root.dies = len(program.operations)
                if root.shape == weight.shape and any(root.origins):
                    root.origins = weight.origins
    return found


def _stacked(operations: Sequence[Operation]) -> dict[Value, int]:
    """Stacked values without rows of the batch, and the weight with the same form."""
    found = {}
    for operation in operations:
        for value in operation.results if operation.name in _STACKING else ():
            weights = [{w for w, _ in o} for o in value.origins if o]
            alike = set.intersection(*weights) if len(weights) > 1 else set()
            if alike and BATCH[0] not in alike:
                found[value] = min(alike)
    return found


def peak_bytes(
    buffers: Sequence[HeldArray],
    parts: Callable[[frozenset[Origin]], float],
    scattered: Callable[[int], float],
) -> float:
    """The largest number of bytes that are held at one time on one device.

    Args:
        buffers: The arrays that are held.
        parts: The number of parts into which a mesh splits a dimension.
        scattered: The additional number of parts in which the gradient of a weight is held.
    """
    changes = [0.0] * (max((b.dies for b in buffers), default=0) + 2)
    sizes: dict[tuple, float] = {}
    for buffer in buffers:
        kind = (buffer.shape, buffer.itemsize, buffer.origins)
        if kind not in sizes:
            dims = [
                size / parts(origins)
                for size, origins in zip(buffer.shape, buffer.origins, strict=True)
            ]
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
    """Elements of an array in memory, including the padding of its tiles of 8 times 128.

    The compiler chooses the two dimensions of the tiles.

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
    """The values that are held, with the values they would be computed from where they are used."""
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
    counted = not name.startswith(_NOT_COUNTED)
    return name in _WRITTEN or (counted and name.startswith(_WRITTEN_BEGIN))


def _roots(operation: Operation, number: int) -> tuple[Value, ...] | None:
    """The values that a result is computed from where it is used; `None` if it is written."""
    if _is_written(operation.name):
        return None
    operands = [] if operation.name.startswith(_NOT_COUNTED) else operation.operands
    if operation.name in _HANDED_ON and len(operands) == len(operation.results):
        operands = operands[number : number + 1]
    return tuple(dict.fromkeys(r for v in operands if v is not None for r in v.roots))


def _is_held(operation: Operation, value: Value, roots: tuple[Value, ...]) -> bool:
    if operation.name in _HANDED_ON or len(roots) < 2:
        return False
    return value.size_bytes < _SMALLER * sum(r.size_bytes for r in roots)


def _write_out(operation: Operation, value: Value | None, place: int, held: list) -> None:
    """Operands of kernels and loops are written, if they are larger than their inputs."""
    if value is None or not value.roots or value.roots == (value,):
        return
    if operation.name in _COMPUTING or operation.name.startswith("reduce"):
        return
    if value.size_bytes > sum(r.size_bytes for r in value.roots):
        value.roots, value.born = (value,), place
        held.append((value, ()))


def _narrow(operation: Operation, value: Value) -> None:
    """A result that is only used after a conversion is written converted."""
    if not _is_written(operation.name) or len(value.readers) != 1:
        return
    (reader,) = value.readers
    if reader.name == "convert_element_type":
        value.itemsize = min(value.itemsize, reader.results[0].itemsize)
