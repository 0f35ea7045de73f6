"""Kernel gradients of convolutions, summed over the devices that have a part and no more."""

from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.partitioner.places import constrained, mesh_here, padded_at_the_end
from keras_tpu_dist.partitioner.spread import Spread
from keras_tpu_dist.trace.jaxprs import replacement

PRIMITIVES = ("conv_general_dilated",)


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether a convolution has something that devices could have parts of, and sum.

    Args:
        equation: The convolution.
        mesh: The mesh, which makes no difference here.
    """
    sizes = enumerate(_windows(equation))
    parts = any(size > 1 or _loses_its_place(equation, n) for n, size in sizes)
    return parts or equation.params["batch_group_count"] > 1


def repaired(equation: Any, spread: Spread) -> list | None:
    """A convolution right on every mesh, or `None` where it is so already.

    With batch groups (the kernel's gradient of a grouped convolution), each device convolves the
    rows it has, in a `shard_map` over the axes that may split them; the parts are summed outside.
    A convolution with a window that is split itself (the kernel's gradient where images are) is
    left to XLA where all axes of the mesh take part, which it gets right; else, and where it would
    lose its place, its image and window are made whole.

    Args:
        equation: The convolution.
        spread: Which mesh axes may split which dimension of the program's values.

    Returns:
        The equations that take its place, or `None`.
    """
    numbers = equation.params["dimension_numbers"]
    left, right = equation.invars
    lhs, rhs = numbers.lhs_spec, numbers.rhs_spec
    grouped = equation.params["batch_group_count"] > 1
    rows = spread.axes(left, lhs[1]) | spread.axes(right, rhs[1])
    spatial = [*zip(lhs[2:], rhs[2:], strict=True)]
    windows = [spread.axes(left, i) | spread.axes(right, k) for i, k in spatial]
    windowed = any(spread.axes(right, k) for k in rhs[2:])
    fragile = any(axes and _loses_its_place(equation, n) for n, axes in enumerate(windows))
    if not windowed and not fragile and not (grouped and (rows or any(windows))):
        return None
    asked = [spread.asked(left, i) | spread.asked(right, k) for i, k in spatial]
    apart = sum(map(len, [rows, *asked])) == len(spread.open_axes)
    if apart and frozenset().union(rows, *asked) == spread.open_axes and not fragile:
        return None if len(spread.open_axes) == 1 else _pinned(equation, spread, rows, asked)

    def convolve(left, right):
        if any(windows):
            left = constrained(left, spread.mesh, dict.fromkeys(lhs[2:], ()))
            right = constrained(right, spread.mesh, dict.fromkeys(rhs[2:], ()))
        if grouped and rows:
            return _by_rows(equation, spread, rows, left, right)
        result = equation.primitive.bind(left, right, **equation.params)
        image = dict.fromkeys(numbers.out_spec[2:], ())
        return constrained(result, spread.mesh, image) if any(windows) else result

    return replacement(equation, convolve)


def _loses_its_place(equation: Any, spatial: int) -> bool:
    """Whether XLA cuts a convolution along a dimension of the image wrongly, or aborts.

    Strides are dilations in gradients, and padding beyond the window or taken away is.
    """
    params = equation.params
    low, high = params["padding"][spatial]
    reach = (_windows(equation)[spatial] - 1) * params["rhs_dilation"][spatial]
    within = 0 <= low <= reach and 0 <= high <= reach
    return not within or params["lhs_dilation"][spatial] > 1 or params["rhs_dilation"][spatial] > 1


def _windows(equation: Any) -> list[int]:
    right = equation.invars[1].aval.shape
    return [right[d] for d in equation.params["dimension_numbers"].rhs_spec[2:]]


def _pinned(equation: Any, spread: Spread, rows: frozenset, asked: list) -> list:
    """The convolution with its operands' layouts constrained: the partitioner may choose others."""
    numbers = equation.params["dimension_numbers"]

    def convolve(left, right):
        pinned = []
        for array, spec in ((left, numbers.lhs_spec), (right, numbers.rhs_spec)):
            pairs = zip(spec[1:], [rows, *asked], strict=True)
            axes = {d: spread.ordered(names) for d, names in pairs}
            pinned.append(constrained(array, spread.mesh, axes))
        return equation.primitive.bind(*pinned, **equation.params)

    return replacement(equation, convolve)


def _by_rows(equation: Any, spread: Spread, axes: frozenset, left: Any, right: Any) -> Any:
    """Each device's own rows convolved, and the sum of them."""
    numbers = equation.params["dimension_numbers"]
    lhs, rhs = numbers.lhs_spec[1], numbers.rhs_spec[1]
    names = spread.ordered(axes)

    def local(left, right):
        return equation.primitive.bind(left, right, **equation.params)[None]

    padding = -left.shape[lhs] % spread.product(axes)
    # Rows of zeros add nothing to a sum over rows.
    left = padded_at_the_end(left, {lhs: padding})
    right = padded_at_the_end(right, {rhs: padding})
    parts = jax.shard_map(
        local,
        mesh=mesh_here(spread.mesh),
        in_specs=(_spec(left.ndim, lhs, names), _spec(right.ndim, rhs, names)),
        out_specs=PartitionSpec(names),
        axis_names=set(names),
        check_vma=False,
    )(left, right)
    return parts.sum(axis=0, dtype=parts.dtype)


def _spec(rank: int, dimension: int, names: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(names if d == dimension else None for d in range(rank)))
