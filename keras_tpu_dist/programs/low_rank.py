"""Kernels with LoRA: gradients are summed over the devices after the small products.

Keras adds the product of the factors to the kernel, `kernel + scale * a @ b`, and multiplies the
input by the sum. The gradient of that sum has the size of the kernel, and the partitioner adds it
up over the devices before it multiplies it by the factors. Here the input is multiplied by the
kernel, and by one factor after the other: the same features, but only the factors have gradients,
and a frozen kernel needs none.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_tpu_dist import _keras
from keras_tpu_dist.programs.answers import (
    Answer,
    CallContext,
    Level,
    Rewritten,
    Why,
    WrittenProgram,
)
from keras_tpu_dist.programs.graph import Atom, Equation, Graph, Instead, graph_of, root_of

BY_FACTORS = "inputs are multiplied by the kernel, and by one factor after the other"
_WHOLE = "inputs are multiplied by the sum of the kernel and its factors' product"
_WAITS = "inputs are multiplied by one factor after the other, if a step allows it"


class LowRankFactors:
    """The pass that multiplies by the kernel and by its LoRA factors one after the other."""

    name = "lora"
    level = Level.LAYER

    def wants(self, layer: Any, strategy: Any) -> bool:
        """Whether a layer has LoRA, under a strategy."""
        return strategy is not None and getattr(layer, "lora_enabled", False)

    def rewritten(self, program: WrittenProgram, where: CallContext) -> Rewritten | Why:
        """The call with its factors apart, or why it adds them to the kernel."""
        graph, path = graph_of(program.jaxpr), where.layer.path
        instead = {found.product: found.replaced() for found in sums_in(graph)}
        if not instead:
            why = "the call does not show that sum"
            return Why([Answer(path, f"{_WHOLE}: {why}")])
        return Rewritten(graph.evaluate(program.args, instead), [Answer(path, BY_FACTORS, True)])

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """The layers that have LoRA."""
        layers = _keras.flatten_layers(model)
        return [Answer(layer.path, _WAITS) for layer in layers if self.wants(layer, strategy)]


@dataclass(frozen=True)
class LowRank:
    """A product with the sum of a kernel and its factors.

    Attributes:
        a: The first factor, `(..., rank)`.
        b: The second factor, `(rank, features)`.
        scale: What the product of the factors is multiplied by, or `None`.
    """

    product: Equation
    side: int
    kernel: Atom
    a: Atom
    b: Atom
    scale: Atom | None

    def replaced(self) -> Instead:
        """The replacement of the product."""
        scales = [] if self.scale is None else [self.scale]
        operands = [self.product.operands[1 - self.side], self.kernel, self.a, self.b, *scales]
        return Instead(operands, self._features)

    def _features(self, arrays: list[Any]) -> list[Any]:
        x, kernel, a, b, *scale = arrays
        summed = self.product.operands[self.side].aval.dtype
        pair = [x, x]
        pair[self.side], pair[1 - self.side] = kernel.astype(summed), x
        (features,) = self.product.run(pair)
        added = self._through_factors(x, a.astype(summed), b.astype(summed))
        for factor in scale:
            added = added * jnp.asarray(factor).astype(added.dtype)
        return [features + added.astype(features.dtype)]

    def _through_factors(self, x: Any, a: Any, b: Any) -> Any:
        """`x` times `a @ b`, with the dimensions of the product."""
        contracted, _ = self.product.equation.params["dimension_numbers"]
        of_x, of_kernel = map(list, (contracted[1 - self.side], contracted[self.side]))
        made = self.product.results[0].aval.dtype
        last = a.ndim - 1

        def times(one: Any, other: Any, dims: tuple[list[int], list[int]]) -> Any:
            return lax.dot_general(one, other, (dims, ([], [])), preferred_element_type=made)

        if last not in of_kernel:
            small = times(x, a, (of_x, of_kernel)).astype(x.dtype)
            result = times(small, b, ([small.ndim - 1], [0]))
        else:
            at = of_kernel.index(last)
            dim = of_x.pop(at)
            del of_kernel[at]
            small = times(x, b, ([dim], [1])).astype(x.dtype)
            of_x = [axis - (axis > dim) for axis in of_x]
            result = times(small, a, ([*of_x, small.ndim - 1], [*of_kernel, last]))
        if self.side:
            return result
        # The kernel is the first operand, so its features come first.
        rows = x.ndim - len(contracted[1])
        return jnp.transpose(result, (*range(rows, result.ndim), *range(rows)))


def sums_in(graph: Graph) -> list[LowRank]:
    """The products of a program with the sum of a kernel and a product of small factors."""
    found = []
    for operation in graph.operations:
        if operation.name != "dot_general" or operation.equation.params["dimension_numbers"][1][0]:
            continue
        for side, operand in enumerate(operation.operands):
            low_rank = _low_rank(operation, side, operand)
            if low_rank is not None:
                found.append(low_rank)
                break
    return found


def _low_rank(product: Equation, side: int, operand: Atom) -> LowRank | None:
    total = _made_by(operand, "add")
    if total is None:
        return None
    for kernel, other in (total.operands, total.operands[::-1]):
        scale, factors = None, _made_by(other, "mul")
        if factors is not None:
            scale, other = sorted(factors.operands, key=lambda atom: len(atom.shape))
            if scale.shape:
                continue
        small = _made_by(other, "dot_general")
        if small is None or kernel.shape != operand.shape:
            continue
        a, b = small.operands
        plain = ((len(a.shape) - 1,), (0,)), ((), ())
        if small.equation.params["dimension_numbers"] == plain and len(b.shape) == 2:
            return LowRank(product, side, kernel, a, b, scale)
    return None


def _made_by(atom: Atom, name: str) -> Equation | None:
    """The operation of this name that makes a value, apart from its dtype."""
    made = root_of(atom).operation
    return made if made is not None and made.name == name else None
