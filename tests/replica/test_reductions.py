"""Reductions through both doors, `strategy.reduce` and the replica context: one result."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_tpu_dist as ktd

WHOLE = ("uint8", "int8", "uint16", "int16", "uint32", "int32")
FLOATS = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
DTYPES = ("bool", "int4", "uint4", *WHOLE, *FLOATS, "complex64")
OPS = ("sum", "mean", "max", "min")
SHAPES = ((), (3,), (0,), (0, 3), (2, 0), (1, 2))
MESHES = {"8": {"data": 8}, "2x2x2": {"data": 2, "fsdp": 2, "model": 2}, "1": None}


def made(mesh):
    sizes = MESHES[mesh]
    return ktd.TPUStrategy(sizes, devices=None if sizes else jax.devices()[:1])


def values(dtype, shape, number):
    """A value for each replica, whose sum and mean pass through numbers too large for the dtype."""
    kind = jnp.dtype(dtype)
    rng = np.random.default_rng(0)
    if jnp.issubdtype(kind, jnp.bool_):
        return rng.integers(0, 2, (number, *shape)).astype(bool)
    if jnp.issubdtype(kind, jnp.integer):
        top = min(int(jnp.iinfo(kind).max), 2**28)
        return np.asarray(rng.integers(top // 2, top, (number, *shape)), "int64").astype(kind)
    if jnp.issubdtype(kind, jnp.complexfloating):
        return rng.normal(size=(number, *shape)).astype(kind)
    top = min(float(jnp.finfo(kind).max), 1e30)
    return rng.choice([top / 2, top / 2, top / 4], (number, *shape)).astype(kind)


def exact(op, stacked, axis=0):
    """The result in as many bits as there are, rounded to the dtype that is documented."""
    kind = stacked.dtype
    float_ = jnp.issubdtype(kind, jnp.inexact)
    if op in ("max", "min"):
        result = kind
    elif op == "mean":
        result = kind if float_ else jnp.dtype("float32")
    else:
        signed = jnp.issubdtype(kind, jnp.bool_) or jnp.issubdtype(kind, jnp.signedinteger)
        result = kind if float_ else jnp.dtype("int32" if signed else "uint32")
    complex_ = jnp.issubdtype(kind, jnp.complexfloating)
    wide = "complex128" if complex_ else "float64"
    whole = getattr(np, op)(np.asarray(stacked).astype(wide), axis=axis)
    return whole, result


def same(found, expected, dtype):
    assert found.dtype == dtype
    found = np.asarray(found).astype(expected.dtype)
    with np.errstate(over="ignore"):
        # A sum of floats may pass the largest one, and is infinite then.
        expected = np.asarray(expected).astype(dtype).astype(expected.dtype)
    if np.issubdtype(np.dtype(found.dtype), np.inexact):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    else:
        np.testing.assert_array_equal(found, expected)


def both_doors(strategy, op, stacked):
    """What `strategy.reduce` and `all_reduce` make of a dictionary of values for each replica."""
    given = strategy.distribute_values_from_function(
        lambda c: {k: v[c.replica_id_in_sync_group] for k, v in stacked.items()}
    )
    inside = strategy.run(lambda v: ktd.get_replica_context().all_reduce(op, v), (given,))
    return strategy.reduce(op, given), strategy.local_results(inside)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("op", OPS)
def test_every_dtype_and_shape_through_both_doors(mesh, op):
    strategy = made(mesh)
    number = strategy.num_replicas_in_sync
    stacked = {
        f"{dtype} {shape}": values(dtype, shape, number)
        for dtype, shape in itertools.product(DTYPES, SHAPES)
        if not (dtype == "complex64" and op in ("max", "min"))
    }
    outside, inside = both_doors(strategy, op, stacked)
    for name, each in stacked.items():
        expected, dtype = exact(op, each)
        for found in (outside[name], *(one[name] for one in inside)):
            assert found.shape == each.shape[1:], name
            same(found, expected, dtype)


def test_means_of_narrow_numbers_do_not_overflow():
    strategy = made("8")
    held = {"uint8": 200, "int16": 30000, "float16": 40000.0}
    stacked = {k: np.full((8,), v, k) for k, v in held.items()}
    outside, inside = both_doors(strategy, "mean", stacked)
    for found in (outside, *inside):
        assert {k: float(v) for k, v in found.items()} == held
        assert found["float16"].dtype == "float16"


@pytest.mark.parametrize("op", ["max", "min"])
def test_complex_numbers_have_no_order(op):
    strategy = made("8")
    with pytest.raises(ValueError, match="Complex numbers have no order"):
        both_doors(strategy, op, {"z": np.ones((8, 2), "complex64")})
    given = strategy.distribute_values_from_function(lambda c: np.ones(2, "complex64"))
    with pytest.raises(ValueError, match="Complex numbers have no order"):
        strategy.reduce(op, given)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [(2, 2), (3, 0), (0, 0)], ids=str)
def test_rows_as_well_as_replicas(op, rows):
    strategy = ktd.TPUStrategy({"data": 2, "model": 4})
    parts = [values("float16", (n, 2), 1)[0] for n in rows]
    given = strategy.distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])
    if op in ("max", "min") and not any(rows):
        with pytest.raises(ValueError, match="needs at least one value"):
            strategy.reduce(op, given, axis=0)
        return
    found = strategy.reduce(op, given, axis=0)
    if not any(rows):
        assert np.asarray(found).shape == (2,)
        assert np.isnan(found).all() if op == "mean" else not np.any(found)
        return
    expected, dtype = exact(op, np.concatenate(parts))
    same(found, expected, dtype)


@pytest.mark.parametrize("mesh", ["8", "2x2x2", "1"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 3)], ids=str)
def test_gathers_of_arrays_without_elements(mesh, shape):
    strategy = made(mesh)
    number = strategy.num_replicas_in_sync
    stacked = {dtype: values(dtype, shape, number) for dtype in ("float32", "bool", "int32")}
    given = strategy.distribute_values_from_function(
        lambda c: {k: v[c.replica_id_in_sync_group] for k, v in stacked.items()}
    )
    for axis in range(len(shape)):
        inside = strategy.run(
            lambda v, axis=axis: ktd.get_replica_context().all_gather(v, axis), (given,)
        )
        outside = strategy.gather(given, axis)
        for name, each in stacked.items():
            expected = np.concatenate([*each], axis=axis)
            for found in (outside[name], *(one[name] for one in strategy.local_results(inside))):
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)


def test_gradients_go_through_reductions_and_empty_gathers():
    strategy = made("8")

    def gradients(x):
        context = ktd.get_replica_context()

        def loss(x):
            mean = context.all_reduce("mean", x["half"]).astype("float32").sum()
            return mean + context.all_gather(x["empty"], 0).sum()

        return jax.grad(loss)(x)

    given = {"half": jnp.ones(2, "float16"), "empty": jnp.ones((0, 3))}
    for found in strategy.local_results(strategy.run(gradients, (given,))):
        assert found["half"].dtype == "float16"
        assert found["half"].tolist() == [1, 1]
        assert found["empty"].shape == (0, 3)


def test_a_sum_is_added_to_a_narrow_variable_in_its_dtype():
    import keras

    strategy = made("8")
    with strategy.scope():
        count = keras.Variable(
            np.zeros((), "uint8"), dtype="uint8", trainable=False, aggregation="sum"
        )
    found = strategy.run(lambda: jnp.asarray(count.assign_add(np.uint8(1)))).dtype
    assert (found, int(count.value)) == ("uint8", 8)
