"""Values between blocks: split along time over the axes that split the weights.

A kernel that closes a pair sums over features that the devices share. Written plainly, the sum is
whole on each of them, and so is everything up to the next kernels: residual sums, norms, dropout.
Here every device gets a part of the times of the sum, and computes those values for that part
alone; the input of a kernel is gathered. An all-reduce is a reduce-scatter and an all-gather, so
as many bytes are sent, and the values in between take a part of the memory.

It is what Megatron-LM calls sequence parallelism. What mixes times in between is gathered by the
partitioner.

References:
    https://arxiv.org/abs/2205.05198
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import entry_names
from keras_tpu_dist.programs.answers import (
    Answer,
    CallContext,
    Level,
    Rewritten,
    Why,
    WrittenProgram,
)
from keras_tpu_dist.programs.graph import (
    SAME_VALUES,
    Atom,
    Equation,
    Graph,
    Instead,
    graph_of,
)
from keras_tpu_dist.programs.partitioner import constrained

# With "auto", a device's sums must have as many bytes: smaller ones take the links' latency, twice
# as often.
_SMALLEST_BYTES = 2**20
# (batch, time, features)
_RANK, _TIME, _FEATURES = 3, 1, 2

SPLIT = "its sums are split along time"
_WHOLE = "its sums are whole on every device"


@dataclass(frozen=True)
class Between:
    """How values between blocks may be split.

    Attributes:
        axes: The mesh axes that split weights, and along which sums are split.
        time: The axis that splits time everywhere, or `None`.
        always: Whether small sums are split too.
    """

    axes: tuple[str, ...]
    time: str | None
    always: bool


_Compute = Callable[[list[Any]], list[Any]]
_Layout = Callable[[Any], Any]

# On a layer that multiplies by weights of a plan; on such a weight, the dimensions that are split.
mark = _keras.Mark("_keras_tpu_dist_between")
split_dims = _keras.Mark("_keras_tpu_dist_split_dims")


class SumsByTime:
    """The pass that splits sums along time, and gathers the inputs of kernels."""

    name = "between"
    level = Level.LAYER

    def wants(self, layer: Any, strategy: Any) -> bool:
        """Whether a plan has marked a layer."""
        return strategy is not None and mark.of(layer) is not None

    def rewritten(self, program: WrittenProgram, where: CallContext) -> Rewritten | Why:
        """The call with its inputs gathered and its sums split, or why they are whole."""
        if where.mesh is None:
            return Why()
        graph, layer = graph_of(program.jaxpr), where.layer
        call = _Call(mark.of(layer), where.mesh, where.data_axes, _dims_by_array(layer))
        instead, words, done = call.replaced(graph)
        answers = [Answer(layer.path, words, done)] if words else []
        if not instead:
            return Why(answers)
        return Rewritten(graph.evaluate(program.args, instead), answers)

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """Nothing: whether a call sums over split features is only known from its program."""
        return []


def _dims_by_array(layer: Any) -> dict[int, tuple[Any, tuple[int, ...]]]:
    """From the id of a weight's array in the program to the array, and the dimensions split."""
    weights = [v for v in _keras.own_variables(layer) if split_dims.of(v) is not None]
    arrays = ((_keras.full_precision(weight), split_dims.of(weight)) for weight in weights)
    return {id(array): (array, dims) for array, dims in arrays}


@dataclass(frozen=True)
class _Call:
    """One call of a layer, and the weights in it.

    Attributes:
        weights: From the id of a weight's array to the array, and the dimensions that are split.
    """

    between: Between
    mesh: Mesh
    data_axes: tuple[str, ...]
    weights: Mapping[int, tuple[Any, tuple[int, ...]]]

    def replaced(self, graph: Graph) -> tuple[dict[Equation, Instead], str, bool]:
        """Replacements of products and lookups; if the call sums, what is done with the sums."""
        instead: dict[Equation, Instead] = {}
        words, done = "", False
        fixed = _of_weights_alone(graph)
        for operation in graph.operations:
            if not _is_product(operation) and operation.name != "gather":
                continue
            numbers = range(len(operation.operands))
            kernels = [n for n in numbers if id(operation.operands[n]) in fixed]
            inputs = [n for n in numbers if n not in kernels]
            if not inputs or not any(self._sums_over(operation, n) for n in kernels):
                compute = self._gathered_before(operation, kernels, inputs)
            elif why := self._why_whole(operation.results[0]):
                is_sequence = len(operation.results[0].shape) == _RANK
                words = words or (f"{_WHOLE}: {why}" if is_sequence else "")
                compute = None
            else:
                words, done = f"{SPLIT} over {', '.join(map(repr, self.between.axes))}", True
                compute = self._split_after(operation)
            if compute is not None:
                instead[operation] = Instead(operation.operands, compute)
        return instead, words, done

    def _sums_over(self, operation: Equation, number: int) -> bool:
        """Whether an operation sums over a dimension of an operand that the devices share."""
        weight, order = _weight_of(operation.operands[number])
        known, split = self.weights.get(id(weight), (None, ()))
        dims = {order.index(dim) for dim in split} if known is not None else set()
        if operation.name == "dot_general":
            (summed, _) = operation.equation.params["dimension_numbers"]
            return number < 2 and bool(dims & set(summed[number]))
        # A quantized kernel is multiplied by a function of Keras's; a table is looked up in.
        return operation.name != "conv_general_dilated" and 0 in dims

    def _why_whole(self, value: Atom) -> str:
        """Why a value is not split along time; `""` if it is."""
        if len(value.shape) != _RANK or not jnp.issubdtype(value.aval.dtype, jnp.floating):
            return f"{value.aval.dtype}{list(value.shape)} is not (batch, time, features) of floats"
        if value.shape[_TIME] % self._ways:
            return f"a time of {value.shape[_TIME]} is not divisible by {self._ways}"
        rows = math.prod(self.mesh.shape[name] for name in self.data_axes)
        size = math.prod(value.shape) * value.aval.dtype.itemsize // rows
        if not self.between.always and size < _SMALLEST_BYTES:
            return f"{size} bytes a device are below {_SMALLEST_BYTES}"
        return ""

    @property
    def _ways(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self._split[_TIME])

    @property
    def _whole(self) -> dict[int, tuple[str, ...]]:
        return {_TIME: entry_names(self.between.time), _FEATURES: ()}

    @property
    def _split(self) -> dict[int, tuple[str, ...]]:
        return {_TIME: (*entry_names(self.between.time), *self.between.axes), _FEATURES: ()}

    def _gathered_before(
        self, operation: Equation, kernels: list[int], inputs: list[int]
    ) -> _Compute | None:
        """Computes a product after its inputs are gathered, `None` if it has no such inputs."""
        matrices = [n for n in kernels if len(operation.operands[n].shape) > 1]
        gathered = [n for n in inputs if not self._why_whole(operation.operands[n])]
        times = {operation.operands[n].shape[_TIME] for n in inputs if self._has_time(operation, n)}
        if not matrices or not times or not _is_product(operation):
            return None

        def compute(arrays: list[Any]) -> list[Any]:
            whole = [self._gather(a) if n in gathered else a for n, a in enumerate(arrays)]
            return [self._all_times(result, times) for result in operation.run(whole)]

        return compute

    def _has_time(self, operation: Equation, number: int) -> bool:
        shape = operation.operands[number].shape
        return len(shape) >= _RANK and not shape[_TIME] % self._ways

    def _all_times(self, result: Any, times: set[int]) -> Any:
        """What a kernel computes, with all times on every device, and so is its gradient.

        Of a gradient that is split along time, XLA's partitioner computes that of a kernel wrongly
        if the other operand is split along another dimension that is summed over: it leaves out the
        sum over the axes of the batch.
        """
        if result.ndim < _RANK or result.shape[_TIME] not in times:
            return result
        return constrained(result, self.mesh, {_TIME: entry_names(self.between.time)})

    def _split_after(self, operation: Equation) -> _Compute:
        """Computes a sum, and splits it."""

        def compute(arrays: list[Any]) -> list[Any]:
            first, *others = operation.run(arrays)
            if operation.name == "gather":
                # Otherwise the whole table would be gathered, for the times of each device.
                first = constrained(first, self.mesh, self._whole)
            return [self._scatter(first), *others]

        return compute

    def _gather(self, array: Any) -> Any:
        """An array with all times on every device; its gradient is split."""
        return _with_gradient(self._gathered, self._parts)(array)

    def _scatter(self, array: Any) -> Any:
        """An array with a part of the times on every device; its gradient is gathered, once."""
        return _with_gradient(self._parts, self._gathered)(array)

    def _parts(self, array: Any) -> Any:
        return constrained(array, self.mesh, self._split)

    def _gathered(self, array: Any) -> Any:
        return constrained(self._parts(array), self.mesh, self._whole)


def _with_gradient(function: _Layout, gradient: _Layout) -> _Layout:
    """A function whose gradient is another one than JAX would derive.

    The gradient of a layout has that layout too, so a gathered input would have a gradient that is
    summed whole on every device.
    """
    laid = jax.custom_vjp(function)
    laid.defvjp(lambda array: (function(array), None), lambda _, g: (gradient(g),))
    return laid


def _is_product(operation: Equation) -> bool:
    # A quantized kernel is multiplied by a function of Keras's, with its own gradient.
    products = ("dot_general", "conv_general_dilated")
    return operation.name in products or operation.name.startswith("custom_vjp_call")


def _of_weights_alone(graph: Graph) -> set[int]:
    """The ids of values that depend on no input of the call."""
    fixed: set[int] = set()
    for operation in graph.operations:
        fixed |= {id(atom) for atom in operation.operands if atom.constant is not None}
        if all(id(atom) in fixed for atom in operation.operands):
            fixed |= set(map(id, operation.results))
    return fixed


def _weight_of(value: Atom) -> tuple[Any, list[int]]:
    """The array that a value is, but for its dtype and the order of its dimensions.

    Returns:
        The array, `None` if it is computed otherwise; and the array's dimension for each of the
        value's.
    """
    order = list(range(len(value.shape)))
    while (made := value.operation) is not None:
        if made.name == "transpose":
            order = [made.equation.params["permutation"][dim] for dim in order]
        elif made.name not in SAME_VALUES:
            return None, order
        (value,) = made.operands
    return value.constant, order
