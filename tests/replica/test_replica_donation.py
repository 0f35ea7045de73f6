"""Variables that replica code updates in place (`donate_state`), and who else holds them."""

import copy
import gc
import threading
import weakref

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, stepped
from test_replica_steps import DYNAMIC, Training

import keras_tpu_dist as ktd

X, Y = data(rows=26, features=6)
MESHES = {
    "8": ({"data": 8}, None),
    "4x2": ({"data": 4, "model": 2}, "tensor_parallel"),
    "2x2x2": ({"data": 2, "fsdp": 2, "model": 2}, "auto"),
    "1": ({"data": 1}, None),
}


class Loop:
    """A model, an optimizer with slots, averages and a metric, trained by replica code."""

    def __init__(self, strategy, rate=0.01):
        self.strategy = strategy
        self.model = built(self._model, strategy)
        with strategy.scope():
            self.optimizer = keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.5)
            self.optimizer.build(self.model.trainable_variables)
            self.metric = keras.metrics.Mean()

    @staticmethod
    def _model():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.Dense(4),
            ]
        )

    def step(self, batch):
        x, y = batch
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        value, _ = stepped(self.model, self.optimizer, x, lambda logits: loss(y, logits))
        self.metric.update_state(value)
        return ktd.get_replica_context().all_reduce("mean", value)

    def batches(self, rows=8):
        return self.strategy.distribute_dataset((X[:24], Y[:24]), batch_size=rows)

    def train(self, steps=1):
        for _ in self.strategy.loop(self.step, self.batches(), steps_per_launch=steps):
            pass
        return self

    @property
    def state(self):
        variables = [*self.model.weights, *self.optimizer.variables, *self.metric.variables]
        return [np.array(v) for v in variables]


def strategy_of(devices, mesh="8", donate_state=True):
    shape, plan = MESHES[mesh]
    number = int(np.prod(list(shape.values())))
    return ktd.TPUStrategy(shape, plan, devices=devices[:number], donate_state=donate_state)


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ("2x2x2", 2),
        *(
            pytest.param(mesh, steps, marks=pytest.mark.slow)
            for mesh in MESHES
            for steps in (1, 2)
            if (mesh, steps) != ("2x2x2", 2)
        ),
    ],
)
def test_results_are_those_without(devices, mesh, steps):
    ours, kept = (
        Loop(strategy_of(devices, mesh, donates)).train(steps).train(steps).state
        for donates in (True, False)
    )
    assert_close(ours, kept)


@pytest.mark.parametrize("steps", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_launch_overwrites_what_it_updates(devices, steps):
    loop = Loop(strategy_of(devices)).train(steps)
    weight = loop.model.layers[0].kernel
    before = weight._value  # as its owner does not see
    loop.train(steps)
    assert before.is_deleted()
    assert (
        not Loop(strategy_of(devices, donate_state=False))
        .train()
        .model.weights[0]
        ._value.is_deleted()
    )


def test_the_setting_auto_is_that_of_fit(devices):
    small = Loop(strategy_of(devices, donate_state="auto")).train()
    before = small.model.weights[0]._value
    small.train()
    assert not before.is_deleted()

    strategy = strategy_of(devices, donate_state="auto")
    with strategy.scope():
        many = [keras.Variable(np.zeros(2, "float32"), name=f"v{i}") for i in range(70)]

    def add():
        for variable in many:
            variable.assign_add(np.ones(2, "float32"))

    strategy.run(add)
    before = many[0]._value
    strategy.run(add)
    assert before.is_deleted()
    assert_close([np.array(v) for v in many], [np.full(2, 2.0)] * 70)


def test_arrays_that_somebody_holds_stay(devices):
    loop = Loop(strategy_of(devices)).train()
    other = Loop(strategy_of(devices))
    held = [v.value for v in loop.model.weights]
    numbers = [np.array(v) for v in held]
    for target, source in zip(other.model.weights, loop.model.weights, strict=True):
        target.assign(source)
    given = jax.device_put(np.ones((6, 8), "float32"), loop.model.weights[0].value.sharding)
    loop.model.weights[0].assign(given)
    loop.train().train()
    assert_close([np.array(v) for v in held], numbers)
    assert_close([np.array(v) for v in other.model.weights], numbers)
    assert_close(np.array(given), np.ones((6, 8)))
    other.train()
    assert_close([np.array(v) for v in held], numbers)


def test_an_argument_that_is_the_value_of_an_updated_variable(devices):
    strategy = strategy_of(devices)
    with strategy.scope():
        variable = keras.Variable(np.arange(4.0, dtype="float32"))

    def double(value):
        variable.assign(value * 2)
        return value

    for _ in range(3):
        result = strategy.run(double, (variable.value,))
    assert_close(np.array(variable), np.arange(4.0) * 8)
    assert_close(strategy.local_results(result)[0], np.arange(4.0) * 4)


def test_two_variables_of_one_array(devices):
    strategy = strategy_of(devices)
    with strategy.scope():
        first, second = (keras.Variable(np.ones(4, "float32")) for _ in range(2))

    def both():
        first.assign_add(np.ones(4, "float32"))
        second.assign(first.value)

    def swap():
        a, b = first.value, second.value
        first.assign(b)
        second.assign(a + 1)

    second.assign(first)
    for _ in range(3):
        strategy.run(both)
        strategy.run(swap)
    assert_close([np.array(first), np.array(second)], [np.full(4, 4.0), np.full(4, 5.0)])


@pytest.mark.parametrize("mesh", ["4x2", pytest.param("1", marks=pytest.mark.slow)])
def test_fit_and_the_loop_take_turns(devices, mesh):
    def trained(donates):
        strategy = strategy_of(devices, mesh, donates)
        loop = Loop(strategy)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        loop.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        for _ in range(2):
            loop.train(2)
            loop.model.fit(X, Y, batch_size=13, shuffle=False, verbose=0)
            loop.model.evaluate(X, Y, batch_size=13, verbose=0)
            loop.train()
        return [*loop.state, loop.model.predict(X, verbose=0)]

    assert_close(trained(True), trained(False))


def test_two_functions_take_turns_without_copies(devices):
    """As the two of a GAN: each updates some variables and reads those of the other."""
    strategy = strategy_of(devices)
    with strategy.scope():
        first, second = (keras.Variable(np.ones(4, "float32")) for _ in range(2))

    def one():
        first.assign(first.value + second.value)

    def other():
        second.assign(second.value + first.value)

    expected = np.ones(4), np.ones(4)
    for _ in range(3):
        before = first._value, second._value
        strategy.run(one)
        strategy.run(other)
        expected = expected[0] + expected[1], expected[0] + 2 * expected[1]
    assert_close([np.array(first), np.array(second)], list(expected))
    assert all(array.is_deleted() for array in before)


@pytest.mark.parametrize("steps", [1, 4])
def test_what_is_written_and_not_read_is_consumed(steps):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, donate_state=True)
    with strategy.scope():
        written = keras.Variable(np.zeros(4, "float32"))

    def step():
        written.assign(np.full(4, 2.0, "float32"))

    strategy.run(step, steps=steps)
    before = written._value
    strategy.run(step, steps=steps)
    assert before.is_deleted()
    assert_close([np.array(written)], [np.full(4, 2.0)])


@pytest.mark.slow
def test_a_callback_of_predict_runs_replica_code(devices):
    def predicted(donates):
        loop = Loop(strategy_of(devices, donate_state=donates)).train()
        loop.model.compile()
        run = keras.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: loop.train())
        return loop.model.predict(X, batch_size=2, verbose=0, callbacks=[run])

    assert_close(predicted(True), predicted(False))


def test_another_thread_predicts(devices):
    loop = Loop(strategy_of(devices, "4x2"), rate=0.0).train()
    loop.model.compile()
    for variable in loop.model.non_trainable_variables:
        variable.assign(np.ones(variable.shape))  # statistics differ from step to step
    expected = loop.model(X, training=False)
    frozen = loop.strategy.run  # a loop that updates slots alone

    def slots():
        for variable in loop.optimizer.variables[1:]:
            variable.assign(variable.value * 1)
        for variable in loop.model.weights:
            variable.assign(variable.value * 1)

    found, stop = [], threading.Event()

    def predict():
        while not stop.is_set():
            try:
                found.append(loop.model.predict(X, batch_size=2, verbose=0))
            except Exception as error:
                found.append(error)
                return

    thread = threading.Thread(target=predict)
    thread.start()
    try:
        while len(found) < 4 and thread.is_alive():
            frozen(slots)
    finally:
        stop.set()
        thread.join()
    for prediction in found:
        assert_close(prediction, np.array(expected))


def test_a_launch_that_fails_says_what_is_lost(devices):
    strategy = strategy_of(devices, "1")
    with strategy.scope():
        variable = keras.Variable(np.ones(4, "float32"), name="weight")

    def fails(value):
        raise OverflowError(f"the callback fails at {value}")

    def step():
        same = jax.pure_callback(fails, jax.ShapeDtypeStruct((), "float32"), variable.value.sum())
        variable.assign(variable.value + same)

    def launch():
        strategy.run(step)
        np.array(variable)

    with pytest.raises(Exception, match="the callback fails") as caught:
        launch()
    notes = " ".join(getattr(caught.value, "__notes__", ()))
    if notes:  # the launch was waited for
        assert "'weight', before it failed; they are lost." in notes
    assert variable._value.is_deleted() or not notes


@pytest.mark.slow
def test_padding_is_checked_without_consuming(devices):
    strategy = strategy_of(devices)
    with strategy.scope():
        total = keras.Variable(np.zeros((), "float32"))

    def step(x):
        context = ktd.get_replica_context()
        rows = np.float32(0) + (x[:, 0] * context.batch_mask).sum()
        total.assign_add(context.all_reduce("sum", rows))

    dataset = strategy.distribute_dataset(X[:13], batch_size=13)
    for _ in range(2):
        for batch in dataset:
            strategy.run(step, (batch,), options=ktd.RunOptions(dynamic_batch=True))
    assert_close(np.array(total), 2 * X[:13, 0].sum())


def test_a_copy_has_arrays_of_its_own(devices):
    loop = Loop(strategy_of(devices)).train()
    twin = copy.deepcopy(loop.model)
    numbers = [np.array(v) for v in twin.weights]
    loop.train()
    assert_close([np.array(v) for v in twin.weights], numbers)


def test_nothing_keeps_old_arrays_alive(devices):
    loop = Loop(strategy_of(devices)).train()
    old = weakref.ref(loop.model.weights[0]._value)
    loop.train()
    gc.collect()
    assert old() is None


@pytest.mark.slow
def test_two_strategies_take_turns_on_a_variable(devices):
    """Each has a lock of its own, so that neither may consume what the other made."""
    first, second = (strategy_of(devices) for _ in range(2))
    with first.scope():
        variable = keras.Variable(np.ones(4, "float32"))

    def double():
        variable.assign(variable.value * 2)

    for strategy in (first, second, second, first):
        strategy.run(double)
        held = variable.value
    assert_close(np.array(held), np.full(4, 16.0))
    assert_close(np.array(variable), np.full(4, 16.0))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
def test_rows_that_do_not_divide_from_tf_data_under_a_plan(devices, steps):
    tf = pytest.importorskip("tensorflow")
    strategies = [strategy_of(devices, "4x2", donates) for donates in (True, False)]

    def trained(strategy):
        training = Training(strategy)
        source = tf.data.Dataset.from_tensor_slices(data(rows=13 * 6 + 5, features=6)).batch(13)
        dataset = strategy.distribute_dataset(source)
        for _ in strategy.loop(training.step, dataset, steps, options=DYNAMIC):
            training.model.get_weights()
        return training.state()

    assert_close(*map(trained, strategies))
