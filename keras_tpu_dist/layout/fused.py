"""Fused kernels for queries, keys and values: reshaped before the product.

A kernel may compute features of several kinds one after another, and the layer then separates them
(`reshape` to three times heads, `split`). Such features cannot be split by heads, because a part of
the row is not a part of every kind. A product with the reshaped kernel gives the same numbers, and
its features have a dimension that can be split.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from keras_tpu_dist.trace.graph import Atom, Equation, Graph, Instead, graph_of

_SAME = ("convert_element_type", "copy")


@dataclass(frozen=True)
class Fused:
    """A product whose features are separated.

    Attributes:
        kernel: The kernel, `(in, features)`.
        operand: The other operand, `(..., in)`.
        bias: The bias, `(features,)`, or `None`.
        factors: The sizes that the features are reshaped to.
        ends: The operations that separate them.
        product: The product.
    """

    kernel: Atom
    operand: Atom
    bias: Atom | None
    factors: tuple[int, ...]
    ends: tuple[Equation, ...]
    product: Equation

    def replaced(self, laid: Callable[[Atom, Any], Any]) -> dict[Equation, Instead]:
        """Replacements for the ends, computed from the reshaped kernel, in one evaluation.

        Args:
            laid: Constrains the layout of the kernel's or the bias's reshaped array.
        """
        weights = [self.kernel, *([] if self.bias is None else [self.bias])]
        made = self.product.results[0].aval.dtype
        computed: list[Any] = []

        def product(arrays: list[Any]) -> Any:
            if computed:
                return computed[0]
            operand, kernel, *bias = arrays
            # Cast before it is sent.
            kernel = kernel.astype(operand.dtype).reshape(-1, *self.factors)
            apart = laid(self.kernel, kernel)
            dims = ((operand.ndim - 1,), (0,)), ((), ())
            result = lax.dot_general(operand, apart, dims, preferred_element_type=made)
            for each in bias:
                result = result + laid(weights[1], each.reshape(self.factors)).astype(made)
            computed.append(result)
            return result

        def instead(end: Equation) -> Instead:
            def compute(arrays: list[Any]) -> list[Any]:
                return _ended(end, product(arrays))

            return Instead([self.operand, *weights], compute)

        return {end: instead(end) for end in self.ends}


def _ended(end: Equation, apart: Any) -> list[Any]:
    """The results of an operation on features that are already separated."""
    dtype = end.results[0].aval.dtype
    if end.name == "reshape":
        return [apart.astype(dtype)]
    axis = apart.ndim - 2
    parts = range(apart.shape[axis])
    if end.name == "slice":
        parts = [end.equation.params["start_indices"][-1] // apart.shape[-1]]
    return [lax.index_in_dim(apart, i, axis, keepdims=False).astype(dtype) for i in parts]


def fused_in(graph: Graph, weights: Container[int]) -> list[Fused]:
    """The products of a program whose features are separated, and not one by one.

    Args:
        graph: The program.
        weights: The ids of values, or of the arrays of constants, that may be such kernels.
    """
    users: dict[int, list[Equation]] = {}
    for operation in graph.operations:
        for operand in operation.operands:
            users.setdefault(id(operand), []).append(operation)
    ends = {id(each) for each in graph.outputs}
    found = []
    for operation in graph.operations:
        if operation.name == "dot_general":
            found += _fused(operation, weights, users, ends)
    return found


def _fused(product: Equation, weights: Container[int], users: Mapping, outputs: set[int]) -> list:
    operand, kernel = product.operands
    root = _root(kernel)
    summed = ((len(operand.shape) - 1,), (0,)), ((), ())
    given = tuple(tuple(map(tuple, each)) for each in product.equation.params["dimension_numbers"])
    if not _is_one(root, weights) or len(root.shape) != 2 or given != summed:
        return []
    value, bias = product.results[0], None
    while id(value) not in outputs and len(users.get(id(value), ())) == 1:
        (user,) = users[id(value)]
        if user.name in ("add", "add_any") and bias is None:
            bias = _bias(user, value, weights)
            if bias is None:
                break
        elif user.name not in _SAME:
            break
        value = user.results[0]
    ends = users.get(id(value), [])
    factors = {_factors(end, value) for end in ends}
    apart = factors.pop() if len(factors) == 1 else None
    if id(value) in outputs or apart is None:
        return []
    return [Fused(root, operand, bias, apart, tuple(ends), product)]


def _bias(addition: Equation, value: Atom, weights: Container[int]) -> Atom | None:
    """The weight that is added to every row of features."""
    others = [each for each in addition.operands if each is not value]
    other = others[0] if len(others) == 1 else None
    while other is not None and other.operation is not None:
        operation = other.operation
        last = len(other.shape) - 1
        repeats = (
            operation.name == "broadcast_in_dim"
            and len(operation.operands[0].shape) > 0
            and operation.equation.params["broadcast_dimensions"][-1] == last
        )
        if not repeats and operation.name not in (*_SAME, "reshape"):
            return None
        other = operation.operands[0]
    is_bias = other is not None and _is_one(other, weights) and other.shape == value.shape[-1:]
    return other if is_bias else None


def _factors(end: Equation, value: Atom) -> tuple[int, ...] | None:
    """The sizes that an operation takes features apart into; the first ones are not split."""
    before = value.shape
    if end.name == "reshape":
        after = end.results[0].shape
        kept = after[: len(before) - 1] == before[:-1]
        apart = tuple(map(int, after[len(before) - 1 :]))
        return apart if kept and len(apart) > 1 else None
    if end.name == "split" and end.equation.params["axis"] == len(before) - 1:
        sizes = {int(size) for size in end.equation.params["sizes"]}
        return _in_parts(before[-1], sizes.pop()) if len(sizes) == 1 else None
    if end.name == "slice" and end.equation.params["strides"] is None:
        start, after = end.equation.params["start_indices"], end.results[0].shape
        one = after[:-1] == before[:-1] and after[-1] and not start[-1] % after[-1]
        return _in_parts(before[-1], after[-1]) if one else None
    return None


def _in_parts(features: int, size: int) -> tuple[int, int] | None:
    return (features // size, size) if 0 < size < features and not features % size else None


def _root(value: Atom) -> Atom:
    while value.operation is not None and value.operation.name in _SAME:
        value = value.operation.operands[0]
    return value


def _is_one(value: Atom, weights: Container[int]) -> bool:
    return value.operation is None and (
        id(value) in weights or (value.constant is not None and id(value.constant) in weights)
    )


def taken_apart(jaxpr: Any, weights: int) -> tuple[Any, dict[int, tuple[int, ...]]]:
    """Rewrites a program so that fused kernels are inputs in their taken-apart shape.

    Args:
        jaxpr: The program, a `ClosedJaxpr`.
        weights: The number of its first inputs that are weights.

    Returns:
        The program, a `ClosedJaxpr`, and the new shapes of the reshaped weights; the same
        program, and no shapes, if there are none.
    """
    graph = graph_of(jaxpr)
    number = {id(atom): n for n, atom in enumerate(graph.inputs[:weights])}
    found = fused_in(graph, number)
    if not found:
        return jaxpr, {}
    views: dict[int, tuple[int, ...]] = {}
    instead: dict[Equation, Instead] = {}
    for each in found:
        views[number[id(each.kernel)]] = (each.kernel.shape[0], *each.factors)
        if each.bias is not None:
            views[number[id(each.bias)]] = each.factors
        instead |= each.replaced(lambda _, array: array)
    if _is_read_elsewhere(graph, instead, {id(graph.inputs[n]) for n in views}):
        return jaxpr, {}
    given = [
        jax.ShapeDtypeStruct(views.get(n, atom.shape), atom.aval.dtype)
        for n, atom in enumerate(graph.inputs)
    ]
    return jax.make_jaxpr(lambda *arrays: graph.evaluate(arrays, instead))(*given), views


def _is_read_elsewhere(
    graph: Graph, instead: Mapping[Equation, Instead], weights: set[int]
) -> bool:
    """Whether a weight that is reshaped is also read in its stored shape."""
    left: Sequence[Equation] = graph.needed({e: new.operands for e, new in instead.items()})
    return any(
        id(operand) in weights for each in left if each not in instead for operand in each.operands
    )
