"""The memory that a loop over tokens must read for a token: a lower bound for its time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core

from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.programs.jaxprs import inner_jaxprs, opened
from keras_tpu_dist.programs.products import lookups_of, products_of
from keras_tpu_dist.tools.hlo.parse import Shape

# XLA's names in the text of programs.
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "s8", "float64": "f64"}


@dataclass(frozen=True)
class TokenLoop:
    """A loop that generates one token in a round.

    Attributes:
        weight_bytes: Bytes on one device of the weights that a round reads completely: all except
            tables of which it reads rows.
        caches: Dtype and global shape of the numeric arrays that it carries, such as the cache of
            keys and values.
    """

    weight_bytes: int
    caches: tuple[tuple[str, tuple[int, ...]], ...]

    def read_bytes(self, carried: Sequence[Shape]) -> int:
        """Bytes that a device reads in a round, if it reads everything once.

        Args:
            carried: The shapes that the compiled loop carries on one device.
        """
        return self.weight_bytes + sum(_on_device(*cache, carried) for cache in self.caches)


def token_loop(jaxpr: Any, weight_bytes: Sequence[int]) -> TokenLoop | None:
    """The loop over tokens of a traced program.

    Args:
        jaxpr: The program, whose first inputs are the weights.
        weight_bytes: Bytes of every weight on one device.

    Returns:
        The loop with the largest arrays, or `None` if the program has none.
    """
    # The weights are the first inputs.
    weights = dict(zip(opened(jaxpr).invars, weight_bytes, strict=False))
    loops = list(_loops(opened(jaxpr)))
    if not loops:
        return None
    loop = max(loops, key=lambda equation: sum(bytes_of(v.aval) for v in equation.outvars))
    body = opened(loop.params["body_jaxpr"])
    skipped = loop.params["cond_nconsts"]
    operands = loop.invars[skipped:]
    of_products = {product.weight for product in products_of(body, len(body.invars))}
    of_rows = {lookup.weight for lookup in lookups_of(body, len(body.invars))} - of_products
    read, caches = 0, []
    for number, operand in enumerate(operands):
        known = None if isinstance(operand, core.Literal) else weights.get(operand)
        if known is not None:
            read += 0 if number in of_rows else known
        elif number >= loop.params["body_nconsts"] and str(operand.aval.dtype) in _DTYPES:
            caches.append((str(operand.aval.dtype), tuple(operand.aval.shape)))
    return TokenLoop(read, tuple(caches))


def _loops(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            yield equation
        else:
            for inner in inner_jaxprs(equation):
                # Their inputs are not those of the program.
                yield from _loops(opened(inner))


def _on_device(dtype: str, shape: tuple[int, ...], carried: Sequence[Shape]) -> int:
    """Bytes of a carried array on one device: the largest shape that can be a part of it."""
    parts = [
        array.bytes
        for array in carried
        if array.dtype == _DTYPES[dtype]
        and len(array.dims) == len(shape)
        and all(part and whole % part == 0 for part, whole in zip(array.dims, shape, strict=True))
    ]
    return max(parts, default=math.prod(shape) * np.dtype(dtype).itemsize)
