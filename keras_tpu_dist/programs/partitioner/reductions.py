"""Reductions with a computation of the program's own, and bitwise ones, along a split dimension."""

from typing import Any

from jax.sharding import Mesh

from keras_tpu_dist.programs.partitioner.spread import Spread
from keras_tpu_dist.programs.partitioner.windows import whole_along

_BITWISE = ("reduce_and", "reduce_or", "reduce_xor")
PRIMITIVES = ("reduce", *_BITWISE)


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether XLA computes a reduction wrongly, or not at all, along a split dimension."""
    if equation.primitive.name not in _BITWISE:
        return True
    # Client for CPUs: all-reduces of truth values are a minimum and a maximum, others are missing.
    numbers = equation.invars[0].aval.dtype != bool
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return on_cpu and (numbers or equation.primitive.name == "reduce_xor")


def repaired(equation: Any, spread: Spread) -> list | None:
    """The reduction of whole dimensions, or `None` if they already are."""
    if not candidate(equation, spread.mesh):
        return None
    return whole_along(equation, spread, _reduced)


def _reduced(equation: Any, dimension: int, parts: int) -> bool:
    name = "axes" if equation.primitive.name in _BITWISE else "dimensions"
    return dimension in equation.params[name]
