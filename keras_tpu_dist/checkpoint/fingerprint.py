"""Fingerprints of arrays, which are the same on every mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_tpu_dist.common.own_mesh import in_own_mesh

# Odd, so that every flipped bit changes the sum (Knuth's multiplicative hashing).
_FACTOR = 2654435761
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def fingerprints(arrays: Sequence[Any]) -> list[int]:
    """A 32-bit number for every array: its bits, weighted by odd numbers and summed modulo 2**32.

    Integers modulo 2**32 have the same sum in any order, so an array has the same number on any
    mesh, and a flipped bit always changes it. The devices of the array compute it.

    Args:
        arrays: JAX or NumPy arrays, with any dtype of JAX.

    Returns:
        The numbers.

    Example:

    >>> import jax.numpy as jnp
    >>> one, other = fingerprints([jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])])
    >>> one == other
    False
    """
    return _started(arrays, _sums)()


def start_fingerprints(arrays: Sequence[Any]) -> Callable[[], list[tuple[int, bool]]]:
    """Starts to compute the fingerprints of arrays, which may be donated afterwards.

    Returns:
        A function that waits for them, in any thread, and returns for every array its fingerprint
        and whether all its numbers are finite.
    """
    found = _started(arrays, _sums_and_finite)
    return lambda: [(int(number), bool(finite)) for number, finite in found()]


@in_own_mesh
def _started(arrays: Sequence[Any], function: Callable) -> Callable[[], list]:
    # One program can only take arrays on the same devices.
    groups: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        devices = array.sharding.device_set if isinstance(array, jax.Array) else ()
        groups.setdefault(frozenset(devices), []).append(i)
    results = [
        (group, function([jnp.asarray(arrays[i]) for i in group])) for group in groups.values()
    ]

    def numbers() -> list:
        found = {
            i: number
            for group, result in results
            for i, number in zip(group, np.asarray(result).tolist(), strict=True)
        }
        return [found[i] for i in range(len(found))]

    return numbers


@jax.jit
def _sums_and_finite(arrays: list) -> jax.Array:
    finite = [jnp.all(jnp.isfinite(array)).astype(jnp.uint32) for array in arrays]
    return jnp.stack([jnp.stack([_sum(array) for array in arrays]), jnp.stack(finite)], axis=1)


@jax.jit
def _sums(arrays: list) -> jax.Array:
    return jnp.stack([_sum(array) for array in arrays])


def _sum(array: jax.Array) -> jax.Array:
    bits = _bits(array)
    # The row-major index, from iotas: a reshape to one dimension would gather a split array.
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    weight = index * np.uint32(2 * _FACTOR % 2**32) + np.uint32(1)
    return jnp.sum(bits * weight, dtype=jnp.uint32)


def _bits(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    kind: Any = _UNSIGNED[array.dtype.itemsize]
    # An element of 8 bytes becomes two numbers.
    return jax.lax.bitcast_convert_type(array, kind).astype(jnp.uint32)
