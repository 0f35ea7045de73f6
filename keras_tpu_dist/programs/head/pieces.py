"""Computes the wide values of a head in pieces of the vocabulary."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.common.axes import axis_size
from keras_tpu_dist.programs.graph import Atom, Equation, Graph, Instead
from keras_tpu_dist.programs.head.reading import Head, RowsAndWords, Sink
from keras_tpu_dist.programs.partitioner import mesh_here
from keras_tpu_dist.programs.partitioner.places import padded_at_the_end

# The most bytes of a piece of the logits on a device, in float32. Larger pieces take less time, as
# what is summed over words is read and written once for each.
PIECE_BYTES = 512 * 2**20
# Pieces begin at multiples of the tiles in which TPUs store arrays.
_TILE = 128


@dataclass(frozen=True)
class HeadSplit:
    """How a head is split over a mesh.

    Attributes:
        rows: The mesh axes that split the rows.
        words: The mesh axes that split the vocabulary.
        features: The mesh axes that split the other dimension of the weights.
    """

    mesh: Mesh
    rows: tuple[str, ...]
    words: tuple[str, ...]
    features: tuple[str, ...]

    @property
    def gathered(self) -> tuple[str, ...]:
        """The axes that split rows and words: pieces of weights are gathered over them."""
        return tuple(name for name in self.words if name in self.rows)

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes that split words but no rows: results of all words are added up over them."""
        return tuple(name for name in self.words if name not in self.rows)

    def ways(self, axes: tuple[str, ...]) -> int:
        """The number of parts over some axes."""
        return axis_size(self.mesh, axes or None)

    def spec(self, rank: int, place: RowsAndWords, features: int | None) -> PartitionSpec:
        """How a value is split."""
        axes = {place.rows: self.rows, place.words: self.words, features: self.features}
        return PartitionSpec(*(axes.get(dimension) or None for dimension in range(rank)))


@dataclass(frozen=True)
class VocabularyPieces:
    """How a device's part of the vocabulary is cut.

    Attributes:
        width: The words of a piece, of this device's part.
        count: The number of pieces. The last one may overlap the one before.
    """

    width: int
    count: int
    part: int

    @property
    def overlaps(self) -> bool:
        """Whether the last piece has words of the one before."""
        return self.width * self.count > self.part


def pieces_of(head: Head, split: HeadSplit) -> VocabularyPieces:
    """The pieces in which a head is computed."""
    part = head.words // split.ways(split.words)
    rows = math.ceil(head.rows / split.ways(split.rows)) * (head.tokens // head.rows)
    words = PIECE_BYTES // (4 * max(rows, 1))
    width = max(words // split.ways(split.gathered), 1)
    if width >= part:
        return VocabularyPieces(part, 1, part)
    tile = _TILE if width >= _TILE else 1
    width = width // tile * tile
    near = sorted(range(width // 2, width * 3 // 2), key=lambda other: abs(other - width))
    width = next((w for w in near if w % tile == 0 and part % w == 0), width)
    return VocabularyPieces(width, math.ceil(part / width), part)


class InPieces:
    """A head that is computed in pieces."""

    def __init__(self, head: Head, split: HeadSplit, pieces: VocabularyPieces, scope: str = "head"):
        self._head, self._split, self._pieces, self._scope = head, split, pieces, scope

    def rewritten(self, graph: Graph) -> tuple[Graph, dict[Equation, Instead]]:
        """The step with a pass over the pieces as an operation, and what computes these."""
        head, instead = self._head, {}
        after: dict[Equation, Equation] = {}
        passes = []
        for number, sinks in enumerate(head.passes):
            one = _Pass(head, self._split, self._pieces, sinks, self._scope)
            operation = one.operation(head.product)
            instead[operation] = Instead(operation.operands, one.compute)
            passes.append((number, 1, operation))
            for sink, found in zip(sinks, one.found, strict=True):
                reads = found if sink.after is None else [*found, sink.after]
                old = sink.operation
                new = Equation(old.program, old.equation, reads, old.results, scope=old.scope)
                after_pass = _AFTER.get(sink.kind)
                instead[new] = Instead(reads, list if after_pass is None else after_pass(sink))
                after[old] = new
        others = []
        for operation in graph.operations:
            known = operation.results if operation in after else operation.operands
            level = max(map(head.level, known), default=0)
            others.append((level, 0, after.get(operation, operation)))
        # A pass comes after all that it may read. Within a level, operations stay in order.
        ordered = sorted([*others, *passes], key=lambda entry: entry[:2])
        return Graph(graph.inputs, [o for _, _, o in ordered], graph.outputs), instead


def _exponentials(sink: Sink) -> Callable:
    """The sum of exponentials with what the step subtracts, instead of the largest one."""
    dtype = sink.operation.results[0].aval.dtype

    def compute(arrays: list) -> list:
        largest, total, subtracted = arrays
        difference = largest - subtracted.reshape(largest.shape).astype(largest.dtype)
        return [(total * jnp.exp(difference)).astype(dtype)]

    return compute


def _taken(sink: Sink) -> Callable:
    """Words that were taken; there may be none of that number."""
    params = sink.operation.equation.params
    (axis,) = params["dimension_numbers"].start_index_map
    words = sink.operation.operands[0].shape[axis]

    def compute(arrays: list) -> list:
        taken, numbers = arrays
        if params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
            return [taken]
        numbers = numbers.reshape(taken.shape)
        return [jnp.where((numbers >= 0) & (numbers < words), taken, params["fill_value"])]

    return compute


_AFTER = {"exponentials": _exponentials, "taken": _taken}


@dataclass(eq=False)
class _Pass:
    """One pass over the pieces.

    Attributes:
        found: For each reduction, its results in the step.
    """

    head: Head
    split: HeadSplit
    pieces: VocabularyPieces
    sinks: list[Sink]
    scope: str
    inputs: list[Atom] = field(default_factory=list)
    streamed: list[Equation] = field(default_factory=list)
    found: list[list[Atom]] = field(default_factory=list)

    def __post_init__(self):
        needed = {id(sink.reduced) for sink in self.sinks}
        for operation in reversed(self.head.operations):
            if any(id(result) in needed for result in operation.results):
                self.streamed.insert(0, operation)
                needed |= {id(operand) for operand in operation.operands}
        computed = {id(result) for operation in self.streamed for result in operation.results}
        read = [atom for operation in self.streamed for atom in operation.operands]
        for sink in self.sinks:
            if sink.operation.name in ("dot_general", "gather"):
                read.append(sink.operation.operands[1 - sink.wide])
        known: set[int] = set()
        for atom in read:
            # A constant array may have words, or belong to the program around.
            number = atom.constant if atom.constant is not None and not atom.shape else None
            is_known = number is not None and not isinstance(number, jax.Array)
            if not is_known and id(atom) not in computed | known:
                known.add(id(atom))
                self.inputs.append(atom)

    def place(self, atom: Atom) -> RowsAndWords:
        """Where a value has rows and words."""
        return self.head.places.get(id(atom), RowsAndWords())

    def operation(self, like: Equation) -> Equation:
        """The pass as an operation, with new results."""
        made = Equation(like.program, like.equation, list(self.inputs), scope=like.scope)
        for sink in self.sinks:
            count = 2 if sink.kind == "exponentials" else 1
            self.found.append([Atom(sink.operation.results[0].aval, made) for _ in range(count)])
            made.results += self.found[-1]
        return made

    def compute(self, arrays: list) -> list:
        """The results of the pass, from what it reads."""
        head, split = self.head, self.split
        ways = split.ways(split.rows)
        short = -head.rows % ways
        padded = [
            self._padded(atom, array, short)
            for atom, array in zip(self.inputs, arrays, strict=True)
        ]
        # The number of each word.
        numbers = jnp.arange(head.words, dtype="int32")
        specs = [self._spec(atom) for atom in self.inputs]
        run = _Run(self, (head.rows + short) // ways, bool(short))
        with jax.named_scope(self.scope):
            results = jax.shard_map(
                run,
                mesh=mesh_here(split.mesh),
                in_specs=(PartitionSpec(split.words or None), *specs),
                out_specs=run.out_specs(),
                check_vma=False,
            )(numbers, *padded)
        own = zip(self.sinks, results, strict=True)
        return [self._cut(sink, array, short) for sink, arrays in own for array in arrays]

    def _padded(self, atom: Atom, array: Any, short: int) -> Any:
        """What is read with rows of zeros at the end, so that all devices have as many."""
        rows = self.place(atom).rows
        if not short or rows is None:
            return array
        inner = array.shape[rows] // self.head.rows
        return padded_at_the_end(array, {rows: short * inner})

    def _cut(self, sink: Sink, array: Any, short: int) -> Any:
        rows = sink.place.rows
        if not short or rows is None:
            return array
        size = sink.operation.results[0].shape[rows]
        return lax.slice_in_dim(array, 0, size, axis=rows)

    def _spec(self, atom: Atom) -> PartitionSpec:
        return self.split.spec(len(atom.shape), self.place(atom), self.features_of(atom))

    def features_of(self, atom: Atom) -> int | None:
        """The dimension of features of weights that a plan may split."""
        if atom is not self.head.weights or len(atom.shape) != 2:
            return None
        return 1 - self.place(atom).words

    def gradient_features(self, sink: Sink) -> int | None:
        """The dimension of features of a gradient with the shape of the weights, or transposed."""
        if sink.kind != "rows" or sink.operation.name != "dot_general":
            return None
        shape = sink.operation.results[0].shape
        if sorted(shape) != sorted(self.head.weights.shape) or len(shape) != 2:
            return None
        return 1 - sink.place.words


class _Run:
    """A pass on one device: its part of the rows, and of the vocabulary."""

    def __init__(self, of: _Pass, rows: int, masked: bool):
        self._of, self._rows, self._masked = of, rows, masked
        self._split, self._pieces = of.split, of.pieces
        self._width = of.pieces.width * self._split.ways(self._split.gathered)

    def out_specs(self) -> list[PartitionSpec]:
        """How the results of each reduction are split."""
        ranks = [len(sink.operation.results[0].shape) for sink in self._of.sinks]
        return [
            self._split.spec(rank, sink.place, self._of.gradient_features(sink))
            for rank, sink in zip(ranks, self._of.sinks, strict=True)
        ]

    def __call__(self, numbers: Any, *arrays: Any) -> list[tuple]:
        start = [self._start(sink) for sink in self._of.sinks]

        def body(piece: Any, sums: list) -> list:
            return self._added(piece, numbers, arrays, sums)

        sums = lax.fori_loop(0, self._pieces.count, body, start)
        return [self._ended(sink, own) for sink, own in zip(self._of.sinks, sums, strict=True)]

    def _local_shape(self, atom: Atom, place: RowsAndWords, words: int) -> tuple[int, ...]:
        """The shape of a device's part of a value."""
        shape = list(atom.shape)
        if place.rows is not None:
            shape[place.rows] = shape[place.rows] // self._of.head.rows * self._rows
        if place.words is not None:
            shape[place.words] = words
        return tuple(shape)

    def _start(self, sink: Sink) -> tuple:
        """The results of a reduction before the first piece."""
        result = sink.operation.results[0]
        shape = list(self._local_shape(result, sink.place, self._pieces.part))
        name, dtype = sink.operation.name, result.aval.dtype
        if sink.kind == "rows":
            if (features := self._of.gradient_features(sink)) is not None:
                shape[features] //= self._split.ways(self._split.features)
            return (jnp.zeros(shape, dtype),)
        sums = _of_sums(dtype)
        if sink.kind == "exponentials":
            return jnp.full(shape, -jnp.inf, sums), jnp.zeros(shape, sums)
        if name in ("argmax", "argmin"):
            compared = sink.reduced.aval.dtype
            return jnp.full(shape, _least(compared, name), compared), jnp.zeros(shape, "int32")
        if name in ("reduce_max", "reduce_min"):
            return (jnp.full(shape, _least(dtype, name), dtype),)
        return (jnp.zeros(shape, sums),)

    def _added(self, piece: Any, numbers: Any, arrays: Sequence, sums: list) -> list:
        """The results after one more piece."""
        of, pieces = self._of, self._pieces
        start = jnp.minimum(piece * pieces.width, pieces.part - pieces.width)
        values: dict[int, Any] = {}
        for atom, array in zip(of.inputs, arrays, strict=True):
            place = of.place(atom)
            if place.words is not None:
                array = self._piece(array, place.words, start, of.features_of(atom))
            values[id(atom)] = array
        numbers = self._piece(numbers, 0, start, None)
        new = None
        if pieces.overlaps:
            own = start + jnp.arange(pieces.width) >= piece * pieces.width
            new = self._gathered(own, 0)

        def value(atom: Atom) -> Any:
            return values.get(id(atom), atom.constant)

        for operation in of.streamed:
            values[id(operation.results[0])] = self._streamed(operation, value, numbers)
        return [
            self._reduced(sink, own, value, numbers, new, start)
            for sink, own in zip(of.sinks, sums, strict=True)
        ]

    def _piece(self, array: Any, words: int, start: Any, features: int | None) -> Any:
        """A piece of an array with words, whole in its features."""
        array = lax.dynamic_slice_in_dim(array, start, self._pieces.width, axis=words)
        array = self._gathered(array, words)
        if features is not None and self._split.features:
            array = lax.all_gather(array, self._split.features, axis=features, tiled=True)
        return array

    def _gathered(self, array: Any, dimension: int) -> Any:
        if not self._split.gathered:
            return array
        return lax.all_gather(array, self._split.gathered, axis=dimension, tiled=True)

    def _streamed(self, operation: Equation, value: Callable, numbers: Any) -> Any:
        """The piece of a wide value."""
        (result,), name = operation.results, operation.name
        place = self._of.place(result)
        shape = self._local_shape(result, place, self._width)
        if name == "iota":
            own = lax.broadcast_in_dim(numbers, shape, (place.words,))
            return own.astype(result.aval.dtype)
        operands = [value(atom) for atom in operation.operands]
        if name == "sharding_constraint":
            return operands[0]
        if name == "scatter-add":
            array, indices, updates = operands
            chosen = self._chosen(operation, indices, numbers, place.words, shape)
            rows = [size for d, size in enumerate(shape) if d != place.words]
            updates = jnp.expand_dims(updates.reshape(rows), place.words)
            return array + jnp.where(chosen, updates, jnp.zeros((), array.dtype))
        if name == "broadcast_in_dim":
            # Of a number, the operation itself would be one for the whole mesh, as it was traced.
            dimensions = operation.equation.params["broadcast_dimensions"]
            return lax.broadcast_in_dim(operands[0], shape, dimensions)
        params = {"new_sizes": shape} if name == "reshape" else {}
        return operation.run(operands, params)[0]

    def _chosen(
        self, operation: Equation, indices: Any, numbers: Any, words: int, shape: tuple
    ) -> Any:
        """Which words of a piece have the number that is given for their row."""
        if operation.equation.params["mode"] == lax.GatherScatterMode.CLIP:
            indices = jnp.clip(indices, 0, self._of.head.words - 1)
        rows = [size for d, size in enumerate(shape) if d != words]
        indices = jnp.expand_dims(indices.reshape(rows), words)
        return indices == lax.broadcast_in_dim(numbers, shape, (words,))

    def _reduced(
        self, sink: Sink, own: tuple, value: Callable, numbers: Any, new: Any, start: Any
    ) -> tuple:
        """The result of a reduction with one more piece."""
        operation, wide = sink.operation, value(sink.reduced)
        place, name = self._of.place(sink.reduced), operation.name
        if sink.kind == "rows":
            return (self._written(sink, own[0], self._without_padding(wide, place), value, start),)
        if sink.kind == "exponentials":
            return _more_exponentials(own, self._masked_words(wide, place, new, -np.inf), place)
        is_best = name in ("argmax", "argmin", "reduce_max", "reduce_min")
        neutral = _least(wide.dtype, name) if is_best else 0
        wide = self._masked_words(wide, place, new, neutral)
        if name in ("argmax", "argmin"):
            return _better(name, own, *_best(operation, wide, place.words, numbers))
        if name in ("reduce_max", "reduce_min"):
            combine = jnp.maximum if name == "reduce_max" else jnp.minimum
            return (combine(own[0], operation.run([wide])[0]),)
        sums = own[0].dtype
        if sink.kind == "taken":
            indices = value(operation.operands[1])
            chosen = self._chosen(operation, indices, numbers, place.words, wide.shape)
            # Not a product with zero: others may be infinite.
            taken = jnp.where(chosen, wide, jnp.zeros((), wide.dtype)).astype(sums)
            return (own[0] + jnp.sum(taken, axis=place.words).reshape(own[0].shape),)
        if name == "reduce_sum":
            return (own[0] + operation.run([wide.astype(sums)])[0],)
        operands = [value(atom) for atom in operation.operands]
        operands[sink.wide] = wide
        return (own[0] + operation.run(operands, {"preferred_element_type": sums})[0],)

    def _masked_words(self, wide: Any, place: RowsAndWords, new: Any, instead: Any) -> Any:
        """A wide value with a constant for words of the piece before."""
        if new is None:
            return wide
        new = lax.broadcast_in_dim(new, wide.shape, (place.words,))
        return jnp.where(new, wide, jnp.asarray(instead, wide.dtype))

    def _without_padding(self, wide: Any, place: RowsAndWords) -> Any:
        """A wide value with zeros in rows that were added at the end."""
        if not self._masked:
            return wide
        head, split = self._of.head, self._split
        inner = wide.shape[place.rows] // self._rows
        first = lax.axis_index(split.rows) * self._rows
        real = jnp.arange(wide.shape[place.rows]) // inner + first < head.rows
        real = lax.broadcast_in_dim(real, wide.shape, (place.rows,))
        return jnp.where(real, wide, jnp.zeros((), wide.dtype))

    def _written(self, sink: Sink, whole: Any, wide: Any, value: Callable, start: Any) -> Any:
        """An array with words, with those of a piece summed over the rows."""
        operation, words = sink.operation, sink.place.words
        operands = [value(atom) for atom in operation.operands]
        operands[sink.wide] = wide
        (part,) = operation.run(operands)
        part = self._scattered(part, self._split.gathered, words)
        if (features := self._of.gradient_features(sink)) is not None:
            part = self._scattered(part, self._split.features, features)
        return lax.dynamic_update_slice_in_dim(whole, part, start, axis=words)

    def _scattered(self, part: Any, axes: tuple[str, ...], dimension: int) -> Any:
        """A device's part of a dimension, summed over the axes that split rows."""
        for axis in axes:
            if axis in self._split.rows:
                part = lax.psum_scatter(part, axis, scatter_dimension=dimension, tiled=True)
            else:
                size = part.shape[dimension] // self._split.ways((axis,))
                first = lax.axis_index(axis) * size
                part = lax.dynamic_slice_in_dim(part, first, size, axis=dimension)
        return part

    def _ended(self, sink: Sink, own: tuple) -> tuple:
        """The results of all devices."""
        name, dtype = sink.operation.name, sink.operation.results[0].aval.dtype
        if sink.kind == "rows":
            done = {*self._split.gathered}
            if self._of.gradient_features(sink) is not None:
                done |= set(self._split.features)
            left = tuple(axis for axis in self._split.rows if axis not in done)
            return (lax.psum(own[0], left) if left else own[0],)
        over = self._split.summed
        if sink.kind == "exponentials":
            return _all_exponentials(own, over)
        if name in ("argmax", "argmin"):
            return (_best_of_all(name, own, over).astype(dtype),)
        if not over:
            return (own[0].astype(dtype),)
        combine = {"reduce_max": lax.pmax, "reduce_min": lax.pmin}.get(name, lax.psum)
        return (combine(own[0], over).astype(dtype),)


def _of_sums(dtype: Any) -> Any:
    """The dtype in which results of all words are added up."""
    return jnp.promote_types(dtype, "float32") if jnp.issubdtype(dtype, jnp.floating) else dtype


def _least(dtype: Any, name: str) -> Any:
    """What a maximum or a minimum of nothing is."""
    sign = 1 if name.endswith("min") else -1
    if jnp.issubdtype(dtype, jnp.floating):
        return sign * np.inf
    limits = jnp.iinfo(dtype)
    return limits.max if sign > 0 else limits.min


def _finite(largest: Any) -> Any:
    """The largest value, or zero if it is infinite: infinity less infinity is no number."""
    return jnp.where(jnp.isfinite(largest), largest, 0)


def _more_exponentials(own: tuple, wide: Any, place: RowsAndWords) -> tuple:
    """The largest value and the sum of the exponentials of the differences from it."""
    largest, total = own
    wide = wide.astype(total.dtype)
    new = jnp.maximum(largest, jnp.max(wide, axis=place.words))
    limit = _finite(new)
    added = jnp.sum(jnp.exp(wide - jnp.expand_dims(limit, place.words)), axis=place.words)
    return new, total * jnp.exp(largest - limit) + added


def _all_exponentials(own: tuple, over: tuple[str, ...]) -> tuple:
    largest, total = own
    if not over:
        return _finite(largest), total
    limit = _finite(lax.pmax(largest, over))
    return limit, lax.psum(total * jnp.exp(_finite(largest) - limit), over)


def _best(operation: Equation, wide: Any, words: int, numbers: Any) -> tuple:
    """The largest or smallest value of a piece, and the number of its word."""
    index = operation.run([wide], {"index_dtype": np.dtype("int32")})[0]
    value = jnp.take_along_axis(wide, jnp.expand_dims(index, words), axis=words)
    return jnp.squeeze(value, words), numbers[index]


def _better(name: str, own: tuple, value: Any, number: Any) -> tuple:
    """The better one of two values, that of the lower number if they are equal."""
    best, before = own
    nan, was_nan = jnp.isnan(value), jnp.isnan(best)
    is_better = value > best if name == "argmax" else value < best
    is_equal = (value == best) | (nan & was_nan)
    takes = (is_better & ~was_nan) | (nan & ~was_nan) | (is_equal & (number < before))
    return jnp.where(takes, value, best), jnp.where(takes, number, before)


def _best_of_all(name: str, own: tuple, over: tuple[str, ...]) -> Any:
    if over:
        values, numbers = (lax.all_gather(array, over) for array in own)
        own = values[0], numbers[0]
        for n in range(1, len(values)):
            own = _better(name, own, values[n], numbers[n])
    return own[1]
