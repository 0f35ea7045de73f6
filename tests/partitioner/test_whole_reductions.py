"""Reductions of rows by a function, and bitwise ones: on simulated devices equal to one device."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, built
from jax import lax

import keras_tpu_dist as ktd

MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}]
ROWS = 13


def both(a, b):
    """The larger value, and the sum of both second values."""
    return jnp.maximum(a[0], b[0]), a[1] + b[1]


# Of rows of floats; every one has a gradient, but for `lax.reduce` of several operands.
FUNCTIONS = {
    "logaddexp": lambda x: lax.reduce(x, -np.float32(np.inf), jnp.logaddexp, (0,)),
    "norm": lambda x: lax.reduce(x, np.float32(0), lambda a, b: jnp.hypot(a, b), (0,)),
    "all": lambda x: lax.reduce(x, -np.float32(np.inf), jnp.logaddexp, (0, 1)),
    "product": lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b + a * b / 64, (0,)),
    "columns": lambda x: lax.reduce(x, np.float32(-9), jnp.logaddexp, (1,)),
}
WHOLE = {
    "started": lambda x: lax.reduce(x, np.float32(5), lax.add, (0,)),
    "two": lambda x: lax.reduce((x, x), (np.float32(-2), np.float32(3)), both, (0,)),
    **{
        name: lambda x, name=name: getattr(lax, f"reduce_{name}")((x * 8).astype("int32"), (0,))
        for name in ("and", "or", "xor")
    },
    "truth": lambda x: lax.reduce_xor(x > 0.3, (0,)),
    "any": lambda x: (lax.reduce_or(x > 0.3, (0,)), jnp.argmax(x, 0), lax.cumlogsumexp(x, 0)),
}
SLOW = pytest.mark.slow


def summed(x, functions):
    """A value of every row, and the results of reducing rows by functions, as one vector."""
    leaves = jax.tree.leaves([functions[name](x) for name in sorted(functions)])
    return jnp.concatenate([jnp.ravel(each).astype("float32") for each in leaves])


class Reduced(keras.layers.Layer):
    """A layer whose output has what it makes of all rows."""

    def call(self, x):
        trained, fixed = summed(x, FUNCTIONS), summed(lax.stop_gradient(x), WHOLE)
        return x + jnp.tanh(jnp.sum(trained) / 64 + jnp.sum(fixed) / 512)


def model():
    layers = [keras.layers.Dense(6, name="first"), Reduced(), keras.layers.Dense(2)]
    made = keras.Sequential([keras.Input((6,)), *layers])
    made.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=2)
    return made


def fitted(strategy):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2 * ROWS, 6)), rng.normal(size=(2 * ROWS, 2))
    made = built(model, strategy)
    history = made.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history
    return [history["loss"], made.predict(x, batch_size=ROWS, verbose=0), *made.get_weights()]


@functools.cache
def expected():
    return fitted(None)


@pytest.mark.parametrize(
    "mesh", [MESHES[1], *(pytest.param(m, marks=SLOW) for m in MESHES[::2])], ids=str
)
def test_a_layer_that_reduces_rows_trains_as_on_one_device(mesh):
    assert_close(fitted(ktd.TPUStrategy(mesh, "auto")), expected())


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=SLOW) for m in MESHES], ids=str)
def test_replicas_reduce_their_own_rows_and_values_split_by_other_axes(mesh):
    rows = [np.random.default_rng(n).normal(size=(4, 6)).astype("float32") for n in range(8)]
    strategy = ktd.TPUStrategy(
        mesh, ktd.LayoutRules([("w", (None, "model" if "model" in mesh else None))])
    )
    with strategy.scope():
        weight = keras.Variable(np.full((4, 6), 1.5, "float32"), name="w")

    def of(w, x):
        return jnp.sum(summed(w * x, FUNCTIONS)) / 16, summed(w * x, WHOLE)

    given = strategy.distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group]
    )
    found = strategy.run(
        lambda x: (*of(weight.value, x), jax.grad(lambda w: of(w, x)[0])(weight.value)), (given,)
    )
    found = strategy.local_results(found)
    for each, x in zip(found, rows, strict=False):
        w = np.full((4, 6), 1.5, "float32")
        right = (*of(w, x), jax.grad(lambda w: of(w, x)[0])(w))
        assert_close(list(each), list(right))
