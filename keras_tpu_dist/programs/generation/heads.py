"""Multiplies by keys or values that several heads share, without a copy for each head."""

import math
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from keras_tpu_dist.programs.jaxprs import inserted, opened, with_equations

# A matrix unit multiplies so many rows in the time of one.
_ROWS = 8
# With fewer numbers per head, the change is not worth it.
_MANY = 128 * 64


@dataclass(frozen=True)
class _Shared:
    """An operand of a product that is shared by several entries of the other operand.

    Attributes:
        side: The number of the operand, 0 or 1.
        source: The array that the operand repeats along a batch dimension, or the operand itself.
        constraint: The equation that constrains the repeated array's layout, or `None`.
    """

    side: int
    source: Any
    axis: int
    constraint: Any = None


def with_grouped_heads(jaxpr: Any) -> Any:
    """A program without arrays that are only repeated for a product.

    `keras.ops.repeat(key, groups, axis=2)` before attention copies the keys for each head of the
    queries. For one position, the copy takes longer than the product.

    Args:
        jaxpr: The program.
    """
    makers = {v: equation for equation in opened(jaxpr).eqns for v in equation.outvars}
    equations: list[Any] = []
    for equation in opened(jaxpr).eqns:
        repeated = _repeated(equation, makers) or _single(equation)
        if repeated is None:
            equations.append(equation)
            continue
        operands = list(equation.invars)
        operands[repeated.side] = repeated.source
        product = _product(equation, repeated)
        equations += inserted(equation, product, operands, list(equation.outvars))[0]
    return with_equations(jaxpr, equations)


def _repeated(equation: Any, makers: dict) -> _Shared | None:
    """A product with the result of `repeat`, with or without a constraint on its layout."""
    if equation.primitive.name != "dot_general":
        return None
    _, batch = equation.params["dimension_numbers"]
    for side, atom in enumerate(equation.invars):
        constraint = _origin(atom, "sharding_constraint", makers)
        merged = _origin(atom if constraint is None else constraint.invars[0], "reshape", makers)
        spread = None if merged is None else _origin(merged.invars[0], "broadcast_in_dim", makers)
        if merged is None or spread is None:
            continue
        axis, source = _axis(spread, merged.outvars[0].aval.shape), spread.invars[0]
        if axis is None or axis not in batch[side]:
            continue
        if constraint is None or _divides(constraint, axis, source.aval.shape[axis]):
            return _Shared(side, source, axis, constraint)
    return None


def _single(equation: Any) -> _Shared | None:
    """A product of many keys or values with one query, or one row of scores, per head."""
    if equation.primitive.name != "dot_general":
        return None
    contracted, batch = equation.params["dimension_numbers"]
    free = [_free(equation, side) for side in (0, 1)]
    side = free.index(max(free))
    shape = equation.invars[side].aval.shape
    numbers = max(free) * math.prod(shape[d] for d in contracted[side])
    if not batch[0] or min(free) != 1 or max(free) == 1 or numbers < _MANY:
        return None
    return _Shared(side, equation.invars[side], batch[side][-1])


def _free(equation: Any, side: int) -> int:
    """The size of an operand without its batch and contracted dimensions."""
    contracted, batch = equation.params["dimension_numbers"]
    shape = equation.invars[side].aval.shape
    others = {*contracted[side], *batch[side]}
    return math.prod(size for d, size in enumerate(shape) if d not in others)


def _origin(atom: Any, name: str, makers: dict) -> Any:
    equation = makers.get(atom) if isinstance(atom, core.Var) else None
    return equation if equation is not None and equation.primitive.name == name else None


def _axis(spread: Any, merged: tuple[int, ...]) -> int | None:
    """The dimension along which a broadcast and a reshape repeat an array, or `None`."""
    before, shape = spread.invars[0].aval.shape, spread.params["shape"]
    new = sorted(set(range(len(shape))) - set(spread.params["broadcast_dimensions"]))
    if len(new) != 1 or new[0] == 0:
        return None
    axis, times = new[0] - 1, shape[new[0]]
    same = (*shape[: axis + 1], *shape[axis + 2 :]) == tuple(before)
    repeated = (*before[:axis], before[axis] * times, *before[axis + 1 :])
    return axis if same and repeated == tuple(merged) else None


def _divides(constraint: Any, axis: int, heads: int) -> bool:
    """Whether the heads can be split like the repeated ones."""
    shape = constraint.outvars[0].aval.shape
    parts = shape[axis] // constraint.params["sharding"].shard_shape(shape)[axis]
    return heads % parts == 0


def _product(equation: Any, repeated: _Shared) -> Callable:
    """The product of the array that one operand repeats and the other operand."""
    side, axis, constraint = repeated.side, repeated.axis, repeated.constraint
    position = equation.params["dimension_numbers"][1][side].index(axis)
    at = equation.params["dimension_numbers"][1][1 - side][position]
    names, result, group_name = _names(equation, side, position)
    out = equation.outvars[0].aval
    how = {key: equation.params[key] for key in ("precision", "preferred_element_type")}

    def product(*operands: Any) -> Any:
        source, other = operands[side], operands[1 - side]
        if constraint is not None:
            source = constraint.primitive.bind(source, **constraint.params)
        grouped = (source.shape[axis], other.shape[at] // source.shape[axis])
        other = other.reshape(*other.shape[:at], *grouped, *other.shape[at + 1 :])
        if grouped[1] == 1:
            # The compiler makes sums of a product with one row, with the batch along the lanes.
            rows = [(0, _ROWS - 1 if d == at + 1 else 0) for d in range(other.ndim)]
            other = jnp.pad(other, rows)
        both = (source, other) if side == 0 else (other, source)
        value = jnp.einsum(f"{names[0]},{names[1]}->{result}", *both, **how)
        group = result.index(group_name)
        value = jax.lax.slice_in_dim(value, 0, grouped[1], axis=group)
        return value.reshape(out.shape)

    return product


def _names(equation: Any, side: int, position: int) -> tuple[list[str], str, str]:
    """Letters for the dimensions of a product whose batch has groups; see `jax.numpy.einsum`."""
    letters = iter(string.ascii_letters)
    contracted, batch = equation.params["dimension_numbers"]
    names: list[dict[int, str]] = [{}, {}]
    result = grouped = ""
    for number, places in enumerate(zip(*batch, strict=True)):
        head = next(letters)
        group = next(letters) if number == position else ""
        grouped += group
        names[side][places[side]] = head
        names[1 - side][places[1 - side]] = head + group
        result += head + group
    for places in zip(*contracted, strict=True):
        shared = next(letters)
        for of, place in zip(names, places, strict=True):
            of[place] = shared
    for of, atom in zip(names, equation.invars, strict=True):
        for dimension in range(atom.aval.ndim):
            if dimension not in of:
                of[dimension] = next(letters)
                result += of[dimension]
    return ["".join(of[d] for d in sorted(of)) for of in names], result, grouped
