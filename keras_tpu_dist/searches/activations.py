"""What a training step holds in memory between its operations, read off its trace, for any mesh.

The compiler writes the results of products and reductions, and computes what works element by
element where it is used, so that of it only what it is made of is held. A mesh splits an activation
as it splits the weights that made it: where its dimensions come from is read off the trace too,
once, for meshes that are not yet known.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core

from keras_tpu_dist.dryrun.products import regrouped, sharing_devices
from keras_tpu_dist.partitioner.jaxprs import inner_jaxprs, opened

# The batch, or a dimension of a weight: its number, and which one.
Origin = tuple[int, int]
BATCH: Origin = (-1, 0)
# For each dimension of a value.
Origins = tuple[frozenset[Origin], ...]

_NONE: frozenset[Origin] = frozenset()


def origins_of(equation: Any, operands: Sequence[Origins | None], number: int) -> Origins:
    """Where the dimensions of a result come from.

    Args:
        equation: The equation.
        operands: Of each operand; `None` for constants.
        number: Which result.
    """
    rule = _RULES.get(equation.primitive.name, _by_size)
    out = equation.outvars[number].aval
    if not hasattr(out, "shape"):
        return ()
    ndims = [len(getattr(atom.aval, "shape", ())) for atom in equation.invars]
    known = [(_NONE,) * n if o is None else o for n, o in zip(ndims, operands)]
    found = rule(equation, known, tuple(out.shape))
    return found if len(found) == len(out.shape) else (_NONE,) * len(out.shape)


def origins_back(equation: Any, made: Sequence[Origins]) -> list[Origins]:
    """What the dimensions of operands are, by the results that they become dimensions of.

    Args:
        equation: The equation.
        made: The origins of each result.
    """
    shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in equation.invars]
    asked = [tuple(frozenset([(-2 - n, d)]) for d in range(len(s))) for n, s in enumerate(shapes)]
    found: dict[Origin, frozenset[Origin]] = {}
    for number, origins in enumerate(made):
        for takes, known in zip(origins_of(equation, asked, number), origins):
            for place in takes:
                found[place] = found.get(place, _NONE) | known
    return [
        tuple(found.get((-2 - n, d), _NONE) for d in range(len(s))) for n, s in enumerate(shapes)
    ]


def weight_origins(number: int, ndim: int) -> Origins:
    """A weight's own dimensions.

    Args:
        number: Which weight.
        ndim: How many they are.
    """
    return tuple(frozenset([(number, d)]) for d in range(ndim))


def batch_origins(shape: Sequence[int], rows: int) -> Origins:
    """Those of an input of the model.

    Args:
        shape: Its shape.
        rows: The batch's rows, which come first.
    """
    batch = frozenset([BATCH])
    return tuple(batch if d == 0 and size == rows else _NONE for d, size in enumerate(shape))


def _dot(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    summed, shared = equation.params["dimension_numbers"]
    left, right = operands
    return (
        *(_shared(left, right, a, b) for a, b in zip(*shared)),
        *(o for d, o in enumerate(left) if d not in (*summed[0], *shared[0])),
        *(o for d, o in enumerate(right) if d not in (*summed[1], *shared[1])),
    )


def _shared(left: Origins, right: Origins, a: int, b: int) -> frozenset[Origin]:
    """Of a dimension that both have, such as experts: as the weight's, which lies where it lies."""
    rows = [any(BATCH in o for o in operand) for operand in (left, right)]
    if rows == [True, False] and right[b]:
        return right[b]
    if rows == [False, True] and left[a]:
        return left[a]
    return left[a] | right[b]


def _convolution(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    numbers = equation.params["dimension_numbers"]
    found = [_NONE] * len(shape)
    found[numbers.out_spec[0]] = operands[0][numbers.lhs_spec[0]]
    found[numbers.out_spec[1]] = operands[1][numbers.rhs_spec[0]]
    return tuple(found)


def _transpose(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    return tuple(operands[0][d] for d in equation.params["permutation"])


def _reshape(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    """Of dimensions that are joined or divided, the first of the new ones is what is split."""
    found: list[frozenset[Origin]] = []
    for taken, sizes in regrouped(equation.invars[0].aval.shape, shape, operands[0]):
        first = next((k for k, size in enumerate(sizes) if size > 1), 0)
        found += [taken if k == first else _NONE for k in range(len(sizes))]
    return tuple(found)


def _broadcast(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    found, before = [_NONE] * len(shape), equation.invars[0].aval.shape
    for i, d in enumerate(equation.params["broadcast_dimensions"]):
        if before[i] == shape[d]:
            found[d] = operands[0][i]
    return tuple(found)


def _squeeze(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    gone = equation.params["dimensions"]
    left = [o for d, o in enumerate(operands[0]) if d not in gone]
    if left and any(BATCH in operands[0][d] for d in gone):
        # One row a device, of many devices.
        left[0] |= {BATCH}
    return tuple(left)


def _reduce(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    gone = equation.params["axes"]
    return tuple(o for d, o in enumerate(operands[0]) if d not in gone)


def _gather(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    numbers = equation.params["dimension_numbers"]
    table = [o for d, o in enumerate(operands[0]) if d not in numbers.collapsed_slice_dims]
    rows, columns = iter(operands[1]), iter(table)
    return tuple(
        next(columns, _NONE) if d in numbers.offset_dims else next(rows, _NONE)
        for d in range(len(shape))
    )


def _stack(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    """Arrays of one shape, along a dimension that they do not have."""
    before = [tuple(atom.aval.shape) for atom in equation.invars]
    alike = [o for s, o in zip(before, operands) if s == before[0]]
    joined = [_NONE.union(*(o[d] for o in alike)) for d in range(len(before[0]))]
    axis = next((v for v in equation.params.values() if isinstance(v, int)), 0)
    return (*joined[:axis], _NONE, *joined[axis:])


def _unstack(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    axis = next((v for v in equation.params.values() if isinstance(v, int)), 0)
    return (*operands[0][:axis], *operands[0][axis + 1 :])


def _by_size(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    """Of what works element by element: what is in the same place, where it is as long.

    Of what is not known: what is as long, wherever it is.
    """
    known = [
        (tuple(atom.aval.shape), origins)
        for atom, origins in zip(equation.invars, operands)
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
        places = (o for s, origins in known for n, o in zip(s, origins) if n == size > 1 and o)
        found[d] = found[d] or next((o for o in places if o not in found), _NONE)
    batch = any(BATCH in o for _, origins in known for o in origins)
    if batch and not any(BATCH in o for o in found):
        found[0] |= {BATCH}
    return tuple(found)


_RULES = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "transpose": _transpose,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reduce_sum": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_and": _reduce,
    "reduce_or": _reduce,
    "argmax": _reduce,
    "gather": _gather,
    "stack": _stack,
    "unstack": _unstack,
}


# The name of operations that hand a value on, into or out of what is called.
ENTER = "enter"
# Whose programs are not read: those of kernels, and of which one only is run.
_CLOSED = frozenset(["pallas_call", "custom_call", "cond", "while", "sort", "reduce", "scatter"])


@dataclass(eq=False)
class Value:
    """A value of a trace.

    Attributes:
        seen: Its shape there, within a `shard_map` that of one device.
        itemsize: Bytes of an element.
        parts: How many devices share what `seen` is a part of.
        origins: What its dimensions are.
        shape: Its shape, of all devices together.
        readers: The operations that read it.
        roots: What is held for it: itself, or what it is computed of where it is used.
        born: The operation that writes it.
        dies: The last that reads it.
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
        """Its bytes, of all devices together."""
        return math.prod(self.shape) * self.itemsize

    def comes_from(self, origins: Origins) -> None:
        """Notes what its dimensions are.

        Args:
            origins: Of each dimension.
        """
        self.origins, self.shape = origins, self.seen
        if self.parts > 1:
            rows = next((d for d, o in enumerate(origins) if BATCH in o), None)
            whole = [s * self.parts if d == rows else s for d, s in enumerate(self.seen)]
            self.shape = tuple(whole)


@dataclass(eq=False)
class Operation:
    """An operation of a trace.

    Attributes:
        name: Its primitive's name, or `ENTER`.
        equation: Its equation, or that which calls.
        operands: What it reads; `None` for constants.
        results: What it makes.
        sliced: How many dimensions `ENTER` takes off in front, as a loop does.
        body: What the body of a loop makes, for each result. Gradients are rather as the weights,
            which the loop reads.
    """

    name: str
    equation: Any
    operands: list[Value | None]
    results: list[Value]
    sliced: int = 0
    body: list[Value | None] = field(default_factory=list)


@dataclass(frozen=True)
class TracedProgram:
    """A trace taken apart.

    Attributes:
        inputs: Its inputs.
        operations: Its operations, in order.
        outputs: Its results; `None` for constants.
    """

    inputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Value | None, ...]


def program_of(trace: Any, num_weights: int, rows: int) -> TracedProgram:
    """Takes a trace apart.

    Args:
        trace: The trace; its first inputs are the weights.
        num_weights: How many weights there are.
        rows: The batch's rows.
    """
    jaxpr = opened(trace)
    names = {v: _value(v.aval, 1) for v in (*jaxpr.invars, *jaxpr.constvars)}
    inputs = tuple(names[v] for v in jaxpr.invars)
    for number, value in enumerate(inputs):
        weight = number < num_weights
        ndim = len(value.seen)
        value.comes_from(
            weight_origins(number, ndim) if weight else batch_origins(value.seen, rows)
        )
    operations = tuple(_flat(jaxpr, names, 1))
    for operation in operations:
        _read(operation)
    for operation in reversed(operations):
        _read_back(operation)
    outputs = (None if isinstance(v, core.Literal) else names[v] for v in jaxpr.outvars)
    return TracedProgram(inputs, operations, tuple(outputs))


def _value(aval: Any, parts: int) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    plain = dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    value = Value(shape, np.dtype(dtype).itemsize if plain else 4, parts)
    value.comes_from((frozenset(),) * len(shape))
    return value


def _flat(jaxpr: Any, names: dict[Any, Value], parts: int) -> Iterator[Operation]:
    """The operations of a program and of those that it calls."""

    def read(atom: Any) -> Value | None:
        return None if isinstance(atom, core.Literal) else names[atom]

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        called = [] if name in _CLOSED else list(map(opened, inner_jaxprs(equation)))
        operands = [read(atom) for atom in equation.invars]
        if not called:
            results = [_value(v.aval, parts) for v in equation.outvars]
            names.update(zip(equation.outvars, results))
            yield Operation(name, equation, operands, results)
            continue
        body = called[0]
        inner_parts = parts * sharing_devices(equation) if name == "shard_map" else parts
        inner = {v: _value(v.aval, inner_parts) for v in (*body.invars, *body.constvars)}
        # Where operands come first that the program does not take, as a rule's constants do.
        first = max(0, len(operands) - len(body.invars))
        for v, operand in zip(body.invars, operands[first:]):
            sliced = 0 if operand is None else len(operand.seen) - len(inner[v].seen)
            yield Operation(ENTER, equation, [operand], [inner[v]], max(0, sliced))
        yield from _flat(body, inner, inner_parts)
        results = [_value(v.aval, parts) for v in equation.outvars]
        names.update(zip(equation.outvars, results))
        last = [None if isinstance(v, core.Literal) else inner[v] for v in body.outvars]
        if name == "scan" or len(last) != len(results):
            # A loop writes what it carries and what it stacks.
            yield Operation(name, equation, operands, results, body=last)
            continue
        for operand, result in zip(last, results):
            yield Operation(ENTER, equation, [operand], [result])


def _read_back(operation: Operation) -> None:
    """Notes what operands are that come from nowhere, such as numbers that are counted off."""
    if operation.body or not any(
        v is not None and v.parts == 1 and not all(v.origins) for v in operation.operands
    ):
        return
    made = [v.origins for v in operation.results]
    if operation.name == ENTER:
        known = [((frozenset(),) * operation.sliced + made[0])]
    else:
        known = origins_back(operation.equation, made)
    for value, origins in zip(operation.operands, known):
        if value is not None and value.parts == 1 and len(origins) == len(value.seen):
            value.comes_from(tuple(o or back for o, back in zip(value.origins, origins)))


def _read(operation: Operation) -> None:
    """Notes where results come from, and who reads the operands."""
    origins = [None if v is None else v.origins for v in operation.operands]
    for number, value in enumerate(operation.results):
        made = operation.body[number] if number < len(operation.body) else None
        if made is not None and any(BATCH in o for o in made.origins):
            stacked = (frozenset(),) * (len(value.seen) - len(made.seen))
            value.comes_from((*stacked, *made.origins))
        elif operation.name != ENTER:
            value.comes_from(origins_of(operation.equation, origins, number))
        elif origins[0] is not None and (value.parts == 1 or any(BATCH in o for o in origins[0])):
            # Weights come whole into what is written for one device.
            value.comes_from(origins[0][operation.sliced :])
    for value in operation.operands:
        if value is not None:
            value.readers.append(operation)


# What is written to memory; all else is computed where it is used.
# fmt: off
_WRITTEN = frozenset(
    [
        "all_gather", "all_to_all", "cond", "custom_call", "dynamic_update_slice", "gather",
        "pallas_call", "ppermute", "psum", "ragged_dot", "rng_bit_generator", "scan", "sort",
        "stack", "top_k", "unstack", "while",
    ]
)
# fmt: on
_WRITTEN_BEGIN = ("arg", "conv_", "cum", "dot_", "reduce_", "scatter", "select_and_", "fft")
_HANDED_ON = frozenset(["optimization_barrier", ENTER])
# What reads operands that are computed while it runs, as reductions do.
_COMPUTING = frozenset(["dot_general", "conv_general_dilated"])
# What puts the weights of a loop together, or takes their gradients apart.
_STACKING = frozenset(["scan", "stack", "unstack"])
# What is made of several values is held itself where it is so much smaller.
_SMALLER = 0.6


@dataclass(frozen=True)
class HeldArray:
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


def buffers_of(trace: Any, num_weights: int, rows: int) -> tuple[HeldArray, ...]:
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
    buffers: Sequence[HeldArray],
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
