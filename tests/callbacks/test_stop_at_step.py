"""StopAtStep(n): exactly n optimizer steps, however many steps a launch makes."""

import logging

import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, data, in_launches

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks import StopAtStep
from keras_tpu_dist.training import membership

# 19 batches an epoch, the last one ragged: launches of 8, 8, and 3 single steps.
X, Y = data(4 * 18 + 3)
EPOCHS = 3


def _schedule():
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.2, 30), momentum=0.9)


def _build(n, optimizer=_schedule):
    return in_launches(n, optimizer=optimizer, metrics=["accuracy"])


def _fit(model, *callbacks, epochs=EPOCHS, **options):
    options = {"batch_size": 4, "shuffle": False, "verbose": 0} | options
    return model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **options)


def _restore(variables, values):
    for variable, value in zip(variables, values):
        variable.assign(value)


class Record(keras.callbacks.Callback):
    """Weights, logs and learning rate after each step of an undisturbed run."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        rate = float(model.optimizer.learning_rate)
        self.steps.append((model.get_weights(), dict(logs), rate))


@pytest.fixture(scope="module")
def undisturbed():
    record = Record()
    history = _fit(built(_build(1), None), record).history
    return record.steps, history


@pytest.mark.slow
def test_every_step_up_to_forty(undisturbed):
    steps, whole = undisturbed
    model = built(_build(8), ktd.TPUStrategy({"data": 4, "model": 2}))
    _fit(model, StopAtStep(1))
    fresh = built(_build(8), ktd.TPUStrategy({"data": 4, "model": 2}))
    weights = fresh.get_weights()
    for n in range(1, 41):
        _restore(model.optimizer.variables, [v.numpy() * 0 for v in model.optimizer.variables])
        model.set_weights(weights)
        ends = []
        batches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: ends.append(b))
        history = _fit(model, StopAtStep(n), batches).history
        assert int(model.optimizer.iterations) == n
        expected, logs, rate = steps[n - 1]
        assert_close(model.get_weights(), expected)
        assert abs(float(model.optimizer.learning_rate) - rate) < 1e-7
        full = (n - 1) // 19
        assert len(history["loss"]) == full + 1
        assert len(ends) == full * 3 + -(-((n - 1) % 19 + 1) // 8)
        for name in ("loss", "accuracy"):
            assert_close(history[name], [*whole[name][:full], logs[name]])


@pytest.mark.parametrize("n", [2, 20])
@pytest.mark.parametrize("where", ["stock", "one step a launch"])
def test_single_steps(undisturbed, where, n):
    model = built(_build(1), None if where == "stock" else ktd.TPUStrategy())
    _fit(model, StopAtStep(n))
    assert int(model.optimizer.iterations) == n
    assert_close(model.get_weights(), undisturbed[0][n - 1][0])


@pytest.mark.slow
def test_a_second_fit_goes_on_from_the_first(undisturbed):
    model = built(_build(8), ktd.TPUStrategy())
    _fit(model, StopAtStep(19))
    stop = StopAtStep(30)
    _fit(model, stop)
    # The loop counts: nobody asks for the logs of each step.
    assert not _keras.listens([stop], "train")
    assert_close(model.get_weights(), undisturbed[0][29][0])
    with pytest.raises(ValueError, match=r"has run 30 steps.*iterations is 30.*larger n"):
        _fit(model, stop)
    # Neither the error nor a stop outlasts its fit.
    assert membership.of_model(model).fit.steps_left is None
    _fit(model, epochs=1)
    assert int(model.optimizer.iterations) == 49
    with pytest.raises(ValueError, match=r"iterations is 49"):
        _fit(model, stop)


@pytest.mark.parametrize("where", ["stock", "launches of 8"])
def test_more_steps_from_where_the_fit_begins(undisturbed, where):
    strategy, n = (None, 1) if where == "stock" else (ktd.TPUStrategy(), 8)
    model = built(_build(n), strategy)
    stop = StopAtStep(19, more=True)
    _fit(model, stop)
    assert (int(model.optimizer.iterations), stop.last_step) == (19, 19)
    stop = StopAtStep(3, more=True)
    _fit(model, stop)
    assert_close(model.get_weights(), undisturbed[0][21][0])
    _fit(model, stop)
    assert (int(model.optimizer.iterations), stop.last_step) == (25, 25)
    with pytest.raises(ValueError, match="more of StopAtStep is True or False"):
        StopAtStep(3, more=1)


def test_more_steps_of_a_run_that_is_resumed(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    for made in (5, 10):
        model = built(_build(2), ktd.TPUStrategy())
        _fit(model, ktd.callbacks.Checkpoint(tmp_path), StopAtStep(5, more=True))
        assert int(model.optimizer.iterations) == made


@pytest.mark.slow
def test_epochs_that_end_before(undisturbed):
    model = built(_build(8), ktd.TPUStrategy())
    _fit(model, StopAtStep(1000))
    assert int(model.optimizer.iterations) == 19 * EPOCHS
    assert_close(model.get_weights(), undisturbed[0][-1][0])


def test_an_exception_ends_it():
    def batches():
        for _ in range(3):
            yield X[:4], Y[:4]
        raise OSError("disk gone")

    model = built(_build(8), ktd.TPUStrategy())
    with pytest.raises(OSError, match="disk gone"):
        model.fit(batches(), shuffle=False, verbose=0, callbacks=[StopAtStep(5)])
    _fit(model, epochs=1)
    assert int(model.optimizer.iterations) == 22


def test_a_generator_is_not_read_beyond_the_last_launch():
    read = []

    def batches():
        while True:
            read.append(1)
            yield X[:4], Y[:4]

    model = built(_build(8), ktd.TPUStrategy(prefetch=2))
    model.fit(
        batches(),
        steps_per_epoch=7,
        epochs=9,
        shuffle=False,
        verbose=0,
        callbacks=[StopAtStep(17)],
    )
    assert int(model.optimizer.iterations) == len(read) == 17


@pytest.mark.slow
def test_validation_and_epoch_end_follow():
    seen = []
    model = built(_build(8), ktd.TPUStrategy())
    end = keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: seen.append((e, logs)))
    history = _fit(model, StopAtStep(21), end, validation_data=(X, Y))
    assert [epoch for epoch, _ in seen] == [0, 1]
    assert len(history.history["val_loss"]) == 2
    assert_close(history.history["val_loss"][-1], model.evaluate(X, Y, verbose=0)[0])


@pytest.mark.slow
def test_a_model_restored_as_training_begins():
    """Whatever the order of the callbacks: StopAtStep counts what is left after restoring."""

    class Restore(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.optimizer.iterations.assign(7)

    for order in (1, -1):
        model = built(_build(8), ktd.TPUStrategy())
        _fit(model, *[StopAtStep(20), Restore()][::order])
        assert int(model.optimizer.iterations) == 20


@pytest.mark.slow
def test_gradient_accumulation_counts_updates():
    optimizer = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)  # noqa: E731
    for strategy, n in ((ktd.TPUStrategy(), 8), (None, 1)):
        model = built(_build(n, optimizer), strategy)
        _fit(model, StopAtStep(5))
        assert int(model.optimizer.iterations) == 5
        _fit(model, stop := StopAtStep(2, more=True))
        assert int(model.optimizer.iterations) == stop.last_step == 7
        model = built(_build(n, optimizer), strategy)
        _fit(model, StopAtStep(5))
        reference = built(_build(1, optimizer), None)
        reference.fit(X[: 4 * 15], Y[: 4 * 15], batch_size=4, shuffle=False, verbose=0)
        assert_close(model.get_weights(), reference.get_weights())


def test_skipped_steps_of_a_loss_scale_do_not_count():
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(  # noqa: E731
        keras.optimizers.SGD(0.01), initial_scale=2.0**127
    )
    model = built(_build(4, optimizer), ktd.TPUStrategy())
    _fit(model, StopAtStep(5), sample_weight=np.full(len(X), 100.0))
    assert int(model.optimizer.iterations) == 5
    assert float(model.optimizer.dynamic_scale) < 2.0**127


class NoOptimizer(keras.Model):
    """Its train step never applies the optimizer."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, batch):
        trainable, *rest = state
        return {"loss": trainable[0].sum()}, ([w + 1.0 for w in trainable], *rest)


class Twice(NoOptimizer):
    """Its train step applies the optimizer twice."""

    def train_step(self, state, batch):
        _, state = keras.Model.train_step(self, state, batch)
        return keras.Model.train_step(self, state, batch)


def test_custom_train_steps(caplog):
    caplog.set_level(logging.INFO, logger="keras_tpu_dist")

    def build(cls):
        def builder():
            return compiled(cls(), "sgd", "mse", steps_per_execution=8)

        return builder

    targets = np.zeros((len(X), 3), "float32")
    fit = {"batch_size": 4, "epochs": 3, "verbose": 0}
    model = built(build(NoOptimizer), ktd.TPUStrategy())
    model.fit(X, targets, callbacks=[StopAtStep(11)], **fit)
    assert_close(model.dense.bias.numpy(), np.full(3, 11.0))
    assert "its train steps were counted" in caplog.text
    model = built(build(Twice), ktd.TPUStrategy())
    model.fit(X, targets, callbacks=[StopAtStep(20)], **fit)
    assert int(model.optimizer.iterations) == 38
    assert "ran 38 optimizer steps, because its train step applies" in caplog.text


def test_a_number_of_numpy():
    assert StopAtStep(np.int64(3)).n == 3


def test_stock_keras_cannot_shorten_a_launch():
    with pytest.raises(ValueError, match=r"steps_per_execution=8.*TPUStrategy"):
        _fit(built(_build(8), None), StopAtStep(3))


@pytest.mark.parametrize("numbers", [(5, 11), (11, 5)])
def test_of_two_the_smaller_number_counts(numbers):
    model = built(_build(4), ktd.TPUStrategy())
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[StopAtStep(n) for n in numbers])
    assert int(model.optimizer.iterations) == 5
