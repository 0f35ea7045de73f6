"""Fingerprints of arrays, which are the same on every mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_tpu_dist.common.own_mesh import in_own_mesh
from keras_tpu_dist.common.sizes import bytes_of

# Odd, so that every flipped bit changes the sum (Knuth's multiplicative hashing).
_FACTOR = 2654435761
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint32"}
# For a smaller array, a launch and the compilation of its program take longer than a copy to the
# host, which a checkpoint needs anyway.
_SMALL_BYTES = 64 * 2**10


def fingerprints(arrays: Sequence[Any]) -> list[int]:
    """A 32-bit number for every array: its bits, weighted by odd numbers and summed modulo 2**32.

    Integers modulo 2**32 have the same sum in any order, so an array has the same number on any
    mesh, and a flipped bit always changes it. The devices of the array compute it, and NumPy for an
    array in host memory.

    Args:
        arrays: JAX or NumPy arrays, with any dtype of JAX.

    Example:

    >>> import jax.numpy as jnp
    >>> one, other = fingerprints([jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])])
    >>> one == other
    False
    """
    return [number for number, _ in start_fingerprints(arrays)()]


@in_own_mesh
def start_fingerprints(arrays: Sequence[Any]) -> Callable[[], list[tuple[int, bool]]]:
    """Starts to compute the fingerprints of arrays. Those on devices may be donated afterwards.

    Args:
        arrays: See `fingerprints`.

    Returns:
        A function that waits for them, in any thread, and returns for every array its fingerprint
        and whether all its numbers are finite.
    """
    begun = [_begun(array) if isinstance(array, jax.Array) else array for array in arrays]

    def found() -> list[tuple[int, bool]]:
        pairs = [np.asarray(one) if isinstance(one, jax.Array) else _on_host(one) for one in begun]
        return [(int(number), bool(finite)) for number, finite in pairs]

    return found


def is_small(array: Any) -> bool:
    """Whether an array is saved and read through the memory of the host, with all such arrays."""
    return bytes_of(array) <= _SMALL_BYTES


def small_on_host(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays, with copies in host memory in place of the small ones on devices."""
    small = {
        i: array.addressable_data(0) if array.is_fully_replicated else array
        for i, array in enumerate(arrays)
        if isinstance(array, jax.Array)
        and is_small(array)
        and (array.is_fully_replicated or array.is_fully_addressable)
    }
    for array in small.values():
        array.copy_to_host_async()
    # On CPU an array of NumPy may be the device's memory, which the next step overwrites.
    copies = {i: np.array(array) for i, array in small.items()}
    return [copies.get(i, array) for i, array in enumerate(arrays)]


def _begun(array: jax.Array) -> jax.Array:
    # One program for each kind of array: that for all arrays of a large model takes a minute to
    # compile. Every device has a replicated array, so one of them computes.
    return _on_devices(array.addressable_data(0) if array.is_fully_replicated else array)


@jax.jit
def _on_devices(array: jax.Array) -> jax.Array:
    finite = jnp.all(jnp.isfinite(array)).astype(jnp.uint32)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    # An element of 8 bytes becomes two numbers.
    kind = jnp.dtype(_UNSIGNED[array.dtype.itemsize])
    bits = jax.lax.bitcast_convert_type(array, kind).astype(jnp.uint32)
    # The row-major index, from iotas: a reshape to one dimension would gather a split array.
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    weight = index * np.uint32(2 * _FACTOR % 2**32) + np.uint32(1)
    return jnp.stack([jnp.sum(bits * weight, dtype=jnp.uint32), finite])


def _on_host(array: np.ndarray) -> tuple[int, bool]:
    # As JAX has it: with 32 bits, unless the user has switched 64 on.
    array = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    finite = bool(np.isfinite(array).all())
    if np.iscomplexobj(array):
        array = np.stack([array.real, array.imag])
    bits = np.ascontiguousarray(array).view(_UNSIGNED[array.dtype.itemsize]).ravel()
    weight = np.arange(bits.size, dtype=np.uint32) * np.uint32(2 * _FACTOR % 2**32) + np.uint32(1)
    return int(np.sum(bits * weight, dtype=np.uint32)), finite
