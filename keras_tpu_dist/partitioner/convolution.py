"""Kernel gradients of grouped convolutions, summed over the devices that have a part and no more."""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from keras_tpu_dist.partitioner.jaxprs import replacement
from keras_tpu_dist.partitioner.places import constrained, mesh_here
from keras_tpu_dist.partitioner.spread import Spread

PRIMITIVES = ("conv_general_dilated",)


def repaired(equation: Any, spread: Spread) -> list | None:
    """A convolution with batch groups right on every mesh, or `None` where it is so already.

    Each device convolves the rows it has, in a `shard_map` over the axes that may split them; the
    parts are summed outside of it. Dimensions of the image are made whole.
    """
    if equation.params["batch_group_count"] == 1:
        return None
    numbers = equation.params["dimension_numbers"]
    left, right = equation.invars
    lhs, rhs = numbers.lhs_spec, numbers.rhs_spec
    axes = spread.axes(left, lhs[1]) | spread.axes(right, rhs[1])
    spatial = [spread.axes(left, i) | spread.axes(right, k) for i, k in zip(lhs[2:], rhs[2:])]
    if not axes and not any(spatial):
        return None
    names = tuple(name for name in spread.sizes if name in axes)
    padding = -left.aval.shape[lhs[1]] % max(spread.product(axes), 1)

    def convolve(left, right):
        if any(spatial):
            left = constrained(left, spread.mesh, dict.fromkeys(lhs[2:], ()))
            right = constrained(right, spread.mesh, dict.fromkeys(rhs[2:], ()))
        if not names:
            return equation.primitive.bind(left, right, **equation.params)

        def local(left, right):
            return equation.primitive.bind(left, right, **equation.params)[None]

        left, right = _padded(left, lhs[1], padding), _padded(right, rhs[1], padding)
        parts = jax.shard_map(
            local,
            mesh=mesh_here(spread.mesh),
            in_specs=(_spec(left.ndim, lhs[1], names), _spec(right.ndim, rhs[1], names)),
            out_specs=PartitionSpec(names),
            axis_names=set(names),
            check_vma=False,
        )(left, right)
        return parts.sum(axis=0, dtype=parts.dtype)

    return replacement(equation, convolve)


def _spec(rank: int, dimension: int, names: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(names if d == dimension else None for d in range(rank)))


def _padded(array, dimension: int, rows: int):
    """Rows of zeros at the end, which add nothing to a sum over rows."""
    if not rows:
        return array
    widths = [(0, rows if d == dimension else 0, 0) for d in range(array.ndim)]
    return lax.pad(array, lax.full((), 0, array.dtype), widths)
