"""Gathers and scatters by index into a split dimension, in replica code."""

from typing import Any

from jax.sharding import Mesh

from keras_tpu_dist.programs.calls import rank
from keras_tpu_dist.programs.jaxprs import surrounded
from keras_tpu_dist.programs.partitioner import scatter
from keras_tpu_dist.programs.partitioner.places import constrained
from keras_tpu_dist.programs.partitioner.spread import Spread

PRIMITIVES = ("gather", *scatter.PRIMITIVES)
# One axis that the `shard_map` has made manual, and two left to the compiler.
_AXES = 3


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether a mesh has enough axes for a lookup to abort the compiler.

    Args:
        equation: The gather, or the scatter.
        mesh: The mesh.
    """
    return sum(size > 1 for size in mesh.shape.values()) >= _AXES


def repaired(equation: Any, spread: Spread) -> list | None:
    """A lookup, or a write, in whole dimensions, or `None` if the compiler does not abort.

    XLA sums what every device found in its part, or gathers what it wrote. If it also splits the
    operation along another dimension, it does this within groups of devices, and computes the
    groups without the axes of the `shard_map`.

    Args:
        equation: The gather, or the scatter.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    if not spread.manual or len(spread.open_axes) < 2:
        return None
    split = _split(equation, spread)
    if not split:
        return None
    is_lookup = equation.primitive.name == "gather"

    def whole(array):
        return constrained(array, spread.mesh, dict.fromkeys(split, ()))

    def before(operand, *rest):
        return [whole(operand), *rest]

    def after(result):
        return [result if is_lookup else whole(result)]

    return surrounded(equation, before, after)


def _split(equation: Any, spread: Spread) -> list[int]:
    """The operand's dimensions to gather, so that at most one kind of dimension is split."""
    operand, indices = equation.invars[:2]
    is_lookup = equation.primitive.name == "gather"
    numbers = equation.params["dimension_numbers"]
    named = numbers.start_index_map if is_lookup else numbers.scatter_dims_to_operand_dims
    atoms = [operand] if is_lookup else [operand, equation.outvars[0]]
    split = [d for d in range(rank(operand)) if any(spread.axes(atom, d) for atom in atoms)]
    if any(spread.axes(indices, d) for d in range(rank(indices) - 1)):
        return split
    by_index = [d for d in split if d in named]
    return by_index if len(by_index) < len(split) else []
