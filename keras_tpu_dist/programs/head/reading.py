"""Finds the head of a model in a traced step: logits, and everything computed from them.

A value is wide if it has a number for each row of the batch (a token) and each word of the
vocabulary, such as logits, their probabilities and their gradient. A head can be computed in pieces
of the vocabulary if all wide values are computed word by word, and what reads all words is a
reduction: a sum, a maximum, a product with the head's weights. A reduction that depends on the
result of another one, as the gradient of the logits depends on the sum of their exponentials,
needs another pass over the pieces.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keras_tpu_dist.programs.dimensions import ELEMENTWISE, Mapped, dimensions
from keras_tpu_dist.programs.graph import Atom, Equation, Graph

_WORD_BY_WORD = ELEMENTWISE | {
    "bitcast_convert_type",
    "broadcast_in_dim",
    "dot_general",
    "reshape",
    "squeeze",
    "transpose",
}
_REDUCTIONS = frozenset(["argmax", "argmin", "reduce_max", "reduce_min", "reduce_sum"])


class RowsAndWords(NamedTuple):
    """Where a value has its rows and its words.

    Attributes:
        rows: The dimension of the rows of the batch, `None` if it has none.
        words: The dimension of the vocabulary, `None` if it has none.
    """

    rows: Any = None
    words: Any = None

    @property
    def is_wide(self) -> bool:
        """Whether it has both."""
        return self.rows is not None and self.words is not None


class StaysWhole(Exception):
    """The reason why a head cannot be computed in pieces."""


@dataclass(eq=False)
class Sink:
    """A reduction of wide values.

    Attributes:
        kind: "words" if it reduces all words, with a result for each row; "rows" if it reduces all
            rows, with a result for each word; "exponentials" if it is a sum of exponentials over
            all words, of which the largest is found in the same pass; "taken" if it takes one word
            of each row.
        after: What the result is computed from besides, after the pass: for exponentials what is
            subtracted from their exponents; for words taken their numbers.
    """

    operation: Equation
    kind: str
    place: RowsAndWords
    wide: int = 0
    after: Atom | None = None

    @property
    def reduced(self) -> Atom:
        """The wide value that a pass reduces; for exponentials, that without the subtraction."""
        operand = self.operation.operands[self.wide]
        difference = _difference(operand) if self.kind == "exponentials" else None
        return difference.operands[0] if difference else operand


@dataclass(eq=False)
class Head:
    """A head in a step.

    Attributes:
        weights: The head's weights, as the product reads them.
        rows: The size of the first dimension of the logits, which is split as the batch is.
        operations: The operations that compute wide values, in order.
        places: By the `id` of an atom, where it has rows and words; of wide values, and of what
            their operations read and reductions return.
        passes: For each pass over the pieces, its reductions.
        levels: By the `id` of an atom, the number of passes that come before it.
    """

    product: Equation
    weights: Atom
    rows: int
    words: int
    operations: list[Equation] = field(default_factory=list)
    places: dict[int, RowsAndWords] = field(default_factory=dict)
    passes: list[list[Sink]] = field(default_factory=list)
    levels: dict[int, int] = field(default_factory=dict)

    @property
    def logits(self) -> Atom:
        """The logits."""
        return self.product.results[0]

    @property
    def tokens(self) -> int:
        """The number of rows, of all dimensions."""
        return math.prod(self.logits.shape) // self.words

    def level(self, atom: Atom) -> int:
        """The number of passes that come before an atom."""
        return self.levels.get(id(atom), 0)


def heads_of(graph: Graph, batch: Iterable[Atom], least_words: int) -> list[Head]:
    """The products in a step that compute logits, the largest first, as heads not yet read.

    They are products of weights of which the largest result is found for each row, as every softmax
    does.
    """
    from_batch, found, operations = {id(atom) for atom in batch}, [], graph.needed({})
    for operation in operations:
        sides = [n for n, atom in enumerate(operation.operands) if id(atom) in from_batch]
        if not sides:
            continue
        from_batch |= {id(result) for result in operation.results}
        if operation.name != "dot_general" or len(sides) != 1:
            continue
        mapped, (_, shared) = _mapped(operation), operation.equation.params["dimension_numbers"]
        rows = [m for m in mapped if m.operand == sides[0]]
        words = [m for m in mapped if m.operand != sides[0]]
        if not any(shared) and rows and len(words) == 1 and words[0].parts >= least_words:
            weights = operation.operands[1 - sides[0]]
            head = Head(operation, weights, rows[0].parts, words[0].parts)
            head.places[id(head.logits)] = RowsAndWords(rows[0].to, words[0].to)
            found.append(head)
    found = [head for head in found if _finds_the_largest(operations, head)]
    return sorted(found, key=lambda head: -head.tokens * head.words)


def _finds_the_largest(operations: list[Equation], head: Head) -> bool:
    """Whether the largest one of each row's values is found."""
    values = {id(head.logits)}
    for operation in operations:
        if any(id(operand) in values for operand in operation.operands):
            (first, *_), name = operation.operands, operation.name
            if name in ("argmax", "reduce_max"):
                sizes = [first.shape[axis] for axis in operation.equation.params["axes"]]
                if sizes == [head.words]:
                    return True
            elif name in _WORD_BY_WORD and name != "dot_general":
                values |= {id(result) for result in operation.results}
    return False


def read(graph: Graph, head: Head, most_passes: int) -> None:
    """Reads how a step uses the logits of a head.

    Args:
        graph: The step.
        head: One of `heads_of`, which gets its operations and passes.
        most_passes: How often the logits may be computed.

    Raises:
        StaysWhole: If it cannot be computed in pieces.
    """
    reader = _Reader(graph, head)
    sinks = reader.read()
    _arrange(head, reader.operations, sinks)
    if len(head.passes) > most_passes:
        raise StaysWhole(
            f"its loss would compute the logits {len(head.passes)} times; a loss of logits "
            '(from_logits=True) takes 2; head="pieces" computes it nevertheless'
        )


class _Reader:
    """Follows logits through a step."""

    def __init__(self, graph: Graph, head: Head):
        self.operations, self._outputs = graph.needed({}), graph.outputs
        self._head, self._places = head, head.places
        # Values computed from the logits. All that reads them has to be understood.
        self._derived = {id(head.logits)}
        self._streamed: set[Equation] = set()
        self._sinks: dict[Equation, Sink] = {}

    def read(self) -> dict[Equation, Sink]:
        """The reductions, by their operations."""
        self._stream(self._head.product, self._places[id(self._head.logits)])
        known = -1
        # Again, until nothing is found: what an operation reads besides may have other readers.
        while known != (known := len(self._streamed) + len(self._sinks)):
            for operation in self.operations:
                self._meet(operation)
        if any(id(output) in self._derived for output in self._outputs):
            raise StaysWhole("the step returns its logits")
        if not any(map(_is_of_a_loss, self._sinks.values())):
            raise StaysWhole("no loss over its words is computed")
        self._head.operations = [o for o in self.operations if o in self._streamed]
        return self._sinks

    def _meet(self, operation: Equation) -> None:
        if operation in self._streamed or operation in self._sinks:
            return
        wide = [n for n, atom in enumerate(operation.operands) if self._place(atom).is_wide]
        if not wide:
            return
        derived = any(id(operation.operands[n]) in self._derived for n in wide)
        try:
            self._understand(operation, wide)
        except StaysWhole:
            # What is not computed from logits can be computed as a whole, too.
            if derived:
                raise
            return
        if derived and operation in self._streamed:
            self._derived |= {id(result) for result in operation.results}

    def _understand(self, operation: Equation, wide: list[int]) -> None:
        """Adds an operation that reads wide values."""
        name = operation.name
        if name in _REDUCTIONS or (name == "dot_general" and self._reduces(operation, wide)):
            self._sinks[operation] = self._sink(operation, wide)
            return
        if name == "gather":
            self._sinks[operation] = self._taken(operation)
            return
        if name not in _WORD_BY_WORD or len(operation.results) != 1:
            raise StaysWhole(f"{name} reads values of its whole vocabulary")
        before = self._place(operation.operands[wide[0]])
        ends = [m for m in _mapped(operation) if m.operand == wide[0]]
        rows = [m.to for m in ends if m.dimension == before.rows and self._by_rows(m)]
        words = [m.to for m in ends if m.dimension == before.words and self._by_words(m)]
        if not rows or not words:
            raise StaysWhole(f"{name} moves its words or rows")
        self._stream(operation, RowsAndWords(rows[0], words[0]))

    def _place(self, atom: Atom) -> RowsAndWords:
        return self._places.get(id(atom), RowsAndWords())

    def _by_rows(self, mapped: Mapped) -> bool:
        return mapped.parts % self._head.rows == 0

    def _by_words(self, mapped: Mapped) -> bool:
        return mapped.parts == self._head.words

    def _reduces(self, operation: Equation, wide: list[int]) -> bool:
        """Whether a product sums over words, or over rows."""
        (summed, _) = operation.equation.params["dimension_numbers"]
        place = self._place(operation.operands[wide[0]])
        return bool({place.rows, place.words} & set(summed[wide[0]]))

    def _sink(self, operation: Equation, wide: list[int]) -> Sink:
        (side, *others), params = wide, operation.equation.params
        operand = operation.operands[side]
        place, mapped = self._place(operand), _mapped(operation)
        other_dimensions = set(range(len(operand.shape))) - {place.words}
        if operation.name == "dot_general":
            summed, shared = params["dimension_numbers"]
            gone = set(summed[side])
            if others or any(shared):
                raise StaysWhole("a product of two arrays of its size is computed")
            pairs = dict(zip(summed[side], summed[1 - side], strict=True))
            other = operation.operands[1 - side]
            if gone == {place.words}:
                self._mark(other, RowsAndWords(None, pairs[place.words]))
            elif gone == other_dimensions:
                self._mark(other, RowsAndWords(pairs[place.rows], None))
        else:
            gone = {int(axis) for axis in params["axes"]}
        left = [m for m in mapped if m.operand == side]
        if gone == {place.words}:
            rows = next(m.to for m in left if m.dimension == place.rows)
            return Sink(operation, "words", RowsAndWords(rows, None), side)
        if gone == other_dimensions and operation.name in ("dot_general", "reduce_sum"):
            words = next(m.to for m in left if m.dimension == place.words)
            return Sink(operation, "rows", RowsAndWords(None, words), side)
        raise StaysWhole(f"{operation.name} reduces some of its dimensions")

    def _taken(self, operation: Equation) -> Sink:
        """A word of each row, as `take_along_axis` takes it."""
        operand, numbers = operation.operands
        place, indices = self._place(operand), operation.equation.params["dimension_numbers"]
        rows = tuple(d for d in range(len(operand.shape)) if d != place.words)
        shared = indices.operand_batching_dims, indices.start_indices_batching_dims
        one_of_each = (
            indices.start_index_map == indices.collapsed_slice_dims == (place.words,)
            and shared == (rows, tuple(range(len(rows))))
            and math.prod(numbers.shape) == self._head.tokens
        )
        if self._place(numbers).words is not None or not one_of_each:
            raise StaysWhole("words are taken from all of them")
        number = RowsAndWords(rows.index(place.rows), None)
        self._mark(numbers, number)
        return Sink(operation, "taken", number, after=numbers)

    def _stream(self, operation: Equation, place: RowsAndWords) -> None:
        """Adds an operation that computes a wide value word by word, and what it reads."""
        (result,) = operation.results
        self._mark(result, place)
        self._streamed.add(operation)
        mapped = _mapped(operation)
        for n, operand in enumerate(operation.operands):
            own = [m for m in mapped if m.operand == n]
            rows = (m.dimension for m in own if m.to == place.rows and self._by_rows(m))
            words = (m.dimension for m in own if m.to == place.words and self._by_words(m))
            reads = RowsAndWords(next(rows, None), next(words, None))
            if not reads.is_wide:
                self._mark(operand, reads)
            elif id(operand) not in self._places:
                self._compute(operand, reads)
            elif self._place(operand) != reads:
                raise StaysWhole("two values of its size have other dimensions")

    def _compute(self, atom: Atom, place: RowsAndWords) -> None:
        """Adds the operation of a wide value that is not computed from the logits."""
        operation = atom.operation
        if operation is None:
            raise StaysWhole("an array of its size is read")
        if operation.name == "iota":
            if operation.equation.params["dimension"] != place.words:
                raise StaysWhole("rows are counted")
            self._mark(atom, place)
            self._streamed.add(operation)
        elif operation.name in _WORD_BY_WORD or self._adds_one_of_each(operation, place):
            self._stream(operation, place)
        else:
            raise StaysWhole(f"{operation.name} computes an array of its size")

    def _adds_one_of_each(self, operation: Equation, place: RowsAndWords) -> bool:
        """Whether an operation adds to one word of each row, as the gradient of `_taken` does."""
        if operation.name != "scatter-add":
            return False
        numbers = operation.equation.params["dimension_numbers"]
        operand, indices, _ = operation.operands
        rows = tuple(d for d in range(len(operand.shape)) if d != place.words)
        return (
            numbers.scatter_dims_to_operand_dims == numbers.inserted_window_dims == (place.words,)
            and numbers.operand_batching_dims == rows
            and numbers.scatter_indices_batching_dims == tuple(range(len(rows)))
            and math.prod(indices.shape) == self._head.tokens
        )

    def _mark(self, atom: Atom, place: RowsAndWords) -> None:
        """Notes where a value has rows and words."""
        if atom.constant is not None and not atom.shape:
            return
        if self._places.setdefault(id(atom), place) != place:
            raise StaysWhole("a value is read in two ways")


def _mapped(operation: Equation) -> tuple[Mapped, ...]:
    found = dimensions(operation.equation)
    return found.mapped if found else ()


def _is_sum_over_words(sink: Sink) -> bool:
    return sink.operation.name == "reduce_sum" and sink.kind == "words"


def _is_of_a_loss(sink: Sink) -> bool:
    return _is_sum_over_words(sink) or sink.kind == "taken"


def _difference(value: Atom) -> Equation | None:
    """The subtraction from which the exponents of a value are computed."""
    exponential = _computed(value)
    if exponential is None or exponential.name != "exp":
        return None
    difference = _computed(exponential.operands[0])
    return difference if difference is not None and difference.name == "sub" else None


def _computed(value: Atom) -> Equation | None:
    """The operation that computes a value, apart from copies."""
    while value.operation is not None and value.operation.name == "copy":
        value = value.operation.operands[0]
    return value.operation


def _arrange(head: Head, operations: list[Equation], sinks: dict[Equation, Sink]) -> None:
    """Decides in which pass each reduction is computed."""
    for operation in operations:
        before = max(map(head.level, operation.operands), default=0)
        after = before
        if (sink := sinks.get(operation)) is not None:
            before, after = _pass_of(head, sink, before)
            head.passes += [[] for _ in range(before + 1 - len(head.passes))]
            head.passes[before].append(sink)
        head.levels.update((id(result), after) for result in operation.results)


def _pass_of(head: Head, sink: Sink, before: int) -> tuple[int, int]:
    """The pass of a reduction, and the number of passes before its result."""
    difference = _difference(sink.operation.operands[0]) if _is_sum_over_words(sink) else None
    if difference is not None:
        exponent, subtracted = difference.operands
        made, is_wide = (
            subtracted.operation,
            head.places.get(id(subtracted), RowsAndWords()).is_wide,
        )
        if is_wide and made is not None and made.name == "broadcast_in_dim":
            (subtracted,) = made.operands
        of_rows = head.places.get(id(subtracted), RowsAndWords()).words is None
        of_rows = of_rows and math.prod(subtracted.shape) == head.tokens
        is_wide = head.places.get(id(exponent), RowsAndWords()).is_wide
        if head.level(exponent) < before and of_rows and is_wide:
            sink.kind, sink.after = "exponentials", subtracted
            first = head.level(exponent)
            return first, max(first + 1, head.level(subtracted))
    return before, before + 1
