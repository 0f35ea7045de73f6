"""Matrix products of a forward pass, read off its trace: their cost, and whose weight they read.

Counted before any compiler: what is computed again for the gradients, or by every device alike, is
in no figure here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core

from keras_tpu_dist.common.plain import CAUSAL
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.programs.calls import calls, rank
from keras_tpu_dist.programs.dimensions import dimensions
from keras_tpu_dist.programs.jaxprs import opened

# What hands a weight on whole.
# fmt: off
_HANDING_ON = frozenset(
    [
        "convert_element_type", "copy", "name", "optimization_barrier", "reshape",
        "sharding_constraint", "transpose",
    ]
)
# fmt: on

# For each dimension of a value, the dimensions of the weight that it consists of.
Dims = tuple[frozenset[int], ...]
Source = tuple[int, Dims]


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product or convolution of the forward pass.

    Attributes:
        flops: Its operations, once: 2 for each multiplication.
        weight: Which weight it reads, by number, or `None` for a product of activations.
        contracted: The dimensions of the weight that are summed over.
        taps: Places of a convolution's window, 1 of other products.
        is_causal: Whether a mask hides half of its values, which count; see
            `keras_tpu_dist.common.plain.CAUSAL`.
    """

    flops: float
    weight: int | None
    contracted: frozenset[int]
    read_bytes: int
    weight_bytes: int
    written_bytes: int
    times: int
    taps: int = 1
    is_causal: bool = False


@dataclass(frozen=True)
class Lookup:
    """Rows taken out of a weight, as an embedding does."""

    weight: int
    taken_bytes: int
    ids: int


def products_of(jaxpr: Any, num_weights: int) -> tuple[MatrixProduct, ...]:
    """The products of a traced forward pass.

    Args:
        jaxpr: The trace; its first inputs are the weights.

    Returns:
        Products in order; of `cond`, the branch with the most operations; the body of a `while`
        loop counts once.
    """
    return tuple(p for p in _found(jaxpr, num_weights) if isinstance(p, MatrixProduct))


def lookups_of(jaxpr: Any, num_weights: int) -> tuple[Lookup, ...]:
    """The look-ups of a traced forward pass, such as those of embeddings."""
    return tuple(p for p in _found(jaxpr, num_weights) if isinstance(p, Lookup))


def _found(jaxpr: Any, num_weights: int) -> list[MatrixProduct | Lookup]:
    weights = opened(jaxpr).invars[:num_weights]
    names = {v: (i, _whole(v.aval.shape)) for i, v in enumerate(weights)}
    found: list[MatrixProduct | Lookup] = []
    _read(opened(jaxpr), names, 1, found)
    return found


def _whole(shape: Sequence[int]) -> Dims:
    return tuple(frozenset([i]) for i in range(len(shape)))


def _read(
    jaxpr: Any,
    names: dict[Any, Source],
    times: int,
    found: list[MatrixProduct | Lookup],
    is_causal: bool = False,
) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        sources = [_source(names, atom) for atom in equation.invars]
        if name == "dot_general":
            is_hidden = is_causal or _is_causal(equation)
            found.append(replace(_dot(equation, sources, times), is_causal=is_hidden))
        elif name == "conv_general_dilated":
            found.append(_convolution(equation, sources, times))
        elif name == "gather" and sources[0] is not None:
            taken, ids = equation.outvars[0].aval, equation.invars[1].aval.shape[:-1]
            found.append(Lookup(sources[0][0], bytes_of(taken) * times, math.prod(ids) * times))
        elif name in _HANDING_ON:
            names.update(_handed_on(equation, sources))
        else:
            is_hidden = is_causal or _is_causal(equation)
            _read_called(equation, sources, names, times, found, is_hidden)


def _is_causal(equation: Any) -> bool:
    return CAUSAL in str(equation.source_info.name_stack)


def _source(names: dict[Any, Source], atom: Any) -> Source | None:
    return None if isinstance(atom, core.Literal) else names.get(atom)


def _handed_on(equation: Any, sources: list) -> Iterator[tuple[Any, Source]]:
    known = dimensions(equation)
    for number, result in enumerate(equation.outvars):
        if known is None or sources[number] is None:
            continue
        weight, dims = sources[number]
        found: list[frozenset[int]] = [frozenset()] * rank(result)
        for step in known.mapped:
            if step.operand == number == step.result:
                found[step.to] |= dims[step.dimension]
        yield result, (weight, tuple(found))


def _dot(equation: Any, sources: list, times: int) -> MatrixProduct:
    (left, right), _ = equation.params["dimension_numbers"]
    a, out = equation.invars[0].aval, equation.outvars[0].aval
    summed = math.prod(a.shape[i] for i in left)
    flops = 2.0 * math.prod(out.shape) * summed
    # A product of two weights would be rare; the second is the weight, as in a dense layer.
    which = 1 if sources[1] is not None else 0
    source, contracting = sources[which], (left, right)[which]
    return _product(equation, flops, source, which, contracting, times)


def _convolution(equation: Any, sources: list, times: int) -> MatrixProduct:
    numbers = equation.params["dimension_numbers"]
    kernel, out = equation.invars[1].aval, equation.outvars[0].aval
    _, features_in, *window = numbers.rhs_spec
    taps = math.prod(kernel.shape[i] for i in window) * kernel.shape[features_in]
    # Of a transposed convolution most places of a window are zeros that were put in between.
    zeros = math.prod(equation.params["lhs_dilation"])
    flops = 2.0 * math.prod(out.shape) * taps / zeros
    product = _product(equation, flops, sources[1], 1, (features_in,), times)
    return replace(product, taps=math.prod(kernel.shape[i] for i in window))


def _product(
    equation: Any, flops: float, source: Source | None, which: int, contracting: Any, times: int
) -> MatrixProduct:
    sizes = [bytes_of(atom.aval) for atom in equation.invars[:2]]
    written = bytes_of(equation.outvars[0].aval)
    if source is None:
        return MatrixProduct(flops, None, frozenset(), sum(sizes), 0, written, times)
    index, dims = source
    contracted = frozenset().union(*(dims[i] for i in contracting))
    return MatrixProduct(flops, index, contracted, sizes[1 - which], sizes[which], written, times)


def _read_called(
    equation: Any,
    sources: list,
    names: dict,
    times: int,
    found: list[MatrixProduct | Lookup],
    is_causal: bool,
) -> None:
    """What programs compute that an equation calls; of several, the one with the most operations.

    A weight is one within a loop if each round reads the same.
    """
    programs: list[list[MatrixProduct | Lookup]] = []
    for call in calls(equation):
        # The first of a linear system's is its product, which the others do again or undo.
        if call.kind == "condition" or (call.kind == "part" and programs):
            continue
        own: list[MatrixProduct | Lookup] = []
        inner = {
            v: source
            for i, v in zip(call.operands, call.jaxpr.invars)
            if (source := sources[i]) is not None
            and i not in call.carried
            and len(source[1]) == rank(v)
        }
        _read(call.jaxpr, inner, times * call.devices * (call.rounds or 1), own, is_causal)
        programs.append(own)
        for i, result in zip(call.results, call.jaxpr.outvars) if call.kind == "call" else ():
            if (source := _source(inner, result)) is not None:
                names[equation.outvars[i]] = source
    found += max(programs, key=operations, default=[])


def operations(products: Sequence[MatrixProduct | Lookup]) -> float:
    """The operations of products, each as often as it runs."""
    return sum(p.flops * p.times for p in products if isinstance(p, MatrixProduct))
