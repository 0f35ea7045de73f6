"""Matrix products of a forward pass, read off its trace: their cost, and whose weight they read.

Counted before any compiler: what is computed again for the gradients, or by every device alike, is
in no figure here.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from keras_tpu_dist.common.plain import CAUSAL
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.programs.calls import Called, calls, rank
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
        passes: How often a training step computes a product of this size: once, and once for the
            gradient of each operand that needs one.
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
    passes: int = 1


@dataclass(frozen=True)
class Lookup:
    """Rows taken out of a weight, as an embedding does."""

    weight: int
    taken_bytes: int
    ids: int


def products_of(jaxpr: Any, num_weights: int, num_trained: int = 0) -> tuple[MatrixProduct, ...]:
    """The products of a traced forward pass.

    Args:
        jaxpr: The trace; its first inputs are the weights.
        num_weights: How many they are.
        num_trained: How many inputs, the first ones, are trained: their gradients need the passes
            of products. What is computed again for them counts once.

    Returns:
        Products in order; of `cond`, the branch with the most operations; the body of a `while`
        loop counts once.
    """
    found = _found(jaxpr, num_weights, num_trained)
    return tuple(p for p in found if isinstance(p, MatrixProduct))


def lookups_of(jaxpr: Any, num_weights: int) -> tuple[Lookup, ...]:
    """The look-ups of a traced forward pass, such as those of embeddings.

    Args:
        jaxpr: The trace; its first inputs are the weights.
        num_weights: How many they are.
    """
    return tuple(p for p in _found(jaxpr, num_weights) if isinstance(p, Lookup))


def _found(jaxpr: Any, num_weights: int, num_trained: int = 0) -> list[MatrixProduct | Lookup]:
    inputs = opened(jaxpr).invars
    names = {v: (i, _whole(v.aval.shape)) for i, v in enumerate(inputs[:num_weights])}
    found: list[MatrixProduct | Lookup] = []
    _read(opened(jaxpr), names, 1, found, gradients=_Gradients(inputs[:num_trained]))
    return found


class _Gradients:
    """The values of a program that need a gradient: what a trained weight changes.

    Args:
        needed: Those of its inputs.
        by_rule: Whether the program has a rule for gradients, as a product of integers has for the
            numbers that they stand for.
    """

    def __init__(self, needed: Iterable[Any], by_rule: bool = False):
        self._needed, self.by_rule = set(needed), by_rule

    def needs(self, atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in self._needed

    def passes(self, equation: Any) -> int:
        """How often a step computes a product of the size of an equation's."""
        return 1 + sum(map(self.needs, equation.invars[:2]))

    def follow(self, equation: Any) -> None:
        """Notes which results of an operation need gradients."""
        if equation.primitive.name != "stop_gradient" and any(map(self.needs, equation.invars)):
            self.add(v for v in equation.outvars if self.by_rule or _is_inexact(v))

    def add(self, results: Iterable[Any]) -> None:
        self._needed.update(results)

    def within(self, equation: Any, call: Called) -> "_Gradients":
        """Those of a program that an equation calls, at its inputs."""
        by_rule = self.by_rule or equation.primitive.name.startswith("custom_vjp")
        if call.kind == "unknown":
            inputs = call.jaxpr.invars if any(map(self.needs, equation.invars)) else ()
        else:
            pairs = zip(call.operands, call.jaxpr.invars, strict=True)
            inputs = [v for i, v in pairs if self.needs(equation.invars[i])]
        return _Gradients(inputs, by_rule)

    def behind(self, equation: Any, call: Called, inner: "_Gradients") -> None:
        """Notes which results of a call need gradients."""
        if inner.by_rule or call.kind == "unknown":
            self.follow(equation)
            return
        pairs = zip(call.results, call.jaxpr.outvars, strict=False)
        self.add(equation.outvars[i] for i, v in pairs if inner.needs(v))

    def carried_on(self, call: Called) -> bool:
        """Notes what the next round of a loop begins with; whether that is more than before."""
        if not call.carried:
            return False
        pairs = zip(call.carried, call.jaxpr.outvars, strict=False)
        inputs = dict(zip(call.operands, call.jaxpr.invars, strict=True))
        more = {inputs[i] for i, v in pairs if self.needs(v)} - self._needed
        self.add(more)
        return bool(more)


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", np.bool_), np.inexact)


def _whole(shape: Sequence[int]) -> Dims:
    return tuple(frozenset([i]) for i in range(len(shape)))


def _read(
    jaxpr: Any,
    names: dict[Any, Source],
    times: int,
    found: list[MatrixProduct | Lookup],
    is_causal: bool = False,
    *,
    gradients: _Gradients,
) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        sources = [_source(names, atom) for atom in equation.invars]
        if name == "dot_general":
            product, is_hidden = _dot(equation, sources, times), is_causal or _is_causal(equation)
            passes = gradients.passes(equation)
            found.append(replace(product, is_causal=is_hidden, passes=passes))
        elif name == "conv_general_dilated":
            product = _convolution(equation, sources, times)
            found.append(replace(product, passes=gradients.passes(equation)))
        elif name == "gather" and sources[0] is not None:
            taken, ids = equation.outvars[0].aval, equation.invars[1].aval.shape[:-1]
            found.append(Lookup(sources[0][0], bytes_of(taken) * times, math.prod(ids) * times))
        elif name in _HANDING_ON:
            names.update(_handed_on(equation, sources))
        else:
            is_hidden = is_causal or _is_causal(equation)
            if _read_called(equation, sources, names, times, found, is_hidden, gradients):
                continue
        gradients.follow(equation)


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
    gradients: _Gradients,
) -> bool:
    """What programs compute that an equation calls; of several, the one with the most operations.

    A weight is one within a loop if each round reads the same.

    Returns:
        Whether it calls one.
    """
    programs: list[list[MatrixProduct | Lookup]] = []
    for call in calls(equation):
        # The first of a linear system's is its product, which the others do again or undo.
        if call.kind == "condition" or (call.kind == "part" and programs):
            continue
        own: list[MatrixProduct | Lookup] = []
        inner = {
            v: source
            for i, v in zip(call.operands, call.jaxpr.invars, strict=call.kind != "unknown")
            if (source := sources[i]) is not None
            and i not in call.carried
            and len(source[1]) == rank(v)
        }
        within = gradients.within(equation, call)
        runs = times * call.devices * (call.rounds or 1)
        while True:
            _read(call.jaxpr, inner, runs, own, is_causal, gradients=within)
            if not within.carried_on(call):
                break
            own.clear()  # a later round needs more gradients than the first
        gradients.behind(equation, call, within)
        programs.append(own)
        for i, result in (
            zip(call.results, call.jaxpr.outvars, strict=True) if call.kind == "call" else ()
        ):
            if (source := _source(inner, result)) is not None:
                names[equation.outvars[i]] = source
    found += max(programs, key=operations, default=[])
    return bool(programs)


def operations(products: Sequence[MatrixProduct | Lookup]) -> float:
    """The operations of products, each as often as it runs.

    Args:
        products: The products; look-ups have none.
    """
    return sum(p.flops * p.times for p in products if isinstance(p, MatrixProduct))


def operations_of_training(products: Sequence[MatrixProduct]) -> float:
    """The operations of products with those for their gradients.

    Args:
        products: The products; see `products_of`.
    """
    return sum(p.flops * p.times * p.passes for p in products)
