"""Sends tokens to experts that are split over the data axes.

If a layer assigns tokens to experts by products with one-hot tensors, as GShard does, some values
have both a dimension of experts and rows of the batch. One mesh axis can split only one of the two.
By default the compiler keeps the rows split and gathers every expert's kernel. Here these values
are split by rows until the first product with experts' kernels, by experts until the last one, and
then by rows again. The compiler changes the layout by an all-to-all. If there are so many tokens
that gathering the kernels takes less time, the program does not change.

References:
    - https://arxiv.org/abs/2006.16668
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import axis_size, entry_names
from keras_tpu_dist.programs.dimensions import Dimensions, dimensions
from keras_tpu_dist.programs.graph import Atom, Equation, Graph, graph_of
from keras_tpu_dist.programs.partitioner.places import constrained

# (experts, features, units)
_RANK = 3
# How much longer it takes to exchange a byte of tokens, twice in each direction, than a step takes
# longer for a byte of kernels that it gathers twice and sums up, most of it beside products, if
# devices wait for every all-to-all. With ASYNCHRONOUS, both take the same. Fitted to what the
# compiler says of both ways for 15 shapes (`python benchmarks/experts.py sizes [--overlap]`).
_EXCHANGE_FACTOR = 2.5
# By libtpu's default devices wait. It is not ours either: for some tables on v5e:8x8 the compiler
# says "Async all-to-all not supported on limited ICI", and refuses the program.
ASYNCHRONOUS = "xla_tpu_enable_async_all_to_all"


def exchange_tokens(
    model: Any, axes_of: Callable[[Any], Sequence], data_axes: Sequence[str]
) -> None:
    """Exchanges tokens in the layers of a model whose experts are split over the data axes.

    Args:
        axes_of: A function from a variable to its layout, one entry per dimension.
    """
    for layer in _keras.flatten_layers(model):
        for kernel in _kernels(layer):
            first = (*axes_of(kernel), None)[0]
            if set(entry_names(first)) & set(data_axes):
                _keras.route_calls(type(layer), _keras.Wrapper.EXCHANGED, _around)


def _kernels(layer: Any) -> list:
    """The layer's own weights that may be kernels of experts."""
    found = [v for v in _keras.own_variables(layer) if v.trainable and len(v.shape) >= _RANK]
    return found if len(found) > 1 else []


def _around(stock: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps the call of a layer class; some of its layers have experts over the data axes."""
    strategy = _keras.active_strategy()
    if (
        strategy is None
        or not (axes := exchange_axes(layer, strategy))
        or jax.sharding.get_abstract_mesh().manual_axes
        or not _keras.in_compiled_call()
    ):
        return stock(*args, **kwargs)

    def exchanged(jaxpr: Any, inputs: list) -> list | None:
        exchange = _Exchange(graph_of(jaxpr), strategy.mesh, tuple(strategy.data_axes), axes)
        options = strategy.runner.compiler_options or {}
        overlapped = str(options.get(ASYNCHRONOUS, False)).lower() in ("true", "1")
        pays = exchange.is_by_expert and exchange.is_shorter(overlapped)
        return exchange.evaluate(inputs) if pays else None

    return _keras.computed_otherwise(stock, layer, args, kwargs, exchanged)


def exchange_axes(layer: Any, strategy: Any) -> dict[int, tuple[str, ...]]:
    """The axes that split the experts of a layer's kernels, by the id of the kernel's array.

    Only kernels for which these include a data axis.
    """
    found = {}
    for kernel in _kernels(layer):
        layout = _keras.variable_layout(kernel)
        if isinstance(layout, NamedSharding) and layout.spec:
            names = entry_names(layout.spec[0])
            if set(names) & set(strategy.data_axes):
                found[id(_keras.full_precision(kernel))] = names
    return found


def is_shorter(tokens_bytes: float, kernels_bytes: float, overlapped: bool = False) -> bool:
    """Whether exchanging tokens takes less time than gathering kernels.

    Args:
        overlapped: Whether all-to-alls run beside other work.
    """
    return (1 if overlapped else _EXCHANGE_FACTOR) * tokens_bytes <= kernels_bytes


class _Exchange:
    """Decides which values of a program are split by rows, and which by experts.

    Attributes:
        products: For each product with kernels of experts, the number of the operand with the
            kernels and the axes that split them.
        is_by_expert: Whether all kernels multiply tokens by expert; `False` if every expert
            computes every token.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        rows: tuple[str, ...],
        kernels: Mapping[int, tuple[str, ...]],
    ):
        self._graph, self._mesh, self._rows = graph, mesh, rows
        self.products: dict[Equation, tuple[int, tuple[str, ...]]] = {}
        # For each value its dimension of experts, and that of rows. For each value of a kernel its
        # dimension of experts, and the kernel.
        self._experts: dict[int, int] = {}
        self._by_rows: dict[int, int] = {}
        self._kernels: dict[int, tuple[int, int]] = {}
        self._axes, met = kernels, set()
        # Other axes that split experts, as tensor parallelism does, split them throughout.
        every = dict.fromkeys(name for axes in kernels.values() for name in axes)
        self._stay = tuple(name for name in every if name not in rows)
        first = next((v for v in graph.inputs if v.shape), None)
        for value in graph.inputs:
            if first is not None and value.shape[:1] == first.shape[:1]:
                self._by_rows[id(value)] = 0
        for operation in graph.operations:
            for operand in operation.operands:
                if operand.constant is not None and id(operand.constant) in kernels:
                    self._kernels[id(operand)] = 0, id(operand.constant)
            self._read(operation, met)
        self.is_by_expert = met == set(kernels)
        # For each product whose results go to experts, what `_batched` needs.
        self._entering = dict[Equation, tuple[int, int]]()
        for operation, (side, _) in self.products.items():
            tokens = operation.operands[1 - side]
            if id(tokens) not in self._experts:
                self._enters(tokens, self._place_of(operation, side))

    def _read(self, operation: Equation, met: set[int]) -> None:
        found = dimensions(operation.equation)
        if found is None:
            return
        ways = axis_size(self._mesh, self._rows)
        if operation.name == "dot_general" and self._is_product(operation, found, met):
            return
        for step in found.mapped:
            operand, result = operation.operands[step.operand], operation.results[step.result]
            if self._by_rows.get(id(operand)) == step.dimension and step.parts % ways == 0:
                self._by_rows.setdefault(id(result), step.to)
            whole = step.parts == result.shape[step.to]
            if self._experts.get(id(operand)) == step.dimension and whole:
                self._experts.setdefault(id(result), step.to)
            dim, kernel = self._kernels.get(id(operand), (None, 0))
            if len(operation.operands) == 1 and dim == step.dimension and whole:
                self._kernels[id(result)] = step.to, kernel

    def _is_product(self, operation: Equation, found: Dimensions, met: set[int]) -> bool:
        """Records a product of tokens and kernels that is batched over experts."""
        _, shared = operation.equation.params["dimension_numbers"]
        for side, operand in enumerate(operation.operands):
            dim, kernel = self._kernels.get(id(operand), (None, 0))
            other, result = operation.operands[1 - side], operation.results[0]
            if dim not in shared[side] or id(other) in self._kernels:
                continue
            place = list(shared[side]).index(dim)
            self.products[operation] = side, self._axes[kernel]
            met.add(kernel)
            # Batch dimensions come first in the result.
            self._experts[id(result)] = place
            rows = self._by_rows.get(id(other))
            for step in found.mapped:
                if step.operand != side and step.dimension == rows:
                    self._by_rows[id(result)] = step.to
            return True
        return False

    def _place_of(self, operation: Equation, side: int) -> int:
        """The dimension of experts in the tokens of a product with kernels."""
        _, shared = operation.equation.params["dimension_numbers"]
        dim, _ = self._kernels[id(operation.operands[side])]
        return int(shared[1 - side][list(shared[side]).index(dim)])

    def _enters(self, value: Atom, dim: int) -> None:
        """Records the product that computes tokens by expert, if only one operand has experts."""
        operation = value.operation
        if operation is None or (found := dimensions(operation.equation)) is None:
            return
        size = value.shape[dim]
        of = [step for step in found.mapped if step.to == dim and step.parts == size]
        if len(of) != 1:
            return
        if operation.name == "dot_general":
            self._entering[operation] = of[0].operand, of[0].dimension
        elif len(operation.operands) == 1:
            self._enters(operation.operands[0], of[0].dimension)

    def evaluate(self, inputs: Sequence[Any]) -> list[Any]:
        """Computes the program's outputs."""
        return self._graph.evaluate(inputs, {}, self._run)

    def is_shorter(self, overlapped: bool) -> bool:
        """Whether exchanging the tokens takes less time than gathering the kernels."""
        sent: dict[int, Atom] = {}
        kernels: dict[int, Atom] = {}
        for operation, (side, _) in self.products.items():
            kernel, tokens = operation.operands[side], operation.operands[1 - side]
            kernels[id(kernel)] = kernel
            if id(tokens) not in self._experts:
                sent[id(tokens)] = tokens
        for operation in self._graph.operations:
            if not any(id(result) in self._experts for result in operation.results):
                sent |= {id(v): v for v in operation.operands if id(v) in self._experts}
        tokens_bytes = sum(map(_bytes, sent.values())) / axis_size(self._mesh, self._rows)
        return is_shorter(tokens_bytes, sum(map(self._added, kernels.values())), overlapped)

    def _added(self, kernel: Atom) -> float:
        """Bytes of a kernel that a step waits for: of as many experts as there are devices.

        If a device has several experts, the others' kernels are gathered while these multiply.
        """
        dim, key = self._kernels[id(kernel)]
        return _bytes(kernel) * min(1, axis_size(self._mesh, self._axes[key]) / kernel.shape[dim])

    def _run(self, operation: Equation, arrays: list[Any]) -> list[Any]:
        if operation not in self.products:
            arrays = self._back(operation, arrays)
            batched = self._entering.get(operation) or self._leaving(operation)
            if batched is None:
                return operation.run(arrays)
            return [_batched(operation, arrays, *batched)]
        side, axes = self.products[operation]
        tokens, place = operation.operands[1 - side], self._place_of(operation, side)
        rows = self._rows_of(tokens, place)
        given = arrays[1 - side]
        if id(tokens) not in self._experts:
            given = self._split_rows(given, rows, place)
        arrays[1 - side] = self._split_experts(given, rows, place, axes)
        (result,) = operation.run(arrays)
        place = self._experts[id(operation.results[0])]
        rows = self._rows_of(operation.results[0], place)
        return [self._split_experts(result, rows, place, axes)]

    def _leaving(self, operation: Equation) -> tuple[int, int] | None:
        """The operand and dimension of experts that a product sums over."""
        if operation.name != "dot_general":
            return None
        summed, _ = operation.equation.params["dimension_numbers"]
        for side, operand in enumerate(operation.operands):
            dim = self._experts.get(id(operand))
            if dim is not None and dim in summed[side]:
                return side, dim
        return None

    def _back(self, operation: Equation, arrays: list[Any]) -> list[Any]:
        """The operands; split by rows if the operation mixes experts."""
        if any(id(result) in self._experts for result in operation.results):
            return arrays
        return [
            self._split_rows(array, self._rows_of(value, place), place)
            if (place := self._experts.get(id(value))) is not None
            else array
            for value, array in zip(operation.operands, arrays, strict=True)
        ]

    def _rows_of(self, value: Atom, experts: int) -> int | None:
        """The dimension of rows; `None` if the layer is given tokens by expert."""
        rows = self._by_rows.get(id(value))
        return None if rows == experts else rows

    def _split_rows(self, array: Any, rows: int | None, experts: int) -> Any:
        if rows is None or array.shape[rows] % axis_size(self._mesh, self._rows):
            return array
        return constrained(array, self._mesh, {rows: self._rows, experts: self._stay})

    def _split_experts(self, array: Any, rows: int | None, experts: int, axes: Any) -> Any:
        dims = {experts: axes}
        left = tuple(name for name in self._rows if name not in axes)
        if rows is not None and array.shape[rows] % axis_size(self._mesh, left or None) == 0:
            dims[rows] = left
        return constrained(array, self._mesh, dims)


def _batched(operation: Equation, arrays: list[Any], side: int, dim: int) -> Any:
    """A product, computed expert by expert: as a product that is batched over experts.

    The compiler lays out the result of a batched product expert by expert, which is how an
    all-to-all sends it; otherwise it copies the result of this product, or of that of its gradient.
    It finds that all experts multiply the same operand, or that their products are summed, so there
    are no arrays for that.

    Args:
        side: The operand that has experts, in its dimension `dim`.
    """
    params = operation.equation.params
    summed, shared = (list(map(list, pair)) for pair in params["dimension_numbers"])
    options = {name: params[name] for name in ("precision", "preferred_element_type")}
    if is_summed := dim in summed[side]:
        place = summed[side].index(dim)
        pair = [of.pop(place) for of in summed]
    else:
        other = arrays[1 - side]
        every = jnp.broadcast_to(other, (arrays[side].shape[dim], *other.shape))
        arrays = [every if number == 1 - side else array for number, array in enumerate(arrays)]
        summed[1 - side] = [1 + d for d in summed[1 - side]]
        shared[1 - side] = [1 + d for d in shared[1 - side]]
        pair = [dim if number == side else 0 for number in range(2)]
    by_expert = lax.dot_general(
        *arrays,
        dimension_numbers=(
            (summed[0], summed[1]),
            ((pair[0], *shared[0]), (pair[1], *shared[1])),
        ),
        **options,
    )
    if is_summed:
        return jnp.sum(by_expert, 0)
    found = dimensions(operation.equation)
    assert found is not None  # a product has its dimensions in the table
    (to,) = [step.to for step in found.mapped if step[:2] == (side, dim)]
    return jnp.moveaxis(by_expert, 0, to)


def _bytes(value: Atom) -> int:
    return math.prod(value.shape) * value.aval.dtype.itemsize
