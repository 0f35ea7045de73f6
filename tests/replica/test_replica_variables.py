"""Keras variables, optimizers, metrics and models inside of strategy.run."""

import logging
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, stepped

import keras_tpu_dist as ktd
from keras_tpu_dist.replica.call import prepare

context = ktd.get_replica_context


def replica_id():
    return context().replica_id_in_sync_group.astype("float32")


def variable(strategy, value=0.0, **options):
    with strategy.scope():
        return keras.Variable(value, **options)


def test_aggregation_of_an_assignment(four):
    """As tf.Variable in replica context; an assignment is seen combined at once."""
    total = variable(four, 10.0, aggregation="sum")
    mean = variable(four, 10.0, aggregation="mean")
    first = variable(four, 10.0, aggregation="only_first_replica")
    seen = []

    def step():
        seen.append(None)
        for v in (total, mean, first):
            v.assign(replica_id() + 1)
        return total.value, mean.value, first.value

    result = four.local_results(four.run(step))
    assert [float(v.value) for v in (total, mean, first)] == [10.0, 2.5, 1.0]
    assert all([float(x) for x in row] == [10.0, 2.5, 1.0] for row in result)
    four.run(step)
    assert len(seen) == 2
    assert all(v.value.sharding.is_fully_replicated for v in (total, mean, first))


def test_what_is_added_to_a_sum_adds_up(four):
    """tf.Variable.assign_add reduces what is added, not the new values."""
    total = variable(four, 10.0, aggregation="sum")
    mean = variable(four, 10.0, aggregation="mean")

    def step():
        total.assign_add(replica_id())
        total.assign_sub(1.0)
        mean.assign_add(replica_id())

    four.run(step)
    assert (float(total.value), float(mean.value)) == (10 + 6 - 4, 11.5)
    with pytest.raises(ValueError, match="shape of the target variable"):
        four.run(lambda: total.assign_add(jnp.ones(3)))
    assert total.value.shape == ()


def test_without_aggregation(four, caplog):
    same, statistic = variable(four, 1.0), variable(four, 1.0, trainable=False)
    weight, count = variable(four, 1.0), variable(four, 1, dtype="int32", trainable=False)

    def agreed():
        same.assign(context().all_reduce("max", replica_id()))
        # also where the reduction is inside of control flow
        steps = jax.lax.scan(
            lambda c, x: (c + context().all_reduce("sum", replica_id()), None), 0.0, jnp.arange(2)
        )[0]
        weight.assign(jax.lax.cond(steps > 0, lambda: steps, lambda: 0.0))
        count.assign_add(1)

    four.run(agreed)
    assert [float(v.value) for v in (same, weight, count)] == [3, 12, 2]
    with caplog.at_level(logging.INFO, "keras_tpu_dist"):
        four.run(lambda: statistic.assign(replica_id()))
    assert float(statistic.value) == 1.5
    assert 'aggregation="none": the values are averaged' in caplog.text
    with pytest.raises(ValueError, match=r"trainable weight.*Reduce the gradients.*all_reduce"):
        four.run(lambda: weight.assign(replica_id()))
    with pytest.raises(ValueError, match=r"needs an aggregation.*only_first_replica"):
        four.run(lambda: count.assign(context().replica_id_in_sync_group))
    whole = variable(four, 1, dtype="int32", aggregation="mean")
    with pytest.raises(ValueError, match="hold floating-point numbers"):
        four.run(lambda: whole.assign(context().replica_id_in_sync_group))
    assert [float(v.value) for v in (weight, count, whole)] == [12, 2, 1]


def test_parts_of_what_is_the_same_differ(four):
    """A weight must not hold another value on each replica, also without anything that differs."""
    weight = variable(four, np.zeros(1, "float32"))
    with pytest.raises(ValueError, match=r"trainable weight.*Reduce the gradients"):
        four.run(lambda: weight.assign(jax.lax.psum_scatter(jnp.ones(4), "data", tiled=True)))
    with pytest.raises(ValueError, match=r"trainable weight.*Reduce the gradients"):
        four.run(lambda: weight.assign(jax.lax.ppermute(jnp.ones(1), "data", [(0, 1)])))
    # summed over one axis after the other it is the same
    strategy = ktd.TPUStrategy({"data": 2, "fsdp": 2}, devices=four.mesh.devices.ravel())
    weight = variable(strategy, 0.0)
    strategy.run(lambda: weight.assign(jax.lax.psum(jax.lax.psum(replica_id(), "data"), "fsdp")))
    assert float(weight.value) == 6


def test_on_read_variables_are_each_replicas_own_until_read(four):
    """tf.VariableSynchronization.ON_READ: each replica's own until it is read outside."""
    kinds = {"sum": (6, 46), "mean": (1.5, 11.5), "only_first_replica": (0, 10)}
    made = {
        how: variable(four, 0.0, trainable=False, aggregation=how, synchronization="on_read")
        for how in kinds
    }

    def step():
        for v in made.values():
            v.assign_add(replica_id())
        return {how: v.value for how, v in made.items()}

    inside = four.local_results(four.run(step))
    four.run(lambda: None)
    for how, (expected, _) in kinds.items():
        assert [float(r[how]) for r in inside] == [0, 1, 2, 3]
        assert float(made[how].value) == expected
    inside = four.local_results(four.run(step))
    assert [float(r["sum"]) for r in inside] == [0, 2, 4, 6]
    assert [float(x) for x in four.local_results(made["sum"])] == [0, 2, 4, 6]
    # assigned outside: a sum is shared out, as tf.distribute does, so that it stays the sum
    for v in made.values():
        v.assign(10.0 if v.aggregation != "sum" else 40.0)
    inside = four.local_results(four.run(step))
    assert [float(r["sum"]) for r in inside] == [10, 11, 12, 13]
    for how, (_, expected) in kinds.items():
        assert float(made[how].value) == expected
    count = variable(
        four, 5, dtype="int32", trainable=False, aggregation="sum", synchronization="on_read"
    )
    four.run(lambda: count.assign_add(1))
    assert int(count.value) == 9
    lost = variable(four, 0.0, trainable=False, synchronization="on_read")
    with pytest.raises(ValueError, match="needs an aggregation"):
        four.run(lambda: lost.assign(replica_id()))


def test_an_on_read_value_follows_the_mesh(devices):
    kind = {"trainable": False, "aggregation": "sum", "synchronization": "on_read"}
    v = keras.Variable(0.0, **kind)
    for number in (2, 4, 1):
        strategy = ktd.TPUStrategy(devices=devices[:number])
        before = float(v.value)
        strategy.run(lambda v=v: v.assign_add(1.0))
        assert float(v.value) == before + number


def test_random_numbers_differ_by_replica_and_the_state_advances_once(four, devices):
    def draws(strategy):
        with strategy.scope():
            seeds = keras.random.SeedGenerator(3)
        x = four.local_results if strategy is four else strategy.local_results
        results = [x(strategy.run(step, (seeds,))) for _ in range(2)]
        return np.array(results), np.asarray(seeds.state.value)

    def step(seeds):
        return keras.random.uniform((2,), seed=seeds), keras.random.uniform((2,), seed=seeds)

    drawn, state = draws(four)
    assert len(np.unique(drawn)) == drawn.size == 2 * 4 * 2 * 2
    assert state.tolist() == [3, 4]
    alone, _ = draws(ktd.TPUStrategy(devices=devices[:1]))
    seeds = keras.random.SeedGenerator(3)
    stock = [keras.random.uniform((2,), seed=seeds) for _ in range(4)]
    np.testing.assert_array_equal(np.reshape(alone, (4, 2)), stock)
    # the first replica draws what one device draws
    np.testing.assert_array_equal(drawn[:, 0].reshape(4, 2), stock)


def test_variables_and_models_made_outside_of_the_scope_move_onto_the_mesh(four, caplog):
    v = keras.Variable(2.0, trainable=False, aggregation="sum")
    with caplog.at_level(logging.INFO, "keras_tpu_dist"):
        assert [float(x) for x in four.local_results(four.run(lambda: v * 3.0))] == [6] * 4
    assert "moved 1 variable(s), created outside of the scope" in caplog.text
    assert len(v.value.sharding.device_set) == 4


def test_a_variable_that_moves_between_strategies(devices):
    strategies = [ktd.TPUStrategy(devices=devices[:n]) for n in (2, 4)]
    v = variable(strategies[0], 0.0, aggregation="sum")

    def step():
        v.assign_add(1.0)

    for expected, strategy in zip((2, 6, 8, 10, 14), [*strategies, strategies[0], *strategies]):
        strategy.run(step)
        assert float(v.value) == expected
        assert v.value.sharding.mesh == strategy.mesh


@pytest.mark.slow
def test_what_is_built_inside_gets_its_values_outside(four):
    """Layers and optimizers that create their variables at the first call, as in TF."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    keras.utils.set_random_seed(1)
    with four.scope():
        layer, optimizer = keras.layers.Dense(2), keras.optimizers.Adam(0.1)
    (batch,) = four.distribute_dataset(x, batch_size=8)

    def step(x):
        def loss(weights):
            outputs, _ = layer.stateless_call(weights, [], x)
            return (outputs**2).mean()

        layer(x)
        gradients = jax.grad(loss)([v.value for v in layer.trainable_variables])
        gradients = context().all_reduce("mean", gradients)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables))

    four.run(step, (batch,))
    keras.utils.set_random_seed(1)
    stock = keras.layers.Dense(2)
    stock.build((8, 3))
    before = [np.asarray(v) for v in stock.trainable_variables]
    gradients = jax.grad(lambda w: (stock.stateless_call(w, [], x)[0] ** 2).mean())(before)
    reference = keras.optimizers.Adam(0.1)
    reference.apply(gradients, stock.trainable_variables)
    assert_close([np.asarray(v) for v in layer.weights], [np.asarray(v) for v in stock.weights])
    assert int(optimizer.iterations) == 1


def test_a_layer_made_anew_in_each_trace_is_an_error(four):
    with pytest.raises(RuntimeError, match=r"same variables every time.*outside of the function"):
        four.run(lambda: keras.layers.Dense(1)(jnp.ones((1, 1))))


def classifier():
    hidden = keras.layers.Dense(16, activation="relu")
    return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(3)])


CROSS_ENTROPY = {"from_logits": True, "reduction": "sum_over_batch_size"}


def custom_loop(strategy, optimizer, x, y, batch_size, epochs=2):
    """The loop of TPUStrategy's documentation, in JAX."""
    with strategy.scope():
        model = classifier()
        optimizer = optimizer()
        loss_mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(**CROSS_ENTROPY)

    def train_step(batch):
        x, y = batch
        loss, logits = stepped(model, optimizer, x, lambda logits: cross_entropy(y, logits))
        loss_mean.update_state(loss)
        accuracy.update_state(y, logits)
        return loss

    history = {"loss": [], "accuracy": []}
    for _ in range(epochs):
        for batch in strategy.distribute_dataset((x, y), batch_size=batch_size):
            strategy.run(train_step, (batch,))
        history["loss"].append(float(loss_mean.result()))
        history["accuracy"].append(float(accuracy.result()))
        loss_mean.reset_state()
        accuracy.reset_state()
    return history, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout", "optimizer"),
    [
        ({"data": 1}, None, lambda: keras.optimizers.Adam(0.01)),
        ({"data": 2}, None, lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
        ({"data": 4, "model": 2}, "tensor_parallel", lambda: keras.optimizers.Adam(0.01)),
        ({"data": 8}, "fsdp", lambda: keras.optimizers.AdamW(0.01, clipnorm=1.0)),
    ],
)
def test_a_custom_loop_equals_fit(mesh, layout, optimizer, devices):
    x, y = data(64)
    number = int(np.prod(list(mesh.values())))
    strategy = ktd.TPUStrategy(mesh, layout, devices=devices[:number])
    history, weights = built(lambda: custom_loop(strategy, optimizer, x, y, 16), None)

    model = built(classifier, None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"])
    expected = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert_close(history, {name: expected[name] for name in ("loss", "accuracy")})
    assert_close(weights, model.get_weights())


def test_forgotten_reduction_is_an_error_and_nothing_is_assigned(four, devices):
    with four.scope():
        model, optimizer = classifier(), keras.optimizers.SGD(0.1)
    before = model.get_weights()
    x, y = data(16)
    (batch,) = four.distribute_dataset((x, y), batch_size=16)

    def step(batch):
        gradients = [jnp.ones(v.shape) * batch[0].mean() for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)

    with pytest.raises(
        ValueError, match=r"All replicas must give .*same new value.*kernel.*all_re"
    ):
        four.run(step, (batch,))
    assert_close(model.get_weights(), before, 0)
    assert int(optimizer.iterations) == 0
    # one replica has nothing to reduce
    alone = ktd.TPUStrategy(devices=devices[:1])
    with alone.scope():
        model = classifier()
    (batch,) = alone.distribute_dataset((x, y), batch_size=16)
    optimizer = keras.optimizers.SGD(0.1)
    alone.run(
        lambda b: optimizer.apply([jnp.ones(v.shape) for v in model.weights], model.weights),
        (batch,),
    )
    assert int(optimizer.iterations) == 1


def test_batch_norm_dropout_lstm_and_losses_inside(devices):
    strategy = ktd.TPUStrategy({"data": 2, "model": 2}, devices=devices[:4])
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5, 3)),
                layers.LSTM(4, activity_regularizer="l2"),
                layers.BatchNormalization(momentum=0.5),
                layers.Dropout(0.5),
                layers.Dense(2),
            ]
        )
    x = np.random.default_rng(0).normal(size=(8, 5, 3)).astype("float32")
    (batch,) = strategy.distribute_dataset(x, batch_size=8)

    def step(x):
        outputs = model(x, training=True)
        return outputs, sum(model.losses)

    results = strategy.local_results(strategy.run(step, (batch,)))
    (a, loss_a), (b, loss_b) = jax.tree.map(np.asarray, results)
    assert not np.allclose(a, b)
    assert loss_a > 0
    assert loss_a != loss_b
    lstm, norm = model.layers[0], model.layers[1]
    features = np.asarray(lstm(x))
    means = [part.mean(0) for part in np.split(features, 2)]
    assert_close(np.asarray(norm.moving_mean), 0.5 * np.mean(means, axis=0))
    dropout_state = np.asarray(model.layers[2].seed_generator.state.value)
    assert dropout_state[1] == 1
    assert not model.losses or all(not isinstance(x, jax.core.Tracer) for x in model.losses)


def test_a_scope_inside_reads_the_program_not_the_past(four):
    """A nested StatelessScope without a value for a variable asks the replica's variables."""
    v = variable(four, 1.0, trainable=False, aggregation="mean")
    w = variable(four, 1.0)

    def step():
        with keras.StatelessScope([(w, jnp.float32(5))]):
            return v * w

    assert float(four.local_results(four.run(step))[0]) == 5
    v.assign(2.0)
    assert float(four.local_results(four.run(step))[0]) == 10


def test_logical_devices_inside(devices):
    """split, replicate and assign within a replica, on 2 replicas of 2 logical devices."""
    strategy = ktd.TPUStrategy({"data": 2, "model": 2}, devices=devices[:4])
    x = np.random.default_rng(0).normal(size=(4, 6, 3)).astype("float32")

    def build(annotate):
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((6, 3)), annotate(keras.layers.Conv1D(4, 3)), keras.layers.Dense(2)]
        )

    expected = np.asarray(build(lambda layer: layer)(x))
    with strategy.scope():
        model = build(lambda layer: ktd.assign(layer, 1))
    (batch,) = strategy.distribute_dataset(x, batch_size=4)

    def step(x):
        x = strategy.split_to_logical_devices(x, [1, 2, 1])
        return strategy.replicate_to_logical_devices(model(x))

    assert_close(strategy.gather(strategy.run(step, (batch,)), 0), expected)


def test_run_within_a_fit(four):
    """A callback's updates are where the fit goes on from."""

    class Reset(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            four.run(self.zero)

        def zero(self):
            for v in self.model.trainable_variables:
                v.assign(jnp.zeros_like(v.value))

    x, y = data(32)
    with four.scope():
        model = classifier()
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Reset()]).history
    assert all(not np.any(w) for w in model.get_weights())
    assert_close(history["loss"][1], np.log(3))


def test_a_step_is_one_all_reduce(four):
    """Gradients, moving statistics and metrics go together; equal updates are not exchanged."""
    layers = keras.layers
    with four.scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(1)]
        )
        optimizer, mean = keras.optimizers.Adam(0.1), keras.metrics.Mean()

    def step(x):
        value, _ = stepped(model, optimizer, x, lambda outputs: (outputs**2).mean())
        mean.update_state(value)

    (batch,) = four.distribute_dataset([np.ones((8, 6), "float32")])
    four.run(step, (batch,))
    (((program,),),) = (by_name[None].values() for by_name in four.replica_code._programs.values())
    call = prepare((batch,), {}, ktd.RunOptions(), four)
    run, arguments = program.with_arguments(call)
    text = run.lower(*arguments).compile().as_text()
    collectives = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", text)
    assert collectives == ["all-reduce"]
    (reduced,) = re.findall(r"= \(([^=]*)\) all-reduce", re.sub(r"/\*.*?\*/", "", text))
    sizes = [
        np.prod([int(n) for n in re.findall(r"\d+", s) or [1]])
        for s in re.findall(r"f32\[([^\]]*)\]", reduced)
    ]
    # four weights and two scales, two moving statistics, total and count of the metric
    assert sum(sizes) == (6 * 8 + 8) + (8 + 8) + (8 + 1) + (8 + 8) + 2


@pytest.mark.slow
@pytest.mark.parametrize("inner", [keras.optimizers.SGD, keras.optimizers.Adam])
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
def test_loss_scaling_applies_skips_and_rescales_inside(mesh, inner):
    """Its `apply` assigns in branches of a conditional, which fails on JAX also without us."""
    steps = [0.5, 1.0, np.inf, 2.0, 0.25, np.nan, 1.5]

    def make():
        optimizer = keras.optimizers.LossScaleOptimizer(
            inner(0.1), initial_scale=8.0, dynamic_growth_steps=2
        )
        return keras.Variable(np.ones((4, 2)), dtype="float32", name="w"), optimizer

    expected_weight, stock = make()
    stock.build([expected_weight])
    strategy = ktd.TPUStrategy(mesh)
    with strategy.scope():
        weight, optimizer = make()

    def step(size):
        gradient = context().all_reduce("mean", jnp.ones((4, 2)) * size.mean())
        optimizer.apply([optimizer.scale_loss(gradient)], [weight])

    for size in steps:
        gradient = stock.scale_loss(jnp.ones((4, 2)) * size)
        values = [v.value for v in stock.variables]
        new = stock.stateless_apply(values, [gradient], [expected_weight.value])
        for variable, value in zip([expected_weight, *stock.variables], [*new[0], *new[1]]):
            variable.assign(value)
        rows = np.full(strategy.num_replicas_in_sync, size, "float32")
        (batch,) = strategy.distribute_dataset(rows, batch_size=len(rows))
        strategy.run(step, (batch,))
        assert_close(weight.numpy(), expected_weight.numpy())
    found, expected = ([v.numpy() for v in o.variables] for o in (optimizer, stock))
    assert_close(found, expected)


def test_variables_as_arguments(four, caplog):
    """By position, by keyword, in lists and dicts: read and updated as those of the closure."""
    counts = [variable(four, float(i), aggregation="sum", trainable=False) for i in range(3)]
    own = variable(four, 0.0, aggregation="sum", synchronization="on_read", trainable=False)
    outside = keras.Variable(np.ones(2, "float32"), aggregation="mean")
    traced = []

    def step(first, others, named=None, seen=None):
        traced.append(first)
        first.assign_add(1.0)
        others["b"][0].assign(others["a"] + first)
        named.assign(named * 2.0 + replica_id())
        seen.assign_add(1.0)
        return first + others["a"], named

    args = counts[0], {"a": counts[1], "b": [counts[2]]}
    for _ in range(2):
        total, mean = four.run(step, args, {"named": outside, "seen": own})
    assert [float(v.value) for v in counts] == [8.0, 1.0, 4 * (8 + 1)]
    assert (outside.numpy().tolist(), float(own.value)) == ([8.5, 8.5], 8.0)
    assert outside.value.sharding.is_fully_replicated
    assert [float(x) for x in four.local_results(total)] == [9.0] * 4
    assert float(four.reduce("mean", mean)[0]) == 8.5
    assert len(traced) == 2
    # Other variables are another program, of the same function.
    args = counts[1], {"a": counts[0], "b": [counts[2]]}
    four.run(step, args, {"named": outside, "seen": own})
    assert (float(counts[1].value), len(traced)) == (5.0, 4)
    four.run(step, args, {"named": outside, "seen": own}, steps=3)
    assert float(counts[1].value) == 17.0
    with pytest.raises(ValueError, match="All replicas must give a trainable weight"):
        four.run(lambda v: v.assign(replica_id()), (variable(four),))


def test_weights_as_arguments_of_a_step(four):
    """A step for several models: the weights and the optimizer come as arguments."""
    x, y = data(16)
    models = [built(_classifier, four, seed) for seed in (1, 2)]
    with four.scope():
        optimizers = [keras.optimizers.SGD(0.1, momentum=0.9) for _ in models]

    def step(batch, model, optimizer, weights):
        x, y = batch

        def compute(values):
            logits, _ = model.stateless_call(values, [], x)
            return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True).mean()

        gradients = jax.grad(compute)([w.value for w in weights])
        optimizer.apply(context().all_reduce("mean", gradients), weights)

    dataset = four.distribute_dataset((x, y), batch_size=8)
    for model, optimizer in zip(models, optimizers):
        args = model, optimizer, model.trainable_variables
        list(four.loop(step, dataset, 2, args=args))
    for seed, model in zip((1, 2), models):
        alone = built(_classifier, None, seed)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        alone.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        alone.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert_close(model.get_weights(), alone.get_weights())


def _classifier():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
