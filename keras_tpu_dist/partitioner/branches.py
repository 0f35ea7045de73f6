"""Branches that only some devices take, in which rows may not be exchanged.

`keras_tpu_dist.assign` puts a layer into a branch that one logical device of each replica takes. If
rows are split unevenly, or move, XLA exchanges them between neighbours by a permute that all
devices must join: those that took the other branch never do, and the program hangs.
"""

from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import Mesh

from keras_tpu_dist.partitioner.exchanges import ONE_DEVICE, rows_are_whole
from keras_tpu_dist.partitioner.jaxprs import (
    any_equation,
    inner_jaxprs,
    manual_axes,
    opened,
    surrounded,
)
from keras_tpu_dist.partitioner.places import constrained
from keras_tpu_dist.partitioner.spread import Spread

PRIMITIVES = ("shard_map",)


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether a `shard_map` has branches.

    Args:
        equation: The `shard_map`.
        mesh: The mesh, which makes no difference here.
    """
    return any(each.primitive.name == "cond" for each in _equations(equation))


def repaired(equation: Any, spread: Spread) -> list | None:
    """A `shard_map` with branches, its rows whole wherever they would be exchanged.

    Every device that takes the branch then computes all rows. `None` where nothing is exchanged.

    Args:
        equation: The `shard_map`.
        spread: Which mesh axes may split which dimension of the program's values.

    Returns:
        The equations that take its place, or `None`.

    Raises:
        RowsExchanged: If the branch is that of an assigned layer, which can be made otherwise.
    """
    conditionals = [e for e in _equations(equation) if e.primitive.name == "cond"]
    branches = [branch for each in conditionals for branch in each.params["branches"]]
    with spread.within(manual_axes(equation)):
        if not any(any_equation(branch, lambda e: _moves(e, spread)) for branch in branches):
            return None
        operands = [_split_dimensions(atom, spread) for atom in equation.invars]
        results = [_split_dimensions(atom, spread) for atom in equation.outvars]
    if any(map(_on_one_device, conditionals)) and not rows_are_whole():
        raise RowsExchanged

    def whole(dimensions: list[list[int]]) -> Callable:
        return lambda *arrays: [
            constrained(array, spread.mesh, dict.fromkeys(each, ())) if each else array
            for array, each in zip(arrays, dimensions, strict=True)
        ]

    return surrounded(equation, whole(operands), whole(results))


class RowsExchanged(Exception):
    """Rows would be exchanged within a branch: the program is made again, `with_whole_rows`."""


def choosing_axes(jaxpr: Any) -> frozenset[str]:
    """The axes that choose the branches of a program, empty if it has none.

    Args:
        jaxpr: The program.
    """
    axes: set[str] = set()

    def look(equation: Any) -> bool:
        if equation.primitive.name in PRIMITIVES and any(map(_on_one_device, _equations(equation))):
            axes.update(manual_axes(equation))
        return False

    any_equation(jaxpr, look, lambda equation: bool(equation.params))
    return frozenset(axes)


def _on_one_device(equation: Any) -> bool:
    scopes = str(equation.source_info.name_stack)
    return equation.primitive.name == "cond" and ONE_DEVICE in scopes


def _equations(equation: Any) -> list:
    return [e for inner in inner_jaxprs(equation) for e in opened(inner).eqns]


def _split_dimensions(atom: Any, spread: Spread) -> list[int]:
    """The dimensions that may be split over axes that the `shard_map` leaves to the compiler."""
    return [d for d in range(getattr(atom.aval, "ndim", 0)) if spread.axes(atom, d)]


def _moves(equation: Any, spread: Spread) -> bool:
    """Whether rows may change their device in an operation."""
    for atom in [*equation.invars, *equation.outvars]:
        if any(spread.uneven(atom, d) for d in _split_dimensions(atom, spread)):
            return True
    moved = _MOVED.get(equation.primitive.name)
    return moved is not None and any(spread.axes(*each) for each in moved(equation))


def _named(parameter: str) -> Callable[[Any], Iterable[tuple[Any, int]]]:
    def moved(equation):
        value = equation.params[parameter]
        dimensions = value if isinstance(value, (tuple, list)) else (value,)
        return [(equation.outvars[0], int(d)) for d in dimensions]

    return moved


def _resized(equation: Any) -> list[tuple[Any, int]]:
    one, other = equation.invars[0], equation.outvars[0]
    if len(one.aval.shape) != len(other.aval.shape):
        return []
    pairs = enumerate(zip(one.aval.shape, other.aval.shape, strict=True))
    return [(one, d) for d, (before, after) in pairs if before != after]


def _indexed(equation: Any) -> list[tuple[Any, int]]:
    """Dimensions of the operand that indices go into."""
    numbers = equation.params["dimension_numbers"]
    names = ("start_index_map", "scatter_dims_to_operand_dims")
    into = next(getattr(numbers, name) for name in names if hasattr(numbers, name))
    return [(equation.invars[0], int(d)) for d in into]


def _sliced(equation: Any) -> list[tuple[Any, int]]:
    small = equation.invars[1] if "update" in equation.primitive.name else equation.outvars[0]
    pairs = enumerate(zip(equation.invars[0].aval.shape, small.aval.shape, strict=True))
    return [(equation.invars[0], d) for d, (whole, part) in pairs if whole != part]


def _window(equation: Any) -> list[tuple[Any, int]]:
    sizes = enumerate(equation.params["window_dimensions"])
    return [(equation.invars[0], d) for d, size in sizes if size > 1]


def _image(equation: Any) -> list[tuple[Any, int]]:
    numbers = equation.params["dimension_numbers"]
    return [(equation.invars[0], d) for d in numbers.lhs_spec[2:]]


_MOVED: dict[str, Callable[[Any], Iterable[tuple[Any, int]]]] = {
    **dict.fromkeys(["slice", "pad"], _resized),
    **dict.fromkeys(["concatenate", "sort"], _named("dimension")),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _named("axis")),
    "rev": _named("dimensions"),
    **dict.fromkeys(["dynamic_slice", "dynamic_update_slice"], _sliced),
    **dict.fromkeys(["gather", "scatter", "scatter-add", "scatter-mul"], _indexed),
    **dict.fromkeys(["scatter-min", "scatter-max", "scatter-sub"], _indexed),
    **dict.fromkeys(["reduce_window_sum", "reduce_window_max", "reduce_window_min"], _window),
    **dict.fromkeys(["reduce_window", "select_and_scatter_add"], _window),
    "select_and_gather_add": _window,
    "conv_general_dilated": _image,
}
