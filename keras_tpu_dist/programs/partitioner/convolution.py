"""Convolutions whose groups or windows are split: devices get whole groups, and sum parts."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.programs.jaxprs import replacement
from keras_tpu_dist.programs.partitioner.places import constrained, mesh_here, padded_at_the_end
from keras_tpu_dist.programs.partitioner.spread import Spread

PRIMITIVES = ("conv_general_dilated",)


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether a convolution sums over something that devices could have parts of.

    Args:
        equation: The convolution.
        mesh: The mesh, which is not used.
    """
    sizes = enumerate(_windows(equation))
    parts = any(size > 1 or _loses_its_place(equation, n) for n, size in sizes)
    return parts or _groups(equation) > 1


def repaired(equation: Any, spread: Spread) -> list | None:
    """A convolution that is right on every mesh, or `None` if it already is.

    If channels of a grouped convolution are split, the image, the kernel and the result are split
    in the same way, so that every device has whole groups, or they are not split at all.

    With batch groups (the kernel's gradient of a grouped convolution), every device convolves its
    own rows, in a `shard_map` over the axes that may split them; the parts are summed outside. A
    convolution whose window is split (the kernel's gradient for split images) is left to XLA if all
    axes of the mesh take part, which it handles correctly; its layout is constrained if XLA could
    use parts of an axis. Otherwise, or if XLA would shift positions, image and window are made
    whole.

    Args:
        equation: The convolution.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    numbers = equation.params["dimension_numbers"]
    left, right = equation.invars
    lhs, rhs = numbers.lhs_spec, numbers.rhs_spec
    grouped = equation.params["batch_group_count"] > 1
    rows = spread.axes(left, lhs[1]) | spread.axes(right, rhs[1])
    spatial = [*zip(lhs[2:], rhs[2:], strict=True)]
    windows = [spread.axes(left, i) | spread.axes(right, k) for i, k in spatial]
    # The window is split: XLA would sum over devices that have the same part of it.
    windowed = any(spread.axes(right, k) for k in rhs[2:])
    # XLA would shift the border that it takes from neighbours.
    border_is_wrong = any(axes and _loses_its_place(equation, n) for n, axes in enumerate(windows))
    summed = rows if grouped else frozenset()
    channels = _channels(equation, spread) - summed
    # Image and window are gathered.
    whole = windowed or border_is_wrong or (grouped and any(windows))
    if not whole and not channels and not summed:
        return None
    asked = [spread.asked(left, i) | spread.asked(right, k) for i, k in spatial]
    # XLA is right if every axis of the mesh splits exactly one dimension.
    apart = sum(map(len, [rows, *asked])) == len(spread.open_axes)
    together = frozenset().union(rows, *asked) == spread.open_axes
    if apart and together and not border_is_wrong and not channels:
        return _pinned(equation, spread, rows, asked) if spread.splits_two_ways else None

    def convolve(left, right):
        if whole:
            left = constrained(left, spread.mesh, dict.fromkeys(lhs[2:], ()))
            right = constrained(right, spread.mesh, dict.fromkeys(rhs[2:], ()))
        result = _by_groups(equation, spread, summed, channels, left, right)
        image = dict.fromkeys(numbers.out_spec[2:], ())
        return constrained(result, spread.mesh, image) if whole else result

    return replacement(equation, convolve)


def _channels(equation: Any, spread: Spread) -> frozenset[str]:
    """The axes that split channels of a grouped convolution, and not its images."""
    if _groups(equation) == 1:
        return frozenset()
    (image, kernel), (made,) = equation.invars, equation.outvars
    left, right, result = _group_dimensions(equation)
    split = spread.axes(image, left) | spread.axes(kernel, right) | spread.axes(made, result)
    if equation.params["batch_group_count"] > 1:
        return split
    numbers = equation.params["dimension_numbers"]
    split |= spread.axes(kernel, numbers.rhs_spec[1])
    images = spread.axes(image, numbers.lhs_spec[0]) | spread.axes(made, numbers.out_spec[0])
    return split - images


def _group_dimensions(equation: Any) -> tuple[int, int, int]:
    """The dimensions that groups divide: in the image, the kernel and the result."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    left = numbers.lhs_spec[1 if params["feature_group_count"] > 1 else 0]
    return left, numbers.rhs_spec[0], numbers.out_spec[1]


def _groups(equation: Any) -> int:
    return equation.params["feature_group_count"] * equation.params["batch_group_count"]


def _loses_its_place(equation: Any, spatial: int) -> bool:
    """Whether XLA splits a convolution along a dimension of the image wrongly, or aborts.

    In gradients, strides are dilations, and there is padding beyond the window or negative padding.
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


def _by_groups(
    equation: Any, spread: Spread, rows: frozenset, channels: frozenset, left: Any, right: Any
) -> Any:
    """Every device convolves its own rows and groups; returns the sum over rows."""
    numbers, params = equation.params["dimension_numbers"], dict(equation.params)
    if not rows and not channels:
        return equation.primitive.bind(left, right, **params)
    added = spread.ordered(rows)
    names: tuple[str, ...] = ()
    for name in spread.ordered(channels):
        if _groups(equation) % spread.product((*names, name)) == 0:
            names = (*names, name)
    for_left, for_right, for_result = ({d: names} for d in _group_dimensions(equation))
    inner = {numbers.rhs_spec[1]: ()} if params["feature_group_count"] > 1 else {}
    if channels:
        left = constrained(left, spread.mesh, for_left)
        right = constrained(right, spread.mesh, for_right | inner)
    for count in ("feature_group_count", "batch_group_count"):
        params[count] = max(params[count] // spread.product(names), 1)

    def local(left, right):
        return equation.primitive.bind(left, right, **params)[None]

    lhs, rhs = numbers.lhs_spec[1], numbers.rhs_spec[1]
    if added:
        # Rows of zeros add nothing to a sum over rows.
        padding = -left.shape[lhs] % spread.product(added)
        left = padded_at_the_end(left, {lhs: padding})
        right = padded_at_the_end(right, {rhs: padding})
        for_left, for_right = for_left | {lhs: added}, for_right | {rhs: added}
    parts = jax.shard_map(
        local,
        mesh=mesh_here(spread.mesh),
        in_specs=(_spec(left.ndim, for_left), _spec(right.ndim, for_right)),
        out_specs=_spec(left.ndim + 1, {0: added} | {d + 1: n for d, n in for_result.items()}),
        # Also an axis that divides no groups: XLA would split inside a group.
        axis_names={*added, *channels},
        check_vma=False,
    )(left, right)
    return parts.sum(axis=0, dtype=parts.dtype) if added else parts[0]


def _spec(rank: int, axes: Mapping[int, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(d) or None for d in range(rank)))
