"""Several steps of a user's loop in one launch: strategy.run(..., steps=N) and strategy.loop."""

import gc
import logging
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, mlp, through_conditionals

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.partitioner import Jitted
from keras_tpu_dist.tools.hlo.parse import parse

DYNAMIC = ktd.RunOptions(dynamic_batch=True)
BATCHES = 4  # of an optimizer that accumulates their gradients
KINDS = ("sum", "mean", "only_first_replica", "none")


context = ktd.get_replica_context


def replica_id():
    return context().replica_id_in_sync_group.astype("float32")


@pytest.fixture
def launches(monkeypatch):
    """The programs that are launched, with their arguments, one after the other."""
    found, stock = [], Jitted.__call__

    def call(jitted, *args):
        found.append((jitted, args))
        return stock(jitted, *args)

    monkeypatch.setattr(Jitted, "__call__", call)
    return found


class Training:
    """A step with all that changes: weights, slots, statistics, seeds, metrics, variables."""

    def __init__(self, strategy, masked=True):
        self.strategy, self.masked = strategy, masked
        self.model = built(self._model, strategy)
        with strategy.scope():
            self.optimizer = keras.optimizers.Adam(
                keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)
            )
            self.metrics = [keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()]
            shared = [self._variable(how) for how in KINDS]
            own = [self._variable(how, synchronization="on_read") for how in KINDS[:3]]
        self.counts = [*shared, *own]

    def _model(self):
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, kernel_regularizer="l2", use_bias=False),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(3),
            ]
        )

    def _variable(self, how, **options):
        return keras.Variable(1.0, aggregation=how, trainable=False, **options)

    def step(self, batch):
        (x, y), model = batch, self.model
        rows = context().batch_size if self.masked else y.shape[0]
        mask = context().batch_mask if self.masked else jnp.ones(y.shape, bool)
        total = context().all_reduce("sum", jnp.asarray(rows, "float32"))

        def compute(weights, others):
            logits, others, losses = model.stateless_call(
                weights, others, jnp.where(mask[:, None], x, 0), training=True, return_losses=True
            )
            each = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            shares = context().num_replicas_in_sync
            return jnp.where(mask, each, 0).sum() / total + sum(losses) / shares, (logits, others)

        state = [[v.value for v in model.trainable_variables]]
        state.append([v.value for v in model.non_trainable_variables])
        (loss, (logits, others)), gradients = jax.value_and_grad(compute, has_aux=True)(*state)
        gradients = context().all_reduce("sum", gradients)
        self.optimizer.apply(gradients, model.trainable_variables)
        for variable, value in zip(model.non_trainable_variables, others):
            variable.assign(value)
        self.metrics[0].update_state(y, logits, sample_weight=mask.astype("float32"))
        self.metrics[1].update_state(loss / 16)  # the total of 35 is exact to less than 1e-6
        for variable in self.counts:
            variable.assign_add(replica_id() + variable)
        return {"loss": loss, "rows": jnp.where(mask[:, None], logits, 0)}

    def state(self):
        """Everything that a step changes, the replicas' own values too."""
        variables = [*self.model.variables, *self.optimizer.variables, *self.counts]
        variables += [v for metric in self.metrics for v in metric.variables]
        own = [v for v in variables if v.synchronization == "on_read"]
        rows = [np.stack(self.strategy.local_results(v)) for v in own]
        return [np.asarray(v) for v in variables] + rows


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "fsdp": 2, "model": 2},
        pytest.param({"data": 8}, marks=pytest.mark.slow),
        pytest.param({"data": 1}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("n", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_steps_of_one_launch_are_as_many_calls(mesh, n, launches, devices):
    """BatchNorm, dropout, slots, metrics, on_read and aggregated variables; a ragged tail."""
    layout = "tensor_parallel" if "model" in mesh else None
    strategy = ktd.TPUStrategy(mesh, layout, devices=devices[: np.prod(list(mesh.values()))])
    batch_size, steps = 13, 35
    x, y = data(batch_size * (steps - 1) + 5)
    one, many = Training(strategy), Training(strategy)
    expected = [
        strategy.run(one.step, (batch,), options=DYNAMIC)
        for batch in strategy.distribute_dataset((x, y), batch_size=batch_size)
    ]
    del launches[:]
    dataset = strategy.distribute_dataset((x, y), batch_size=batch_size)
    done, results = [], []
    for step, found in strategy.loop(many.step, dataset, n, options=DYNAMIC):
        done.append(step)
        results.append(found)
    scans, singles = divmod(steps, n)
    assert done == [*range(n, steps, n), *range(steps - singles + 1, steps + 1)]
    # For each of the two shapes, checking its padding takes two more, once.
    checks = 4 * (strategy.num_replicas_in_sync > 1)
    assert len(launches) == scans + singles + checks
    assert_close(many.state(), one.state(), 1e-6)
    for step, found in zip(done, results):
        for name, value in expected[step - 1].items():
            rows = strategy.local_results(found[name])
            assert_close(list(rows), list(strategy.local_results(value)), 1e-6)


@pytest.mark.parametrize("n", [1, 4])
def test_the_results_of_all_steps(four, n):
    x = np.arange(40.0, dtype="float32").reshape(20, 2)
    dataset = four.distribute_dataset(x, batch_size=4)

    def step(x):
        return x, x.sum()

    launched = list(four.loop(step, dataset, n, outputs="all"))
    assert [done for done, _ in launched] == {1: [1, 2, 3, 4, 5], 4: [4, 5]}[n]
    rows, sums = zip(*(results for _, results in launched))
    # For each replica (steps, 1, 2), and (steps,).
    shapes = [value.padded_shape for value in rows]
    assert shapes == {1: [(1, 1, 2)] * 5, 4: [(4, 1, 2), (1, 1, 2)]}[n]
    joined = np.concatenate([np.asarray(four.gather(value, axis=1)) for value in rows])
    np.testing.assert_array_equal(joined, x.reshape(5, 4, 2))
    found = np.concatenate([np.asarray(four.reduce("sum", value)) for value in sums])
    np.testing.assert_array_equal(found, x.reshape(5, 8).sum(1))


def test_the_next_batches_of_an_iterator(four, launches):
    """Fewer steps at the end of the dataset, then StopIteration; a launch may have any number."""
    total = keras.Variable(0.0, aggregation="sum")
    dataset = four.distribute_dataset(np.arange(40.0), batch_size=4)
    batches = iter(dataset)

    def step(scale, x):
        total.assign_add(scale * x[0])
        return x[0]

    def run(steps, outputs="last"):
        found = four.run(step, (2.0,), {"x": batches}, steps=steps, outputs=outputs)
        return np.stack(four.local_results(found)).tolist()

    assert run(4) == [12, 13, 14, 15]
    assert len(launches) == 1
    assert float(total.value) == 2 * np.arange(16).sum()
    # The next four lie ready, stacked: they are taken apart.
    np.testing.assert_array_equal(np.stack(four.local_results(next(batches)))[:, 0], range(16, 20))
    assert run(2, "all") == [[20, 24], [21, 25], [22, 26], [23, 27]]
    assert len(launches) == 3
    assert run(100, "all") == [[i, i + 4, i + 8] for i in range(28, 32)]
    with pytest.raises(StopIteration):
        run(4)
    assert float(total.value) == 2 * (np.arange(40).sum() - np.arange(16, 20).sum())
    # A loop goes on where an iterator stands.
    batches = iter(dataset)
    next(batches)
    assert [done for done, _ in four.loop(lambda x: x, batches, 4)] == [4, 8, 9]


def test_steps_with_the_same_arguments(four, launches):
    """No iterator among them: what changes are variables, and each step draws anew."""
    with four.scope():
        seeds, value = keras.random.SeedGenerator(3), keras.Variable(1.0, trainable=False)
    (rows,) = four.distribute_dataset(np.arange(4.0), batch_size=4)

    def step(x, factor):
        value.assign(value * factor)
        return keras.random.uniform((), seed=seeds), x[0] + value

    drawn, sums = four.run(step, (rows, 2.0), steps=5, outputs="all")
    assert len(launches) == 1
    drawn = np.stack(four.local_results(drawn))
    assert drawn.shape == (4, 5)
    assert len(np.unique(drawn)) == 20
    np.testing.assert_array_equal(
        np.stack(four.local_results(sums)), [[i + 2**n for n in range(1, 6)] for i in range(4)]
    )
    assert (float(value.value), int(seeds.state.value[1])) == (32.0, 5)
    (last,) = {float(v) for v in four.local_results(four.run(lambda: value * 1, steps=3))}
    assert last == 32.0


def test_the_program_does_not_depend_on_where_variables_lie(four, launches):
    """Each process has its own; another order of collectives in one of them ends all."""

    def text(order):
        with four.scope():
            counts = {n: keras.Variable(np.zeros(n), aggregation="sum") for n in order}

        def step():
            for n in range(1, 9):
                counts[n].assign_add(replica_id())

        four.run(step, steps=3)
        program, args = launches[-1]
        return program.lower(*args).as_text()

    assert text(range(1, 9)) == text(range(8, 0, -1))


def test_a_statistic_that_a_weight_follows(four):
    """What one step combines the next one reads combined: it is no update that differs."""
    with four.scope():
        statistic = keras.Variable(0.0, trainable=False)
        weight = keras.Variable(0.0)

    def step(x):
        weight.assign_add(statistic.value)
        statistic.assign(x[0])

    for n in (1, 4):
        weight.assign(0.0)
        statistic.assign(0.0)
        for _ in four.loop(step, four.distribute_dataset(np.arange(16.0), batch_size=4), n):
            pass
        assert (float(weight.value), float(statistic.value)) == (1.5 + 5.5 + 9.5, 13.5)


def test_batches_of_each_replica_own_source(four, launches):
    """distribute_datasets_from_function: stacked on the host; a step that lacks some runs alone."""
    given = [(np.full((2, 3), i, "float32"), np.float32(i)) for i in range(18)]

    def step(batch):
        x, number = batch
        return jnp.where(context().batch_mask[:, None], x, 0).sum(), number

    def found(n):
        dataset = four.distribute_datasets_from_function(lambda context: given)
        launched = four.loop(step, dataset, n, outputs="all", options=DYNAMIC)
        columns = zip(*(results for _, results in launched))
        # Of each result (replicas, steps).
        return [np.concatenate([np.stack(four.local_results(v)) for v in c], 1) for c in columns]

    one = found(1)
    del launches[:]
    assert_close(found(4), one, 0)
    # A launch of four, and one with a step that two replicas have no batch for.
    assert len(launches) == 2
    np.testing.assert_array_equal(one[1][:, :4].T.ravel(), range(16))
    np.testing.assert_array_equal(one[0][:, 4], [6 * 16, 6 * 17, 0, 0])


def test_elements_without_a_batch(devices):
    """What all replicas get whole is each step's own too."""
    batches = [
        {"x": np.arange(8.0), "scale": np.float32([i, 1]), "step": np.int32(i)} for i in range(4)
    ]

    def step(batch):
        return batch["x"].sum() * batch["scale"][0] + batch["step"]

    strategy = ktd.TPUStrategy(
        devices=devices[:4], batch_axis=({"x": 0, "scale": None, "step": None},)
    )
    dataset = strategy.distribute_dataset([(b,) for b in batches])
    ((_, found),) = strategy.loop(lambda b: step(*b), dataset, 4, outputs="all")
    found = np.asarray(strategy.reduce("sum", found))
    np.testing.assert_array_equal(found, [28 * i + 4 * i for i in range(4)])


def test_a_source_that_writes_into_the_same_arrays(four):
    def batches():
        array = np.zeros(4, "float32")
        for i in range(8):
            array[:] = i
            yield array

    dataset = four.distribute_dataset(batches())
    ((_, found),) = four.loop(lambda x: x[0], dataset, 8, outputs="all")
    np.testing.assert_array_equal(four.local_results(found)[0], range(8))
    made = four.distribute_datasets_from_function(lambda context: batches())
    rows = [np.stack(four.local_results(batch))[:, 0].tolist() for batch in made]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_lengths_in_buckets_are_launched_one_by_one(four, launches):
    options = ktd.RunOptions(buckets="power_of_two", axis=1)
    given = [np.ones((4, n), "float32") for n in (3, 5, 4, 7)]

    def step(x):
        mask = context().length_mask
        return jnp.where(mask, x, 0).sum()

    for padded in (options, None):
        dataset = four.distribute_dataset(given, padded)
        found = [four.reduce("sum", r) for _, r in four.loop(step, dataset, 4, options=options)]
        assert [float(value) for value in found] == [12, 20, 16, 28]


def test_what_fails(four):
    with four.scope():
        value = keras.Variable(1.0, aggregation="sum")
    dataset = four.distribute_dataset(np.arange(32.0), batch_size=4)

    def fails(x):
        value.assign_add(x[0])
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        next(four.loop(fails, dataset, 4))
    assert float(value.value) == 1.0

    def differs(x):
        weight.assign(x[0])

    with four.scope():
        weight = keras.Variable(1.0)
    with pytest.raises(ValueError, match="All replicas must give a trainable weight"):
        next(four.loop(differs, dataset, 4))
    assert float(weight.value) == 1.0

    # An input that fails, after the steps before it.
    def batches():
        yield from np.arange(8.0).reshape(2, 4)
        raise OSError("disk")

    loop = four.loop(lambda x: x, four.distribute_dataset(batches()), 4)
    assert [next(loop)[0], next(loop)[0]] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        next(loop)
    # Uneven rows are an error at their step, as without steps.
    uneven = four.distribute_dataset(np.arange(18.0), batch_size=8)
    with pytest.raises(ValueError, match="equally many rows"):
        list(four.loop(lambda x: x.sum(), uneven, 2))
    rows = four.distribute_dataset(np.arange(18.0), batch_size=8)
    with pytest.raises(ValueError, match="joins values of one shape"):
        four.run(lambda x: x, (iter(rows),), options=DYNAMIC, steps=8, outputs="all")
    iterator = iter(dataset)
    for call, kind, words in (
        (lambda: four.run(fails, (1.0,), steps=0), ValueError, "steps of run is a whole number"),
        (lambda: four.run(fails, (1.0,), outputs="first"), ValueError, 'outputs="last"'),
        (lambda: four.loop(fails, [1.0]), TypeError, "strategy.loop(fn, strategy.distribute_data"),
        (lambda: four.loop(fails, dataset, 0), ValueError, "steps_per_launch of loop"),
        (lambda: four.run(fails, (iterator, iter(dataset))), ValueError, "zip(a, b)"),
        (lambda: four.run(fails, ([iterator],)), TypeError, "an argument by itself"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            call()


def test_a_loop_that_nobody_goes_through_says_so(four, caplog):
    dataset = four.distribute_dataset(np.arange(8.0), batch_size=4)
    four.loop(lambda x: x, dataset)
    gc.collect()
    assert "strategy.loop ran no step" in caplog.text
    caplog.clear()
    for _ in four.loop(lambda x: x, dataset):
        break
    gc.collect()
    assert not caplog.text


def test_variables_that_the_first_step_creates(four):
    made = {}

    def step(x):
        if not made:
            made["total"] = keras.Variable(
                "zeros", shape=(), aggregation="sum", trainable=False, name="total"
            )
            made["model"] = keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")])
        made["total"].assign_add(x.sum())
        return made["model"](x)

    x = np.arange(16.0).reshape(8, 2)
    ((_, found),) = four.loop(step, four.distribute_dataset(x, batch_size=4), 2)
    assert float(made["total"].value) == x.sum()
    expected = np.repeat(x[4:].sum(1, keepdims=True), 2, 1)
    np.testing.assert_array_equal(np.asarray(four.gather(found, 0)), expected)


def test_a_loop_within_a_callback_of_a_fit(four):
    """It may train the model that fit trains, and one of its own."""
    x, y = data(32)

    def trained(n):
        training = Training(four, masked=False)
        model = built(mlp, four)
        model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
        scale = four.distribute_dataset(np.full(8, 0.5, "float32"), batch_size=4)

        def shrink(factor):
            factor = context().all_reduce("mean", factor)
            for weight in model.trainable_variables:
                weight.assign(weight * factor[0])

        def on_end(epoch, logs):
            list(four.loop(training.step, four.distribute_dataset((x, y), batch_size=8), n))
            list(four.loop(shrink, scale, n))

        callback = keras.callbacks.LambdaCallback(on_epoch_end=on_end)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
        return training.state() + model.get_weights()

    assert_close(trained(4), trained(1), 1e-6)


def test_where_a_checkpoint_of_a_loop_stands(four, tmp_path):
    with four.scope():
        total = keras.metrics.Sum()
    x = np.arange(44.0)

    def step(x):
        total.update_state(x)

    dataset = four.distribute_dataset(x, batch_size=4)
    with ktd.LoopCheckpoint(tmp_path, total, dataset) as saved:
        for done, _ in four.loop(step, dataset, 4):
            saved.save(done)
            if done == 8:
                break
    total.reset_state()
    dataset = four.distribute_dataset(x, batch_size=4)
    with ktd.LoopCheckpoint(tmp_path, total, dataset) as saved:
        assert saved.restore() == {"step": 8}
        assert [done for done, _ in four.loop(step, dataset, 2)] == [2, 3]
    assert float(total.result()) == x.sum()


def accumulating(strategy, optimizer="adam"):
    made = Training(strategy)
    options = {"gradient_accumulation_steps": BATCHES}
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)
    with strategy.scope():
        if optimizer == "everything":
            options |= {"momentum": 0.9, "weight_decay": 0.01, "global_clipnorm": 0.5}
            options |= {"use_ema": True, "ema_overwrite_frequency": 3}
            made.optimizer = keras.optimizers.SGD(rate, **options)
        else:
            made.optimizer = keras.optimizers.Adam(rate, **options)
    return made


@pytest.mark.parametrize(
    ("mesh", "plan", "optimizer", "n"),
    [
        ({"data": 4, "model": 2}, "tensor_parallel", "everything", 3),
        pytest.param({"data": 8}, "fsdp", "adam", 8, marks=pytest.mark.slow),
        pytest.param({"data": 8}, None, "everything", 4, marks=pytest.mark.slow),
    ],
)
def test_launches_are_as_many_steps(mesh, plan, optimizer, n, caplog):
    """Launches that begin and end within an update, uneven rows, a tail."""
    strategy = ktd.TPUStrategy(mesh, plan)
    dataset = strategy.distribute_dataset(data(13 * 10 + 5), batch_size=13)
    one, many = accumulating(strategy, optimizer), accumulating(strategy, optimizer)
    for batch in dataset:
        strategy.run(one.step, (batch,), options=DYNAMIC)
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        for _ in strategy.loop(many.step, dataset, n, options=DYNAMIC):
            pass
    assert "at every small batch" not in caplog.text
    assert_close(many.state(), one.state())
    assert int(many.optimizer.iterations) == 11 // BATCHES


def test_the_program_sums_gradients_for_an_update_alone(launches):
    strategy = ktd.TPUStrategy()
    made = accumulating(strategy)
    dataset = strategy.distribute_dataset(data(13 * 8), batch_size=13)
    for _ in strategy.loop(made.step, dataset, 8, options=DYNAMIC):
        pass
    run, args = launches[-1]
    program = parse(run.lower(*args).compile().as_text())
    inside = through_conditionals(program)
    summed = [
        computation.name
        for computation in program
        for instruction in computation
        if instruction.opcode == "all-reduce" and "f32[6,8]" in str(instruction)
    ]
    # For an update, and at the end of a launch that ends within one.
    assert len(summed) == 2
    assert set(summed) <= inside


def test_gradients_that_are_changed_before_the_update_are_summed_every_time(caplog):
    strategy = ktd.TPUStrategy()
    dataset = strategy.distribute_dataset(data(13 * 4), batch_size=13)
    with strategy.scope():
        weight = keras.Variable(np.zeros(6, "float32"))
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    def step(batch):
        rows = batch[0] * context().batch_mask[:, None]
        optimizer.apply([context().all_reduce("sum", rows.sum(0)) / 13], [weight])

    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        for _ in strategy.loop(step, dataset, 4, options=DYNAMIC):
            pass
    assert "pass these as they are to optimizer.apply" in caplog.text
    expected = -0.1 * data(13 * 4)[0].reshape(2, 26, 6).sum(1).sum(0) / 26
    assert_close([np.asarray(weight)], [expected])


@pytest.mark.parametrize("outputs", ["last", "all"])
@pytest.mark.parametrize("first", ["int32", "bool", "float16", "bfloat16", "weak"])
def test_a_variable_that_begins_with_another_dtype(four, first, outputs):
    """The second step begins with what the first one assigned."""

    def begins(shape, dtype=None):
        return jnp.full(shape, 1.0) if first == "weak" else jnp.ones(shape, first)

    def made():
        with four.scope():
            mean = keras.Variable(begins, (3,), "float32", trainable=False)
            own = {"aggregation": "sum", "synchronization": "on_read", "trainable": False}
            total = keras.Variable(begins, (), "float32", **own)

        def step(x):
            before = mean.value
            mean.assign(0.9 * mean + 0.1 * context().all_reduce("mean", x.mean(0)))
            total.assign_add(x.sum())
            return before

        return step, mean, total

    found = []
    for n in (1, 4):
        step, *variables = made()
        dataset = four.distribute_dataset(np.linspace(0, 1, 120).reshape(40, 3), batch_size=4)
        results = [
            four.local_results(r)[0] for _, r in four.loop(step, dataset, n, outputs=outputs)
        ]
        if outputs == "all":
            results = [np.concatenate(results)]
        found.append([results[-1], *(v.numpy() for v in variables)])
    assert_close(*found, 1e-6)
    assert all(value.dtype == "float32" for one in found for value in one[1:])
    assert 0.3 < found[0][1].mean() < 1
