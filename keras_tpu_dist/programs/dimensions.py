"""How dimensions of operands correspond to those of results: one table for all analyses."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from keras_tpu_dist.programs.calls import rank

# An operand's number, and that of one of its dimensions.
Place = tuple[int, int]


class Mapped(NamedTuple):
    """A dimension of an operand that becomes one of a result.

    Attributes:
        operand: The operand's number.
        dimension: The number of its dimension.
        result: The result's number.
        to: The number of its dimension.
        parts: If both are cut into so many equal parts, a part of the result only depends on the
            same part of the operand along this dimension. It is the size for position-wise
            operations, and 1 if values move to other positions. For a reshape, the dimensions that
            come first in both are equal part by part.
    """

    operand: int
    dimension: int
    result: int
    to: int
    parts: int


@dataclass(frozen=True)
class Dimensions:
    """What becomes of the dimensions of an equation's operands.

    All other dimensions are summed over, reduced, indexed, or of size one.

    Attributes:
        mapped: The dimensions that become dimensions of results; for a reshape in order.
        together: Pairs of dimensions of operands that correspond: both are summed over, or are one
            dimension of the result.
        indexed: Dimensions of operands that are indexed.
    """

    mapped: tuple[Mapped, ...] = ()
    together: tuple[tuple[Place, Place], ...] = ()
    indexed: tuple[Place, ...] = ()


def dimensions(equation: Any) -> Dimensions | None:
    """What becomes of the dimensions of an equation's operands.

    Args:
        equation: The equation.

    Returns:
        Its dimensions, or `None` if the primitive is not in the table: nothing is known then, or,
        of one that calls a program, what `calls` says.
    """
    rule = _RULES.get(equation.primitive.name)
    return None if rule is None else rule(equation)


def regrouped(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The dimensions that a reshape joins, splits or leaves, the fewest at a time.

    Args:
        before: The shape before.
        after: The shape after.

    Yields:
        Dimensions before, and those of the same product after. Of size one, the last may be left
        out.
    """
    i = j = 0
    while i < len(before) and j < len(after):
        first, a, b = (i, j), before[i], after[j]
        while a != b:
            if a < b and i + 1 < len(before):
                i += 1
                a *= before[i]
            elif b < a and j + 1 < len(after):
                j += 1
                b *= after[j]
            else:
                break
        i, j = i + 1, j + 1
        yield range(first[0], i), range(first[1], j)


def _reshape(equation: Any) -> Dimensions:
    """A dimension's factors, the first of which is what its first parts are."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if 0 in before:  # any other dimensions may be lost or new
        return Dimensions()
    mapped = []
    for old, new in regrouped(before, after):
        ends = [_ends(before, old), _ends(after, new)]
        cuts = sorted({1, *ends[0].values(), *ends[1].values()})
        if any(b % a for a, b in itertools.pairwise(cuts) if a):
            places = itertools.product(ends[0], ends[1])
            mapped += [Mapped(0, i, 0, j, 1) for i, j in places]
            continue
        for low, high in itertools.pairwise(cuts):
            i, j = (next(d for d, end in one.items() if end >= high) for one in ends)
            leads = low == ends[0][i] // before[i] == ends[1][j] // after[j]
            mapped.append(Mapped(0, i, 0, j, high // low if leads else 1))
    return Dimensions(tuple(mapped))


def _ends(shape: Sequence[int], group: Iterable[int]) -> dict[int, int]:
    """Of dimensions larger than one, the product of the sizes up to each."""
    taken = [d for d in group if shape[d] > 1]
    return dict(
        zip(taken, itertools.accumulate((shape[d] for d in taken), lambda a, b: a * b), strict=True)
    )


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _in_place(equation: Any, moved: Iterable[int] = ()) -> Dimensions:
    """Dimensions stay in their place; of size one they may be repeated."""
    moved, mapped = set(moved), []
    for number, operand in enumerate(map(_shape, equation.invars)):
        for result, shape in enumerate(map(_shape, equation.outvars)):
            if len(operand) == len(shape):
                mapped += [
                    Mapped(
                        number, d, result, d, before if before == after and d not in moved else 1
                    )
                    for d, (before, after) in enumerate(zip(operand, shape, strict=True))
                    if before == after or before > 1 or d in moved
                ]
    return Dimensions(tuple(mapped))


def _moved_along(parameter: str) -> Callable[[Any], Dimensions]:
    def rule(equation: Any) -> Dimensions:
        # The last one, in versions of JAX that have no other.
        named = equation.params.get(parameter, -1)
        given = named if isinstance(named, (tuple, list)) else (named,)
        return _in_place(equation, {int(d) % rank(equation.invars[0]) for d in given})

    return rule


def _windows(equation: Any) -> Dimensions:
    names = ("window_dimensions", "window_strides", "padding")
    windows = enumerate(zip(*(equation.params[name] for name in names), strict=True))
    return _in_place(equation, {d for d, (n, s, p) in windows if n > 1 or s > 1 or any(p)})


def _pad(equation: Any) -> Dimensions:
    padding = enumerate(equation.params["padding_config"])
    return _in_place(equation, {d for d, amounts in padding if any(amounts)})


def _sent(equation: Any, places: Iterable[tuple[int, int]]) -> Dimensions:
    """Whole dimensions of all operands, but for numbers, sent to places in all results."""
    first, places = rank(equation.invars[0]), list(places)
    operands = [(n, _shape(a)) for n, a in enumerate(equation.invars) if rank(a) == first]
    results = range(len(equation.outvars))
    return Dimensions(
        tuple(Mapped(n, d, r, to, s[d]) for n, s in operands for r in results for d, to in places)
    )


def _removed(parameter: str) -> Callable[[Any], Dimensions]:
    def rule(equation: Any) -> Dimensions:
        ndim = rank(equation.invars[0])
        gone = {int(d) % ndim for d in equation.params[parameter]}
        left = (d for d in range(ndim) if d not in gone)
        return _sent(equation, ((d, to) for to, d in enumerate(left)))

    return rule


def _broadcast(equation: Any) -> Dimensions:
    before, after = _shape(equation.invars[0]), _shape(equation.outvars[0])
    places = enumerate(equation.params["broadcast_dimensions"])
    return _sent(equation, ((d, int(to)) for d, to in places if before[d] == after[to]))


def _transpose(equation: Any) -> Dimensions:
    return _sent(equation, ((int(d), to) for to, d in enumerate(equation.params["permutation"])))


def _bitcast(equation: Any) -> Dimensions:
    """Numbers of another size become, or come from, one more dimension, the last one."""
    both = min(rank(equation.invars[0]), rank(equation.outvars[0]))
    return _sent(equation, ((d, d) for d in range(both)))


def _stack(equation: Any) -> Dimensions:
    axis, ndim = equation.params["axis"], rank(equation.invars[0])
    return _sent(equation, ((d, d + (d >= axis)) for d in range(ndim)))


def _unstack(equation: Any) -> Dimensions:
    axis, ndim = equation.params["axis"], rank(equation.outvars[0])
    return _sent(equation, ((to + (to >= axis), to) for to in range(ndim)))


def _dot(equation: Any) -> Dimensions:
    summed, shared = equation.params["dimension_numbers"]
    shapes = [_shape(atom) for atom in equation.invars[:2]]
    mapped = []
    for side, shape in enumerate(shapes):
        free = [d for d in range(len(shape)) if d not in summed[side] and d not in shared[side]]
        # The left operand's own dimensions come before those of the right one.
        first = len(shared[0]) if side == 0 else rank(equation.outvars[0]) - len(free)
        places = [*enumerate(shared[side]), *enumerate(free, first)]
        mapped += [Mapped(side, int(d), 0, to, shape[d]) for to, d in places]
    pairs = [*zip(*summed, strict=True), *zip(*shared, strict=True)]
    return Dimensions(tuple(mapped), tuple(((0, int(i)), (1, int(j))) for i, j in pairs))


def _convolution(equation: Any) -> Dimensions:
    parameters = equation.params
    numbers = parameters["dimension_numbers"]
    image, kernel, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    shapes = [_shape(atom) for atom in equation.invars]
    of_features, of_batch = parameters["feature_group_count"], parameters["batch_group_count"]
    mapped = [
        Mapped(0, image[0], 0, out[0], shapes[0][image[0]] if of_batch == 1 else 1),
        Mapped(1, kernel[0], 0, out[1], shapes[1][kernel[0]]),
    ]
    if of_features > 1:
        mapped.append(Mapped(0, image[1], 0, out[1], of_features))
    if of_batch > 1:
        mapped.append(Mapped(0, image[0], 0, out[1], of_batch))
    together = [((0, image[1]), (1, kernel[1]))]
    for n, (i, k, j) in enumerate(zip(image[2:], kernel[2:], out[2:], strict=True)):
        same = parameters["window_strides"][n] == parameters["lhs_dilation"][n]
        plain = shapes[1][k] == 1 and same and not any(parameters["padding"][n])
        mapped.append(Mapped(0, i, 0, j, shapes[0][i] if plain else 1))
        together.append(((0, i), (1, k)))
    return Dimensions(tuple(mapped), tuple(together))


def _gather(equation: Any) -> Dimensions:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    operand, indices = map(_shape, equation.invars[:2])
    shared = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    gone = {*numbers.collapsed_slice_dims, *shared[0]}
    left = [d for d in range(len(operand)) if d not in gone]
    batch = [d for d in range(rank(equation.outvars[0])) if d not in numbers.offset_dims]
    pairs = list(zip(*shared, strict=True))
    windows = zip(left, numbers.offset_dims, strict=True)
    mapped = [
        # A slice that is not whole begins at any place.
        *(Mapped(0, d, 0, to, n if (n := operand[d]) == sizes[d] else 1) for d, to in windows),
        *(Mapped(1, i, 0, to, indices[i]) for i, to in enumerate(batch)),
        *(Mapped(0, d, 0, batch[i], operand[d]) for d, i in pairs),
    ]
    together = tuple(((0, d), (1, i)) for d, i in pairs)
    indexed = tuple((0, int(d)) for d in numbers.start_index_map)
    return Dimensions(tuple(mapped), together, indexed)


def _scatter(equation: Any) -> Dimensions:
    numbers = equation.params["dimension_numbers"]
    operand, _, updates = map(_shape, equation.invars[:3])
    shared = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    gone = {*numbers.inserted_window_dims, *shared[0]}
    left = [d for d in range(len(operand)) if d not in gone]
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    pairs = list(zip(*shared, strict=True))
    windows = zip(left, numbers.update_window_dims, strict=True)
    mapped = [
        *(Mapped(0, d, 0, d, size) for d, size in enumerate(operand)),
        *(Mapped(2, w, 0, d, n if (n := operand[d]) == updates[w] else 1) for d, w in windows),
        *(Mapped(1, i, 0, d, operand[d]) for d, i in pairs),
        *(Mapped(2, batch[i], 0, d, operand[d]) for d, i in pairs),
    ]
    together = [((0, d), (1, i)) for d, i in pairs]
    together += [((1, i), (2, of)) for i, of in enumerate(batch)]
    indexed = tuple((0, int(d)) for d in numbers.scatter_dims_to_operand_dims)
    return Dimensions(tuple(mapped), tuple(together), indexed)


def _barrier(equation: Any) -> Dimensions:
    shapes = enumerate(map(_shape, equation.invars))
    return Dimensions(
        tuple(Mapped(n, d, n, d, size) for n, s in shapes for d, size in enumerate(s))
    )


def _nothing(equation: Any) -> Dimensions:
    """Results that depend on no operand's dimensions."""
    return Dimensions()


# fmt: off
# Their operands have the result's shape, or none.
ELEMENTWISE = frozenset(
    [
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
        "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
        "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to",
        "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
        "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma",
        "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "name", "ne", "neg",
        "nextafter", "not", "one_minus_square", "or", "polygamma", "polynomial",
        "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem",
        "round", "rsqrt",
        "select_n", "sharding_constraint", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
        "tan", "tanh", "xor", "zeta",
    ]
)
_RULES: dict[str, Callable[[Any], Dimensions]] = {
    **dict.fromkeys(ELEMENTWISE, _in_place),
    **dict.fromkeys(
        ["bitcast_convert_type", "slice", "dynamic_slice", "dynamic_update_slice"], _in_place
    ),
    **dict.fromkeys(["concatenate", "sort"], _moved_along("dimension")),
    **dict.fromkeys(
        ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split", "top_k"],
        _moved_along("axis"),
    ),
    "rev": _moved_along("dimensions"),
    "approx_top_k": _moved_along("reduction_dimension"),
    **dict.fromkeys(
        [
            "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min",
            "select_and_scatter", "select_and_scatter_add", "select_and_gather_add",
        ],
        _windows,
    ),
    "pad": _pad,
    **dict.fromkeys(["iota", "axis_index"], _nothing),
    **dict.fromkeys(["random_bits", "random_seed", "random_split", "random_wrap"], _nothing),
    **dict.fromkeys(
        [
            "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
            "reduce_xor", "argmax", "argmin",
        ],
        _removed("axes"),
    ),
    **dict.fromkeys(["squeeze", "reduce"], _removed("dimensions")),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "stack": _stack,
    "unstack": _unstack,
    "optimization_barrier": _barrier,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"],
        _scatter,
    ),
}
# fmt: on

# The primitives in the table, which call no program with their operands.
KNOWN = frozenset(_RULES)

# Parameters that only say the shape of a result.
SHAPES = {
    "broadcast_in_dim": "shape",
    "dynamic_slice": "slice_sizes",
    "gather": "slice_sizes",
    "iota": "shape",
    "random_bits": "shape",
    "random_split": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
}
