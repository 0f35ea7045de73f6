"""Lookups in a split dimension inside of a `shard_map`, which leaves other axes to the compiler."""

from typing import Any

from jax.sharding import Mesh

from keras_tpu_dist.partitioner.classes import rank
from keras_tpu_dist.partitioner.indices import widened
from keras_tpu_dist.partitioner.jaxprs import replacement
from keras_tpu_dist.partitioner.places import constrained
from keras_tpu_dist.partitioner.spread import Spread

PRIMITIVES = ("gather",)
# One that the shard_map has taken, and two that are left.
_AXES = 3


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether a mesh has enough axes for a lookup to abort the compiler.

    Args:
        equation: The gather.
        mesh: The mesh.
    """
    return sum(size > 1 for size in mesh.shape.values()) >= _AXES


def repaired(equation: Any, spread: Spread) -> list | None:
    """A lookup in whole dimensions, or `None` where the compiler does not abort.

    XLA adds what each device found in its part. Where it splits the lookup along another dimension
    too, it does so within groups of devices, and makes these without the axes of the `shard_map`.

    Args:
        equation: The gather.
        spread: Which mesh axes may split which dimension of the program's values.

    Returns:
        The equations that take its place, or `None`.
    """
    if not spread.manual or len(spread.open_axes) < 2:
        return None
    operand, indices = equation.invars[:2]
    named = set(equation.params["dimension_numbers"].start_index_map)
    split = [d for d in named if spread.axes(operand, d)]
    others = [(operand, d) for d in range(rank(operand)) if d not in named]
    others += [(indices, d) for d in range(rank(indices) - 1)]
    if not split or not any(spread.axes(*each) for each in others):
        return None

    def gather(operand, indices):
        whole = constrained(operand, spread.mesh, dict.fromkeys(split, ()))
        return equation.primitive.bind(whole, widened(indices), **equation.params)

    return replacement(equation, gather)
