"""Layers computed again, as one loop or by one logical device, within strategy.run."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, built, stepped

import keras_tpu_dist as ktd

L = keras.layers
WAYS = ("remat", "assign", "scan_blocks")


@pytest.fixture
def pairs(devices):
    """A strategy of two replicas of two devices."""
    return ktd.TPUStrategy({"data": 2, "model": 2}, devices=devices[:4])


def blocks_by(way, block):
    """Builds a model of two equal blocks, computed in a way; `None` computes them as usual."""

    def build():
        blocks = [block(name=f"block_{i}") for i in range(2)]
        if way in ("remat", "assign"):
            wrap = {"remat": ktd.remat, "assign": lambda each: ktd.assign(each, 1)}[way]
            blocks = [wrap(each) for each in blocks]
        model = keras.Sequential([keras.Input((4,)), *blocks, L.Dense(1)])
        if way == "scan_blocks":
            assert ktd.scan_blocks(model).runs
        return model

    return build


def dense(name, dropout=0.0):
    return keras.Sequential([L.Dense(8, "tanh"), L.Dropout(dropout), L.Dense(4)], name=name)


def rows():
    return np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


@pytest.mark.slow  # imports TensorFlow
def test_a_step_of_tensorflow_is_answered(pairs):
    tf = pytest.importorskip("tensorflow")
    weights = keras.Variable(np.ones(2, "float32"))

    def taped(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weights.value)
        return tape.gradient(loss, [weights])

    for step in (taped, tf.function(lambda x: x + 1)):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - TensorFlow's own
            pairs.run(step, (np.ones((4, 2), "float32"),))
        assert "ktd.loss_and_gradients(loss, model) for a tape" in " ".join(caught.value.__notes__)
    for args in ((np.ones((4, 2), "float32"),), ()):
        outer = tf.function(lambda *args: pairs.run(lambda *a: jnp.ones(2), args), autograph=False)
        with pytest.raises(RuntimeError, match=r"outside of tf\.function.*Remove @tf\.function"):
            outer(*args)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_of_the_values_given_to_stateless_call(pairs, way):
    def gradients(model):
        def loss(trainable, others, x):
            outputs, _ = model.stateless_call(trainable, others, x, training=True)
            return (outputs**2).mean()

        def step(x):
            values = [[v.value for v in model.trainable_variables]]
            values.append([v.value for v in model.non_trainable_variables])
            found = jax.grad(loss)(*values, x)
            return ktd.get_replica_context().all_reduce("mean", found)

        (batch,) = pairs.distribute_dataset([rows()])
        return [np.asarray(pairs.local_results(g)[0]) for g in pairs.run(step, (batch,))]

    expected = gradients(built(blocks_by(None, dense), pairs))
    assert all(np.any(each) for each in expected)
    assert_close(gradients(built(blocks_by(way, dense), pairs)), expected)


class Counter(L.Layer):
    """Counts over all replicas, by additions and in the end by what `last` does."""

    last = None
    aggregation = "sum"

    def build(self, shape):
        self.seen = self.add_weight(
            *((), "zeros"), trainable=False, name="seen", aggregation=self.aggregation
        )
        self.kernel = self.add_weight(name="kernel", shape=(4, 4))

    def call(self, x):
        self.seen.assign_add(4.0)
        self.seen.assign_sub(1.0)
        if self.last is not None:
            self.last(self.seen)
        return jnp.tanh(x @ self.kernel)


class Last(Counter):
    def last(self, seen):
        seen.assign(1.0)
        seen.assign_add(2.0)


@pytest.mark.parametrize(("layer", "expected"), [(Counter, 18), (Last, 6)])
@pytest.mark.parametrize("way", [None, *WAYS])
def test_additions_to_a_sum_add_up(pairs, way, layer, expected):
    """In each of three launches, 3 by each of two replicas; or that alone, assigned."""
    model = built(blocks_by(way, layer), pairs)
    (batch,) = pairs.distribute_dataset([rows()])

    def step(x):
        return model(x)

    for _ in range(3):
        pairs.run(step, (batch,))
    assert [float(v.value) for v in model.non_trainable_variables] == [expected] * 2


class Reader(Counter):
    """Reads what all replicas have added and assigned, while it computes."""

    def call(self, x):
        self.seen.assign_add(x.mean())
        self.seen.assign_add(1.0)
        added = self.seen + 0.0
        self.seen.assign(self.seen * 2.0)
        assigned = self.seen + 0.0
        self.seen.assign_add(1.0)
        return jnp.tanh(x @ self.kernel) + added + 10 * assigned + 100 * self.seen


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_of_updates_is_of_all_replicas(pairs, way, aggregation, monkeypatch):
    """As without, where an update is combined at once."""
    monkeypatch.setattr(Reader, "aggregation", aggregation)

    def outcome(way):
        model = built(blocks_by(way, Reader), pairs)
        (batch,) = pairs.distribute_dataset([rows()])
        for _ in range(2):
            outputs = pairs.run(lambda x, model=model: model(x), (batch,))
        seen = [float(v.value) for v in model.non_trainable_variables]
        return seen, np.asarray(pairs.gather(outputs, 0))

    found, expected = outcome(way), outcome(None)
    assert_close(found, expected, 1e-5 * np.abs(expected[1]).max())


def test_additions_within_calls_within_calls(pairs):
    def build():
        inner = ktd.remat(Counter())
        outer = ktd.assign(keras.Sequential([keras.Input((4,)), inner]), 1)
        return keras.Sequential([keras.Input((4,)), ktd.remat(outer)])

    model = built(build, pairs)
    (batch,) = pairs.distribute_dataset([rows()])
    for _ in range(2):
        pairs.run(model, (batch,))
    assert [float(v.value) for v in model.non_trainable_variables] == [12]


@pytest.mark.parametrize("way", WAYS)
def test_dropout_draws_as_without(pairs, way):
    def outputs(way):
        def block(name):
            return dense(name, dropout=0.5)

        model = built(blocks_by(way, block), pairs)
        (batch,) = pairs.distribute_dataset([np.ones((8, 4), "float32")])

        def step(x):
            return model(x, training=True)

        return [pairs.gather(pairs.run(step, (batch,)), 0) for _ in range(2)]

    expected = outputs(None)
    assert np.any(expected[0][:4] != expected[0][4:]), "replicas draw numbers of their own"
    assert_close(outputs(way), expected)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_context_within_an_assigned_function(replicas, devices):
    strategy = ktd.TPUStrategy({"data": replicas, "model": 2}, devices=devices[: 2 * replicas])

    def inner(x):
        context = ktd.get_replica_context()
        numbers = (context.replica_id_in_sync_group, context.batch_size, context.length)
        masked = jnp.where(context.batch_mask[:, None] & context.length_mask, x, 0)
        return numbers, context.all_reduce("sum", masked.sum())

    def outer(x):
        found = strategy.assign_to_logical_device(inner, 1)(x)
        return found, inner(x)

    options = ktd.RunOptions(dynamic_batch=True, buckets="power_of_two", axis=1)
    (batch,) = strategy.distribute_dataset([np.ones((4 * replicas - 1, 3), "float32")])
    found, expected = strategy.run(outer, (batch,), options=options)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert_close(strategy.local_results(a), strategy.local_results(b))
    assert float(strategy.local_results(found[1])[0]) == 3 * (4 * replicas - 1)


def test_an_assignment_in_a_branch_or_loop_is_an_error(two):
    with two.scope():
        v = keras.Variable(0.0, name="v", trainable=False)
        total = keras.Variable(0.0, name="v", trainable=False, aggregation="sum")

    def once(i, carry):
        v.assign_add(1.0)
        return carry

    def also(carry, _):
        return total.assign_add(1.0), None

    context = ktd.get_replica_context
    for step in (
        lambda: jax.lax.cond(
            context().replica_id_in_sync_group >= 0, lambda: v.assign(5.0), lambda: v.assign(3.0)
        ),
        lambda: keras.ops.cond(v.value < 1, lambda: v.assign(v + 1), lambda: v.value),
        lambda: jax.lax.fori_loop(0, 3, once, 0.0),
        lambda: jax.lax.scan(also, 0.0, None, length=3)[0],
        lambda: jax.jit(lambda: v.assign(v + 1))(),
    ):
        with pytest.raises(ValueError, match=r"an assignment of 'v' within .*assign it outside"):
            two.run(step)
    assert float(v.value) == float(total.value) == 0

    def outside():
        v.assign(jax.lax.cond(v.value < 1, lambda: v + 5.0, lambda: v.value))

    two.run(outside)
    assert float(v.value) == 5


def test_an_assignment_in_a_gradient_or_a_map(two):
    with two.scope():
        calls = keras.Variable(0.0, trainable=False)
        dropout = L.Dropout(0.5)

    def loss(x):
        calls.assign_add(1.0)
        return (dropout(x, training=True) ** 2).sum()

    def step(x):
        first = jax.value_and_grad(loss)(x)[0]
        return first, jax.vmap(jax.grad(loss))(x)

    (batch,) = two.distribute_dataset([np.ones((4, 3), "float32")])
    two.run(step, (batch,))
    assert float(calls.value) == 2


@pytest.mark.parametrize("normalized", [False, True])
def test_a_layer_is_frozen_between_two_runs(two, normalized):
    """As if `fn` were new: what trains is part of the program, and known programs come back."""
    layers = [keras.Input((3,)), keras.layers.Dense(4, name="frozen")]
    if normalized:
        layers.append(keras.layers.BatchNormalization(center=False, scale=False, name="norm"))
    with two.scope():
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    traces = []

    def step(x):
        traces.append(1)
        return stepped(model, optimizer, x, lambda outputs: keras.ops.mean(outputs**2))[0]

    (x,) = two.distribute_dataset(np.arange(18, dtype="float32").reshape(6, 3), batch_size=6)
    changed = [model.layers[-2] if normalized else model.layers[0]]

    def changes():
        before = [np.array(v) for v in changed[0].variables]
        two.run(step, (x,))
        return any(not np.array_equal(a, b) for a, b in zip(before, changed[0].variables))

    assert changes()
    changed[0].trainable = False
    assert not changes()
    count = len(traces)
    changed[0].trainable = True
    assert changes()
    changed[0].trainable = False
    assert not changes()
    assert len(traces) == count


NAN_GUARDS = {
    "!=": lambda v: v != v,
    "==": lambda v: v == 1.0,
    "<": lambda v: v < 1,
    ">=": lambda v: np.float32(3) >= v,
    "abs": abs,
    "format": lambda v: f"{v:.4f}",
    "round": lambda v: round(v, 2),
    "**": lambda v: v**2,
    "in": lambda v: 1.0 in v,
    "bool": bool,
    "isnan": np.isnan,
    **{each.__name__: each for each in (np.asarray, float, iter, len)},
    "+": lambda v: v + 1,
    "2 *": lambda v: 2 * v,
}


def test_a_value_per_replica_is_no_number(two):
    value = two.run(lambda x: x * np.nan, (1.0,))
    for guard in NAN_GUARDS.values():
        with pytest.raises(TypeError, match=r"not one array.*Use strategy\.reduce"):
            guard(value)
    with pytest.raises(TypeError, match="PerReplica"):
        jnp.sum(value)


def test_a_value_per_replica_is_an_object(two):
    value = two.run(lambda: jnp.ones(2))
    assert value.block_until_ready() is value
    assert (value.padded_shape, str(value.dtype)) == ((2,), "float32")
    assert value != None  # noqa: E711
    assert value != "none"
    assert value in [value]
    assert {value: 1}[value] == 1
    assert f"{value}" == str(value) == repr(value)
