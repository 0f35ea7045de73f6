"""The loss and the gradients of models: as by hand, on one device and in replica code."""

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, scoped

import keras_tpu_dist as ktd

L = keras.layers
X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 1)).astype("float32")


def model_of(*hidden, name="model"):
    return keras.Sequential([keras.Input((4,)), *hidden, L.Dense(1)], name=name)


def by_hand(model, x, y):
    def loss(weights, others):
        outputs, others = model.stateless_call(weights, others, x, training=True)
        return keras.ops.mean((outputs - y) ** 2), others

    values = [
        [v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables)
    ]
    (value, others), gradients = jax.value_and_grad(loss, has_aux=True)(*values)
    return value, gradients, others


def test_it_is_what_one_writes_by_hand():
    keras.utils.set_random_seed(0)
    model = model_of(L.Dense(8, "tanh"), L.BatchNormalization(), L.Dropout(0.3, seed=3))
    value, gradients, others = by_hand(model, X, Y)
    mean = lambda: keras.ops.mean((model(X, training=True) - Y) ** 2)  # noqa: E731
    loss, found = ktd.loss_and_gradients(mean, model)
    assert_close([loss, *found], [value, *gradients], 1e-6)
    for variable, expected in zip(model.non_trainable_variables, others, strict=True):
        assert_close(variable.value, expected, 1e-6)


def test_the_structure_of_the_gradients_is_that_of_the_models():
    one, other = model_of(name="one"), model_of(name="other")
    kernel = one.layers[0].kernel
    returned, found = ktd.loss_and_gradients(
        lambda: (keras.ops.sum(one(X)) * 2 + keras.ops.sum(other(X)), {"aux": 3.0}),
        {"both": (one, other), "kernel": [kernel]},
    )
    assert returned[1] == {"aux": 3.0}
    assert [len(gradients) for gradients in found["both"]] == [2, 2]
    assert_close(found["both"][0][0], 2 * X.sum(0)[:, None], 1e-5)
    assert_close(found["both"][1][0], X.sum(0)[:, None], 1e-5)
    assert_close(found["kernel"][0], found["both"][0][0], 0)


def test_losses_of_layers():
    model = model_of(L.Dense(4, kernel_regularizer="l2"))
    _, found = ktd.loss_and_gradients(lambda: (model(X), sum(model.losses))[1], model)
    assert_close(found[0], 0.02 * np.asarray(model.layers[0].kernel), 1e-6)


def gan(in_replicas):
    """A generator and a discriminator that train in one step, with a metric and seeds."""
    keras.utils.set_random_seed(1)
    maker = keras.Sequential(
        [keras.Input((2,)), L.Dense(8, "tanh"), L.LayerNormalization(), L.Dense(4)], name="maker"
    )
    judge = model_of(L.Dense(8, "tanh"), Counts(name="counts"), name="judge")
    makes, judges = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
    seen = keras.metrics.Mean(name="seen")
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(noise, x):
        ones = keras.ops.ones((x.shape[0], 1))

        def judged():
            real, made = judge(x), judge(maker(noise))
            seen.update_state(made)
            return entropy(ones, real) + entropy(0 * ones, made)

        def made():
            return entropy(ones, judge(maker(noise))), "an aux"

        loss, for_judge = ktd.loss_and_gradients(judged, judge)
        (worse, aux), for_maker = ktd.loss_and_gradients(made, maker)
        assert aux == "an aux"
        if in_replicas:
            context = ktd.get_replica_context()
            for_judge, for_maker = context.all_reduce("mean", (for_judge, for_maker))
        judges.apply(for_judge, judge.trainable_variables)
        makes.apply(for_maker, maker.trainable_variables)
        return loss, worse

    return step, (maker, judge), seen


class Counts(L.Layer):
    """Keeps an average of what it sees, as BatchNormalization does."""

    def build(self, shape):
        self.average = self.add_weight(
            name="average", initializer="zeros", trainable=False, aggregation="mean"
        )

    def call(self, x):
        self.average.assign(0.9 * self.average + 0.1 * keras.ops.mean(x))
        return x


def trained(strategy=None):
    with scoped(strategy):
        step, models, seen = gan(strategy is not None)
    noise = np.random.default_rng(2).normal(size=(16, 2)).astype("float32")
    losses = []
    for _ in range(3):
        if strategy is None:
            losses.append([float(loss) for loss in step(noise, X)])
        else:
            for batch in strategy.distribute_dataset((noise, X), batch_size=16):
                of_replicas = strategy.run(step, batch)
                losses.append([float(strategy.reduce("mean", loss)) for loss in of_replicas])
    weights = [np.asarray(v) for model in models for v in model.variables]
    return [np.asarray(losses), *weights, float(seen.result())]


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 2, "model": 2}])
def test_two_models_in_replica_code_train_as_on_one_device(mesh):
    expected = trained()
    layout = "fsdp" if "fsdp" in mesh else None
    found = trained(ktd.TPUStrategy(mesh, layout))
    for value, other in zip(found, expected, strict=True):
        assert_close(value, other, 1e-5)
    assert found[-1] != 0.0


def looped(strategy, steps):
    """The weights after four batches of 13 rows, in launches of some steps or on one device."""
    keras.utils.set_random_seed(1)
    with scoped(strategy):
        model = model_of(L.Dense(8, "tanh"))
        optimizer = keras.optimizers.Adam(0.01)
    x = np.random.default_rng(3).normal(size=(52, 4)).astype("float32")

    def step(x, y, mask=None):
        def loss():
            error = (model(x, training=True) - y) ** 2
            error = error if mask is None else keras.ops.where(mask[:, None], error, 0)
            return keras.ops.sum(error) / 13

        value, gradients = ktd.loss_and_gradients(loss, model)
        if strategy is not None:
            gradients = ktd.get_replica_context().all_reduce("sum", gradients)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    def of_replica(batch):
        return step(*batch, ktd.get_replica_context().batch_mask)

    if strategy is None:
        for first in range(0, 52, 13):
            step(x[first : first + 13], x[first : first + 13, :1])
    else:
        batches = strategy.distribute_dataset((x, x[:, :1]), batch_size=13)
        options = ktd.RunOptions(dynamic_batch=True)
        list(strategy.loop(of_replica, batches, options=options, steps_per_launch=steps))
    return model.get_weights()


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [({"data": 4, "model": 2}, "tensor_parallel"), ({"data": 2, "fsdp": 2, "model": 2}, "fsdp")],
)
def test_ragged_batches_in_launches_with_split_weights(mesh, layout, steps):
    assert_close(looped(ktd.TPUStrategy(mesh, layout), steps), looped(None, 1), 1e-6)


@pytest.mark.parametrize(
    ("function", "models", "words"),
    [
        (3, "model", "takes a function that computes the loss.*function=3"),
        (lambda: keras.ops.ones((2,)), "model", r"one floating-point number.*shape=\(2,\)"),
        (lambda: 1, "model", r"one floating-point number.*dtype='int32'"),
        (lambda: 1.0, keras.Sequential([L.Dense(1)], name="late"), "'late', which is not built"),
        (lambda: 1.0, [], "differentiates models, or lists of variables"),
        (lambda: 1.0, "text", "differentiates models, or lists of variables"),
        (lambda: 1.0, ([3],), "differentiates models, or lists of variables"),
    ],
)
def test_what_is_wrong_is_said(function, models, words):
    with pytest.raises(ValueError, match=words):
        ktd.loss_and_gradients(function, model_of() if models == "model" else models)


class Sums(L.Layer):
    """Counts rows over all replicas.

    Args:
        read: Whether it reads the count after it has added to it.
    """

    def __init__(self, read=False, **options):
        super().__init__(**options)
        self.read = read

    def build(self, shape):
        options = {"initializer": "ones", "trainable": False, "aggregation": "sum"}
        self.count = self.add_weight(name="count", **options)

    def call(self, x):
        self.count.assign_add(keras.ops.sum(keras.ops.ones_like(x[:, 0])))
        return x + 0 * self.count if self.read else x


@pytest.mark.parametrize("read", [False, True])
def test_what_is_added_over_replicas(read):
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        model = model_of(Sums(read, name="sums"))

    def step(x):
        return ktd.loss_and_gradients(lambda: keras.ops.mean(model(x)), model)[0]

    (batch,) = strategy.distribute_dataset((X,), batch_size=16)
    if read:
        with pytest.raises(ValueError, match=r"adds to is not read.*'model/sums/count'.*after"):
            strategy.run(step, batch)
        assert float(model.layers[0].count.value) == 1.0
    else:
        strategy.run(step, batch)
        assert float(model.layers[0].count.value) == 17.0


def test_an_error_assigns_nothing():
    model = model_of(Counts(name="counts"))

    def failing():
        model(X)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        ktd.loss_and_gradients(failing, model)
    assert float(model.layers[0].average.value) == 0.0
    assert keras.ops.mean(model(X)).shape == ()
