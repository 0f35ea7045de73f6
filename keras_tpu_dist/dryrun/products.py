"""Matrix products of a forward pass, read off its trace: their cost, and whose weight they read.

Counted before any compiler: what is computed again for the gradients, or by every device alike, is
in no figure here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core

from keras_tpu_dist.common.axes import names_in
from keras_tpu_dist.partitioner.jaxprs import inner_jaxprs, opened, scan_parts

# What hands a weight on as it is, but for its dtype.
_SAME = ("convert_element_type", "copy", "sharding_constraint", "optimization_barrier", "name")

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
        read_bytes: Bytes of its operands, without the weight.
        weight_bytes: Bytes of the weight as it is read.
        written_bytes: Bytes of its result.
        times: How often it runs.
        taps: Places of a convolution's window, 1 of other products.
    """

    flops: float
    weight: int | None
    contracted: frozenset[int]
    read_bytes: int
    weight_bytes: int
    written_bytes: int
    times: int
    taps: int = 1


@dataclass(frozen=True)
class Lookup:
    """Rows taken out of a weight, as an embedding does.

    Attributes:
        weight: Which weight, by number.
        taken_bytes: Bytes of the rows.
    """

    weight: int
    taken_bytes: int


def products_of(jaxpr: Any, num_weights: int) -> tuple[MatrixProduct, ...]:
    """The products of a traced forward pass.

    Args:
        jaxpr: The trace; its first inputs are the weights.
        num_weights: How many they are.

    Returns:
        Products in order; of `cond`, the branch with the most operations; the body of a `while`
        loop counts once.
    """
    return tuple(p for p in _found(jaxpr, num_weights) if isinstance(p, MatrixProduct))


def lookups_of(jaxpr: Any, num_weights: int) -> tuple[Lookup, ...]:
    """The look-ups of a traced forward pass, such as those of embeddings.

    Args:
        jaxpr: The trace; its first inputs are the weights.
        num_weights: How many they are.
    """
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
    jaxpr: Any, names: dict[Any, Source], times: int, found: list[MatrixProduct | Lookup]
) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        sources = [_source(names, atom) for atom in equation.invars]
        if name == "dot_general":
            found.append(_dot(equation, sources, times))
        elif name == "conv_general_dilated":
            found.append(_convolution(equation, sources, times))
        elif name == "gather" and sources[0] is not None:
            found.append(Lookup(sources[0][0], _bytes(equation.outvars[0].aval) * times))
        elif name == "scan":
            _read_scan(equation, sources, times, found)
        elif name == "cond":
            _read_branches(equation, sources, times, found)
        elif name == "while":
            _read_while(equation, sources, times, found)
        elif name in _SAME or name in ("transpose", "reshape"):
            if sources and sources[0] is not None:
                names[equation.outvars[0]] = _moved(equation, sources[0])
        else:
            _read_called(equation, sources, names, times, found)


def _source(names: dict[Any, Source], atom: Any) -> Source | None:
    return None if isinstance(atom, core.Literal) else names.get(atom)


def _moved(equation: Any, source: Source) -> Source:
    index, dims = source
    name = equation.primitive.name
    if name == "transpose":
        return index, tuple(dims[i] for i in equation.params["permutation"])
    if name == "reshape":
        before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return index, _regrouped(before, after, dims)
    return source


def _regrouped(before: Sequence[int], after: Sequence[int], dims: Dims) -> Dims:
    """The dimensions after a reshape: those that were joined or divided count for each other."""
    groups = regrouped(before, after, dims)
    return tuple(taken for taken, sizes in groups for _ in sizes)


def regrouped(
    before: Sequence[int], after: Sequence[int], dims: Sequence[frozenset]
) -> Iterator[tuple[frozenset, Sequence[int]]]:
    """What the dimensions after a reshape consist of, those together that are of the same ones.

    Args:
        before: The shape before it.
        after: The shape after it.
        dims: What each dimension before it consists of.
    """
    i, start = 0, 0
    wanted, got = 1, 1
    taken: frozenset = frozenset()
    for end, size in enumerate(after, 1):
        wanted *= size
        while got < wanted and i < len(before):
            got *= before[i]
            taken |= dims[i]
            i += 1
        if got == wanted:
            yield taken, after[start:end]
            start, wanted, got, taken = end, 1, 1, frozenset()
    if start < len(after):
        yield taken, after[start:]


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
    sizes = [_bytes(atom.aval) for atom in equation.invars[:2]]
    written = _bytes(equation.outvars[0].aval)
    if source is None:
        return MatrixProduct(flops, None, frozenset(), sum(sizes), 0, written, times)
    index, dims = source
    contracted = frozenset().union(*(dims[i] for i in contracting))
    return MatrixProduct(flops, index, contracted, sizes[1 - which], sizes[which], written, times)


def _read_scan(
    equation: Any, sources: list, times: int, found: list[MatrixProduct | Lookup]
) -> None:
    body, constants, _ = scan_parts(equation)
    pairs = zip(body.invars[:constants], sources[:constants])
    inner = {v: source for v, source in pairs if source is not None}
    _read(body, inner, times * _length(equation, body), found)


def _read_while(
    equation: Any, sources: list, times: int, found: list[MatrixProduct | Lookup]
) -> None:
    body, constants = opened(equation.params["body_jaxpr"]), equation.params["body_nconsts"]
    before = len(sources) - len(body.invars)
    pairs = zip(body.invars[:constants], sources[before:])
    _read(body, {v: source for v, source in pairs if source is not None}, times, found)


def _length(equation: Any, body: Any) -> int:
    for outer, inner in zip(
        (*equation.invars, *equation.outvars), (*body.invars, *body.outvars), strict=True
    ):
        if len(outer.aval.shape) > len(inner.aval.shape):
            return outer.aval.shape[0]
    return int(equation.params.get("length", 1))


def _read_branches(
    equation: Any, sources: list, times: int, found: list[MatrixProduct | Lookup]
) -> None:
    branches: list[list[MatrixProduct | Lookup]] = []
    for branch in map(opened, inner_jaxprs(equation)):
        pairs = zip(branch.invars, sources[1:])
        own: list[MatrixProduct | Lookup] = []
        _read(branch, {v: source for v, source in pairs if source is not None}, times, own)
        branches.append(own)
    found += max(branches, key=operations, default=[])


def _read_called(
    equation: Any, sources: list, names: dict, times: int, found: list[MatrixProduct | Lookup]
) -> None:
    """What a call of a program computes: `jit`, `remat`, functions with gradients of their own."""
    if equation.primitive.name == "shard_map":
        times *= sharing_devices(equation)
    for called in map(opened, inner_jaxprs(equation)):
        # Where operands come first that the program does not take, as a rule's constants do.
        offset = len(sources) - len(called.invars)
        pairs = zip(called.invars, sources[max(offset, 0) :])
        inner = {v: source for v, source in pairs if source is not None}
        _read(called, inner, times, found)
        if len(called.outvars) == len(equation.outvars):
            for outer, result in zip(equation.outvars, called.outvars):
                source = _source(inner, result)
                if source is not None:
                    names[outer] = source
        return


def sharing_devices(equation: Any) -> int:
    """How many devices share the work of a `shard_map`, which is written for one of them.

    Args:
        equation: The `shard_map`.
    """
    used = {axis for spec in equation.params["in_specs"] for axis in names_in(spec)}
    return math.prod(equation.params["mesh"].shape[axis] for axis in used)


def operations(products: Sequence[MatrixProduct | Lookup]) -> float:
    """The operations of products, each as often as it runs.

    Args:
        products: The products; look-ups have none.
    """
    return sum(p.flops * p.times for p in products if isinstance(p, MatrixProduct))


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * jax.numpy.dtype(aval.dtype).itemsize
