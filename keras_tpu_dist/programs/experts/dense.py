"""Finds programs that compute all experts for every token and add up the chosen ones.

Such a sum over experts multiplies by weights that are zero except for the chosen experts; the
weights come from a `one_hot` of a `top_k`. All operations between the experts' kernels and the sum
(activations, gates, biases) work row by row. So they can be computed for rows of a token and one of
its chosen experts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_tpu_dist.programs.dimensions import ELEMENTWISE, SHAPES, dimensions
from keras_tpu_dist.programs.experts.routed import Group, Where, routed
from keras_tpu_dist.programs.graph import Atom, Equation, Graph, Instead, graph_of

# The meaning of a dimension: experts, the number of a token dimension, or `None`.
_EXPERTS = -1
Labels = tuple[int | None, ...]

_MOVES = {
    "broadcast_in_dim", "convert_element_type", "copy", "reshape", "sharding_constraint",
    "squeeze", "transpose",
}  # fmt: skip
_KEEPS_ZEROS = _MOVES | {"mul", "neg", "reduce_sum", "dot_general"}
_BY_ROW = (
    ELEMENTWISE
    | _MOVES
    | {"concatenate", "pad", "reduce_max", "reduce_min", "reduce_sum", "slice", "split"}
)


class _NotByRow(Exception):
    """The result for a token and an expert depends on other tokens or experts."""


@dataclass(frozen=True)
class ChosenSum:
    """A sum over experts in which only the chosen ones count.

    Attributes:
        indices: The chosen experts of every token; the last dimension is that of the choices.
        rows: How to compute the summands for a token and an expert.
    """

    operation: Equation
    indices: Atom
    count: int
    rows: "_Rows"
    labels: Labels

    @property
    def operands(self) -> list[Atom]:
        """The values needed to compute it from the chosen experts."""
        rows = self.rows
        leaves = [*rows.tokens, *rows.experts, *rows.whole]
        return [*(value for value, _ in leaves), self.indices]

    def replaced(self, where: Where) -> Instead:
        """The replacement that computes only the chosen experts.

        Args:
            where: Which mesh axes split tokens and experts.
        """
        rows, sizes = self.rows, self.indices.shape[:-1]
        dtype = self.operation.results[0].aval.dtype

        def compute(arrays: list[Any]) -> list[Any]:
            *given, indices = arrays
            of = iter(given)
            tokens = [_by_token(next(of), labels, sizes) for _, labels in rows.tokens]
            experts = [
                jnp.moveaxis(next(of), labels.index(_EXPERTS), 0) for _, labels in rows.experts
            ]
            flat = indices.reshape(-1, indices.shape[-1])
            sums = routed(rows.compute, tokens, experts, list(of), flat, self.count, where, dtype)
            return [self._in_place(sums)]

        return Instead(self.operands, compute)

    def _in_place(self, sums: Any) -> Any:
        """Sums of flattened tokens, in the dimensions of the program's result."""
        result = self.operation.results[0].shape
        of_tokens = sorted((i, d) for d, i in enumerate(self.labels) if i is not None)
        order = [d for _, d in of_tokens]
        order += [d for d, label in enumerate(self.labels) if label is None]
        array = sums.reshape([result[d] for d in order])
        return jnp.transpose(array, [order.index(d) for d in range(len(order))])


def chosen_sums(graph: Graph) -> list[ChosenSum]:
    """The sums over experts of a program in which only the chosen ones count.

    Args:
        graph: The program.
    """
    found = []
    for operation in graph.operations:
        for value, axis in _summed(operation):
            chosen = _chosen(value, axis)
            total = None if chosen is None else _chosen_sum(operation, value, axis, *chosen)
            if total is not None:
                found.append(total)
                break
    # If other operations need all experts, nothing is saved.
    needed = set(graph.needed({summed.operation: summed.operands for summed in found}))
    return [summed for summed in found if needed.isdisjoint(summed.rows.products)]


def computed(jaxpr: Any, inputs: Sequence[Any], where_of: Any) -> list[Any] | None:
    """Runs a program, computing only the chosen experts.

    Args:
        jaxpr: The program, a `ClosedJaxpr`.
        inputs: Its inputs.
        where_of: A function from the number of experts to the `Where` of their kernels.

    Returns:
        Its outputs, or `None` if the program has no sum over chosen experts.
    """
    graph = graph_of(jaxpr)
    sums = chosen_sums(graph)
    if not sums:
        return None
    instead = {total.operation: total.replaced(where_of(total.count)) for total in sums}
    return graph.evaluate(inputs, instead)


def _summed(operation: Equation) -> Iterator[tuple[Atom, int]]:
    """The values that an operation sums, and the dimensions that may be those of experts."""
    if operation.name == "reduce_sum" and len(operation.equation.params["axes"]) == 1:
        yield operation.operands[0], operation.equation.params["axes"][0]
    if operation.name == "dot_general":
        summed, _ = operation.equation.params["dimension_numbers"]
        for value, axes in zip(operation.operands, summed, strict=True):
            yield from ((value, int(axis)) for axis in axes)


def _chosen_sum(
    operation: Equation, value: Atom, axis: int, indices: Atom, places: dict[int, int]
) -> ChosenSum | None:
    """The sum, if its token dimensions are known and each row can be computed separately."""
    count, last = value.shape[axis], len(indices.shape) - 1
    # A single token needs no sorting, and dimensions of size one are ignored.
    wanted = [i for i in range(last) if indices.shape[i] > 1]
    tokens = {d: i for d, i in places.items() if i in wanted}
    if not wanted or sorted(tokens.values()) != wanted or last in places.values():
        return None
    if indices.shape[-1] >= count:
        return None
    labels = tuple(_EXPERTS if d == axis else tokens.get(d) for d in range(len(value.shape)))
    rows = _Rows(count, indices.shape[:-1])
    try:
        if operation.name == "reduce_sum":
            # Values that are widened for the sum can be widened after the products.
            rows.end = rows.pull(_before_widened(value), labels)
            after = tuple(label for d, label in enumerate(labels) if d != axis)
        else:
            after = rows.pull_sum(operation, value, labels)
    except _NotByRow:
        return None
    if not rows.products:
        return None
    shape = operation.results[0].shape
    rows.features = tuple(n for n, label in zip(shape, after, strict=True) if label is None)
    return ChosenSum(operation, indices, count, rows, after)


def _chosen(value: Atom, axis: int) -> tuple[Atom, dict[int, int]] | None:
    """The indices from `top_k`, if a value is zero along a dimension except at these indices.

    Returns:
        The indices, and from a dimension of the value to that of the indices.
    """
    operation = value.operation
    if operation is None:
        return None
    if operation.name == "eq":
        for one, other in (operation.operands, operation.operands[::-1]):
            if _counts(other, axis):
                return _indices(one)
        return None
    if operation.name not in _KEEPS_ZEROS:
        return None
    for number, operand in enumerate(operation.operands):
        places = _places_before(operation, number)
        if axis in places and (inner := _chosen(operand, places[axis])) is not None:
            indices, known = inner
            return indices, {to: known[d] for to, d in places.items() if d in known}
    return None


def _places_before(operation: Equation, number: int) -> dict[int, int]:
    """From dimensions of an operation's result to the equal dimensions of an operand."""
    found = dimensions(operation.equation)
    return {
        step.to: step.dimension
        for step in (() if found is None else found.mapped)
        if step.operand == number and step.parts == operation.results[0].shape[step.to]
    }


def _counts(value: Atom, axis: int) -> bool:
    """Whether a value is 0, 1, 2 and so on along a dimension."""
    if value.constant is not None:
        return False
    operation = value.operation
    if operation is None:
        return False
    if operation.name == "iota":
        return operation.equation.params["dimension"] == axis
    if operation.name not in _MOVES:
        return False
    places = _places_before(operation, 0)
    return axis in places and _counts(operation.operands[0], places[axis])


def _indices(value: Atom) -> tuple[Atom, dict[int, int]] | None:
    """The indices from `top_k`, if a value equals them, and how their dimensions correspond."""
    operation = value.operation
    if operation is None:
        return None
    if operation.name == "top_k":
        if value is operation.results[1]:
            return value, {d: d for d in range(len(value.shape))}
        return None
    if operation.name not in _MOVES:
        return None
    inner = _indices(operation.operands[0])
    if inner is None:
        return None
    indices, known = inner
    return indices, {to: known[d] for to, d in _places_before(operation, 0).items() if d in known}


# How to compute a value for the rows of a device: from the group, and a function that computes what
# it reads, to the array, and whether its first dimension is that of rows.
_Node = Callable[[Group, Callable], tuple[Any, bool]]


@dataclass
class _Rows:
    """How to compute the summands for rows of a token and one of its experts.

    In a row, the dimensions of tokens and of experts have size one. The recipe is built backwards
    from the sum over experts, by what the labels of a value's dimensions are: a value of tokens
    alone is taken for the row's token, one of experts alone for its expert, one of neither as it
    is. A value of both is computed by its operation, from what that reads. An operation that mixes
    rows raises. For a feed-forward layer of Mixtral, `sum(gates * (silu(x @ w1) * (x @ w3)) @ w2)`,
    `x` is of tokens, `w1`, `w3` and `w2` are of experts, and all between is computed for rows.

    Attributes:
        tokens: The values of tokens that rows read, with their labels.
        experts: The same for values of experts.
        whole: The same for values that are common to all rows.
        features: The sizes of the other dimensions of the result.
    """

    count: int
    sizes: Sequence[int]
    tokens: list[tuple[Atom, Labels]] = field(default_factory=list)
    experts: list[tuple[Atom, Labels]] = field(default_factory=list)
    whole: list[tuple[Atom, Labels]] = field(default_factory=list)
    products: list[Equation] = field(default_factory=list)
    end: _Node | None = None
    features: tuple[int, ...] = ()
    _known: dict[Any, _Node] = field(default_factory=dict)

    def pull(self, value: Atom, labels: Labels) -> _Node:
        """The computation of a value for rows.

        Raises:
            _NotByRow: If the value depends on other rows.
        """
        key = (id(value), labels)
        if key not in self._known:
            self._known[key] = self._pulled(value, labels)
        return self._known[key]

    def pull_sum(self, operation: Equation, value: Atom, labels: Labels) -> Labels:
        """Sets the computation of the rows of a product that sums over experts.

        Args:
            value: The operand that is zero except for the chosen experts.
        """
        side = next(i for i, operand in enumerate(operation.operands) if operand is value)
        places = _places_before(operation, side)
        rank = len(operation.results[0].shape)
        after = tuple(labels[places[d]] if d in places else None for d in range(rank))
        summed, _ = operation.equation.params["dimension_numbers"]
        pair = list(summed[side]).index(labels.index(_EXPERTS))
        before = [
            tuple(_EXPERTS if d == axes[pair] else label for d, label in enumerate(known))
            for known, axes in zip(self._before(operation, after, 0), summed, strict=True)
        ]
        if before[side] != labels:
            raise _NotByRow
        self.end = self._dot(operation, before, after)
        return after

    def _pulled(self, value: Atom, labels: Labels) -> _Node:
        self._check(value, labels)
        of_expert, of_token = _EXPERTS in labels, any(i not in (None, _EXPERTS) for i in labels)
        if not (of_expert and of_token):
            kind = "tokens" if of_token else "experts" if of_expert else "whole"
            return self._leaf(kind, value, labels)
        operation = value.operation
        if operation is None:
            raise _NotByRow
        if operation.name == "custom_jvp_call":
            if not _is_relu(operation):
                raise _NotByRow
            return _relu(self.pull(operation.operands[0], labels))
        result = next(i for i, atom in enumerate(operation.results) if atom is value)
        before = self._before(operation, labels, result)
        if operation.name == "dot_general":
            return self._dot(operation, before, labels)
        if operation.name not in _BY_ROW:
            raise _NotByRow
        operands = tuple(map(self.pull, operation.operands, before))
        if operation.name == "sharding_constraint":
            return operands[0]
        return _step(operation, operands, self._params(operation, labels), result)

    def _check(self, value: Atom, labels: Labels) -> None:
        for size, label in zip(value.shape, labels, strict=True):
            wanted = {None: size, _EXPERTS: self.count}
            if label is not None and size != wanted.get(label, self.sizes[label]):
                raise _NotByRow
        named = [label for label in labels if label is not None]
        if len(set(named)) != len(named):
            raise _NotByRow

    def _leaf(self, kind: str, value: Atom, labels: Labels) -> _Node:
        """A value that rows read: that of their token, that of their expert, or a common one."""
        leaves: list[tuple[Atom, Labels]] = getattr(self, kind)
        number, shape = len(leaves), _of_one_row(value.shape, labels)
        leaves.append((value, labels))

        def leaf(group: Group, of: Callable) -> tuple[Any, bool]:
            given = getattr(group, kind)[number]
            if kind == "whole":
                return given, False
            given = group.of_experts(given) if kind == "experts" else given
            return given.reshape(len(group.expert), *shape), True

        return leaf

    def _before(self, operation: Equation, labels: Labels, result: int) -> list[Labels]:
        """The meaning of the dimensions of an operation's operands, from those of a result."""
        found = dimensions(operation.equation)
        if found is None:
            raise _NotByRow
        before: list[list[int | None]] = [
            [None] * len(operand.shape) for operand in operation.operands
        ]
        shape = operation.results[result].shape
        for step in found.mapped:
            if step.result != result or labels[step.to] is None:
                continue
            if step.parts != shape[step.to]:
                raise _NotByRow
            before[step.operand][step.dimension] = labels[step.to]
        return list(map(tuple, before))

    def _dot(self, operation: Equation, before: list[Labels], after: Labels) -> _Node:
        """A product of rows; with the kernels of experts if only one operand has tokens."""
        of_token = [any(i not in (None, _EXPERTS) for i in labels) for labels in before]
        side = of_token.index(True)
        if not all(of_token) and _EXPERTS in before[1 - side]:
            return self._product(operation, side, before[side], before[1 - side], after)
        return _step(operation, tuple(map(self.pull, operation.operands, before)), {}, 0)

    def _product(
        self, operation: Equation, side: int, labels: Labels, kernel: Labels, after: Labels
    ) -> _Node:
        """A product of rows and the kernels of their experts."""
        value, weights = operation.operands[side], operation.operands[1 - side]
        dims, _ = operation.equation.params["dimension_numbers"]
        pairs = [
            (int(a), int(b))
            for a, b in zip(dims[side], dims[1 - side], strict=True)
            if kernel[b] != _EXPERTS
        ]
        summed = {a for a, _ in pairs}
        own = (d for d, label in enumerate(labels) if label is None and d not in summed)
        if any(value.shape[d] > 1 for d in own):
            raise _NotByRow  # it has features that are not summed over
        self._check(weights, kernel)
        self.products.append(operation)
        rows, number, expert = self.pull(value, labels), len(self.experts), kernel.index(_EXPERTS)
        self.experts.append((weights, kernel))
        # In rows, whose first dimension is theirs, and in kernels, whose first one is of experts.
        row_dims = tuple(1 + a for a, _ in pairs)
        kernel_dims = tuple(b + (b < expert) for _, b in pairs)
        shape = _of_one_row(operation.results[0].shape, after)
        options = ("precision", "preferred_element_type")

        def product(group: Group, of: Callable) -> tuple[Any, bool]:
            kernels = _followed_by(kernel_dims, group.experts[number])
            flat = _followed_by(row_dims, of(rows)[0])
            features = math.prod(kernels.shape[1 : 1 + len(kernel_dims)])
            results = group.product(
                flat.reshape(len(flat), features),
                kernels.reshape(len(kernels), features, -1),
                **{name: operation.equation.params[name] for name in options},
            )
            return results.reshape(len(results), *shape), True

        return product

    def _params(self, operation: Equation, labels: Labels) -> dict[str, Any]:
        """The parameters of an operation that contain sizes, for one row."""
        name = SHAPES.get(operation.name)
        return {name: _of_one_row(operation.equation.params[name], labels)} if name else {}

    def compute(self, group: Group) -> Any:
        """The rows of a device.

        Returns:
            `(rows, ...)`, without the dimensions of tokens and experts.
        """
        known: dict[_Node, tuple[Any, bool]] = {}

        def of(node: _Node) -> tuple[Any, bool]:
            if node not in known:
                known[node] = node(group, of)
            return known[node]

        assert self.end is not None
        array, _ = of(self.end)
        return array.reshape(len(group.expert), *self.features)


def _step(operation: Equation, operands: tuple, params: dict[str, Any], result: int) -> _Node:
    """An operation on values of rows."""

    def one_row(*arrays: Any) -> Any:
        return operation.run(arrays, params)[result]

    def step(group: Group, of: Callable) -> tuple[Any, bool]:
        arrays, by_row = zip(*map(of, operands), strict=True)
        if not any(by_row):
            return one_row(*arrays), False
        return jax.vmap(one_row, [0 if split else None for split in by_row])(*arrays), True

    return step


def _relu(inner: _Node) -> _Node:
    def relu(group: Group, of: Callable) -> tuple[Any, bool]:
        array, by_row = of(inner)
        return jax.nn.relu(array), by_row

    return relu


def _followed_by(dims: Sequence[int], array: Any) -> Any:
    """An array whose first dimension is followed by some of the others."""
    return jnp.transpose(array, (0, *dims, *_others(array.ndim, (0, *dims))))


def _others(ndim: int, dims: Sequence[int]) -> list[int]:
    return [d for d in range(ndim) if d not in dims]


def _by_token(array: Any, labels: Labels, sizes: Sequence[int]) -> Any:
    """Values of flattened tokens, `(tokens, ...)`; values that tokens share are repeated."""
    missing = [i for i in range(len(sizes)) if i not in labels]
    array = jnp.expand_dims(array, tuple(range(len(missing))))
    labels = (*missing, *labels)
    places = [labels.index(i) for i in range(len(sizes))]
    array = jnp.transpose(array, (*places, *_others(array.ndim, places)))
    array = jnp.broadcast_to(array, (*sizes, *array.shape[len(sizes) :]))
    return array.reshape(math.prod(sizes), *array.shape[len(sizes) :])


def _before_widened(value: Atom) -> Atom:
    """The value before its conversion to a wider float."""
    operation = value.operation
    if operation is None or operation.name != "convert_element_type":
        return value
    before, after = operation.operands[0].aval.dtype, value.aval.dtype
    both_float = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (before, after))
    return operation.operands[0] if both_float and before.itemsize < after.itemsize else value


def _is_relu(operation: Equation) -> bool:
    """Whether a function with a custom gradient rule is JAX's `relu`."""
    graph = graph_of(operation.equation.params["call_jaxpr"])
    if [step.name for step in graph.operations] != ["max"] or len(graph.inputs) != 1:
        return False
    value, least = graph.operations[0].operands
    return value is graph.inputs[0] and least.constant is not None and not np.any(least.constant)


def _of_one_row(sizes: Iterable[int], labels: Labels) -> tuple[int, ...]:
    return tuple(n if label is None else 1 for n, label in zip(sizes, labels, strict=True))
