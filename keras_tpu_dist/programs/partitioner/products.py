"""Products that sum over several dimensions, which the operands have split differently."""

from typing import Any

import jax
from jax.sharding import Mesh

from keras_tpu_dist.programs.jaxprs import replacement
from keras_tpu_dist.programs.partitioner.places import constrained
from keras_tpu_dist.programs.partitioner.spread import Spread

PRIMITIVES = ("dot_general",)


# Operands whose layouts share no axis were wrong only with so many summed dimensions.
_MANY = 3


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether a product sums over several dimensions.

    Args:
        equation: The product.
        mesh: The mesh; any may split two dimensions differently.
    """
    (summed, _), _ = equation.params["dimension_numbers"]
    return len(summed) > 1


def repaired(equation: Any, spread: Spread) -> list | None:
    """The product of operands whose summed dimensions are split alike, or `None` if they are.

    An axis that may split several of them splits the first.

    Args:
        equation: The product.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    places = list(zip(*equation.params["dimension_numbers"][0], strict=True))
    may_split = [_axes(equation, pair, spread) for pair in places]
    split = [axes for axes in may_split if axes]
    taken: set[str] = set()
    layout = []
    for axes in may_split:
        layout.append(spread.ordered(axes - taken))
        taken |= axes
    shared = sum(map(len, split)) > len(taken)
    if not shared and (len(split) < 2 or len(places) < _MANY):
        return None

    def product(*arrays):
        laid_out = (
            constrained(array, spread.mesh, dict(zip(dims, layout, strict=True)))
            for array, dims in zip(arrays, zip(*places, strict=True), strict=True)
        )
        # Apart from what else the operands are used for, whose layout would become this one.
        arrays = jax.lax.optimization_barrier([*laid_out])
        return equation.primitive.bind(*arrays, **equation.params)

    return replacement(equation, product)


def _axes(equation: Any, places: tuple[int, int], spread: Spread) -> frozenset[str]:
    """The axes that may split a summed dimension, in either operand."""
    sides = zip(equation.invars, places, strict=True)
    return frozenset().union(*(spread.axes(operand, place) for operand, place in sides))
