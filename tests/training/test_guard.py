"""No failed call leaves a model without the weights of its last completed step."""

import os
import re
import signal

import jax
import keras
import numpy as np
import pytest
from helpers import At, Stop, assert_close, built, compiled, data, in_launches, mlp, sequential

import keras_tpu_dist as ktd
from keras_tpu_dist.training import guard, loop
from keras_tpu_dist.training.membership import fit_in_training, of_model

X, Y = data(40)
slow = pytest.mark.slow


def _strategy(**options):
    return ktd.TPUStrategy({"data": 4, "model": 2}, **options)


def _weights_after(steps, batch_size=8):
    """The weights of an undisturbed run after `steps` steps, unshuffled."""
    model = built(mlp, None)
    if steps:
        model.fit(
            X[: steps * batch_size], Y[: steps * batch_size], batch_size, shuffle=False, verbose=0
        )
    return model.get_weights()


def _still_trains(model):
    history = model.fit(X, Y, batch_size=8, verbose=0).history
    assert np.isfinite(history["loss"][0])


def _batches(failing_step, error):
    for step in range(5):
        if step == failing_step:
            raise error
        yield X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]


@pytest.mark.slow
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("error", [ValueError("bad logs"), KeyboardInterrupt()])
def test_callback_that_raises_in_fit(donate, step, error):
    model = built(mlp, _strategy(donate_state=donate))
    with pytest.raises(type(error)):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[At(step + 1, error)])
    assert_close(model.get_weights(), _weights_after(step + 1))
    _still_trains(model)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize(
    ("error", "step", "prefetch", "launch"),
    [
        (OSError, 3, 2, 2),
        *((KeyboardInterrupt, 4, None, launch) for launch in (1, 2)),
        *(pytest.param(OSError, *each, marks=slow) for each in [(2, 0, 1), (3, 2, 1), (3, 2, 4)]),
    ],
)
def test_generator_that_raises(donate, error, step, prefetch, launch):
    model = built(in_launches(launch), _strategy(donate_state=donate, prefetch=prefetch))
    with pytest.raises(error, match="disk gone"):
        model.fit(_batches(step, error("disk gone")), shuffle=False, verbose=0)
    assert_close(model.get_weights(), _weights_after(step))
    _still_trains(model)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_batch_that_does_not_fit_the_model(donate, steps):
    def batches(x, y):
        for i in range(0, 8 * steps, 8):
            yield X[i : i + 8], Y[i : i + 8]
        yield x, y

    for wrong, words in (
        ((X[:8, :5], Y[:8]), r"expected.*6|incompatible"),
        ((X[:8], np.zeros((8, 3, 7), "float32")), "shape"),
    ):
        model = built(mlp, _strategy(donate_state=donate))
        with pytest.raises(ValueError, match=words):
            model.fit(batches(*wrong), shuffle=False, verbose=0)
        assert_close(model.get_weights(), _weights_after(steps))
        _still_trains(model)


@pytest.mark.parametrize("error", [ValueError("bad logs"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_evaluate_and_predict_that_raise(name, step, error):
    model = built(mlp, _strategy())
    model.fit(X, Y, batch_size=8, verbose=0)
    before = model.get_weights()
    call = getattr(model, name)
    ends = "on_test_batch_end" if name == "evaluate" else "on_predict_batch_end"
    arguments = {"x": X, "batch_size": 8, "verbose": 0}
    if name == "evaluate":
        arguments["y"] = Y
    with pytest.raises(type(error)):
        call(**arguments, callbacks=[At(step + 1, error, ends)])
    assert_close(model.get_weights(), before, 0)
    with pytest.raises(ValueError, match=r"expected.*6|incompatible"):
        call(**{**arguments, "x": X[:, :5]})
    assert_close(model.get_weights(), before, 0)
    _still_trains(model)


def test_on_batch_calls_that_raise():
    model = built(mlp, _strategy(donate_state=True))
    model.train_on_batch(X[:13], Y[:13])
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"expected.*6|incompatible"):
        model.train_on_batch(X[:13, :5], Y[:13])
    with pytest.raises(ValueError, match="same number of rows"):
        model.test_on_batch(X[:13], Y[:12])
    with pytest.raises(ValueError, match=r"expected.*6|incompatible"):
        model.predict_on_batch(X[:13, :5])
    assert_close(model.get_weights(), before, 0)
    model.train_on_batch(X[:13], Y[:13])


def test_validation_that_raises_keeps_the_epoch():
    model = built(mlp, _strategy())
    callbacks = [At(1, method="on_test_batch_end")]
    options = {"shuffle": False, "verbose": 0, "validation_data": (X, Y), "callbacks": callbacks}
    with pytest.raises(Stop):
        model.fit(X, Y, batch_size=8, **options)
    assert_close(model.get_weights(), _weights_after(5))
    _still_trains(model)


def test_a_learning_rate_set_between_epochs_survives_a_failure_in_the_next_first_step():
    class Lower(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.125

    def batches():
        for step in range(5):
            yield X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]
        raise OSError("second epoch")

    model = built(mlp, _strategy())
    with pytest.raises(OSError, match="second epoch"):
        model.fit(
            batches(), steps_per_epoch=5, epochs=2, shuffle=False, verbose=0, callbacks=[Lower()]
        )
    assert float(model.optimizer.learning_rate.numpy()) == 0.125
    assert_close(model.get_weights(), _weights_after(5))


def after_launch(monkeypatch, n, act):
    """Calls `act` with the state of the n-th launch of training, right after that launch."""
    real = loop.jitted_step

    def jitted(trainer, kind, *rest, **options):
        step = real(trainer, kind, *rest, **options)
        calls = []

        def run(state, batch):
            calls.append(1)
            done = step(state, batch)
            if kind == "train" and len(calls) == n:
                act(state)
            return done

        return run

    monkeypatch.setattr(loop, "jitted_step", jitted)


def dies(state):
    """As a launch that dies on the device after it consumed its donated input."""
    raise RuntimeError("the launch died")


def test_a_launch_that_dies_after_it_began_gives_back_the_state_before_it(monkeypatch):
    after_launch(monkeypatch, 4, dies)
    model = built(mlp, _strategy(donate_state=False))
    with pytest.raises(RuntimeError, match="the launch died"):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert_close(model.get_weights(), _weights_after(3))
    _still_trains(model)


@pytest.mark.parametrize("every_s", [0.0, 60.0])
def test_a_launch_that_consumed_its_state_gives_back_the_start_of_an_epoch(
    every_s, monkeypatch, caplog
):
    """Of this one, or, for at most a minute, of one before."""
    after_launch(monkeypatch, 8, dies)
    monkeypatch.setattr(guard, "_COPY_EVERY_S", every_s)
    model = built(mlp, _strategy(donate_state=True))
    before = model.get_weights()
    with pytest.raises(RuntimeError, match="the launch died"):
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_close(model.get_weights(), before if every_s else _weights_after(5))
    assert re.search(r"state of \d seconds ago", caplog.text)
    assert "donate_state=False" in caplog.text
    _still_trains(model)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_evaluation_and_prediction_leave_weights_where_they_are(steps):
    """A program copies all that it returns: of 25 MB of weights a step took three times as long."""

    def build():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(16), keras.layers.BatchNormalization()]
        )
        model.add(keras.layers.Dropout(0.5))
        model.add(keras.layers.Dense(3))
        return compiled(model, "adam", "mse", metrics=["mae"], steps_per_execution=steps)

    model = built(build, _strategy())
    x, y = np.ones((37, 6), "float32"), np.ones((37, 3), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    before = {v.path: v.value for v in model.weights}
    first = model.evaluate(x, y, batch_size=8, verbose=0)
    model.predict(x, batch_size=8, verbose=0)
    model.predict_on_batch(x[:5])
    model.test_on_batch(x[:5], y[:5])
    assert all(v.value is before[v.path] for v in model.weights)
    assert model.evaluate(x, y, batch_size=8, verbose=0) == first


def test_short_epochs_share_a_copy_unless_weights_were_assigned(monkeypatch):
    copies = []
    stock = guard.HostCopy
    monkeypatch.setattr(guard, "HostCopy", lambda state: copies.append(1) or stock(state))
    model = built(mlp, _strategy(donate_state=True))
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, validation_data=(X, Y))
    assert len(copies) == 1

    def halved(epoch, logs=None):
        model.set_weights([w / 2 for w in model.get_weights()])

    assigns = keras.callbacks.LambdaCallback(on_epoch_begin=halved)
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[assigns])
    assert len(copies) == 4


def test_train_on_batch_copies_a_donated_state_once_a_minute(monkeypatch, caplog):
    copies = []

    class Copy(guard.HostCopy):
        def __init__(self, state):
            copies.append(state)
            super().__init__(state)

    monkeypatch.setattr(guard, "HostCopy", Copy)
    model = built(mlp, _strategy(donate_state=True))
    model.train_on_batch(X[:8], Y[:8])
    for _ in range(4):
        model.train_on_batch(X[:8], Y[:8])
        model.reset_metrics()
        model.evaluate(X, Y, verbose=0)
    assert len(copies) == 1
    # What somebody else made of the weights is copied at once.
    given = [2 * w for w in model.get_weights()]
    model.set_weights(given)
    model.train_on_batch(X[:8], Y[:8])
    assert len(copies) == 2
    monkeypatch.setattr(guard, "_COPY_EVERY_S", 0.0)
    model.train_on_batch(X[:8], Y[:8])
    assert len(copies) == 3
    before = model.get_weights()
    monkeypatch.setattr(guard, "_COPY_EVERY_S", 60.0)
    model.train_on_batch(X[:8], Y[:8])
    assert len(copies) == 3

    member = of_model(model).guard
    launch = member.launch

    def dies(*args):
        launch(*args)
        for leaf in jax.tree.leaves(member._newest):
            leaf.delete()
        raise RuntimeError("the launch died")

    monkeypatch.setattr(member, "launch", dies)
    with pytest.raises(RuntimeError, match="the launch died"):
        model.train_on_batch(X[:8], Y[:8])
    assert re.search(r"the state of \d+ seconds ago", caplog.text)
    monkeypatch.undo()
    # Of two steps before, when the copy was made.
    model.train_on_batch(X[:8], Y[:8])
    assert_close(model.get_weights(), before)
    # A fit copies the state of the start of each epoch, and lets go of it.
    model.fit(X, Y, epochs=2, verbose=0)
    assert member._host_copy is None
    _still_trains(model)


def test_ctrl_c_within_a_launch_waits_until_the_new_state_has_a_name(monkeypatch):
    def interrupts(state):
        os.kill(os.getpid(), signal.SIGINT)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state[0]))

    after_launch(monkeypatch, 3, interrupts)
    handler = signal.getsignal(signal.SIGINT)
    model = built(mlp, _strategy(donate_state=True))
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert signal.getsignal(signal.SIGINT) is handler
    assert_close(model.get_weights(), _weights_after(3))


def test_nan_check_of_jax_names_the_failure_and_keeps_the_weights():
    model = built(mlp, _strategy(donate_state=False))
    poisoned = X.copy()
    poisoned[20] = np.nan
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        model.fit(poisoned, Y, batch_size=8, shuffle=False, verbose=0)
    assert_close(model.get_weights(), _weights_after(2))
    _still_trains(model)


def test_auto_keeps_small_states_and_donates_large_ones(monkeypatch):
    states_to_keep = guard.states_to_keep
    variables = built(mlp, _strategy()).variables
    state_bytes = sum(v.value.nbytes for v in variables)
    assert [states_to_keep(s, variables) for s in ("auto", False, True)] == [32, 32, 0]
    budget = "keras_tpu_dist.training.guard._KEEP_BYTES_WHERE_MEMORY_IS_UNKNOWN"
    monkeypatch.setattr(budget, 3 * state_bytes)
    assert [states_to_keep(s, variables) for s in ("auto", False, True)] == [3, 3, 0]
    monkeypatch.setattr(budget, 100 * state_bytes)
    many = variables * 20
    assert len(many) > 65
    assert [bool(states_to_keep(s, many[:64])) for s in ("auto", False)] == [True, True]
    assert [bool(states_to_keep(s, many[:65])) for s in ("auto", False)] == [False, True]
    monkeypatch.setattr(budget, state_bytes)
    assert [states_to_keep(s, variables) for s in ("auto", False, True)] == [0, 2, 0]


@pytest.mark.parametrize("donate", [True, False])
def test_a_model_that_shares_layers_trained_from_a_callback(donate):
    """Both trainings count, as where Keras is told to bring the variables up to date first."""
    with _strategy(donate_state=donate).scope():
        inputs, shared = keras.Input((6,)), keras.layers.Dense(6)
        outer = keras.Model(inputs, keras.layers.Dense(3)(shared(inputs)))
        outer.compile(keras.optimizers.SGD(0.0), "mse")
        inner = keras.Model(inputs, shared(inputs))
        inner.compile("sgd", "mse")
    expected = [shared.kernel.numpy()]

    class Trains(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert_close(shared.kernel.numpy(), expected[-1], 0)
            inner.train_on_batch(X, X)
            assert (shared.kernel.numpy() != expected[-1]).any()
            expected.append(shared.kernel.numpy())

    y = np.eye(3, dtype="float32")[Y]
    outer.fit(X, y, batch_size=8, verbose=0, callbacks=[Trains()])
    assert len(expected) == 6
    assert_close(shared.kernel.numpy(), expected[-1], 0)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("launch", [1, 2])
def test_what_fails_after_a_launch_keeps_its_weights(donate, launch):
    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.left = 2 // launch + 1
            fit_in_training(self.model).after_launch = self.after_launch

        def after_launch(self, steps):
            self.left -= 1
            if not self.left:
                raise OSError("disk full")

    model = built(in_launches(launch), _strategy(donate_state=donate))
    with pytest.raises(OSError, match="disk full"):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[Fails()])
    assert_close(model.get_weights(), _weights_after(3 if launch == 1 else 4))
    _still_trains(model)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("error", [TypeError, MemoryError, KeyboardInterrupt])
def test_batches_that_cannot_be_placed_ahead_keep_the_steps_before(monkeypatch, donate, error):
    strategy = _strategy(donate_state=donate)
    model = built(in_launches(2), strategy)
    placer = type(strategy.placer)
    stock, calls = placer.place_many, []

    def place_many(self, batches):
        calls.append(batches)
        if len(calls) == 2:
            raise error("no room on the devices")
        return stock(self, batches)

    monkeypatch.setattr(placer, "place_many", place_many)
    with pytest.raises(error, match="no room"):
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert_close(model.get_weights(), _weights_after(2))
    _still_trains(model)


def test_a_batch_of_objects_of_a_known_shape_is_named():
    def batches():
        for i in range(4):
            x = X[8 * i : 8 * i + 8]
            yield x.astype(object) if i == 2 else x, Y[8 * i : 8 * i + 8]

    model = built(in_launches(2), _strategy(donate_state=True))
    with pytest.raises(ValueError, match=r"A batch must be numeric.*element='x'.*object"):
        model.fit(batches(), shuffle=False, verbose=0)
    assert_close(model.get_weights(), _weights_after(2))


def test_slots_count_for_what_is_kept_also_after_a_prediction():
    """Weights alone are few enough to be kept; with Adam's slots they are not."""

    def deep():
        layers = [keras.layers.Dense(4) for _ in range(20)]
        return sequential(X.shape[1], *layers, keras.layers.Dense(4), optimizer="adam")

    model = built(deep, _strategy())
    model.predict(X, verbose=0)
    donated = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            assert fit_in_training(model) is not None
            donated.append(of_model(model).guard.donate)

    y = np.zeros((len(X), 4), "float32")
    model.fit(X, y, batch_size=8, verbose=0, callbacks=[Look()])
    assert donated == [True]
    assert_close(model.get_weights(), _fitted(deep, y))


def _fitted(build, y):
    model = built(build, None)
    model.fit(X, y, batch_size=8, verbose=0)
    return model.get_weights()
