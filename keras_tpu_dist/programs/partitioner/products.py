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

    An axis that may split several of them splits the first. Parts of one dimension of an operand,
    of which a reshape made several, count as one and are left to the compiler, unless the program
    asks for different layouts of the two operands.

    Args:
        equation: The product.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    places = list(zip(*equation.params["dimension_numbers"][0], strict=True))
    groups = _groups([pair for pair in places if _axes(equation, pair, spread)], equation, spread)
    taken: set[str] = set()
    layout: dict[tuple[int, int], tuple[str, ...]] = dict.fromkeys(places, ())
    shared = False
    for group in groups:
        axes = _axes(equation, group[0], spread)
        shared = shared or bool(axes & taken)
        if len(group) == 1:
            layout[group[0]] = spread.ordered(axes - taken)
        for pair in group if len(group) > 1 else ():
            del layout[pair]
        taken |= axes
    if not shared and (len(groups) < 2 or len(places) < _MANY):
        return None

    def product(*arrays):
        laid_out = (
            constrained(array, spread.mesh, dict(zip(dims, layout.values(), strict=True)))
            for array, dims in zip(arrays, zip(*layout, strict=True), strict=True)
        )
        # Apart from what else the operands are used for, whose layout would become this one.
        arrays = jax.lax.optimization_barrier([*laid_out])
        return equation.primitive.bind(*arrays, **equation.params)

    return replacement(equation, product) if layout else None


def _groups(
    places: list[tuple[int, int]], equation: Any, spread: Spread
) -> list[list[tuple[int, int]]]:
    """Summed dimensions that an axis may split, parts of one dimension together."""
    groups: list[list[tuple[int, int]]] = []
    for pair in places:
        same = [group for group in groups if _were_one(equation, group[0], pair, spread)]
        if same:
            same[0].append(pair)
        else:
            groups.append([pair])
    return groups


def _were_one(equation: Any, one: tuple[int, int], other: tuple[int, int], spread: Spread) -> bool:
    """Whether two summed dimensions are parts of one, and the program does not split them
    differently in the two operands."""
    sides = zip(equation.invars, one, other, strict=True)
    (left, asked_left), (right, asked_right) = (spread.parts_of_one(*side) for side in sides)
    differ = asked_left and asked_right and asked_left != asked_right
    return (left or right) and not differ


def _axes(equation: Any, places: tuple[int, int], spread: Spread) -> frozenset[str]:
    """The axes that may split a summed dimension, in either operand."""
    sides = zip(equation.invars, places, strict=True)
    return frozenset().union(*(spread.axes(operand, place) for operand, place in sides))
