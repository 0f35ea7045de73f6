"""Fingerprints of arrays, which are the same on every mesh."""

import functools
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


def identities(arrays: Sequence[Any]) -> list[tuple[int, bool]]:
    """Fingerprints that tell arrays apart, and whether all numbers are finite.

    A sum of `fingerprints` finds damage, and does not tell constants apart: it is 0 for 1024 zeros
    and for 1024 ones. Here the bits of each element are mixed with its index before they are
    summed. One changed element still always changes the number.

    Args:
        arrays: See `fingerprints`.

    Example:

    >>> import jax.numpy as jnp
    >>> constants = [jnp.zeros(1024), jnp.ones(1024)]
    >>> fingerprints(constants)
    [0, 0]
    >>> len({number for number, _ in identities(constants)})
    2
    """
    return start_fingerprints(small_on_host(arrays), mixed=True)()


@in_own_mesh
def start_fingerprints(
    arrays: Sequence[Any], mixed: bool = False
) -> Callable[[], list[tuple[int, bool]]]:
    """Starts to compute the fingerprints of arrays. Those on devices may be donated afterwards.

    Args:
        arrays: See `fingerprints`.
        mixed: Whether they are those of `identities`.

    Returns:
        A function that waits for them, in any thread, and returns for every array its fingerprint
        and whether all its numbers are finite.
    """
    begun = [_begun(array, mixed) if isinstance(array, jax.Array) else array for array in arrays]

    def found() -> list[tuple[int, bool]]:
        pairs = [
            np.asarray(one) if isinstance(one, jax.Array) else _on_host(one, mixed) for one in begun
        ]
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


def _begun(array: jax.Array, mixed: bool) -> jax.Array:
    # One program for each kind of array: that for all arrays of a large model takes a minute to
    # compile. Every device has a replicated array, so one of them computes.
    here = array.addressable_data(0) if array.is_fully_replicated else array
    return _on_devices(here, mixed=mixed)


@functools.partial(jax.jit, static_argnames="mixed")
def _on_devices(array: jax.Array, *, mixed: bool) -> jax.Array:
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
    terms = _mixed(bits, index) if mixed else bits * _weight(index)
    return jnp.stack([jnp.sum(terms, dtype=jnp.uint32), finite])


def _on_host(array: np.ndarray, mixed: bool) -> tuple[int, bool]:
    finite = bool(np.isfinite(array).all())
    if np.iscomplexobj(array):
        array = np.stack([array.real, array.imag])
    bits = np.ascontiguousarray(array).view(_UNSIGNED[array.dtype.itemsize]).ravel()
    bits = bits.astype(np.uint32)
    index = np.arange(bits.size, dtype=np.uint32)
    terms = _mixed(bits, index) if mixed else bits * _weight(index)
    return int(np.sum(terms, dtype=np.uint32)), finite


def _weight(index: Any) -> Any:
    return index * np.uint32(2 * _FACTOR % 2**32) + np.uint32(1)


def _mixed(bits: Any, index: Any) -> Any:
    """Each element's bits and index, mixed as MurmurHash3 does at its end: a bijection of bits."""
    mixed = bits + index * np.uint32(_FACTOR)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return mixed ^ (mixed >> np.uint32(16))


def is_fingerprint_of_32_bits(number: int, array: Any) -> bool:
    """Whether it is the fingerprint of an array of the host as older versions computed it.

    They cast one of 64 bits to 32 before, unless the user had switched 64 on.
    """
    if not isinstance(array, np.ndarray):
        return False
    cast = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return cast.dtype != array.dtype and _on_host(cast, False)[0] == number
