"""JAX's debugging modes on every step: they find what they find in stock Keras, by the layer."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import built, sequential
from jax.experimental import checkify

import keras_tpu_dist as ktd

X = np.random.default_rng(0).normal(size=(45, 6)).astype("float32")
Y = X[:, :1]
MESHES = [
    pytest.param({"data": 4, "model": 2}, id="4x2"),
    pytest.param({"data": 2, "fsdp": 2, "model": 2}, id="2x2x2", marks=pytest.mark.slow),
]


class Bad(keras.layers.Layer):
    """Makes NaN, or infinite values, of everything."""

    def __init__(self, makes):
        super().__init__()
        self.makes = makes

    def call(self, x):
        x = x * 0.0
        return keras.ops.log(x - 10.0) if self.makes == "nans" else keras.ops.exp(x + 1000.0)


def build(makes="nans", steps=1, layers=1):
    hidden = [keras.layers.Dense(4) for _ in range(layers)]
    return sequential(6, *hidden, Bad(makes), loss="mean_absolute_error", steps_per_execution=steps)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("makes", ["nans", "infs"])
def test_the_layer_is_named(mesh, makes):
    """13 rows on four devices ended in JAX's IndivisibleError, several steps in "scan"."""
    layout = "auto" if "fsdp" in mesh else "tensor_parallel"
    strategy = ktd.TPUStrategy(mesh, layout)
    one_step, model = built(lambda: (build(makes), build(makes, 4)), strategy)
    debug = {"nans": jax.debug_nans, "infs": jax.debug_infs}[makes]
    calls = {
        "fit": lambda: model.fit(X, Y, batch_size=13, verbose=0),
        "evaluate": lambda: model.evaluate(X, Y, batch_size=13, verbose=0),
        "predict": lambda: model.predict(X, batch_size=13, verbose=0),
        "train_on_batch": lambda: one_step.train_on_batch(X[:13], Y[:13]),
    }
    for call in calls.values():
        with debug(True), pytest.raises(FloatingPointError, match=r"calling Bad\.call\(\)"):
            call()


def test_values_that_were_wrong_before_are_not_named_after_our_padding():
    """The first operation on them was the slice that cuts the padding off."""
    model = built(lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)]), None)
    x = np.full((13, 6), np.nan, "float32")
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    on_mesh = built(lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)]), strategy)
    for each in (model, on_mesh):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"Dense\.call\(\)"):
            each.predict(x, batch_size=13, verbose=0)


def test_a_donated_state_is_there_after_it():
    model = built(lambda: build(layers=40), ktd.TPUStrategy({"data": 8}))
    before = model.get_weights()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"Bad\.call"):
        model.fit(X, Y, batch_size=13, verbose=0)
    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)


def test_replica_code():
    # jax 0.10 cannot run a `shard_map` over some axes of a mesh operation by operation.
    either = r"Bad\.call|cannot be run operation by operation"
    for mesh, words in (({"data": 8}, r"Bad\.call"), ({"data": 4, "model": 2}, either)):
        strategy = ktd.TPUStrategy(mesh)
        model = built(build, strategy)
        (batch,) = strategy.distribute_dataset([X[:16]])
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match=words):
            strategy.run(model, args=(batch,))


@pytest.mark.parametrize("mode", ["disable_jit", "check_tracer_leaks"])
@pytest.mark.slow
def test_a_step_that_is_right_runs_in_every_mode(mode):
    x, y = X[:13], Y[:13]

    def fitted(strategy):
        def dense():
            return sequential(6, keras.layers.Dense(1), steps_per_execution=2)

        model = built(dense, strategy)
        model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        return [*model.get_weights(), model.predict(x, batch_size=5, verbose=0)]

    expected = fitted(None)
    turned_on = jax.disable_jit() if mode == "disable_jit" else jax.checking_leaks()
    with turned_on, jax.debug_nans(True):
        found = fitted(ktd.TPUStrategy({"data": 4, "model": 2}))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Checked(keras.layers.Layer):
    """Checks its input: by itself, which JAX allows outside of programs, or as a function."""

    def __init__(self, functionalized):
        super().__init__()
        self.functionalized = functionalized

    def call(self, x):
        if not self.functionalized:
            checkify.check(jnp.all(x > -50), "an input of {least}", least=jnp.min(x))
            return x
        error, x = checkify.checkify(self.normalized, errors=checkify.all_checks)(x)
        del error  # within a program it can only be returned
        return x

    def normalized(self, x):
        checkify.check(jnp.all(x > -50), "an input below -50")
        return jnp.cumsum(x, axis=0) / (1 + jnp.abs(x).sum())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_checks_of_checkify(mesh):
    """A check that fails ends an eager step; one that is made a function is computed exactly."""

    def build(functionalized):
        layers = [keras.layers.Dense(8), Checked(functionalized), keras.layers.Dense(1)]
        return sequential(6, *layers, run_eagerly=not functionalized)

    strategy = ktd.TPUStrategy(mesh, "auto" if "fsdp" in mesh else "tensor_parallel")
    for functionalized in (False, True):
        one_device = built(lambda: build(functionalized), None)
        model = built(lambda: build(functionalized), strategy)
        for each in (one_device, model):
            each.fit(X[:26], Y[:26], batch_size=13, shuffle=False, verbose=0)
        for weight, expected in zip(model.get_weights(), one_device.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, atol=1e-5)
    eager = built(lambda: build(False), strategy)
    with pytest.raises(checkify.JaxRuntimeError, match=r"an input of -(.|\n)*Checked\.call"):
        eager.fit(X - 1000, Y, batch_size=13, verbose=0)
