"""Products whose result is split over axes in another order than the devices are numbered."""

import itertools
from typing import Any

from jax.sharding import Mesh

from keras_tpu_dist.programs.calls import rank
from keras_tpu_dist.programs.jaxprs import replacement
from keras_tpu_dist.programs.partitioner.places import constrained
from keras_tpu_dist.programs.partitioner.spread import Spread

PRIMITIVES = ("dot_general", "conv_general_dilated")
# One axis is summed over, and two split a dimension of the result.
_FEWEST_AXES = 3


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether a product may sum over one axis of a mesh and be split over two others.

    Args:
        equation: The product.
        mesh: The mesh.
    """
    several = sum(size > 1 for size in mesh.shape.values()) >= _FEWEST_AXES
    return several and bool(_summed(equation)) and rank(equation.outvars[0]) > 1


def repaired(equation: Any, spread: Spread) -> list | None:
    """The product with its sum on every device, or `None` if no order is another one.

    Args:
        equation: The product.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    result = equation.outvars[0]
    layouts = [spread.layouts(result, d) for d in range(rank(result))]
    found = [one for one in _summed_axes(equation, spread) if _is_wrong(layouts, one, spread)]
    if not found:
        return None
    summed = frozenset().union(*found)
    parts = _split_over(layouts, summed)

    def product(*arrays):
        made = equation.primitive.bind(*arrays, **equation.params)
        return constrained(made, spread.mesh, dict.fromkeys(parts, ()))

    return replacement(equation, product)


def _summed(equation: Any) -> list[tuple[int, int]]:
    """The dimensions of both operands that a product sums over."""
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "dot_general":
        return list(zip(*numbers[0], strict=True))
    # Features, and where windows are moved.
    return list(zip(numbers.lhs_spec[1:], numbers.rhs_spec[1:], strict=True))


def _summed_axes(equation: Any, spread: Spread) -> set[frozenset[str]]:
    """The axes that may split what a product sums over: of each dimension, the compiler may take
    either operand's layout."""
    left, right = equation.invars
    choices = (
        spread.layouts(left, i) | spread.layouts(right, j) or {()} for i, j in _summed(equation)
    )
    return {frozenset().union(*chosen) for chosen in itertools.product(*choices)}


def _is_wrong(layouts: list[set[tuple]], summed: frozenset[str], spread: Spread) -> bool:
    """Whether one dimension of a result may be split over summed axes, and another one over several
    others that are not in the order of the mesh."""
    others = [d for d, known in enumerate(layouts) if _another_order(known, summed, spread)]
    return any(d != other for d in _split_over(layouts, summed) for other in others)


def _split_over(layouts: list[set[tuple]], axes: frozenset[str]) -> list[int]:
    """The dimensions that some of these axes may split."""
    return [d for d, known in enumerate(layouts) if any(axes & set(layout) for layout in known)]


def _another_order(layouts: set[tuple[str, ...]], summed: frozenset[str], spread: Spread) -> bool:
    """Whether a dimension is split over several axes that are not summed over, and not only in the
    order of the mesh."""
    others = {tuple(name for name in layout if name not in summed) for layout in layouts} - {()}
    several = [layout for layout in others if len(layout) > 1]
    return bool(several) and (len(others) > 1 or several[0] != spread.ordered(several[0]))
