"""A number for the values of an array that does not depend on how it lies on the devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Odd, so that whatever single bit differs, the sum does (Knuth's multiplicative hashing).
_FACTOR = 2654435761
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def fingerprints(arrays: Sequence[jax.Array]) -> list[int]:
    """A 32-bit number of each array: its bits, each element with an odd weight of its own, summed.

    Integers modulo 2**32 add up to the same in any order, so an array has the same number on any
    mesh, and one flipped bit always changes it. It is computed where the array lies.

    Args:
        arrays: Arrays on devices, of any dtype that JAX has on them.

    Returns:
        The numbers.

    Example:

    >>> import jax.numpy as jnp
    >>> one, other = fingerprints([jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])])
    >>> one == other
    False
    """
    if not arrays:
        return []
    return [int(number) for number in np.asarray(_sums(list(arrays)))]


def fingerprints_of(arrays: Sequence[Any]) -> list[int]:
    """The numbers of arrays of which some lie on devices and others on the host.

    Args:
        arrays: Arrays of JAX's and NumPy's. See `fingerprints`.
    """
    return begun(arrays)()


def begun(arrays: Sequence[Any]) -> Callable[[], list[int]]:
    """Has the devices begin to compute the numbers of arrays, which may be donated afterwards.

    Args:
        arrays: See `fingerprints_of`.

    Returns:
        What waits for the numbers and gives them, from any thread.
    """
    return _begun(arrays, _sums)


def begun_with_finite(arrays: Sequence[Any]) -> Callable[[], list[tuple[int, bool]]]:
    """As `begun`, with whether all numbers of an array are finite.

    Args:
        arrays: See `fingerprints_of`.
    """
    found = _begun(arrays, _sums_and_finite)
    return lambda: [(int(number), bool(finite)) for number, finite in found()]


def _begun(arrays: Sequence[Any], function: Callable) -> Callable[[], list]:
    groups: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        devices = array.sharding.device_set if isinstance(array, jax.Array) else ()
        groups.setdefault(frozenset(devices), []).append(i)
    made = [(group, function([jnp.asarray(arrays[i]) for i in group])) for group in groups.values()]

    def numbers() -> list:
        found = {i: n for group, each in made for i, n in zip(group, np.asarray(each).tolist())}
        return [found[i] for i in range(len(found))]

    return numbers


@jax.jit
def _sums_and_finite(arrays: list) -> jax.Array:
    finite = [jnp.all(jnp.isfinite(each)).astype(jnp.uint32) for each in arrays]
    return jnp.stack([jnp.stack([_sum(each) for each in arrays]), jnp.stack(finite)], axis=1)


@jax.jit
def _sums(arrays: list) -> jax.Array:
    return jnp.stack([_sum(array) for array in arrays])


def _sum(array: jax.Array) -> jax.Array:
    bits = _bits(array)
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
    # Of 8 bytes there are two numbers for each element.
    return jax.lax.bitcast_convert_type(array, kind).astype(jnp.uint32)
