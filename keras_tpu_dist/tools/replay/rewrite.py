"""Rewrites a program of the TPU compiler so that XLA's CPU client can run it.

The values of every instruction stay those of the TPU program: what was fused, scheduled, split,
moved or exchanged stays so. What changes is how it is written down:

- partitions become replicas, and groups of devices are written out;
- tiles and memory spaces go. A bitcast means the bytes of a layout, so it becomes a transpose, a
  reshape and a transpose;
- fusions become calls;
- what is started and finished apart is computed at its start;
- operands whose dtypes differ, which the TPU has no objection to, are converted;
- hand-written kernels are replaced by computations that are given for them.

Anything else that is unknown is an error, never a guess.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.tools.hlo.collectives import Groups, groups_of, replica_groups
from keras_tpu_dist.tools.hlo.parse import (
    Computation,
    Instruction,
    Program,
    Shape,
    end_of_value,
    shapes_of,
)
from keras_tpu_dist.tools.replay import slices
from keras_tpu_dist.tools.replay.errors import cannot_run

KERNEL = "tpu_custom_call"
# Where a device is: in its slice, and in which.
_PARTITION, _SLICE = 0, 1

_LAYOUT = re.compile(r"(?<=\])\{[^{}]*\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_NAME = re.compile(r"\s*,?\s*([a-z_]\w*)=")
# What says nothing about values. Programs are compared as replicas, without buffers.
_DROPPED = {
    "backend_config",
    "buffer_donor",
    "channel_id",
    "control-predecessors",
    "frontend_attributes",
    "is_scheduled",
    "kind",
    "metadata",
    "origin",
    "output_to_operand_aliasing",
    "sharding",
    "use_global_device_ids",
}
_COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
# Of several arrays, as if they were called for each. XLA's CPU client wants one dtype.
_ONE_BY_ONE = {"all-gather", "all-reduce", "collective-permute", "reduce-scatter"}
# As HLO defines them, operands and results have one dtype.
_ELEMENTWISE = {
    "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "cosine", "count-leading-zeros",
    "divide", "erf", "exponential", "exponential-minus-one", "floor", "log", "log-plus-one",
    "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power",
    "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "shift-left",
    "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract",
    "tan", "tanh", "xor",
}  # fmt: skip
# Nothing to change but layouts and what says nothing about values.
_PLAIN = {
    "after-all", "bitcast-convert", "call", "complex", "conditional", "constant", "convert",
    "get-tuple-element", "imag", "iota", "is-finite", "map", "opt-barrier", "optimization-barrier",
    "parameter", "real", "reduce-precision", "rng-bit-generator", "sort", "topk", "tuple", "while",
}  # fmt: skip
# They move the elements of their first operand.
_MOVES = {
    "broadcast", "copy", "dynamic-slice", "gather", "reshape", "reverse", "slice", "transpose",
}  # fmt: skip
# Custom calls of the TPU compiler that return their operand.
_IDENTITIES = {"AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked"}
# What XLA's CPU client can reduce over devices; truth values also by and, or.
_REDUCED = {"add", "maximum", "minimum", "multiply"}
# Elements of the largest array for which it is found out whether tiles matter for a bitcast.
_MOST_COMPARED = 2**22
_FLOATS = ("bf16", "f16", "f32", "f64")


@dataclass(frozen=True)
class InterpretedKernel:
    """A computation that replaces a hand-written kernel."""

    entry: str
    text: str
    is_tuple: bool = True


Interpreter = Callable[[Instruction, list[Shape]], InterpretedKernel]


def _no_kernels(instruction: Instruction, operands: list[Shape]) -> InterpretedKernel:
    raise cannot_run(instruction, "it is a hand-written kernel")


def runnable(
    program: Program,
    devices: Sequence[int],
    *,
    kernels: Interpreter = _no_kernels,
    as_on_chip: bool = False,
) -> str:
    """The text of a program that XLA's CPU client compiles.

    Args:
        program: The program of the TPU compiler, finished or as it is after one of the passes
            behind the partitioner.
        devices: The ids of the devices, in the order of the mesh. The program of several slices
            is that of one, which runs on all of them.
        kernels: Returns the computation to use for a hand-written kernel.
        as_on_chip: Whether products of float32 round their operands to bfloat16 where the chip
            does, which is where the program asks for no other precision.

    Returns:
        HLO for as many replicas.

    Raises:
        CannotRun: If it has something that is not known.
    """
    return _Rewriter(program, tuple(devices), kernels, as_on_chip).text()


def attributes_of(instruction: Instruction) -> dict[str, str]:
    """The attributes of an instruction, as text, by name."""
    text, found, at = instruction.attributes, {}, 0
    while match := _NAME.match(text, at):
        end = end_of_value(text, match.end())
        found[match[1]] = text[match.end() : end]
        at = end
    return found


def _plain_type(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", _LAYOUT.sub("", text))


def _array(shape: Shape, dims: tuple[int, ...] | None = None) -> str:
    return f"{shape.dtype}[{_listed(shape.dims if dims is None else dims)}]"


def _listed(values: object) -> str:
    return ",".join(str(int(value)) for value in values)  # type: ignore[attr-defined]


def _order(shape: Shape) -> list[int]:
    """The dimensions of an array, from the slowest in memory to the fastest."""
    fastest_first = shape.layout.partition(":")[0]
    if not fastest_first:
        return list(range(len(shape.dims)))
    return [int(d) for d in fastest_first.split(",")][::-1]


def _index(element: Instruction) -> int:
    return int(element.attribute("index") or 0)


def _zero(dtype: str) -> str:
    return "false" if dtype == "pred" else "0"


def _bits(shape: Shape) -> int:
    return Shape(shape.dtype, (8,)).bytes


def _tiles(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """The tiles of an array, each within the one before."""
    found = re.search(r":T((?:\([\d,]*\))+)", shape.layout)
    return tuple(_ints(tile) for tile in re.findall(r"\(([\d,]*)\)", found[1])) if found else ()


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _cut_dims(
    dims: Sequence[int], tile: tuple[int, ...]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """How dimensions are cut by a tile, which belongs to the last of them.

    Returns:
        The dimensions filled up to whole tiles; these with each tiled one as number and size of
        tiles; the dimensions afterwards, all numbers before all sizes; and the order of that.
    """
    dims = [*[1] * (len(tile) - len(dims)), *dims]
    rest = len(dims) - len(tile)
    numbers = [-(-size // step) for size, step in zip(dims[rest:], tile)]
    filled = [*dims[:rest], *(n * step for n, step in zip(numbers, tile))]
    paired = [*dims[:rest], *(part for pair in zip(numbers, tile) for part in pair)]
    order = [*range(rest), *range(rest, len(paired), 2), *range(rest + 1, len(paired), 2)]
    return filled, paired, [paired[d] for d in order], order


@functools.lru_cache(maxsize=1024)
def _tiles_matter(
    source: tuple[int, ...],
    source_tiles: tuple[tuple[int, ...], ...],
    result: tuple[int, ...],
    result_tiles: tuple[tuple[int, ...], ...],
) -> bool:
    """Whether the elements of two arrays of the same bytes come in another order for their tiles.

    Args:
        source: Dimensions in the order of the layout, the slowest first.
    """
    if math.prod(source) > _MOST_COMPARED:
        return True
    one, other = _in_memory(source, source_tiles), _in_memory(result, result_tiles)
    # Of different sizes in memory: one is a part of the other's bytes, in the order of the layout.
    return one.size == other.size and not np.array_equal(one, other)


def _in_memory(dims: tuple[int, ...], tiles: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The numbers of an array's elements in the order of its bytes, -1 between them."""
    array = np.arange(math.prod(dims)).reshape(dims)
    for tile in tiles:
        filled, paired, _, order = _cut_dims(array.shape, tile)
        array = array.reshape([*[1] * (len(filled) - array.ndim), *array.shape])
        missing = [(0, n - size) for n, size in zip(filled, array.shape)]
        array = np.pad(array, missing, constant_values=-1).reshape(paired).transpose(order)
    return array.ravel()


class _Steps:
    """Lines that move the elements of one array."""

    def __init__(self, name: str, dtype: str, last: str):
        self.lines: list[str] = []
        self.last = last
        self._name, self._dtype = name, dtype

    def _add(self, dims: Sequence[int], computed: str) -> None:
        step = f"%{self._name}.step{len(self.lines)}"
        self.lines.append(f"{step} = {self._dtype}[{_listed(dims)}] {computed}")
        self.last = step

    def transpose(self, order: Sequence[int], dims: Sequence[int]) -> None:
        self._add(dims, f"transpose({self.last}), dimensions={{{_listed(order)}}}")

    def reshape(self, dims: Sequence[int]) -> None:
        self._add(dims, f"reshape({self.last})")

    def converted(self, dtype: str, dims: Sequence[int]) -> None:
        """Reads elements as those of another dtype of the same width."""
        if dtype != self._dtype:
            # A truth value is a byte, 0 or 1.
            opcode = "convert" if "pred" in (dtype, self._dtype) else "bitcast-convert"
            self._dtype = dtype
            self._add(dims, f"{opcode}({self.last})")

    def regrouped(self, dtype: str, size: int, ratio: float) -> None:
        """Reads the bytes of an array as elements of another width."""
        self.reshape([size])
        if self._dtype == "pred":
            self.converted("u8", [size])
        if ratio > 1:
            self.reshape([size // int(ratio), int(ratio)])
        if ratio == 1:
            self.converted(dtype, [size])
            return
        dims = [size // int(ratio)] if ratio > 1 else [size, round(1 / ratio)]
        self._dtype = "u8" if dtype == "pred" else dtype
        self._add(dims, f"bitcast-convert({self.last})")
        self.converted(dtype, dims)

    def cut(self, dims: Sequence[int], tile: tuple[int, ...]) -> list[int]:
        """Reshapes an array into tiles."""
        filled, paired, after, order = _cut_dims(dims, tile)
        longer = [*[1] * (len(filled) - len(dims)), *dims]
        self.reshape(longer)
        source = self.last
        self._add([], f"constant({_zero(self._dtype)})")
        padding = "x".join(f"0_{n - size}" for n, size in zip(filled, longer))
        self._add(filled, f"pad({source}, {self.last}), padding={padding}")
        self.reshape(paired)
        self.transpose(order, after)
        return after

    def joined(self, dims: Sequence[int], tile: tuple[int, ...]) -> None:
        """Reshapes tiles into an array."""
        filled, paired, _, order = _cut_dims(dims, tile)
        self.transpose(np.argsort(order).tolist(), paired)
        self.reshape(filled)
        self.first([*[1] * (len(filled) - len(dims)), *dims])
        self.reshape(dims)

    def first(self, dims: Sequence[int]) -> None:
        """The first elements along each dimension."""
        cuts = ", ".join(f"[0:{size}]" for size in dims)
        self._add(dims, f"slice({self.last}), slice={{{cuts}}}")


def _is_leading_rows(source: Shape, result: Shape) -> bool:
    """Whether a result has the first rows of an array, whose rows are one after the other.

    Tiles would say the same. But XLA's CPU compiler writes these rows into the same buffer while it
    reads them, if both are reshaped, padded and cut on the way.
    """
    (tiles, flat), (others, ordered) = (
        (_tiles(shape), [shape.dims[d] for d in _order(shape)]) for shape in (source, result)
    )
    if source.dtype != result.dtype or not len(tiles) == len(others) == 1:
        return False
    if min(map(len, (flat, ordered, tiles[0], others[0]))) < 2 or tiles[0][-1] != others[0][-1]:
        return False
    is_one_column = flat[-1] == ordered[-1] <= tiles[0][-1]
    has_no_gap = flat[-2] % tiles[0][-2] == 0
    is_whole = len(ordered) == 2 or ordered[-2] % others[0][-2] == 0
    fewer = math.prod(ordered) < math.prod(flat)
    return is_one_column and has_no_gap and is_whole and fewer


@dataclass
class _Rewriter:
    program: Program
    devices: tuple[int, ...]
    kernels: Interpreter
    as_on_chip: bool
    texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.num_devices = len(self.devices)
        # of one slice
        self.partitions = self.program.num_partitions or self.num_devices
        self.slices = [list(range(self.num_devices))]
        if self.partitions != self.num_devices:
            self.slices = slices.replicas_of(self.devices)
        if {len(replicas) for replicas in self.slices} != {self.partitions}:
            raise value_error(
                "Every slice must run the whole of a program for several.",
                received={"devices": self.num_devices, "partitions": self.partitions},
                fix="Pass all devices of all slices.",
            )

    def text(self) -> str:
        written = [
            self._computation(computation)
            for computation in self.program
            if computation is not self.program.entry
        ]
        written.append("ENTRY " + self._computation(self.program.entry))
        header = f"HloModule replay, replica_count={self.num_devices}"
        return "\n\n".join([header, *self.texts.values(), *written]) + "\n"

    def _computation(self, computation: Computation) -> str:
        lines = []
        for instruction in computation:
            *before, last = self._lines(computation, instruction)
            root = "ROOT " if instruction is computation.root else ""
            lines += [*before, root + last]
        return f"%{computation.name} {{\n" + "".join(f"  {line}\n" for line in lines) + "}"

    def _lines(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """The lines for an instruction; the last has its name."""
        opcode, name = instruction.opcode, instruction.name
        begins = opcode.removesuffix("-start")
        if opcode in _ELEMENTWISE or opcode in ("select", "compare"):
            yield from self._elementwise(computation, instruction)
        elif opcode in ("dot", "convolution"):
            yield from self._product(computation, instruction)
        elif opcode == "bitcast":
            yield from self._bitcast(computation, instruction)
        elif opcode == "fusion":
            yield from self._fusion(computation, instruction)
        elif opcode == "partition-id":
            yield from self._place(name, _PARTITION)
        elif opcode == "replica-id":  # partitions of one replica, until here
            yield f"%{name} = u32[] constant(0)"
        elif opcode == "custom-call":
            yield from self._custom_call(computation, instruction)
        elif opcode in ("reduce", "reduce-window", "scatter", "select-and-scatter"):
            yield from self._reduction(computation, instruction)
        elif opcode in ("concatenate", "dynamic-update-slice", "pad"):
            yield from self._of_one_dtype(computation, instruction)
        elif opcode in _MOVES:
            yield from self._moved(computation, instruction)
        elif opcode in ("send", "recv") and slices.key_of(instruction):
            yield f"%{name} = token[] after-all()"
        elif opcode in ("send-done", "recv-done") and slices.key_of(
            computation.operands(instruction)[0]
        ):
            yield from self._exchanged(computation, instruction)
        elif opcode == "all-reduce" and not self._is_reduced(instruction):
            yield from self._reduced_by_pairs(instruction)
        elif opcode in _ONE_BY_ONE:
            yield from self._one_by_one(computation, instruction, opcode)
        elif opcode in _COLLECTIVES:
            yield self._written(instruction, opcode, self._collective_attributes(instruction))
        elif opcode in ("copy-start", "slice-start", "async-start") or begins in _COLLECTIVES:
            yield from self._begun(computation, instruction)
        elif opcode.endswith(("-done", "-update")):
            yield self._finished(computation, instruction)
        elif opcode in _PLAIN:
            if opcode == "constant" and "..." in instruction.operands:
                raise cannot_run(instruction, "the values of the constant are left out of the text")
            yield self._written(instruction, opcode, self._kept(instruction))
        else:
            raise cannot_run(instruction, "the operation is not known")

    def _kept(self, instruction: Instruction) -> str:
        found = attributes_of(instruction)
        return ", ".join(f"{name}={text}" for name, text in found.items() if name not in _DROPPED)

    def _written(
        self, instruction: Instruction, opcode: str, attributes: str = "", operands: str = ""
    ) -> str:
        operands = operands or _plain_type(instruction.operands)
        return (
            f"%{instruction.name} = {_plain_type(instruction.type_text)} {opcode}({operands})"
            + (f", {attributes}" if attributes else "")
        )

    def _fusion(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        called = attributes_of(instruction)["calls"]
        inner = self.program.computations[called.lstrip("%")]
        wanted = [parameter.shapes for parameter in inner.parameters]
        given = [operand.shapes for operand in computation.operands(instruction)]
        found = inner.root.shapes if inner.root else instruction.shapes
        dtypes = [[shape.dtype for shape in shapes] for shapes in (*wanted, found)]
        if dtypes == [[s.dtype for s in shapes] for shapes in (*given, instruction.shapes)]:
            yield self._written(instruction, "call", f"to_apply={called}")
            return
        wide = [dtype for (dtype,) in dtypes[:-1]]
        yield from self._typed(
            computation, instruction, wide, dtypes[-1], f"to_apply={called}", opcode="call"
        )

    def _elementwise(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """An operation whose values have one dtype, as HLO defines it: here the widest."""
        (result,) = instruction.shapes
        dtypes = [operand.shapes[0].dtype for operand in computation.operands(instruction)]
        compares, chosen_by = instruction.opcode == "compare", instruction.opcode == "select"
        values = dtypes[chosen_by:]
        wide = self._widest(instruction, *values, *([] if compares else [result.dtype]))
        wanted = [*dtypes[:chosen_by], *[wide] * len(values)]
        results = [result.dtype if compares else wide]
        yield from self._typed(computation, instruction, wanted, results)

    def _reduction(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """An operation with a computation of its own, whose parameters have the dtypes."""
        name = instruction.called_by("scatter") or instruction.called_by("to_apply")
        parameters = self.program.computations[name or ""].parameters
        number = len(parameters) // 2
        dtypes = [parameter.shapes[0].dtype for parameter in parameters[:number]]
        wanted = [operand.shapes[0].dtype for operand in computation.operands(instruction)]
        if instruction.opcode == "scatter":  # arrays, indices, updates
            wanted[:number] = wanted[number + 1 :] = dtypes
        else:  # arrays, and as many initial values or, to be scattered, one array and one value
            wanted = (dtypes * len(wanted))[: len(wanted)]
        yield from self._typed(computation, instruction, wanted, dtypes)

    def _of_one_dtype(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """An operation that moves values: it has the dtype of its result."""
        (result,) = instruction.shapes
        operands = computation.operands(instruction)
        wanted = [operand.shapes[0].dtype for operand in operands]
        moved = 2 if instruction.opcode in ("dynamic-update-slice", "pad") else len(wanted)
        wanted[:moved] = [result.dtype] * moved
        yield from self._typed(computation, instruction, wanted, [result.dtype])

    def _moved(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """An operation that moves elements, and may convert them on the way."""
        if instruction.type_text.startswith("("):  # a copy of a tuple
            yield self._written(instruction, instruction.opcode)
            return
        wanted = [operand.shapes[0].dtype for operand in computation.operands(instruction)]
        yield from self._typed(computation, instruction, wanted, wanted[:1])

    def _widest(self, instruction: Instruction, *dtypes: str) -> str:
        if len(set(dtypes)) == 1:
            return dtypes[0]
        if not set(dtypes) <= set(_FLOATS):
            raise cannot_run(instruction, f"its dtypes are {', '.join(sorted(set(dtypes)))}")
        return max(dtypes, key=_FLOATS.index)

    def _typed(
        self,
        computation: Computation,
        instruction: Instruction,
        wanted: list[str],
        results: list[str],
        attributes: str | None = None,
        sources: list[str] | None = None,
        opcode: str = "",
    ) -> Iterator[str]:
        """An instruction with operands of these dtypes, whose results have the others.

        The TPU's compiler lets them differ from what HLO asks for, above all after it has joined
        conversions with what reads or writes them.
        """
        name = instruction.name
        names = []
        for number, operand in enumerate(computation.operands(instruction)):
            (shape,) = operand.shapes
            names.append(sources[number] if sources else f"%{operand.name}")
            if shape.dtype != wanted[number]:
                target = f"{wanted[number]}[{_listed(shape.dims)}]"
                yield f"%{name}.in{number} = {target} convert({names[-1]})"
                names[-1] = f"%{name}.in{number}"
        opcode = opcode or instruction.opcode
        if attributes is None:
            attributes = self._kept(instruction)
        computed = f"{opcode}({', '.join(names)})" + (f", {attributes}" if attributes else "")
        shapes = instruction.shapes
        wide = [f"{dtype}[{_listed(shape.dims)}]" for dtype, shape in zip(results, shapes)]
        is_tuple = instruction.type_text.startswith("(")
        declared = f"({', '.join(wide)})" if is_tuple else wide[0]
        if all(shape.dtype == dtype for shape, dtype in zip(shapes, results)):
            yield f"%{name} = {declared} {computed}"
            return
        yield f"%{name}.wide = {declared} {computed}"
        if not is_tuple:
            yield f"%{name} = {_array(shapes[0])} convert(%{name}.wide)"
            return
        for number, shape in enumerate(shapes):
            member = f"get-tuple-element(%{name}.wide), index={number}"
            yield f"%{name}.g{number} = {wide[number]} {member}"
            yield f"%{name}.c{number} = {_array(shape)} convert(%{name}.g{number})"
        members = ", ".join(f"%{name}.c{number}" for number in range(len(shapes)))
        yield f"%{name} = ({', '.join(map(_array, shapes))}) tuple({members})"

    def _product(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        (result,) = instruction.shapes
        name, kept = instruction.name, attributes_of(instruction)
        # Without either, the chip multiplies in bfloat16.
        precise = "high" in kept.get("operand_precision", "") or "algorithm" in kept
        operands, sources = computation.operands(instruction), []
        for number, operand in enumerate(operands):
            (shape,) = operand.shapes
            sources.append(f"%{operand.name}")
            if self.as_on_chip and shape.dtype == "f32" and not precise:
                sources[-1] = f"%{name}.as{number}"
                yield (
                    f"{sources[-1]} = {_array(shape)} reduce-precision(%{operand.name}), "
                    "exponent_bits=8, mantissa_bits=7"
                )
        # The chip adds up products of bfloat16 in float32.
        dtypes = [operand.shapes[0].dtype for operand in operands]
        wide = dtypes[0]
        if {*dtypes, result.dtype} <= set(_FLOATS):
            wide = self._widest(instruction, *dtypes, result.dtype, "f32")
        dropped = {*_DROPPED, "operand_precision", "algorithm"}
        attributes = ", ".join(f"{key}={text}" for key, text in kept.items() if key not in dropped)
        results = [wide if wide in _FLOATS else result.dtype]
        wanted = [wide if wide in _FLOATS else dtype for dtype in dtypes]
        yield from self._typed(computation, instruction, wanted, results, attributes, sources)

    def _bitcast(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """The same bytes as another array.

        Bytes are in the order of the layout, and within that tile by tile. There are three cases:
        the result is larger than the operand, which an earlier bitcast made smaller within a tile;
        tiles make no difference: transpose, reshape, transpose; they do: the array is cut into
        tiles, these are regrouped, and joined.
        """
        (result,), (operand,) = instruction.shapes, computation.operands(instruction)
        (source,), name = operand.shapes, instruction.name
        if _bits(result) == _bits(source) and result.size > source.size:
            whole = self._before_narrowed(computation, operand, result)
            if whole is None:
                raise cannot_run(instruction, "it does not have the bytes of its operand")
            yield f"%{name} = {_array(result)} copy(%{whole.name})"
            return
        source_order, result_order = _order(source), _order(result)
        steps = _Steps(name, source.dtype, f"%{operand.name}")
        flat = [source.dims[d] for d in source_order]
        steps.transpose(source_order, flat)
        ordered = [result.dims[d] for d in result_order]
        shapes = [ordered]
        for tile in _tiles(result):
            shapes.append(_cut_dims(shapes[-1], tile)[2])
        same_width = _bits(source) == _bits(result)
        if same_width and not _tiles_matter(
            tuple(flat), _tiles(source), tuple(ordered), _tiles(result)
        ):
            steps.converted(result.dtype, flat)
            steps.reshape(ordered)
        elif _is_leading_rows(source, result):
            steps.reshape([math.prod(flat[:-1]), flat[-1]])
            steps.first([math.prod(ordered[:-1]), flat[-1]])
            steps.reshape(ordered)
        else:
            for tile in _tiles(source):
                flat = steps.cut(flat, tile)
            if math.prod(flat) * _bits(source) != math.prod(shapes[-1]) * _bits(result):
                raise cannot_run(instruction, "it does not have the bytes of its operand")
            steps.regrouped(result.dtype, math.prod(flat), _bits(result) / _bits(source))
            steps.reshape(shapes[-1])
            for tile, shape in zip(_tiles(result)[::-1], shapes[-2::-1]):
                steps.joined(shape, tile)
        yield from steps.lines
        back = np.argsort(np.array(result_order, int))
        yield f"%{name} = {_array(result)} transpose({steps.last}), dimensions={{{_listed(back)}}}"

    def _before_narrowed(
        self, computation: Computation, narrow: Instruction, wanted: Shape
    ) -> Instruction | None:
        """The array that a bitcast made smaller, within a tile: its memory still has the rest.

        Behind the loops that only read it, another bitcast has the whole again.
        """
        found: Instruction | None = narrow
        while found is not None:
            operands = computation.operands(found)
            if found.opcode == "bitcast":
                found = operands[0]
                if found.shapes == (wanted,) and found.shapes[0].layout == wanted.layout:
                    return found
            elif found.opcode == "get-tuple-element":
                found = self._element(computation, operands[0], _index(found))
            else:
                return None
        return None

    def _element(self, computation: Computation, of: Instruction, index: int) -> Instruction | None:
        """An element of a tuple, also of one that a loop passes on unchanged."""
        if of.opcode == "while":
            body = self.program.computations[of.called_by("body") or ""]
            last = body.root and body.operands(body.root)[index]
            if last is None or last.opcode != "get-tuple-element":
                return None
            (carried,) = body.operands(last)
            if carried.opcode != "parameter" or _index(last) != index:
                return None
            (of,) = computation.operands(of)
        return computation.operands(of)[index] if of.opcode == "tuple" else None

    def _collective_attributes(self, instruction: Instruction) -> str:
        """Who takes part, written out, and what else a collective is given."""
        found = attributes_of(instruction)
        if "source_target_pairs" in found:
            pairs = self._in_all_slices(replica_groups(found["source_target_pairs"], 0))
            groups = f"source_target_pairs={pairs}"
        else:
            groups = f"replica_groups={self._groups(instruction)}"
        rest = [
            f"{name}={text}"
            for name, text in found.items()
            if name not in {*_DROPPED, "replica_groups", "source_target_pairs"}
        ]
        return ", ".join([groups, *rest])

    def _groups(self, instruction: Instruction) -> str:
        return self._in_all_slices(groups_of(instruction, self.partitions))

    def _in_all_slices(self, groups: Groups) -> str:
        """Groups of partitions of one slice, or pairs of them, as replicas of all slices."""
        listed = (
            f"{{{_listed(replicas[partition] for partition in group)}}}"
            for replicas in self.slices
            for group in groups
        )
        return f"{{{','.join(listed)}}}"

    def _place(self, name: str, which: int) -> Iterator[str]:
        """The number of a device's partition in its slice, or of its slice."""
        places = {
            replica: (partition, number)
            for number, replicas in enumerate(self.slices)
            for partition, replica in enumerate(replicas)
        }
        numbers = _listed(places[replica][which] for replica in range(self.num_devices))
        yield f"%{name}.every = u32[{self.num_devices}] constant({{{numbers}}})"
        yield f"%{name}.at = u32[] replica-id()"
        operands = f"%{name}.every, %{name}.at"
        yield f"%{name}.one = u32[1] dynamic-slice({operands}), dynamic_slice_sizes={{1}}"
        yield f"%{name} = u32[] reshape(%{name}.one)"

    def _exchanged(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """A collective between slices, computed where its result is waited for."""
        (receives,), name = computation.operands(instruction), instruction.name
        if instruction.opcode == "send-done":
            yield f"%{name} = token[] after-all()"
            return
        key = slices.key_of(receives)
        sends = [i for i in computation if i.opcode == "send" and slices.key_of(i) == key]
        if len(sends) != 1:
            raise cannot_run(receives, f"{len(sends)} operations beside it send with its key")
        operand, *_ = computation.operands(sends[0])
        exchange = slices.exchange_of(receives, operand.shapes[0], self.devices)
        if exchange.before:
            self.texts.setdefault(exchange.before, exchange.before)
        result = _array(instruction.shapes[0])
        computed = f"{exchange.opcode}(%{operand.name}), {exchange.attributes}"
        yield f"%{name}.result = {result} {computed}"
        yield f"%{name}.token = pred[] constant(false)"
        yield f"%{name} = ({result}, pred[]) tuple(%{name}.result, %{name}.token)"

    def _one_by_one(
        self, computation: Computation, instruction: Instruction, opcode: str
    ) -> Iterator[str]:
        """A collective, of several arrays as several. A reduction has the dtype of its function."""
        attributes = self._collective_attributes(instruction)
        reduced_by = self.program.computations.get(instruction.called_by("to_apply") or "")
        members = []
        for number, operand in enumerate(computation.operands(instruction)):
            source, of = f"%{operand.name}", f"%{instruction.name}.of{number}"
            (given,), shape = operand.shapes, instruction.shapes[number]
            dtype = reduced_by.parameters[0].shapes[0].dtype if reduced_by else given.dtype
            yield f"{of}.in = {dtype}[{_listed(given.dims)}] convert({source})"
            computed = f"{opcode}({of}.in), {attributes}"
            yield f"{of}.out = {dtype}[{_listed(shape.dims)}] {computed}"
            yield f"{of} = {_array(shape)} convert({of}.out)"
            members.append(of)
        several = instruction.type_text.startswith("(")
        yield self._written(
            instruction, "tuple" if several else "copy", operands=", ".join(members)
        )

    def _is_reduced(self, instruction: Instruction) -> bool:
        """Whether XLA's CPU client can reduce over devices by a computation."""
        name = instruction.called_by("to_apply") or ""
        root = self.program.computations[name].root
        if root is None or len(self.program.computations[name].instructions) != 3:
            return False
        truth = root.shapes[0].dtype == "pred" and root.opcode in ("and", "or")
        return truth or root.opcode in _REDUCED

    def _reduced_by_pairs(self, instruction: Instruction) -> Iterator[str]:
        """A reduction by a computation of its own: gathered, and joined one by one."""
        name, size = instruction.name, len(groups_of(instruction, self.partitions)[0])
        groups = self._groups(instruction)
        called = attributes_of(instruction)["to_apply"]
        (wide,) = self.program.computations[called.lstrip("%")].parameters[0].shapes
        results = []
        for place, operand in enumerate(instruction.operand_names):
            shape, of = instruction.shapes[place], f"%{name}.of{place}"
            one, every = (1, *shape.dims), (size, *shape.dims)
            yield f"{of}.one = {_array(shape, one)} reshape(%{operand})"
            gather = f"all-gather({of}.one), replica_groups={groups}, dimensions={{0}}"
            yield f"{of}.all = {_array(shape, every)} {gather}"
            dimensions = _listed(range(len(shape.dims)))
            results.append("")
            for number in range(size):
                cuts = [f"[{number}:{number + 1}]", *(f"[0:{n}]" for n in shape.dims)]
                part = f"{of}.part{number}"
                cut = f"slice({of}.all), slice={{{', '.join(cuts)}}}"
                yield f"{part}.cut = {_array(shape, one)} {cut}"
                yield f"{part}.one = {_array(shape)} reshape({part}.cut)"
                yield f"{part} = {wide.dtype}[{_listed(shape.dims)}] convert({part}.one)"
                if results[place]:
                    both = f"map({results[place]}, {part})"
                    joined = f"{both}, dimensions={{{dimensions}}}, to_apply={called}"
                    part = f"{part}.joined"
                    yield f"{part} = {wide.dtype}[{_listed(shape.dims)}] {joined}"
                results[place] = part
            yield f"{of} = {_array(shape)} convert({results[place]})"
            results[place] = of
        opcode = "tuple" if instruction.type_text.startswith("(") else "copy"
        yield self._written(instruction, opcode, operands=", ".join(results))

    def _begun(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """What runs beside the rest, computed where it is started.

        Its result is a tuple of its operands, its result and what the chip needs to wait for it.
        """
        opcode, name = instruction.opcode.removesuffix("-start"), instruction.name
        types = _parts(instruction.type_text)
        if opcode == "all-reduce" or not instruction.type_text.startswith("("):
            yield from self._one_by_one(computation, instruction, opcode)
            return
        operands, result = types[:2]
        if opcode == "copy":  # the copy comes before the original
            operands, result = result, operands
            computed = f"{_plain_type(result)} copy({_plain_type(instruction.operands)})"
        elif opcode in _COLLECTIVES:
            given = _plain_type(instruction.operands)
            attributes = self._collective_attributes(instruction)
            computed = f"{_plain_type(result)} {opcode}({given}), {attributes}"
        elif opcode == "slice":
            kept = self._kept(instruction)
            computed = f"{_plain_type(result)} slice({_plain_type(instruction.operands)}), {kept}"
        else:
            called = attributes_of(instruction)["calls"]
            operand_names = _plain_type(instruction.operands)
            computed = f"{_plain_type(result)} call({operand_names}), to_apply={called}"
        yield f"%{name}.result = {computed}"
        given = [f"%{operand}" for operand in instruction.operand_names]
        first = given[0]
        if operands.startswith("("):
            first = f"%{name}.operands"
            yield f"{first} = {_plain_type(operands)} tuple({', '.join(given)})"
        members = [f"%{name}.result", first] if opcode == "copy" else [first, f"%{name}.result"]
        for number, rest in enumerate(types[2:], 2):
            yield from _zeros(f"%{name}.part{number}", shapes_of(rest)[0])
            members.append(f"%{name}.part{number}")
        yield f"%{name} = {_plain_type(instruction.type_text)} tuple({', '.join(members)})"

    def _finished(self, computation: Computation, instruction: Instruction) -> str:
        (source,) = computation.operands(instruction)
        # All-reduces are no tuple of operands and results, but results alone.
        whole = instruction.opcode == "all-reduce-done" or instruction.opcode.endswith("-update")
        if whole or not source.type_text.startswith("("):
            return self._written(instruction, "copy")
        index = 0 if instruction.opcode == "copy-done" else 1
        return self._written(instruction, "get-tuple-element", f"index={index}")

    def _custom_call(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        found = _TARGET.search(instruction.attributes)
        target = found[1] if found else ""
        operands = computation.operands(instruction)
        if target == "AllocateBuffer":
            yield from _zeros(f"%{instruction.name}", *instruction.shapes)
        elif target == "SliceId":
            yield from self._place(instruction.name, _SLICE)
        elif target in _IDENTITIES:
            yield self._written(instruction, "copy", operands=f"%{operands[0].name}")
        elif target == "ZeroCrop":  # zeros behind the elements, up to whole tiles
            (source,), (result,) = operands[0].shapes, instruction.shapes
            zero = f"%{instruction.name}.zero"
            yield f"{zero} = {source.dtype}[] constant({_zero(source.dtype)})"
            sizes = zip(source.dims, result.dims, strict=True)
            padding = "x".join(f"0_{size - of}" for of, size in sizes)
            given = f"%{operands[0].name}, {zero}"
            yield self._written(instruction, "pad", f"padding={padding}", given)
        elif target == "ConcatBitcast":  # parts that were fetched one by one
            (result,), first = instruction.shapes, operands[0].shapes[0]
            differ = [d for d, size in enumerate(first.dims) if size != result.dims[d]]
            if len(differ) != 1:
                raise cannot_run(instruction, "its parts do not join along one dimension")
            yield self._written(instruction, "concatenate", f"dimensions={{{differ[0]}}}")
        elif target == "AsyncCollectiveStart":
            yield from self._started(computation, instruction)
        elif target == "AsyncCollectiveDone":
            # Between start and end, fusions repeat the collective, which takes its steps in them.
            (collective,) = (operand for operand in operands if operand.opcode in _COLLECTIVES)
            yield self._written(instruction, "copy", operands=f"%{collective.name}")
        elif target == KERNEL:
            shapes = [shape for operand in operands for shape in operand.shapes]
            kernel = self.kernels(instruction, shapes)
            self.texts.setdefault(kernel.entry, kernel.text)
            if kernel.is_tuple or not instruction.type_text.startswith("("):
                yield self._written(instruction, "call", f"to_apply={kernel.entry}")
                return
            (shape,), one = instruction.shapes, f"%{instruction.name}.one"
            given = _plain_type(instruction.operands)
            yield f"{one} = {_array(shape)} call({given}), to_apply={kernel.entry}"
            yield self._written(instruction, "tuple", operands=one)
        else:
            raise cannot_run(instruction, f"the custom call {target!r} is not known")

    def _started(self, computation: Computation, instruction: Instruction) -> Iterator[str]:
        """The start of a collective that runs within the fusions that follow."""
        (collective,) = computation.operands(instruction)
        arrays = [*computation.operands(collective), collective]
        if len(collective.shapes) != 1 or len(arrays) != 2:
            raise cannot_run(instruction, "it starts a collective of several arrays")
        for one, shape in zip(arrays, instruction.shapes):
            if (one.shapes[0].dtype, one.shapes[0].dims) != (shape.dtype, shape.dims):
                raise cannot_run(instruction, "its result is not its operand and its result")
        members = [f"%{one.name}" for one in arrays]
        for number, shape in enumerate(instruction.shapes[2:]):
            yield from _zeros(f"%{instruction.name}.part{number}", shape)
            members.append(f"%{instruction.name}.part{number}")
        yield self._written(instruction, "tuple", operands=", ".join(members))


def _zeros(name: str, shape: Shape) -> Iterator[str]:
    yield f"{name}.zero = {shape.dtype}[] constant({_zero(shape.dtype)})"
    yield f"{name} = {_array(shape)} broadcast({name}.zero), dimensions={{}}"


def _parts(type_text: str) -> list[str]:
    """The members of a tuple's type, as text."""
    inner = re.sub(r"/\*.*?\*/", "", type_text.strip())[1:-1]
    parts, depth, start = [], 0, 0
    for at, c in enumerate(inner):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(inner[start:at].strip())
            start = at + 1
    return [*parts, inner[start:].strip()]
