"""The number of an array's values: the same on every mesh, another for every flipped bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.fingerprint import (
    fingerprints,
    identities,
    is_fingerprint_of_32_bits,
    small_on_host,
    start_fingerprints,
)

MESH = {"data": 2, "fsdp": 2, "model": 2}
DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "complex64"]


def expected(array):
    raw = np.stack([array.real, array.imag]) if np.iscomplexobj(array) else array
    unsigned = f"u{min(raw.dtype.itemsize, 4)}"
    bits = np.ascontiguousarray(raw).view(unsigned).ravel().astype(np.uint64)
    weights = np.arange(bits.size, dtype=np.uint64) * np.uint64(2 * 2654435761) + np.uint64(1)
    return int(np.sum(bits * (weights % 2**32) % 2**32) % 2**32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_same_on_every_mesh(dtype):
    mesh = ktd.TPUStrategy(MESH).mesh
    array = np.random.default_rng(0).normal(size=(8, 4, 2)) * 50
    array = np.asarray(jnp.asarray(array.astype("float32")).astype(dtype))
    specs = [(), ("data",), (("data", "fsdp"), "model"), ("model", "fsdp", "data"), (None, "model")]
    placed = [jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))) for spec in specs]
    assert set(fingerprints(placed)) == {expected(array)}
    assert fingerprints([array, placed[1], array]) == [expected(array)] * 3


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_all_bits_of_eight_bytes_count(dtype):
    with jax.enable_x64(True):
        array = (np.random.default_rng(0).normal(size=(8, 4)) * 2**40).astype(dtype)
        mesh = ktd.TPUStrategy(MESH).mesh
        split = jax.device_put(array, NamedSharding(mesh, PartitionSpec("data", "model")))
        fractions = np.array([0.25, 0.5]).astype(dtype)
        arrays = [array, split, fractions]
        assert fingerprints(arrays) == [expected(array)] * 2 + [expected(fractions)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_identity_is_the_same_on_every_mesh_and_tells_constants_apart(dtype):
    mesh = ktd.TPUStrategy(MESH).mesh
    # Above 64 KiB, the devices compute it.
    array = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(512, 256)) * 50, dtype))
    specs = [(), ("data",), (("data", "fsdp"), "model"), (None, "model")]
    placed = [jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))) for spec in specs]
    assert len(set(identities([array, *placed]))) == 1
    constants = [jnp.full((512, 256), value, dtype) for value in (0, 1, 2, 4)]
    others = [placed[1], placed[1].T.reshape(512, 256), *constants, placed[1].at[7, 7].add(1)]
    assert len({number for number, _ in identities(others)}) == len(others)


def test_all_bits_of_the_hosts_arrays_count():
    one, other = np.array([1, 2**40 + 1]), np.array([2**40 + 1, 1])
    assert fingerprints([one]) != fingerprints([other])
    # Older versions cast to 32 bits before, and what they wrote loads.
    [number] = fingerprints([one.astype("int32")])
    assert is_fingerprint_of_32_bits(number, one)
    assert not is_fingerprint_of_32_bits(number + 1, one)
    assert not is_fingerprint_of_32_bits(number, one.astype("int32"))


def test_empty_ones_have_numbers_too():
    assert fingerprints([]) == []
    assert fingerprints([jnp.zeros(()), jnp.zeros((0, 3))]) == [0, 0]


def test_host_and_devices_see_what_is_not_finite():
    arrays = [np.array([1.0, value], "float32") for value in (1.0, np.nan, -np.inf)]
    found = start_fingerprints([*arrays, *map(jnp.asarray, arrays), np.arange(3), np.ones(2, bool)])
    assert [finite for _, finite in found()] == [True, False, False] * 2 + [True, True]


def test_small_arrays_are_copied_to_the_host_and_large_ones_stay():
    mesh = ktd.TPUStrategy(MESH).mesh
    split = NamedSharding(mesh, PartitionSpec("data"))
    small, large = np.arange(8.0, dtype="float32"), np.zeros(2**17, "float32")
    given = [jax.device_put(small, split), jax.device_put(large, split), small]
    copied, stays, same = small_on_host(given)
    given[0].delete()
    np.testing.assert_array_equal(copied, small)
    assert stays is given[1]
    assert same is small


@given(st.integers(0, 4 * 300 - 1), st.integers(0, 7))
def test_one_flipped_bit_changes_it(byte, bit):
    array = np.random.default_rng(1).normal(size=(30, 10)).astype("float32")
    flipped = bytearray(array.tobytes())
    flipped[byte] ^= 1 << bit
    other = np.frombuffer(bytes(flipped), "float32").reshape(array.shape)
    one, changed = fingerprints([jnp.asarray(array), jnp.asarray(other)])
    assert one != changed
