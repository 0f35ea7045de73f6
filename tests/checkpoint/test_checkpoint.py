"""Training that stops anywhere ends as if it had not, on any mesh."""

import importlib
import os
import pathlib
import signal

import keras
import numpy as np
import pytest
from helpers import assert_close, loaded
from pydatasets import in_batches

import keras_tpu_dist as ktd

job = loaded(pathlib.Path(__file__).with_name("job.py"), "checkpoint_job")
ROWS, BATCH, EPOCHS = 45, 8, 3
X = np.random.default_rng(0).normal(size=(ROWS, 12)).astype("float32")
Y = X[:, :4]


INPUTS = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays in parts": lambda: {"x": X, "y": Y, "batch_size": BATCH, "steps_per_epoch": 3},
    "pydataset": lambda: {"x": in_batches(BATCH, X, Y), "shuffle": True},
    "generator": lambda: {
        "x": in_batches(BATCH, X, Y).endless(),
        "steps_per_epoch": 4,
        "shuffle": False,
    },
}


def made(strategy, steps=1):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = job.network(0.3)
        model.compile(
            keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=steps
        )
    return model


class Stop(Exception):
    pass


class StopAfter(keras.callbacks.Callback):
    """Fails after a number of train batches, or at the end of an epoch."""

    def __init__(self, batches=None, epoch=None):
        super().__init__()
        self.batches, self.epoch, self.seen = batches, epoch, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.batches:
            raise Stop

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Stop


def callbacks():
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0),
    ]


def fit(model, feed, *more):
    return model.fit(
        **INPUTS[feed](),
        epochs=EPOCHS,
        verbose=0,
        validation_data=(X[:9], Y[:9]),
        callbacks=[*callbacks(), *more],
    )


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("feed", "every", "stop", "steps"),
    [
        ("arrays", {"every_steps": 2}, StopAfter(9), 1),
        pytest.param("arrays", {"every_steps": 3}, StopAfter(3), 4, marks=slow),
        pytest.param("arrays", {"every_epochs": 1}, StopAfter(8), 1, marks=slow),
        pytest.param("arrays", {"every_steps": 6}, StopAfter(epoch=0), 1, marks=slow),
        pytest.param("arrays in parts", {"every_steps": 5}, StopAfter(6), 1, marks=slow),
        pytest.param("pydataset", {"every_steps": 4}, StopAfter(11), 1, marks=slow),
        pytest.param("generator", {"every_steps": 3}, StopAfter(7), 1, marks=slow),
        pytest.param("generator", {"every_epochs": 2}, StopAfter(3), 4, marks=slow),
    ],
)
def test_a_run_that_stopped_ends_as_one_that_did_not(feed, every, stop, steps, tmp_path):
    whole = made(ktd.TPUStrategy())
    expected = fit(whole, feed).history
    stop.seen = 0
    with pytest.raises(Stop):
        fit(made(ktd.TPUStrategy(), steps), feed, ktd.callbacks.Checkpoint(tmp_path, **every), stop)
    np.random.seed(99)
    mesh = {"data": 2, "fsdp": 2, "model": 2}
    again = made(ktd.TPUStrategy(mesh, "fsdp", donate_state=True), steps)
    history = fit(again, feed, ktd.callbacks.Checkpoint(tmp_path, **every))
    assert history.epoch == list(range(EPOCHS))
    assert sorted(history.history) == sorted(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, atol=1e-5)
    assert_close(again.get_weights(), whole.get_weights())


@slow
def test_a_run_that_ended_has_nothing_left_to_do(tmp_path):
    one = made(ktd.TPUStrategy())
    first = fit(one, "arrays", ktd.callbacks.Checkpoint(tmp_path))
    again = made(ktd.TPUStrategy({"fsdp": 8}, "fsdp"))
    second = fit(again, "arrays", ktd.callbacks.Checkpoint(tmp_path))
    assert second.epoch == first.epoch
    assert second.history == {name: pytest.approx(v) for name, v in first.history.items()}
    assert_close(again.get_weights(), one.get_weights())
    # Without resume, it trains anew.
    other = made(ktd.TPUStrategy())
    fit(other, "arrays", ktd.callbacks.Checkpoint(tmp_path, resume=False))
    assert_close(other.get_weights(), one.get_weights())


@slow
def test_a_run_that_a_callback_stopped_stays_stopped(tmp_path):
    class Enough(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    one = made(ktd.TPUStrategy())
    fit(one, "arrays", Enough(), ktd.callbacks.Checkpoint(tmp_path))
    again = made(ktd.TPUStrategy())
    assert fit(again, "arrays", ktd.callbacks.Checkpoint(tmp_path)).epoch == [0]
    assert_close(again.get_weights(), one.get_weights())


@slow
def test_the_newest_and_the_best_are_kept(tmp_path):
    class Logs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_f1"] = [0.3, 0.9, 0.5, 0.4, float("nan")][epoch]

    model = made(ktd.TPUStrategy())
    saved = ktd.callbacks.Checkpoint(tmp_path, keep=2, monitor="val_f1")
    model.fit(X, Y, batch_size=ROWS, epochs=5, verbose=0, callbacks=[Logs(), saved])
    assert saved.steps == [2, 4, 5]
    wrong = ktd.callbacks.Checkpoint(tmp_path / "other", monitor="val_f2")
    with pytest.raises(
        ValueError, match=r"names an entry.*monitor='val_f2'.*Did you mean 'val_f1'"
    ):
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[Logs(), wrong])


@slow
def test_saving_that_fails_does_not_end_training(tmp_path, caplog, monkeypatch):
    def full(*arguments, **named):
        raise ktd.CheckpointError("no space left on device")

    monkeypatch.setattr("keras_tpu_dist.checkpoint.store.Store.save", full)
    model = made(ktd.TPUStrategy())
    fit(model, "arrays", ktd.callbacks.Checkpoint(tmp_path, every_steps=5))
    assert caplog.text.count("training goes on without this checkpoint. no space left") == 4
    assert model.optimizer.iterations == EPOCHS * 6


@pytest.mark.slow
def test_sigterm_saves_and_ends(tmp_path):
    class Terminate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    ended = []
    before = signal.signal(
        signal.SIGTERM, lambda *_: ended.append(1) or (_ for _ in ()).throw(Stop)
    )
    try:
        with pytest.raises(Stop):
            fit(made(ktd.TPUStrategy()), "arrays", Terminate(), ktd.callbacks.Checkpoint(tmp_path))
        assert ended == [1]
        assert ktd.callbacks.Checkpoint(tmp_path).steps == [5]
    finally:
        signal.signal(signal.SIGTERM, before)
    whole, again = made(ktd.TPUStrategy()), made(ktd.TPUStrategy())
    fit(whole, "arrays")
    fit(again, "arrays", ktd.callbacks.Checkpoint(tmp_path))
    assert_close(again.get_weights(), whole.get_weights())


@slow
def test_stock_keras_saves_epochs(tmp_path):
    def stock():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
        model.compile("adam", "mse")
        return model

    whole = stock()
    fit(whole, "arrays")
    with pytest.raises(Stop):
        fit(stock(), "arrays", ktd.callbacks.Checkpoint(tmp_path), StopAfter(15))
    again = stock()
    fit(again, "arrays", ktd.callbacks.Checkpoint(tmp_path))
    assert_close(again.get_weights(), whole.get_weights())
    with pytest.raises(ValueError, match=r"need the loop of a TPUStrategy.*every_steps=2"):
        fit(stock(), "arrays", ktd.callbacks.Checkpoint(tmp_path, every_steps=2))


@pytest.mark.parametrize(
    "wrong", [{"every_steps": 0}, {"every_minutes": -1}, {"keep": 0}, {"mode": "best"}]
)
def test_malformed_arguments(wrong, tmp_path):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"whole numbers of at least 1.*{name}={value!r}"):
        ktd.callbacks.Checkpoint(tmp_path, **wrong)


@slow
def test_processes_that_see_other_directories_are_told(tmp_path, monkeypatch):
    fit(made(ktd.TPUStrategy()), "arrays", ktd.callbacks.Checkpoint(tmp_path))
    module = importlib.import_module("keras_tpu_dist.callbacks.checkpoint")
    monkeypatch.setattr(module, "agree", lambda what, fix, value: [value, []])
    with pytest.raises(ValueError, match=r"see the same.*\[6, 12, 18\] in process 0; \[\] in proc"):
        fit(made(ktd.TPUStrategy()), "arrays", ktd.callbacks.Checkpoint(tmp_path))
