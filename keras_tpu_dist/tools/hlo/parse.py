"""The text of a compiled program as data: computations, instructions, shapes."""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes as _  # noqa: F401
import numpy as np

from keras_tpu_dist.common.errors import value_error

# What runs beside the main thread, as on a SparseCore, says so where it ends.
_END = re.compile(r"\}(?:, execution_thread=\"([^\"]*)\")?")
_HEADER = re.compile(r"^(?:ENTRY )?%?(?P<name>[^\s(]+) \(.*\) -> .* \{$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
# libtpu 0.0.50 writes an element of a tuple so, without an instruction that takes it out.
_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,]+)\)")
_PACKED = re.compile(r"\((\d+),1\)")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")
_MESH_ORDER = ", device_ids="
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_INTEGER = re.compile(r"-?\d+")

LANES = 128
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "token": 0, "opaque": 0}


@functools.cache
def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    if match := re.fullmatch(r"[suf](\d+)|bf(\d+)|c(\d+)", dtype):
        return int(next(g for g in match.groups() if g))
    name = dtype.replace("f8", "float8_").replace("f4", "float4_")
    # Which NumPy knows once `ml_dtypes` is imported.
    return np.dtype(name).itemsize * 8


@dataclass(frozen=True, slots=True)
class Shape:
    """One array of an instruction's result.

    Args:
        dtype: XLA's name, as in `"bf16"`.
        dims: Sizes of its dimensions on one device.
        memory_space: 0 for HBM; the TPU compiler uses 1 for the on-chip vector memory.
        layout: Its layout in memory, as in `"1,0:T(8,128)"`: dimensions from the fastest to the
            slowest, and the tiles that it is made of.
    """

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0
    layout: str = field(default="", compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without the padding of tiled layouts."""
        return self.size * _bits(self.dtype) // 8

    @property
    def hbm_bytes(self) -> int:
        """Bytes that it takes in HBM, with the padding of its tiles; 0 if it is elsewhere."""
        return self.window_bytes(self.dims) if self.memory_space == 0 else 0

    def window_bytes(self, dims: tuple[int, ...], *, whole_tiles: bool = True) -> int:
        """Bytes that a part of it takes, with the padding of its tiles.

        Args:
            dims: Sizes of the part.
            whole_tiles: Whether all of each tile is moved, as for an update, or only the rows of
                it that are asked for.
        """
        order, tile, packed = _read_layout(self.layout)
        if len(order) != len(dims):
            order = tuple(reversed(range(len(dims))))
        if not whole_tiles:
            tile = (packed * LANES,) if len(tile) == 1 else (*tile[:1], packed)[: len(tile)]
        size = _bits(self.dtype)
        for place, axis in enumerate(order):
            step = tile[place] if place < len(tile) else 1
            size *= -(-dims[axis] // step) * step
        return size // 8

    @property
    def tiles(self) -> dict[int, int]:
        """The dimensions that tiles cut, and their sizes in a tile."""
        order, tile = _read_layout(self.layout)[:2]
        return dict(zip(order, tile, strict=False))  # a tile cuts the innermost dimensions


@functools.lru_cache(maxsize=4096)
def _read_layout(text: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Dimensions and sizes of a tile, fastest first, and how many elements share one word."""
    order = tuple(int(d) for d in text.partition(":")[0].split(",") if d.isdigit())
    tile = _TILE.search(text)
    packed = _PACKED.search(text)
    sizes = tuple(int(n) for n in reversed(tile[1].split(","))) if tile else ()
    return order, sizes, int(packed[1]) if packed else 1


def shapes_of(type_text: str) -> tuple[Shape, ...]:
    """The arrays of a type, tuples flattened.

    Args:
        type_text: As an instruction's text has it: `"bf16[8,4]{1,0}"`, or a tuple of such.
    """
    found = []
    for dtype, dims, layout in _SHAPE.findall(type_text):
        space = _MEMORY_SPACE.search(layout) if "S(" in layout else None
        sizes = tuple(int(d) for d in dims.replace("<=", "").split(",") if d)
        found.append(Shape(dtype, sizes, int(space[1]) if space else 0, layout))
    return tuple(found)


class Instruction:
    """One instruction; what is rarely needed is read from its text when asked for."""

    # A large program has a million of these.
    __slots__ = ("_shapes", "attributes", "name", "opcode", "operands", "type_text")

    def __init__(self, name: str, opcode: str, type_text: str, operands: str, attributes: str):
        self.name = name
        self.opcode = opcode
        self.operands = operands
        self.attributes = attributes
        self.type_text = type_text
        self._shapes: tuple[Shape, ...] | None = None

    def __repr__(self) -> str:
        return f"%{self.name} = {self.type_text} {self.opcode}({self.operands})"

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, tuples flattened."""
        if self._shapes is None:
            self._shapes = shapes_of(self.type_text)
        return self._shapes

    @property
    def operand_names(self) -> list[str]:
        """Names of the operands."""
        return _OPERAND.findall(self.operands)

    @property
    def called(self) -> list[str]:
        """Names of the computations it calls, branches included."""
        called = _CALLED.findall(self.attributes)
        if branches := _BRANCHES.search(self.attributes):
            called += [name.strip().lstrip("%") for name in branches[1].split(",")]
        return called

    @property
    def op_name(self) -> str:
        """The name stack of the operation it came from, or `""`."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    def attribute(self, name: str) -> str | None:
        """The text of `name=...` up to the comma that ends it, with its braces and brackets.

        Args:
            name: The attribute's name, such as `"replica_groups"`.
        """
        start = re.search(rf"(?:^|[ ,]){re.escape(name)}=", self.attributes)
        if start is None:
            return None
        return self.attributes[start.end() : end_of_value(self.attributes, start.end())]

    def called_by(self, name: str) -> str | None:
        """The computation in attribute `name`, such as `body`.

        Args:
            name: The attribute's name.

        Returns:
            The computation's name, or `None` without the attribute.
        """
        text = self.attribute(name)
        return text.lstrip("%") if text else None

    def integers(self, name: str) -> list[int] | None:
        """The integers in attribute `name`, or `None` without it.

        Args:
            name: The attribute's name.
        """
        text = self.attribute(name)
        return None if text is None else [int(n) for n in _INTEGER.findall(text)]

    def number(self, key: str) -> int | None:
        """The integer of `"key":"123"` in the compiler's own annotations.

        Args:
            key: The annotation's key, such as `"estimated_cycles"`.
        """
        at = self.attributes.find(f'"{key}":')
        match = _INTEGER.search(self.attributes, at) if at >= 0 else None
        return int(match[0]) if match else None


def end_of_value(text: str, at: int) -> int:
    """Where the value that begins at `at` ends: at the comma before the next name."""
    depth, quoted = 0, False
    while at < len(text):
        c = text[at]
        if quoted:
            at += c == "\\"
            quoted = c != '"'
        elif c == '"':
            quoted = True
        elif c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        # The order of a mesh's devices has a comma of its own.
        elif c == "," and depth == 0 and not text.startswith(_MESH_ORDER, at):
            return at
        at += 1
    return at


class Computation:
    """A named list of instructions."""

    def __init__(self, name: str):
        self.name = name
        self.instructions: list[Instruction] = []
        self.root: Instruction | None = None
        self.by_name: dict[str, Instruction] = {}
        # What it runs on beside the main core, such as "sparsecore".
        self.thread = ""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions an instruction reads.

        Args:
            instruction: An instruction of this computation.
        """
        return [self.by_name[n] for n in instruction.operand_names if n in self.by_name]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads each instruction, by name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in set(instruction.operand_names):
                users.setdefault(name, []).append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters in order of their number."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.operands))


@dataclass(frozen=True)
class Program:
    """A compiled program: its computations by name, and the one that runs first.

    Attributes:
        num_partitions: The devices of one slice, if the program says it.
    """

    computations: dict[str, Computation]
    entry: Computation
    num_partitions: int | None = None
    sizes: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    # Integers that were read, so that what is read twice at each level is not read 2^levels times.
    integers: dict[Any, int | None] = field(default_factory=dict, compare=False, repr=False)

    def __iter__(self) -> Iterator[Computation]:
        return iter(self.computations.values())


def parse(text: str) -> Program:
    """Reads the text of a compiled program, `compiled.as_text()`.

    Args:
        text: HLO of the TPU or the CPU compiler.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    if not isinstance(text, str):
        raise value_error(
            "A compiled program is read from its text.",
            received={"text": text},
            fix="Pass compiled.as_text().",
        )
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line) if line.endswith("{") else None
            if header:
                current = Computation(header["name"])
                if line.startswith("ENTRY"):
                    entry = current
        elif end := _END.fullmatch(line.rstrip()):
            current.thread = end[1] or ""
            computations[current.name] = current
            current = None
        elif line.startswith("  "):
            _add(current, line)
        elif current.instructions:
            # the metadata of hand-written kernels may break lines
            current.instructions[-1].attributes += line
    if entry is None or entry.name not in computations:
        raise value_error(
            "The text is no compiled program: it has no ENTRY computation.",
            received={"text": text[:80]},
            fix="Pass compiled.as_text().",
        )
    partitions = _PARTITIONS.search(text.partition("\n")[0])
    return Program(computations, entry, int(partitions[1]) if partitions else None)


def size_of(program: Program, computation: Computation) -> int:
    """The number of instructions of a computation and of all that it calls.

    Args:
        program: The program, to look up the computations that are called.
        computation: The computation.
    """
    name, sizes = computation.name, program.sizes
    if name not in sizes:
        called = [n for i in computation for n in i.called if n in program.computations]
        of_called = sum(size_of(program, program.computations[n]) for n in called)
        sizes[name] = len(computation.instructions) + of_called
    return sizes[name]


def _add(computation: Computation, line: str) -> None:
    name, equals, rest = line.strip().partition(" = ")
    if not equals:
        return
    is_root = name.startswith("ROOT ")
    name = name.removeprefix("ROOT ").lstrip("%")
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else 0
    opcode = _OPCODE.search(rest, type_end)
    if opcode is None:
        return
    close = _closing(rest, opcode.end() - 1)
    operands = rest[opcode.end() : close]
    if "#" in operands:
        operands = _ELEMENT.sub(lambda match: _taken_out(computation, match), operands)
    instruction = Instruction(name, opcode[1], rest[: opcode.start()], operands, rest[close + 1 :])
    computation.instructions.append(instruction)
    computation.by_name[name] = instruction
    if is_root:
        computation.root = instruction


def _taken_out(computation: Computation, match: re.Match) -> str:
    """The name of the instruction that takes an element out of a tuple; added if there is none."""
    of, number = match[1], int(match[2])
    source, name = computation.by_name.get(of), f"{of}.element{number}"
    if source is None or number >= len(source.shapes):
        return match[0]
    if name not in computation.by_name:
        shape = source.shapes[number]
        layout = f"{{{shape.layout}}}" if shape.layout else ""
        text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]{layout}"
        element = Instruction(name, "get-tuple-element", text, f"%{of}", f", index={number}")
        computation.instructions.append(element)
        computation.by_name[name] = element
    return f"%{name}"


_PARENTHESIS = re.compile(r"[()]")


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)
