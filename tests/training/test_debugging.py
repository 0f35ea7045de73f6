"""JAX's debugging modes: a step that is right runs in each."""

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
