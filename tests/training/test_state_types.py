"""Values that begin with another dtype than their variable's: as in stock Keras, step by step."""

import itertools

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_close, data, sequential

import keras_tpu_dist as ktd

FIRST = {
    "int32": np.int32,
    "bool": np.bool_,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "weak": None,
    "float32": np.float32,
}
POLICIES = ["float32", "bfloat16", "mixed_bfloat16", "mixed_float16"]
MESHES = {
    "one device": ({"data": 1}, {}),
    "data": ({"data": 8}, {}),
    "fsdp": ({"data": 4, "model": 2}, {"layout": "fsdp"}),
}


def begins_as(name):
    """An initializer whose values have a dtype of their own."""

    def initializer(shape, dtype=None):
        dtype = FIRST[name]
        return jnp.full(shape, 1.0) if dtype is None else jnp.ones(shape, dtype)

    return initializer


class Means(keras.layers.Layer):
    """A moving mean for every dtype to begin with."""

    def build(self, shape):
        self.means = [
            self.add_weight(
                shape=(shape[-1],), initializer=begins_as(n), trainable=False, name=f"of_{n}"
            )
            for n in FIRST
        ]

    def call(self, x):
        mean = keras.ops.mean(x, axis=0)
        for each in self.means:
            each.assign(0.9 * each + 0.1 * keras.ops.cast(mean, each.dtype))
            x = x + keras.ops.cast(0.01 * each, x.dtype)
        return x


class Momentum(keras.optimizers.SGD):
    """Slots of every dtype to begin with."""

    def build(self, variables):
        super().build(variables)
        self.slots = {
            n: [self.add_variable(v.shape, begins_as(n), name=f"of_{n}") for v in variables]
            for n in FIRST
        }

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        place = self._get_variable_index(variable)
        for slots in self.slots.values():
            slot = slots[place]
            self.assign(slot, 0.9 * slot + 0.1 * keras.ops.cast(gradient, slot.dtype))
            self.assign_sub(variable, keras.ops.cast(0.01 * slot, variable.dtype))


class Seen(keras.metrics.Metric):
    """Sums of every dtype to begin with."""

    def __init__(self):
        super().__init__(name="seen")
        self.sums = [self.add_variable((), begins_as(n), name=f"of_{n}") for n in FIRST]

    def update_state(self, y, y_pred, sample_weight=None):
        for each in self.sums:
            each.assign(0.9 * each + keras.ops.cast(keras.ops.mean(y_pred), each.dtype))

    def result(self):
        return sum(keras.ops.cast(each, "float32") for each in self.sums)

    def reset_state(self):
        pass


class Raw(keras.Sequential):
    """A step that reads and returns arrays as they are."""

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        logs, (trainable, after, optimizer, metrics) = super().train_step(state, data)
        mean = data[0].mean()
        # `others` are not cast to their variables' dtypes, as within Keras's own step.
        after = [0.9 * v + 0.01 * mean if v.ndim == 1 else n for v, n in zip(others, after)]
        return logs, (trainable, after, optimizer, metrics)


def built(kind, policy, steps, accumulated=None):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    try:
        model = kind([keras.Input((6,)), Means(), keras.layers.Dense(3, activation="softmax")])
        optimizer = Momentum(0.1, gradient_accumulation_steps=accumulated)
        model.compile(
            optimizer,
            "sparse_categorical_crossentropy",
            metrics=[Seen()],
            steps_per_execution=steps,
        )
        return model
    finally:
        keras.config.set_dtype_policy("float32")


def trained(model, rows):
    x, y = data(rows)
    before = (
        model.evaluate(x, y, batch_size=8, verbose=0),
        model.predict(x, batch_size=8, verbose=0).astype("float64"),
    )
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
    predicted = model.predict(x, batch_size=8, verbose=0)
    on_batch = model.train_on_batch(x[:5], y[:5])
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return (
        {v.path: np.asarray(v.value, "float64") for v in variables},
        {v.path: v.value.dtype for v in variables},
        history,
        (before, evaluated, np.asarray(predicted, "float64"), on_batch),
    )


def assert_equal(ours, stock, policy):
    tolerance = 1e-5 if policy == "float32" else 2e-2
    assert list(ours[1].values()) == list(stock[1].values())
    pairs = zip(jax.tree.leaves(ours[0:1] + ours[2:]), jax.tree.leaves(stock[0:1] + stock[2:]))
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def strategy_on(mesh):
    axes, options = MESHES[mesh]
    devices = jax.devices()[: np.prod(list(axes.values()))]
    return ktd.TPUStrategy(axes, devices=devices, **options)


CASES = list(itertools.product([keras.Sequential, Raw], POLICIES, MESHES, [1, 4]))


@pytest.mark.parametrize(("kind", "policy", "mesh", "steps"), CASES)
def test_every_step_begins_with_what_the_last_one_returned(kind, policy, mesh, steps):
    rows = 8 * 6 + 3
    stock = trained(built(kind, policy, 1), rows)
    with strategy_on(mesh).scope():
        model = built(kind, policy, steps)
    assert_equal(trained(model, rows), stock, policy)


@pytest.mark.parametrize("steps", [4, 6])
@pytest.mark.parametrize("mesh", MESHES)
def test_small_batches_of_one_update(mesh, steps):
    stock = trained(built(keras.Sequential, "float32", 1, accumulated=2), 8 * 6)
    with strategy_on(mesh).scope():
        model = built(keras.Sequential, "float32", steps, accumulated=2)
    assert_equal(trained(model, 8 * 6), stock, "float32")


class Summed(keras.layers.Layer):
    """A sum along the rows, which XLA partitions wrongly, so that the program is repaired."""

    def call(self, x):
        return x + 0.01 * jnp.cumsum(x, axis=0)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("mesh", MESHES)
def test_of_a_program_that_is_repaired(mesh, steps):
    def model(steps):
        keras.utils.set_random_seed(0)
        layers = [Summed(), Means(), keras.layers.Dense(3, activation="softmax")]
        loss = "sparse_categorical_crossentropy"
        return sequential(6, *layers, optimizer=Momentum(0.1), loss=loss, steps_per_execution=steps)

    stock = trained(model(1), 8 * 6 + 3)
    with strategy_on(mesh).scope():
        ours = model(steps)
    assert_equal(trained(ours, 8 * 6 + 3), stock, "float32")


@pytest.mark.parametrize("sizes", [[8, 5, 3, 8], [3, 5, 7, 8, 2, 6]])
@pytest.mark.parametrize("mesh", MESHES)
def test_of_single_batches_of_other_sizes(mesh, sizes):
    def losses(model):
        x, y = data(8)
        return [model.train_on_batch(x[:n], y[:n]) for n in sizes], model.get_weights()

    stock = losses(built(keras.Sequential, "float32", 1))
    with strategy_on(mesh).scope():
        model = built(keras.Sequential, "float32", 1)
    assert_close(losses(model), stock)


@pytest.mark.parametrize("steps", [1, 4])
def test_while_a_callback_looks_for_values_that_are_not_finite(steps):
    def fitted(model, callbacks):
        x, y = data(48)
        losses = model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks).history
        return losses, [v.numpy() for v in (*model.variables, *model.optimizer.variables)]

    stock = fitted(built(keras.Sequential, "float32", 1), [])
    with strategy_on("data").scope():
        model = built(keras.Sequential, "float32", steps)
    assert_close(fitted(model, [ktd.callbacks.NameNaN()]), stock)
