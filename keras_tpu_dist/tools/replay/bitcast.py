"""Bitcasts of the TPU compiler: the same bytes as another array, tile by tile."""

import functools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from keras_tpu_dist.tools.hlo.parse import Computation, Instruction, Program, Shape
from keras_tpu_dist.tools.replay.errors import cannot_run
from keras_tpu_dist.tools.replay.spelling import array_type, listed, zero_of

# Elements of the largest array for which it is found out whether tiles matter.
_MOST_COMPARED = 2**22


def lines(program: Program, computation: Computation, instruction: Instruction) -> Iterator[str]:
    """The same bytes as another array.

    Bytes are in the order of the layout, and within that tile by tile. There are three cases:
    the result is larger than the operand, which an earlier bitcast made smaller within a tile;
    tiles make no difference: transpose, reshape, transpose; they do: the array is cut into
    tiles, these are regrouped, and joined.
    """
    (result,), (operand,) = instruction.shapes, computation.operands(instruction)
    (source,), name = operand.shapes, instruction.name
    if _bits(result) == _bits(source) and result.size > source.size:
        whole = _before_narrowed(program, computation, operand, result)
        if whole is None:
            raise cannot_run(instruction, "it does not have the bytes of its operand")
        yield f"%{name} = {array_type(result)} copy(%{whole.name})"
        return
    yield from of_bytes(instruction, source, f"%{operand.name}")


def of_bytes(instruction: Instruction, source: Shape, operand: str) -> Iterator[str]:
    """Lines for the result of an instruction that has the bytes of an array.

    Args:
        instruction: The instruction, of one result.
        source: The array, with its layout.
        operand: Its name.
    """
    (result,), name = instruction.shapes, instruction.name
    source_order, result_order = _order(source), _order(result)
    steps = _Steps(name, source.dtype, operand)
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
        for tile, shape in zip(_tiles(result)[::-1], shapes[-2::-1], strict=True):
            steps.joined(shape, tile)
    yield from steps.lines
    back = np.argsort(np.array(result_order, int))
    yield f"%{name} = {array_type(result)} transpose({steps.last}), dimensions={{{listed(back)}}}"


def _before_narrowed(
    program: Program, computation: Computation, narrow: Instruction, wanted: Shape
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
            found = _element(program, computation, operands[0], _index(found))
        else:
            return None
    return None


def _element(
    program: Program, computation: Computation, of: Instruction, index: int
) -> Instruction | None:
    """An element of a tuple, also of one that a loop passes on unchanged."""
    if of.opcode == "while":
        body = program.computations[of.called_by("body") or ""]
        last = body.root and body.operands(body.root)[index]
        if last is None or last.opcode != "get-tuple-element":
            return None
        (carried,) = body.operands(last)
        if carried.opcode != "parameter" or _index(last) != index:
            return None
        (of,) = computation.operands(of)
    return computation.operands(of)[index] if of.opcode == "tuple" else None


def _order(shape: Shape) -> list[int]:
    """The dimensions of an array, from the slowest in memory to the fastest."""
    fastest_first = shape.layout.partition(":")[0]
    if not fastest_first:
        return list(range(len(shape.dims)))
    return [int(d) for d in fastest_first.split(",")][::-1]


def _index(element: Instruction) -> int:
    return int(element.attribute("index") or 0)


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
    numbers = [-(-size // step) for size, step in zip(dims[rest:], tile, strict=True)]
    filled = [*dims[:rest], *(n * step for n, step in zip(numbers, tile, strict=True))]
    paired = [*dims[:rest], *(part for pair in zip(numbers, tile, strict=True) for part in pair)]
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
        missing = [(0, n - size) for n, size in zip(filled, array.shape, strict=True)]
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
        self.lines.append(f"{step} = {self._dtype}[{listed(dims)}] {computed}")
        self.last = step

    def transpose(self, order: Sequence[int], dims: Sequence[int]) -> None:
        self._add(dims, f"transpose({self.last}), dimensions={{{listed(order)}}}")

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
        self._add([], f"constant({zero_of(self._dtype)})")
        padding = "x".join(f"0_{n - size}" for n, size in zip(filled, longer, strict=True))
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
