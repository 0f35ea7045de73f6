"""Reductions over replicas and dimensions: the dtypes of the computation and the result.

`strategy.reduce` and the replica context's `all_reduce` both use this module, so that they agree.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_tpu_dist.common.errors import value_error

REDUCTIONS = ("sum", "mean", "max", "min")

_OVER_DIMENSIONS: dict[str, Any] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
}
_OVER_REPLICAS: dict[str, Any] = {
    "sum": jax.lax.psum,
    "mean": jax.lax.pmean,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
}


def checked_reduction(op: Any) -> str:
    """The name of a reduction, from its name in any case or from an enum such as `ReduceOp.SUM`.

    Args:
        op: The name, or a member of an enum that has such a name.
    """
    name = op if isinstance(op, str) else getattr(op, "name", None)
    lowered = name.lower() if isinstance(name, str) else None
    if lowered not in REDUCTIONS:
        raise value_error(
            'A reduction is one of "sum", "mean", "max", "min".',
            received={"reduce_op": op},
            fix='Write for example "sum".',
            name=lowered,
            choices=REDUCTIONS,
        )
    return lowered


def reduced(op: str, array: Any, axes: Sequence[int] = (), replicas: tuple[str, ...] = ()) -> Any:
    """An array reduced over some of its dimensions, over replicas, or over both.

    Args:
        op: A name of `REDUCTIONS`.
        array: The array.
        axes: The dimensions, counted from the front.
        replicas: Within replica code, the mesh axes of the replicas.
    """
    array = jnp.asarray(array)
    wide, result = dtypes_of(op, array.dtype)
    array = array.astype(wide)
    if axes:
        check_not_empty(op, array.shape, axes)
        array = _OVER_DIMENSIONS[op](array, axis=tuple(axes))
    # XLA does not always compile a collective over empty arrays.
    if replicas and array.size:
        array = _OVER_REPLICAS[op](array, replicas)
    return array.astype(result)


def dtypes_of(op: str, dtype: Any) -> tuple[Any, Any]:
    """The dtype in which a reduction is computed, and that of its result.

    A sum of integers, or of `bool`, has at least 32 bits, and their mean is a floating-point
    number. Floating-point numbers keep their dtype; those with fewer than 32 bits are added up in
    float32. The maximum and the minimum have the dtype of the values.

    Args:
        op: A name of `REDUCTIONS`.
        dtype: The dtype of the values.
    """
    dtype = jnp.dtype(dtype)
    if op in ("max", "min"):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise value_error(
                "Complex numbers have no order.",
                received={"reduce_op": op, "dtype": str(dtype)},
                fix='Reduce their size, jnp.abs(value), or write "sum" or "mean".',
            )
        return _sent_as(dtype), dtype
    # NumPy's rules, which jnp.sum and jnp.mean follow, except for int4 and the like.
    values = jax.ShapeDtypeStruct((), _whole_bytes(dtype))
    result = jax.eval_shape(_OVER_DIMENSIONS[op], values).dtype
    return _sent_as(result), result


def check_not_empty(op: str, shape: Sequence[int], axes: Sequence[int]) -> None:
    """Raises a `ValueError` for the maximum or minimum of no values.

    Args:
        op: A name of `REDUCTIONS`.
        shape: The shape of the values.
        axes: The dimensions over which they are reduced.
    """
    if op in ("max", "min") and not all(shape[a] for a in axes):
        raise value_error(
            f'"{op}" needs at least one value.',
            received={"shape": tuple(shape), "axis": tuple(axes)},
            fix="Leave empty values out, or use a sum, which is 0.",
        )


def _sent_as(dtype: Any) -> Any:
    """A dtype that can hold the values and sums of them, and that devices can reduce."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.dtype("uint8")
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype("float32")
    return _whole_bytes(dtype)


def _whole_bytes(dtype: Any) -> Any:
    """The dtype with at least 8 bits if it is an integer one; other dtypes as they are."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.dtype("int8" if jnp.issubdtype(dtype, jnp.signedinteger) else "uint8")
    return dtype
