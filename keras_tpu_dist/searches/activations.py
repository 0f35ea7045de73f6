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

from keras_tpu_dist.trace.calls import Called, calls, rank
from keras_tpu_dist.trace.dimensions import dimensions, regrouped
from keras_tpu_dist.trace.jaxprs import opened

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
    shape = tuple(getattr(equation.outvars[number].aval, "shape", ()))
    ndims = map(rank, equation.invars)
    known = [(_NONE,) * n if o is None else o for n, o in zip(ndims, operands)]
    moved = dimensions(equation)
    if moved is None:
        return _by_size(equation, known, shape)
    found = [_NONE] * len(shape)
    for step in moved.mapped:
        if step.result == number:
            origins = known[step.operand][step.dimension]
            same = equation.invars[step.operand].aval.shape[step.dimension] == shape[step.to]
            # Rows are rows, however many of them are taken.
            found[step.to] |= origins if same else origins & {BATCH}
    rule = _RULES.get(equation.primitive.name)
    if rule is not None:
        rule(equation, known, found)
    return tuple(found)


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


def _dot(equation: Any, operands: list[Origins], found: list[frozenset[Origin]]) -> None:
    _, shared = equation.params["dimension_numbers"]
    left, right = operands
    for to, (a, b) in enumerate(zip(*shared)):
        found[to] = _shared(left, right, a, b)


def _shared(left: Origins, right: Origins, a: int, b: int) -> frozenset[Origin]:
    """Of a dimension that both have, such as experts: as the weight's, which lies where it lies."""
    rows = [any(BATCH in o for o in operand) for operand in (left, right)]
    if rows == [True, False] and right[b]:
        return right[b]
    if rows == [False, True] and left[a]:
        return left[a]
    return left[a] | right[b]


def _convolution(equation: Any, operands: list[Origins], found: list[frozenset[Origin]]) -> None:
    """Features are the kernel's, also those of groups, which are features of the image too."""
    numbers = equation.params["dimension_numbers"]
    found[numbers.out_spec[0]] = operands[0][numbers.lhs_spec[0]]
    found[numbers.out_spec[1]] = operands[1][numbers.rhs_spec[0]]


def _reshape(equation: Any, operands: list[Origins], found: list[frozenset[Origin]]) -> None:
    """Of dimensions that are joined or divided, the first of the new ones is what is split."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    found[:] = [_NONE] * len(after)
    for old, new in regrouped(before, after):
        first = next((d for d in new if after[d] > 1), new[0])
        found[first] = _NONE.union(*(operands[0][d] for d in old))


def _squeeze(equation: Any, operands: list[Origins], found: list[frozenset[Origin]]) -> None:
    if found and any(BATCH in operands[0][d] for d in equation.params["dimensions"]):
        # One row a device, of many devices.
        found[0] |= {BATCH}


def _by_size(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    """Of what is not known: what is as long in the same place, or wherever it is."""
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


# What there is to say beside the dimensions that become those of the result.
_RULES = {
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "reshape": _reshape,
    "squeeze": _squeeze,
}


# The name of operations that hand a value on, into or out of what is called.
ENTER = "enter"


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
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = [_of(names, atom) for atom in equation.invars]
        call = _only_call(equation)
        inner: dict[Any, Value] = {}
        if call is not None:
            body, own_parts = call.jaxpr, parts * call.devices
            inner = {v: _value(v.aval, own_parts) for v in (*body.invars, *body.constvars)}
            for i, v in zip(call.operands, body.invars):
                sliced = rank(equation.invars[i]) - rank(v)
                yield Operation(ENTER, equation, [operands[i]], [inner[v]], sliced)
            yield from _flat(body, inner, own_parts)
        results = [_value(v.aval, parts) for v in equation.outvars]
        names.update(zip(equation.outvars, results))
        made = [] if call is None else [_of(inner, atom) for atom in call.jaxpr.outvars]
        if call is None or call.kind == "loop":
            # A loop writes what it carries and what it stacks.
            yield Operation(name, equation, operands, results, body=made)
            continue
        for operand, result in zip(made, results):
            yield Operation(ENTER, equation, [operand], [result])


def _of(names: dict[Any, Value], atom: Any) -> Value | None:
    return None if isinstance(atom, core.Literal) else names[atom]


def _only_call(equation: Any) -> Called | None:
    """The program that an equation runs, if it runs one whose rounds are known."""
    called = calls(equation)
    runs = len(called) == 1 and called[0].kind in ("call", "loop")
    return called[0] if runs else None


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
        "all_gather", "all_to_all", "cond", "custom_call", "custom_linear_solve",
        "dynamic_update_slice", "gather", "pallas_call", "ppermute", "psum", "ragged_dot",
        "rng_bit_generator", "scan", "sort", "stack", "top_k", "unstack", "while",
    ]
)
# fmt: on
_WRITTEN_BEGIN = ("arg", "conv_", "cum", "dot_", "reduce_", "scatter", "select_and_", "fft")
# What is added up by rows, as gradients of tables are, counts for nothing: counted, the memory of a
# ranking model is forecast in a worse order (`python benchmarks/search.py --recorded`).
_NOT_COUNTED = "scatter-"
_HANDED_ON = frozenset(["optimization_barrier", ENTER])
# What reads operands that are computed while it runs, as reductions do.
_COMPUTING = frozenset(["dot_general", "conv_general_dilated"])
# What puts the weights of a loop together, or takes their gradients apart.
_STACKING = frozenset(["scan", "stack", "unstack"])
# What is made of several values is held itself if it is so much smaller. Without it ViT's memory
# correlates with the compiler's by 0.73 instead of 0.94.
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
    counted = not name.startswith(_NOT_COUNTED)
    return name in _WRITTEN or (counted and name.startswith(_WRITTEN_BEGIN))


def _roots(operation: Operation, number: int) -> tuple[Value, ...] | None:
    """What a result is computed of where it is used, `None` for one that is written."""
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
