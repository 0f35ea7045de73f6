"""Fused kernels for queries, keys and values: reshaped before the product.

A kernel may compute features of several kinds one after another, and the layer then separates them
(`reshape` to three times heads, `split`). Such features cannot be split by heads, because a part of
the row is not a part of every kind. A product with the reshaped kernel gives the same numbers, and
its features have a dimension that can be split.

A quantized kernel is multiplied by a function of Keras's, with its own gradient. It gets the
features in another order: all that one device computes, of every kind, then those of the next one.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_tpu_dist.programs.graph import (
    SAME_VALUES,
    Atom,
    Equation,
    Graph,
    Instead,
    graph_of,
    root_of,
)
from keras_tpu_dist.programs.jaxprs import any_equation

# Constrains the layout of the array of a weight that is reshaped.
Laid = Callable[[Atom, Any], Any]


@dataclass(frozen=True)
class Fused:
    """A product whose features are separated.

    Attributes:
        kernel: The kernel, `(in, features)`.
        operand: The other operand, `(..., in)`.
        bias: The bias, `(features,)`, or `None`.
        factors: The sizes that the features are reshaped to.
        ends: The operations that separate them.
        scales: Scales and zero points, `(..., features)`, of a quantized kernel.
    """

    kernel: Atom
    operand: Atom
    bias: Atom | None
    factors: tuple[int, ...]
    ends: tuple[Equation, ...]
    product: Equation
    scales: tuple[Atom, ...] = ()

    def views(self) -> list[tuple[Atom, tuple[int, ...]]]:
        """The weights, and the shapes that they are reshaped to."""
        if self.scales:
            kinds = self.factors[0]
            found = [
                (weight, (*weight.shape[:-1], kinds, weight.shape[-1] // kinds))
                for weight in (self.kernel, *self.scales)
            ]
        else:
            found = [(self.kernel, (self.kernel.shape[0], *self.factors))]
        return found if self.bias is None else [*found, (self.bias, self.factors)]

    def replaced(self, laid: Laid, ways: int | None = None) -> dict[Equation, Instead]:
        """Replacements for the ends, computed from the reshaped weights, in one evaluation.

        Args:
            laid: Constrains the layout of the array of a weight that is reshaped.
            ways: The number of devices that share the features of a quantized kernel. By default
                its product is only similar: it has the same dimensions.
        """
        made = self.product.results[0].aval.dtype
        weights = [weight for weight, _ in self.views()]
        own = set(map(id, weights))
        others = [operand for operand in self.product.operands if id(root_of(operand)) not in own]
        # By the calls of `jax.checkpoint` that the ends are in.
        computed: dict[tuple[Equation, ...], Any] = {}

        def features(end: Equation, arrays: list[Any]) -> Any:
            if end.within not in computed:
                values = dict(zip(map(id, (*others, *weights)), arrays, strict=True))
                result = self._product(values, laid, ways)
                if self.bias is not None:
                    bias = values[id(self.bias)].reshape(self.factors)
                    result = result + laid(self.bias, bias).astype(made)
                computed[end.within] = result
            return computed[end.within]

        def instead(end: Equation) -> Instead:
            return Instead([*others, *weights], lambda arrays: _ended(end, features(end, arrays)))

        return {end: instead(end) for end in self.ends}

    def _product(self, values: dict[int, Any], laid: Laid, ways: int | None) -> Any:
        """The features, separated."""
        if self.scales and ways is not None:
            return self._quantized(values, laid, ways)
        operand, views = values[id(self.operand)], self.views()
        # Cast before it is sent.
        kernel = values[id(self.kernel)].astype(operand.dtype)
        kernel = laid(self.kernel, kernel.reshape(views[0][1]))
        if self.scales:
            kernel = self._similar(kernel, values)
        dims = ((operand.ndim - 1,), (0,)), ((), ())
        made = self.product.results[0].aval.dtype
        result = lax.dot_general(operand, kernel, dims, preferred_element_type=made)
        return result.reshape(*operand.shape[:-1], *self.factors)

    def _similar(self, kernel: Any, values: dict[int, Any]) -> Any:
        """A kernel of floats whose dimensions depend on the same ones of quantized weights."""
        size, kinds = kernel.shape[0], self.factors[0]
        if self._packed:
            kernel = jnp.stack([kernel, kernel], -1).reshape(size, kinds, -1)
        for scale in self.scales:
            scales = values[id(scale)].reshape(-1, *kernel.shape[1:]).astype(kernel.dtype)
            if len(scales) > 1:
                scales = jnp.take(scales, jnp.zeros(size, "int32"), axis=0, mode="clip")
            kernel = kernel * scales
        return kernel

    def _quantized(self, values: dict[int, Any], laid: Laid, ways: int) -> Any:
        arranged = {
            id(weight): _by_device(laid(weight, values[id(weight)].reshape(view)), ways)
            for weight, view in self.views()
            if weight is not self.bias
        }
        operands = [
            arranged[id(root)].astype(operand.aval.dtype)
            if id(root := root_of(operand)) in arranged
            else values[id(operand)]
            for operand in self.product.operands
        ]
        (result,) = self.product.run(operands)
        rows = result.shape[:-1]
        result = jnp.swapaxes(result.reshape(*rows, ways, self.factors[0], -1), -3, -2)
        return result.reshape(*rows, *self.factors)

    @property
    def _packed(self) -> bool:
        """Whether two values share a byte."""
        return self.kernel.shape[-1] != self.scales[0].shape[-1]


def _by_device(apart: Any, ways: int) -> Any:
    """Puts features of several kinds in the order of the devices that share each kind."""
    *rows, kinds, size = apart.shape
    apart = jnp.swapaxes(apart.reshape(*rows, kinds, ways, size // ways), -3, -2)
    return apart.reshape(*rows, kinds * size)


# What takes features apart. See `_factors`.
_ENDS = ("reshape", "split", "slice")


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


# From the id of a quantized kernel to those of its scales and zero points.
Scales = Mapping[int, Container[int]]


def fused_in(graph: Graph, weights: Container[int], scales: Scales) -> list[Fused]:
    """The products of a program whose features are separated, and not one by one.

    Args:
        graph: The program.
        weights: The ids of values, or of the arrays of constants, that may be such kernels.
        scales: From the ids of quantized kernels to those of their scales and zero points.
    """
    users, ends = _users(graph), set(map(id, graph.outputs))
    found = (_fused(operation, weights, scales, users, ends) for operation in graph.operations)
    return [fused for fused in found if fused is not None]


def _users(graph: Graph) -> dict[int, list[Equation]]:
    """The operations that read each value, by its id."""
    users: dict[int, list[Equation]] = {}
    for operation in graph.operations:
        for operand in operation.operands:
            users.setdefault(id(operand), []).append(operation)
    return users


def _fused(
    product: Equation, weights: Container[int], scales: Scales, users: Mapping, outputs: set[int]
) -> Fused | None:
    kernel, beside = _multiplied(product, weights, scales)
    if kernel is None:
        return None
    value, bias = _features(product, weights, users, outputs)
    ends = users.get(id(value), [])
    factors = {_factors(end, value) for end in ends}
    apart = factors.pop() if len(factors) == 1 else None
    # Of features of odd width, two kinds may share a byte.
    if id(value) in outputs or apart is None or (beside and kernel.shape[-1] % apart[0]):
        return None
    return Fused(kernel, product.operands[0], bias, apart, tuple(ends), product, beside)


def _features(
    product: Equation, weights: Container[int], users: Mapping, outputs: set[int]
) -> tuple[Atom, Atom | None]:
    """The features that a product computes, and the bias that is added to them."""
    value, bias = product.results[0], None
    while id(value) not in outputs and len(users.get(id(value), ())) == 1:
        (user,) = users[id(value)]
        if user.name in ("add", "add_any") and bias is None:
            bias = _bias(user, value, weights)
            if bias is None:
                break
        elif user.name not in SAME_VALUES:
            break
        value = user.results[0]
    return value, bias


def _multiplied(
    product: Equation, weights: Container[int], scales: Scales
) -> tuple[Atom | None, tuple[Atom, ...]]:
    """The kernel that an operation multiplies its first operand by, and the kernel's scales."""
    roots = list(map(root_of, product.operands))
    if product.name == "dot_general":
        summed = ((len(roots[0].shape) - 1,), (0,)), ((), ())
        dims = product.equation.params["dimension_numbers"]
        plain = tuple(tuple(map(tuple, dim)) for dim in dims) == summed
        is_kernel = plain and len(roots[1].shape) == 2 and _id(roots[1]) in weights
        return roots[1] if is_kernel else None, ()
    if product.name.startswith("custom_vjp_call"):
        for kernel in roots:
            if own := scales.get(_id(kernel)):
                return kernel, tuple(root for root in roots if _id(root) in own)
    return None, ()


def _bias(addition: Equation, value: Atom, weights: Container[int]) -> Atom | None:
    """The weight that is added to every row of features."""
    others = [operand for operand in addition.operands if operand is not value]
    other = others[0] if len(others) == 1 else None
    while other is not None and other.operation is not None:
        operation = other.operation
        last = len(other.shape) - 1
        repeats = (
            operation.name == "broadcast_in_dim"
            and len(operation.operands[0].shape) > 0
            and operation.equation.params["broadcast_dimensions"][-1] == last
        )
        if not repeats and operation.name not in (*SAME_VALUES, "reshape"):
            return None
        other = operation.operands[0]
    is_bias = other is not None and _id(other) in weights and other.shape == value.shape[-1:]
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


def _id(value: Atom) -> int:
    return id(value) if value.constant is None else id(value.constant)


def taken_apart(
    jaxpr: Any, weights: int, scales: Mapping[int, Sequence[int]]
) -> tuple[Any, dict[int, tuple[int, ...]]]:
    """Rewrites a program so that fused kernels are inputs in their taken-apart shape.

    Args:
        jaxpr: The program, a `ClosedJaxpr`.
        weights: The number of its first inputs that are weights.
        scales: From the numbers of quantized kernels to those of their scales and zero points.

    Returns:
        The program, a `ClosedJaxpr`, and the new shapes of the reshaped weights; the same
        program, and no shapes, if there are none.
    """
    if not any_equation(jaxpr, lambda equation: equation.primitive.name in _ENDS):
        return jaxpr, {}
    graph = graph_of(jaxpr)
    number = {id(atom): n for n, atom in enumerate(graph.inputs[:weights])}
    ids = list(number)
    own = {ids[kernel]: {ids[each] for each in beside} for kernel, beside in scales.items()}
    found = fused_in(graph, number, own)
    if not found:
        return jaxpr, {}
    views: dict[int, tuple[int, ...]] = {}
    instead: dict[Equation, Instead] = {}
    for fused in found:
        views |= {number[id(weight)]: view for weight, view in fused.views()}
        instead |= fused.replaced(lambda _, array: array)
    if _is_read_elsewhere(graph, instead, {id(graph.inputs[n]) for n in views}):
        return jaxpr, {}
    given = [
        jax.ShapeDtypeStruct(views.get(n, atom.shape), atom.aval.dtype)
        for n, atom in enumerate(graph.inputs)
    ]
    program = jax.make_jaxpr(lambda *arrays: graph.evaluate(arrays, instead))(*given)
    return program, views


def _is_read_elsewhere(
    graph: Graph, instead: Mapping[Equation, Instead], weights: set[int]
) -> bool:
    """Whether a weight that is reshaped is also read in its stored shape."""
    left: Sequence[Equation] = graph.needed({e: new.operands for e, new in instead.items()})
    return any(
        id(operand) in weights for each in left if each not in instead for operand in each.operands
    )
