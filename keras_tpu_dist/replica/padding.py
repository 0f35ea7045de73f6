"""The effect of padding on a replica program: which results it changes, and how to cut them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.replica.call import Leaf


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array or number.

    Args:
        leaf: The array or number.
    """
    array = jnp.asarray(leaf) if isinstance(leaf, (int, float, complex)) else leaf
    # JAX 0.11 and newer warn if a 64-bit dtype becomes a 32-bit one.
    return jax.ShapeDtypeStruct(np.shape(array), jax.dtypes.canonicalize_dtype(array.dtype))


def doubled(described: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
    """A shape whose dimension `axis`, if any, is twice as long.

    Args:
        described: The shape and dtype.
        axis: The dimension, or `None` for the shape as it is.
    """
    if axis is None:
        return described
    shape = list(described.shape)
    shape[axis] *= 2
    return jax.ShapeDtypeStruct(tuple(shape), described.dtype)


def of_one_replica(array: Any, place: Leaf, number: int) -> jax.ShapeDtypeStruct:
    """The shape of one replica's part of an array for `number` of them.

    Args:
        array: The array for all replicas, or a number.
        place: How the replicas get it.
        number: The number of replicas.
    """
    whole = shape_of(array)
    shape = list(whole.shape)
    if place.stacked:
        shape = shape[1:]
    elif place.split is not None:
        shape[place.split] //= number
    return jax.ShapeDtypeStruct(tuple(shape), whole.dtype)


def size_at(arrays: list, places: list[Leaf], kind: str) -> int | None:
    """The padded size of the dimension that holds the rows or the length.

    Args:
        arrays: The arguments of one replica.
        places: How the replicas get them.
        kind: `"rows"` or `"length"`.
    """
    for array, place in zip(arrays, places, strict=True):
        axis = getattr(place, kind)
        if axis is not None:
            return array.shape[axis - place.stacked]
    return None


@contextlib.contextmanager
def takes_any(kind: str, size: int) -> Iterator[None]:
    """A context in which a function is traced with twice as many rows, or twice the length.

    Args:
        kind: `"rows"` or `"length"`.
        size: The padded number of them.
    """
    try:
        yield
    except Exception as error:
        raise value_error(
            f"If the number of {kind} varies, the function must take twice as many.",
            received=f"padded {kind}={size}; with {2 * size}: {type(error).__name__}: {error}",
            fix="Accept any number: keras.Input((None,)), reshape(-1, n).",
        ) from error


def dimensions_that_follow(kind: str, size: int, first: tuple, second: tuple) -> list[int]:
    """The dimensions of a result that are the padded rows, or the padded length.

    Args:
        kind: `"rows"` or `"length"`.
        size: Their padded number.
        first: The result's shape.
        second: Its shape with twice as many.
    """
    axes = []
    for axis, (a, b) in enumerate(zip(first, second, strict=True)):
        if a == b:
            continue
        if (a, b) != (size, 2 * size):
            raise value_error(
                f"If a dimension of a result depends on the padded {kind}, it must be equal to it.",
                received={f"padded {kind}": size, "result's shape": first, "dimension": axis},
                fix="Return a value that does not depend on it, such as a masked sum.",
            )
        axes.append(axis)
    return axes


def same_numbers(a: Any, b: Any) -> bool:
    """Whether two arrays are equal up to rounding.

    Args:
        a: An array.
        b: Another. Unless they are exact, they may differ by 1e-6 plus 1e-5 of `b`; NaN equals NaN.
    """
    a, b = np.asarray(a), np.asarray(b)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(np.array_equal(a, b))
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    return bool(np.allclose(a.astype(wide), b.astype(wide), 1e-5, 1e-6, equal_nan=True))
