"""Windows and strides along a split dimension, which is gathered if XLA gets them wrong."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.programs.jaxprs import replacement
from keras_tpu_dist.programs.partitioner.places import constrained, mesh_here
from keras_tpu_dist.programs.partitioner.spread import Spread


def candidate(equation: Any, mesh: Mesh) -> bool:
    """Whether an operation is one that XLA gets wrong along a split dimension.

    Args:
        equation: The operation, one of `PRIMITIVES`.
        mesh: The mesh, whose devices are the most parts of a dimension.
    """
    wrong = _WRONG[equation.primitive.name]
    if equation.primitive.name == "concatenate":
        # What is joined may be uneven where the whole is not.
        atoms = [*equation.invars, *equation.outvars]
        if any(size % mesh.size for atom in atoms for size in atom.aval.shape):
            return True
    return any(wrong(equation, d, mesh.size) for d in _dimensions(equation))


def repaired(equation: Any, spread: Spread) -> list | None:
    """The operation with whole dimensions along its windows, or `None` if they already are.

    It is computed in a `shard_map`, which the partitioner does not change: with a layout alone, XLA
    sometimes reuses the part of another operation on the same rows. A `shard_map` gathers the other
    dimensions over the same axes too. If one of those may be split (the rows of pooled images), it
    should stay so, and only layouts are constrained.

    Args:
        equation: The operation, one of `PRIMITIVES`.
        spread: Which mesh axes may split which dimension of the program's values.
    """
    whole = whole_along(equation, spread, _WRONG[equation.primitive.name])
    return _joined_apart(equation, spread) if whole is None else whole


def _joined_apart(equation: Any, spread: Spread) -> list | None:
    """A join of arrays of its own along a split dimension, `None` if no part is uneven.

    libtpu makes it the largest of arrays with minus infinity around each, and then takes one of
    these where zeros are padded around the same array, as in the gradient of a split.
    """
    if equation.primitive.name != "concatenate":
        return None
    atoms, along = [*equation.invars, *equation.outvars], equation.params["dimension"]
    is_split = any(spread.axes(atom, along) for atom in atoms)
    if not is_split or not any(spread.uneven(a, d) for a in atoms for d in _dimensions(equation)):
        return None

    def joined(*arrays):
        return equation.primitive.bind(*jax.lax.optimization_barrier([*arrays]), **equation.params)

    return replacement(equation, joined)


def whole_along(
    equation: Any, spread: Spread, wrong: Callable[[Any, int, int], bool]
) -> list | None:
    """An operation with some dimensions whole, or `None` if they already are. See `repaired`.

    Args:
        spread: Which mesh axes may split which dimension of the program's values.
        wrong: Whether a dimension of the first operand must be whole, from the operation, the
            dimension, and the most parts that it may be split into.
    """
    rank = len(_dimensions(equation))
    atoms = [a for a in [*equation.invars, *equation.outvars] if len(a.aval.shape) == rank]
    split = [frozenset().union(*(spread.axes(a, d) for a in atoms)) for d in _dimensions(equation)]
    whole = [d for d, axes in enumerate(split) if axes and wrong(equation, d, spread.product(axes))]
    if not whole:
        return None
    axes = frozenset().union(*(split[d] for d in whole))
    shared = any(axes & others for d, others in enumerate(split) if d not in whole)

    def operation(*arrays):
        return equation.primitive.bind(*arrays, **equation.params)

    def laid_out(array):
        dimensions = dict.fromkeys(whole, ())
        return constrained(array, spread.mesh, dimensions) if array.ndim == rank else array

    def computed(*arrays):
        arrays = map(laid_out, arrays) if shared else arrays
        # A separate array: XLA mixes up the parts of one array for several uses.
        arrays = jax.lax.optimization_barrier([*arrays])
        if shared:
            return jax.tree.map(laid_out, operation(*map(laid_out, arrays)))
        return jax.shard_map(
            operation,
            mesh=mesh_here(spread.mesh),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(axes),
            check_vma=False,
        )(*arrays)

    return replacement(equation, computed)


def _dimensions(equation: Any) -> range:
    return range(len(equation.invars[0].aval.shape))


def _pad(equation: Any, dimension: int, parts: int) -> bool:
    low, high, interior = equation.params["padding_config"][dimension]
    rows = equation.invars[0].aval.shape[dimension]
    # Rows added at the end, as in every repair of a scatter, move nothing.
    uneven = rows < parts or rows % parts != 0
    return low < 0 or high < 0 or interior > 0 or (uneven and low > 0)


def _slice(equation: Any, dimension: int, parts: int) -> bool:
    before, after = (a.aval.shape[dimension] for a in (equation.invars[0], equation.outvars[0]))
    steps = equation.params["strides"]
    far = steps is not None and steps[dimension] > 1
    # Cutting divisible rows, as the trim of a ragged batch does, is correct.
    return far or (before != after and before % parts != 0)


def _concatenate(equation: Any, dimension: int, parts: int) -> bool:
    # libtpu reads rows of an operand that crosses the border of two devices at a wrong place. It
    # was seen where the operand has fewer rows than there are devices, and than one of them has.
    if dimension != equation.params["dimension"]:
        return False
    total = equation.outvars[0].aval.shape[dimension]
    sizes = (operand.aval.shape[dimension] for operand in equation.invars)
    return any(2 <= size < parts and size * size < total for size in sizes)


def _cumulate(equation: Any, dimension: int, parts: int) -> bool:
    return equation.params["axis"] == dimension


def _transform(equation: Any, dimension: int, parts: int) -> bool:
    rank = len(_dimensions(equation))
    return dimension >= rank - len(equation.params["fft_lengths"])


def _window(equation: Any, dimension: int, parts: int) -> bool:
    params = equation.params
    return params["window_dimensions"][dimension] > 1 or params["window_strides"][dimension] > 1


_WRONG: dict[str, Callable[[Any, int, int], bool]] = {
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _cumulate),
    "concatenate": _concatenate,
    "fft": _transform,
    "pad": _pad,
    "slice": _slice,
    **dict.fromkeys(["reduce_window", "reduce_window_sum", "reduce_window_max"], _window),
    "reduce_window_min": _window,
    **dict.fromkeys(["select_and_scatter_add", "select_and_gather_add"], _window),
}
PRIMITIVES = tuple(_WRONG)
