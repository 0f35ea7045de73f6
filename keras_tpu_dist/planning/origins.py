"""What the dimensions of a value in a trace are: the batch's rows, or dimensions of weights.

A mesh splits an activation as it splits the weights that made it. Read off the trace once, for
meshes that are not yet known.
"""

import math
from collections.abc import Sequence
from typing import Any

from keras_tpu_dist.dryrun.products import regrouped

# The batch, or a dimension of a weight: its number, and which one.
Origin = tuple[int, int]
BATCH: Origin = (-1, 0)
# For each dimension of a value.
Origins = tuple[frozenset[Origin], ...]

_NONE: frozenset[Origin] = frozenset()


def origins_of(equation: Any, operands: Sequence[Origins | None], number: int) -> Origins:
    """Where the dimensions of a result come from.

    Args:
        equation: The equation.
        operands: Of each operand; `None` for constants.
        number: Which result.
    """
    rule = _RULES.get(equation.primitive.name, _by_size)
    out = equation.outvars[number].aval
    if not hasattr(out, "shape"):
        return ()
    ndims = [len(getattr(atom.aval, "shape", ())) for atom in equation.invars]
    known = [(_NONE,) * n if o is None else o for n, o in zip(ndims, operands)]
    found = rule(equation, known, tuple(out.shape))
    return found if len(found) == len(out.shape) else (_NONE,) * len(out.shape)


def origins_back(equation: Any, made: Sequence[Origins]) -> list[Origins]:
    """What the dimensions of operands are, by the results that they become dimensions of.

    Args:
        equation: The equation.
        made: The origins of each result.
    """
    shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in equation.invars]
    asked = [tuple(frozenset([(-2 - n, d)]) for d in range(len(s))) for n, s in enumerate(shapes)]
    found: dict[Origin, frozenset[Origin]] = {}
    for number, origins in enumerate(made):
        for takes, known in zip(origins_of(equation, asked, number), origins):
            for place in takes:
                found[place] = found.get(place, _NONE) | known
    return [
        tuple(found.get((-2 - n, d), _NONE) for d in range(len(s))) for n, s in enumerate(shapes)
    ]


def weight_origins(number: int, ndim: int) -> Origins:
    """A weight's own dimensions.

    Args:
        number: Which weight.
        ndim: How many they are.
    """
    return tuple(frozenset([(number, d)]) for d in range(ndim))


def batch_origins(shape: Sequence[int], rows: int) -> Origins:
    """Those of an input of the model.

    Args:
        shape: Its shape.
        rows: The batch's rows, which come first.
    """
    batch = frozenset([BATCH])
    return tuple(batch if d == 0 and size == rows else _NONE for d, size in enumerate(shape))


def _dot(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    summed, shared = equation.params["dimension_numbers"]
    left, right = operands
    return (
        *(_shared(left, right, a, b) for a, b in zip(*shared)),
        *(o for d, o in enumerate(left) if d not in (*summed[0], *shared[0])),
        *(o for d, o in enumerate(right) if d not in (*summed[1], *shared[1])),
    )


def _shared(left: Origins, right: Origins, a: int, b: int) -> frozenset[Origin]:
    """Of a dimension that both have, such as experts: as the weight's, which lies where it lies."""
    rows = [any(BATCH in o for o in operand) for operand in (left, right)]
    if rows == [True, False] and right[b]:
        return right[b]
    if rows == [False, True] and left[a]:
        return left[a]
    return left[a] | right[b]


def _convolution(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    numbers = equation.params["dimension_numbers"]
    found = [_NONE] * len(shape)
    found[numbers.out_spec[0]] = operands[0][numbers.lhs_spec[0]]
    found[numbers.out_spec[1]] = operands[1][numbers.rhs_spec[0]]
    return tuple(found)


def _transpose(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    return tuple(operands[0][d] for d in equation.params["permutation"])


def _reshape(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    """Of dimensions that are joined or divided, the first of the new ones is what is split."""
    found: list[frozenset[Origin]] = []
    for taken, sizes in regrouped(equation.invars[0].aval.shape, shape, operands[0]):
        first = next((k for k, size in enumerate(sizes) if size > 1), 0)
        found += [taken if k == first else _NONE for k in range(len(sizes))]
    return tuple(found)


def _broadcast(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    found, before = [_NONE] * len(shape), equation.invars[0].aval.shape
    for i, d in enumerate(equation.params["broadcast_dimensions"]):
        if before[i] == shape[d]:
            found[d] = operands[0][i]
    return tuple(found)


def _squeeze(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    gone = equation.params["dimensions"]
    left = [o for d, o in enumerate(operands[0]) if d not in gone]
    if left and any(BATCH in operands[0][d] for d in gone):
        # One row a device, of many devices.
        left[0] |= {BATCH}
    return tuple(left)


def _reduce(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    gone = equation.params["axes"]
    return tuple(o for d, o in enumerate(operands[0]) if d not in gone)


def _gather(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    numbers = equation.params["dimension_numbers"]
    table = [o for d, o in enumerate(operands[0]) if d not in numbers.collapsed_slice_dims]
    rows, columns = iter(operands[1]), iter(table)
    return tuple(
        next(columns, _NONE) if d in numbers.offset_dims else next(rows, _NONE)
        for d in range(len(shape))
    )


def _stack(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    """Arrays of one shape, along a dimension that they do not have."""
    before = [tuple(atom.aval.shape) for atom in equation.invars]
    alike = [o for s, o in zip(before, operands) if s == before[0]]
    joined = [_NONE.union(*(o[d] for o in alike)) for d in range(len(before[0]))]
    axis = next((v for v in equation.params.values() if isinstance(v, int)), 0)
    return (*joined[:axis], _NONE, *joined[axis:])


def _unstack(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    axis = next((v for v in equation.params.values() if isinstance(v, int)), 0)
    return (*operands[0][:axis], *operands[0][axis + 1 :])


def _by_size(equation: Any, operands: list[Origins], shape: Sequence[int]) -> Origins:
    """Of what works element by element: what is in the same place, where it is as long.

    Of what is not known: what is as long, wherever it is.
    """
    known = [
        (tuple(atom.aval.shape), origins)
        for atom, origins in zip(equation.invars, operands)
        if any(origins)
    ]
    found = [
        _NONE.union(*(o[d] for s, o in known if len(s) == len(shape) and s[d] == size))
        for d, size in enumerate(shape)
    ]
    alike = any(s == tuple(shape) for s, _ in known)
    if alike or math.prod(shape) == 1:
        return tuple(found)
    for d, size in enumerate(shape):
        places = (o for s, origins in known for n, o in zip(s, origins) if n == size > 1 and o)
        found[d] = found[d] or next((o for o in places if o not in found), _NONE)
    batch = any(BATCH in o for _, origins in known for o in origins)
    if batch and not any(BATCH in o for o in found):
        found[0] |= {BATCH}
    return tuple(found)


_RULES = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "transpose": _transpose,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reduce_sum": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_and": _reduce,
    "reduce_or": _reduce,
    "argmax": _reduce,
    "gather": _gather,
    "stack": _stack,
    "unstack": _unstack,
}
