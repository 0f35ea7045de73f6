"""Loops of one's own whose weights lie split: the numbers of one device."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, built
from jax import lax
from jax.sharding import PartitionSpec as P
from keras import layers as kl

import keras_tpu_dist as ktd

FOUR, TWO, THREE = (
    {"data": 4, "model": 2},
    {"data": 2, "model": 4},
    {"data": 2, "fsdp": 2, "model": 2},
)
RULES = ktd.LayoutRules([(".*window/weight", ("model",)), (".*", ())])
RNG = np.random.default_rng(0)
VECTORS, IMAGES = (RNG.normal(size=s).astype("float32") for s in ((16, 5), (16, 8, 8, 4)))
LABELS = RNG.integers(0, 6, 16)


class Windows(keras.Layer):
    """A largest value of each window along a weight."""

    def build(self, shape):
        near = keras.initializers.RandomNormal(seed=1)
        self.weight = self.add_weight(shape=(16,), initializer=near, name="weight")

    def call(self, x):
        largest = lax.reduce_window(
            self.weight.value, np.float32(-np.inf), lax.max, (3,), (2,), "VALID"
        )
        return x @ jnp.outer(jnp.arange(5.0), largest)


def dense(units=6):
    return [keras.Input((5,)), kl.Dense(8, activation="tanh"), kl.Dense(units)]


def convolutions():
    depthwise = kl.DepthwiseConv2D(3, depth_multiplier=2, padding="same")
    return [keras.Input((8, 8, 4)), kl.Conv2D(8, 3), depthwise, kl.Conv2D(8, 3), kl.Flatten()]


def windows():
    return [keras.Input((5,)), Windows(name="window")]


def own_label(model, x, y):
    z = jax.nn.log_softmax(model(x))
    return -jnp.take_along_axis(z, y[:, None] % z.shape[1], 1).mean()


def contrastive(model, x, y):
    context, z = ktd.get_replica_context(), model(x)
    z = z / jnp.sqrt((z * z).sum(-1, keepdims=True))
    others = context.all_gather(z, 0)
    own = context.replica_id_in_sync_group * z.shape[0] + jnp.arange(z.shape[0])
    return -jnp.take_along_axis(jax.nn.log_softmax(3 * z @ others.T), own[:, None], 1).mean()


def repeated(model, x, y):
    again = jax.checkpoint(lambda h: jnp.tanh(h + 0.1 * model(h)))
    h, sums = lax.scan(lambda h, _: (again(h), h.mean()), x, None, length=3)
    return own_label(lambda h: h, h, y) + 1e-3 * sums.mean()


CASES = {
    "take_along_axis": (dense, own_label, VECTORS),
    "depthwise": (convolutions, own_label, IMAGES),
    "contrastive": (dense, contrastive, VECTORS),
    "scan": (lambda: dense(5), repeated, VECTORS),
    "window": (windows, own_label, VECTORS),
}


def trained(case, mesh, plan):
    """The loss, and what a step adds to each weight."""
    layers, loss_of, x = CASES[case]
    devices = None if mesh else jax.devices()[:1]
    strategy = ktd.TPUStrategy(mesh, plan, devices=devices)
    model = built(lambda: keras.Sequential(layers()), strategy)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(model.trainable_variables)
    before = [np.asarray(v.value) for v in model.trainable_variables]

    def step(x, y):
        context = ktd.get_replica_context()

        def loss(values):
            return loss_of(lambda x: model.stateless_call(values, [], x)[0], x, y)

        value, gradients = jax.value_and_grad(loss)([v.value for v in model.trainable_variables])
        optimizer.apply(context.all_reduce("mean", gradients), model.trainable_variables)
        return context.all_reduce("mean", value)

    number = strategy.num_replicas_in_sync
    own = [dict(enumerate(np.split(a, number))) for a in (x, LABELS)]
    batch = strategy.distribute_values_from_function(
        lambda context: [parts[context.replica_id_in_sync_group] for parts in own]
    )
    losses = strategy.run(step, batch)
    pairs = zip(model.trainable_variables, before)
    return [strategy.local_results(losses)[0], *(np.asarray(v.value) - old for v, old in pairs)]


def compare(case, mesh, plan):
    assert_close(trained(case, mesh, plan), trained(case, None, None))


@pytest.mark.parametrize(
    ("mesh", "plan"), [(FOUR, "tensor_parallel"), (THREE, "auto")], ids=["4x2", "2x2x2"]
)
def test_each_rows_own_label(mesh, plan):
    compare("take_along_axis", mesh, plan)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["take_along_axis", "depthwise", "contrastive", "scan"])
@pytest.mark.parametrize(
    ("mesh", "plan"),
    [(TWO, "tensor_parallel"), (FOUR, "tensor_parallel"), (THREE, "auto"), (THREE, "fsdp")],
    ids=["2x4", "4x2", "auto", "fsdp"],
)
def test_losses_that_gather(case, mesh, plan):
    compare(case, mesh, plan)


@pytest.mark.parametrize("mesh", [FOUR, TWO], ids=["4x2", "2x4"])
def test_the_gradient_of_a_largest_window_along_a_split_weight(mesh):
    compare("window", mesh, RULES)


@pytest.mark.parametrize("mesh", [FOUR, TWO], ids=["4x2", "2x4"])
def test_arrays_that_lie_split_are_given_whole(mesh):
    strategy = ktd.TPUStrategy(mesh)
    array = np.sin(np.arange(16, dtype="float32"))

    def gradient(x):
        def total(x):
            made = lax.reduce_window(x, np.float32(-np.inf), lax.max, (3,), (2,), "VALID")
            return (made * jnp.arange(1.0, 8)).sum()

        return jax.grad(total)(x)

    expected = np.asarray(gradient(array))
    another = jax.make_mesh((8,), ("other",), axis_types=(jax.sharding.AxisType.Auto,))
    for layout in (
        jax.NamedSharding(strategy.mesh, P("model")),
        jax.NamedSharding(strategy.mesh, P("data")),
        jax.NamedSharding(strategy.mesh, P()),
        jax.NamedSharding(another, P("other")),
    ):
        # One function, whose programs differ in the layout alone.
        found = strategy.run(gradient, (jax.device_put(array, layout),))
        assert_close([*strategy.local_results(found)], [expected] * strategy.num_replicas_in_sync)


MOVES = {
    "roll": lambda k, x: x @ jnp.roll(k, 1, 1),
    "shift": lambda k, x: x @ jnp.pad(k, ((0, 0), (1, 0)))[:, :-1],
    "reverse": lambda k, x: x @ k[:, ::-1],
    "sort": lambda k, x: x @ jnp.sort(k, 1),
    "sum": lambda k, x: x @ jnp.cumsum(k, 1),
    "lookup": lambda k, x: x @ jnp.take(k, jnp.arange(8)[::-1], 1),
    "slice": lambda k, x: jnp.pad(x @ k[:, 1:6], ((0, 0), (0, 3))),
    "reshape": lambda k, x: x @ k.T.reshape(4, 16).reshape(8, 8),
    "write": lambda k, x: x @ jax.lax.dynamic_update_slice(k, jnp.ones((8, 3)), (0, 4)),
    "features": lambda k, x: jnp.roll(jnp.tanh(x @ k), 3, 1),
}


@pytest.mark.parametrize(
    ("mesh", "move"),
    [
        pytest.param(mesh, move, marks=() if (n, move) == (0, "shift") else pytest.mark.slow)
        for n, mesh in enumerate((FOUR, TWO, THREE))
        for move in MOVES
    ],
)
def test_a_branch_that_some_replicas_take_moves_a_split_weight(mesh, move):
    """Of a user's own `jax.lax.cond`: devices that take it wait for none that does not."""
    strategy = ktd.TPUStrategy(mesh, {".*kernel": (None, "model")})
    with strategy.scope():
        layer = keras.layers.Dense(8, use_bias=False)
        layer.build((None, 8))
    kernel, number = np.array(layer.kernel), strategy.num_replicas_in_sync
    x = np.random.default_rng(0).normal(size=(3 * number, 8)).astype("float32")
    compute = MOVES[move]

    def step(batch):
        replica = ktd.get_replica_context().replica_id_in_sync_group

        def loss(k):
            out = jax.lax.cond(
                replica % 2 == 1, lambda: compute(k, batch), lambda: jnp.zeros_like(batch)
            )
            return (out**2).sum()

        gradient = jax.grad(loss)(layer.kernel.value)
        return ktd.get_replica_context().all_reduce("sum", gradient)

    (batch,) = strategy.distribute_dataset(x, batch_size=3 * number)
    found = strategy.local_results(strategy.run(step, (batch,)))[0]

    def expected(k):
        return sum((compute(k, x[3 * i : 3 * i + 3]) ** 2).sum() for i in range(1, number, 2))

    assert_close(np.array(found), np.array(jax.grad(expected)(jnp.asarray(kernel))))
