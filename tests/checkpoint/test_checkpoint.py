"""Training that stops anywhere ends as if it had not, on any mesh."""

import importlib
import pathlib
import shutil
import signal
import sys

import keras
import numpy as np
import pytest
from helpers import At, Stop, assert_close, loaded, terminate
from pydatasets import in_batches

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.store import Store

network = loaded(pathlib.Path(__file__).with_name("network.py"), "checkpoint_network").network
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
        model = network(0.3)
        model.compile(
            keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=steps
        )
    return model


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
        ("arrays", {"every_steps": 2}, At(9), 1),
        pytest.param("arrays", {"every_steps": 3}, At(3), 4, marks=slow),
        pytest.param("arrays", {"every_epochs": 1}, At(8), 1, marks=slow),
        pytest.param("arrays", {"every_steps": 6}, At(1, method="on_epoch_end"), 1, marks=slow),
        pytest.param("arrays in parts", {"every_steps": 5}, At(6), 1, marks=slow),
        pytest.param("pydataset", {"every_steps": 4}, At(11), 1, marks=slow),
        pytest.param("generator", {"every_steps": 3}, At(7), 1, marks=slow),
        pytest.param("generator", {"every_epochs": 2}, At(3), 4, marks=slow),
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
    # Without resume, it trains anew, if the checkpoints that are there may go.
    other = made(ktd.TPUStrategy())
    with pytest.raises(ValueError, match=r"holds the checkpoints of one run.*overwrite=True"):
        fit(other, "arrays", ktd.callbacks.Checkpoint(tmp_path, resume=False))
    other = made(ktd.TPUStrategy())
    fit(other, "arrays", ktd.callbacks.Checkpoint(tmp_path, resume=False, overwrite=True))
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
@pytest.mark.parametrize("every", [{"every_epochs": 1}, {"every_steps": 4}, {"every_steps": 3}])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_that_stopped_at_a_step_goes_on_to_a_later_one(tmp_path, every, steps):
    """As `max_steps` of an Estimator: nothing for the same number, the rest for a larger one."""

    def run(*stops, directory=tmp_path / "run"):
        model = made(ktd.TPUStrategy(), steps)
        saved = ktd.callbacks.Checkpoint(directory, **every)
        callbacks = [saved, *map(ktd.callbacks.StopAtStep, stops)]
        history = model.fit(
            X,
            Y,
            batch_size=BATCH,
            epochs=3,
            verbose=0,
            validation_data=(X[:9], Y[:9]),
            callbacks=callbacks,
        )
        return int(model.optimizer.iterations), history.epoch, model.get_weights(), history.history

    whole = run(directory=tmp_path / "whole")
    cut = run(8)
    assert cut[:2] == (8, [0, 1])
    for stops in [(8,), (5,), (5, 20)]:
        again = run(*stops)
        assert again[:2] == (8, [0, 1])
        assert_close(again[2], cut[2])
        assert again[3] == {name: pytest.approx(values) for name, values in cut[3].items()}
    # The epoch that was cut is not done: it goes on where it stopped.
    assert run(10)[:2] == (10, [0, 1])
    assert run(12)[:2] == (12, [0, 1])
    ended = run()
    assert ended[:2] == whole[:2] == (18, [0, 1, 2])
    assert_close(ended[2], whole[2])
    assert sorted(ended[3]) == sorted(whole[3])
    for name, values in whole[3].items():
        np.testing.assert_allclose(ended[3][name], values, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [6, pytest.param(8, marks=slow), pytest.param(12, marks=slow)])
@pytest.mark.parametrize("where", ["strategy", pytest.param("stock", marks=slow)])
def test_a_later_run_goes_on_from_the_last_weights_not_from_the_best(stop, where, tmp_path):
    """`EarlyStopping` restores the best ones at the end, here those of the first epoch."""
    if where == "stock" and stop == 8:
        pytest.skip("stock Keras does not go on within an epoch")

    def run(stop, directory):
        keras.utils.set_random_seed(1)
        model = network(0.3) if where == "stock" else made(ktd.TPUStrategy())
        model.compile(keras.optimizers.SGD(0.3), "mse")
        early = keras.callbacks.EarlyStopping(
            "val_loss", mode="max", patience=9, restore_best_weights=True
        )
        saved = ktd.callbacks.Checkpoint(directory)
        callbacks = [early, saved, ktd.callbacks.StopAtStep(stop)]
        given = {"validation_data": (X[:9], Y[:9]), "callbacks": callbacks, "shuffle": False}
        model.fit(X, Y, batch_size=BATCH, epochs=4, verbose=0, **given)
        last = network(0.3)
        ktd.restore(last, directory)
        return model.get_weights(), last.get_weights()

    whole = run(18, tmp_path / "whole")
    run(stop, tmp_path / "run")
    assert_close(run(18, tmp_path / "run"), whole)


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


def averaged(directory, first, *more):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with ktd.TPUStrategy().scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9), "mse")
    saved = ktd.callbacks.Checkpoint(directory, every_epochs=1)
    both = [saved, keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    both = both if first else both[::-1]
    model.fit(**INPUTS["arrays"](), epochs=EPOCHS, verbose=0, callbacks=[*both, *more])
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=slow)])
def test_averages_in_the_place_of_weights_are_swapped_back(first, tmp_path):
    whole = averaged(tmp_path / "whole", first)
    with pytest.raises(Stop):
        averaged(tmp_path / "stopped", first, At(14))
    assert_close(averaged(tmp_path / "stopped", first), whole)


@slow
@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_ended_with_averages_goes_on_in_more_epochs(first, tmp_path, monkeypatch):
    averaged(tmp_path, first)
    swaps = []
    monkeypatch.setattr(
        keras.callbacks.SwapEMAWeights, "_swap_variables", lambda self: swaps.append(1)
    )
    monkeypatch.setattr(sys.modules[__name__], "EPOCHS", EPOCHS + 1)
    averaged(tmp_path, first)
    assert len(swaps) == 2  # back, and at the end of the epoch


@slow
def test_averages_that_nothing_swaps_back_are_said(tmp_path, caplog):
    with pytest.raises(Stop):
        averaged(tmp_path, True, At(14))
    with ktd.TPUStrategy().scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(0.1, use_ema=True), "mse")
    model.fit(
        **INPUTS["arrays"](),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[ktd.callbacks.Checkpoint(tmp_path)],
    )
    assert "this fit has no SwapEMAWeights to swap them back" in caplog.text


@pytest.fixture
def terminated():
    """Handles SIGTERM as a program does that notes it and goes on."""
    calls = []

    def note(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGTERM, note)
    yield calls
    assert signal.getsignal(signal.SIGTERM) is note
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("method", "n"),
    [
        ("on_train_end", 1),
        pytest.param("on_test_begin", EPOCHS, marks=slow),
        pytest.param("on_epoch_end", EPOCHS, marks=slow),
    ],
)
def test_sigterm_after_the_last_launch_is_passed_on(method, n, tmp_path, terminated):
    fit(
        made(ktd.TPUStrategy()),
        "arrays",
        ktd.callbacks.Checkpoint(tmp_path),
        At(n, terminate, method),
    )
    assert terminated == [signal.SIGTERM]
    assert ktd.callbacks.Checkpoint(tmp_path).steps == [6, 12, 18]


def test_sigterm_while_the_last_checkpoint_is_written(tmp_path, terminated, monkeypatch):
    close = Store.close

    def closes(store, **options):
        signal.raise_signal(signal.SIGTERM)
        assert not terminated
        close(store, **options)

    saved = ktd.callbacks.Checkpoint(tmp_path)
    monkeypatch.setattr(Store, "close", closes)
    made(ktd.TPUStrategy()).fit(**INPUTS["arrays"](), verbose=0, callbacks=[saved])
    monkeypatch.undo()
    assert terminated == [signal.SIGTERM]
    assert saved.steps == [6]


@pytest.mark.parametrize("ignored", [False, pytest.param(True, marks=slow)])
def test_training_goes_on_and_saves_where_the_handler_returns(ignored, tmp_path, terminated):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if ignored else None
    saved = ktd.callbacks.Checkpoint(tmp_path, every_steps=4, keep=None)
    fit(
        made(ktd.TPUStrategy()),
        "arrays",
        saved,
        At(2, terminate),
        At(9, terminate),
    )
    if ignored:
        assert signal.signal(signal.SIGTERM, before) == signal.SIG_IGN
    assert terminated == ([] if ignored else 2 * [signal.SIGTERM])
    # After steps 3 and 10 the signal was acted on.
    assert saved.steps == [3, 7, 10, 14, 18]


@pytest.mark.parametrize("swapped", [False, pytest.param(True, marks=slow)])
def test_two_in_one_fit_both_save(swapped, tmp_path, terminated):
    often = ktd.callbacks.Checkpoint(tmp_path / "often", every_steps=4, keep=None)
    ends = ktd.callbacks.Checkpoint(tmp_path / "ends", every_epochs=1, keep=None)
    both = [often, ends]
    fit(
        made(ktd.TPUStrategy()),
        "arrays",
        *(both[::-1] if swapped else both),
        At(2, terminate),
    )
    assert terminated == [signal.SIGTERM]
    assert often.steps == [3, 7, 11, 15, 18]
    assert ends.steps == [3, 6, 12, 18]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("swapped", "without"),
    [(False, None), pytest.param(True, None, marks=slow), pytest.param(True, "ends", marks=slow)],
)
def test_of_two_in_one_fit_the_one_that_is_ahead_goes_on(swapped, without, tmp_path):
    def two():
        often = ktd.callbacks.Checkpoint(tmp_path / "often", every_steps=4, keep=None)
        ends = ktd.callbacks.Checkpoint(tmp_path / "ends", every_epochs=1, keep=None)
        return [ends, often] if swapped else [often, ends]

    whole = made(ktd.TPUStrategy())
    history = fit(whole, "arrays")
    with pytest.raises(Stop):
        fit(made(ktd.TPUStrategy()), "arrays", *two(), At(10))
    if without:
        shutil.rmtree(tmp_path / without)
    again, both = made(ktd.TPUStrategy()), two()
    went_on = fit(again, "arrays", *both)
    assert (went_on.epoch, sorted(went_on.history)) == (history.epoch, sorted(history.history))
    for name, values in history.history.items():
        assert_close(went_on.history[name], values)
    assert_close(again.get_weights(), whole.get_weights())
    steps = {each.directory[-4:]: each.steps for each in both}
    assert steps == {"ften": [4, 8, 12, 16, 18], "ends": [6, 12, 18][1 if without else 0 :]}


def test_a_fit_that_fails_before_its_first_epoch_leaves_the_next_alone(tmp_path):
    model = made(ktd.TPUStrategy())
    saved = ktd.callbacks.Checkpoint(tmp_path)
    fit(model, "arrays", saved)
    with pytest.raises(Stop):
        fit(model, "arrays", saved, At(1, method="on_train_begin"))
    assert fit(model, "arrays").epoch == [0, 1, 2]


@pytest.mark.parametrize("where", ["stock", "strategy"])
def test_a_fit_of_no_epoch_saves_nothing_that_a_later_one_would_lose(where, tmp_path):
    model = network(0.3)
    if where == "strategy":
        model = made(ktd.TPUStrategy())
    model.compile("adam", "mse")
    saved = ktd.callbacks.Checkpoint(tmp_path)
    given = {"x": X, "y": Y, "batch_size": BATCH, "verbose": 0, "callbacks": [saved]}
    model.fit(**given, epochs=0)
    assert saved.steps == []
    assert model.fit(**given, epochs=2).epoch == [0, 1]
    assert saved.steps == [6, 12]


@pytest.mark.slow
def test_a_list_of_callbacks_that_does_not_know_the_epochs(tmp_path, caplog):
    def fitted(*callbacks):
        model = made(ktd.TPUStrategy())
        callbacks = keras.callbacks.CallbackList(
            [ktd.callbacks.Checkpoint(tmp_path), *callbacks], add_history=True, model=model
        )
        return model.fit(X, Y, batch_size=BATCH, verbose=0, epochs=3, callbacks=callbacks)

    with pytest.raises(Stop):
        fitted(At(2, method="on_epoch_end"))
    assert fitted().epoch == [0, 1, 2]
    fitted()
    assert "nothing is left to do: the run" in caplog.text
    assert caplog.text.count("training goes on with the run") == 1


@pytest.mark.slow
def test_epochs_that_are_not_validated_have_nothing_to_be_judged_by(tmp_path):
    model = made(ktd.TPUStrategy())
    saved = ktd.callbacks.Checkpoint(tmp_path / "a", monitor="val_loss", keep=None)
    arrays = {"x": X, "y": Y, "batch_size": BATCH, "verbose": 0, "validation_data": (X, Y)}
    model.fit(**arrays, epochs=3, validation_freq=2, callbacks=[saved])
    assert saved.steps == [6, 12, 18]
    saved = ktd.callbacks.Checkpoint(tmp_path / "b", monitor="val_los")
    with pytest.raises(ValueError, match=r"names an entry.*Did you mean 'val_loss'"):
        model.fit(**arrays, epochs=2, validation_freq=2, callbacks=[saved])


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
        fit(stock(), "arrays", ktd.callbacks.Checkpoint(tmp_path), At(15))
    again = stock()
    fit(again, "arrays", ktd.callbacks.Checkpoint(tmp_path))
    assert_close(again.get_weights(), whole.get_weights())
    with pytest.raises(ValueError, match=r"need the loop of a TPUStrategy.*every_steps=2"):
        fit(stock(), "arrays", ktd.callbacks.Checkpoint(tmp_path, every_steps=2))


def test_stock_keras_does_not_go_on_within_an_epoch(tmp_path):
    """It would train on the batches that were done once more."""
    saved = ktd.callbacks.Checkpoint(tmp_path, every_steps=2)
    with pytest.raises(Stop):
        fit(made(ktd.TPUStrategy()), "arrays", saved, At(3))
    stock = network(0.3)
    stock.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    with pytest.raises(ValueError, match=r"within an epoch needs the loop of a TPU.*batches=2"):
        fit(stock, "arrays", ktd.callbacks.Checkpoint(tmp_path))


class Shrinks(keras.Model):
    """A custom train step that never applies `model.optimizer`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        weights, *rest = state
        return {"loss": weights[0].sum()}, ([0.9 * each for each in weights], *rest)


@pytest.mark.parametrize(("steps", "expected"), [(1, [6, 12, 18]), (4, [6, 12, 18])])
def test_stock_keras_and_a_train_step_without_the_optimizer(steps, expected, tmp_path):
    model = Shrinks()
    model.build((None, 12))
    model.compile("sgd", "mse", steps_per_execution=steps)
    saved = ktd.callbacks.Checkpoint(tmp_path)
    fit(model, "arrays", saved)
    assert saved.steps == expected
    again = Shrinks()
    again.build((None, 12))
    ktd.restore(again, tmp_path)
    assert_close(again.get_weights(), model.get_weights())


@slow
def test_processes_that_see_other_directories_are_told(tmp_path, monkeypatch):
    fit(made(ktd.TPUStrategy()), "arrays", ktd.callbacks.Checkpoint(tmp_path))
    module = importlib.import_module("keras_tpu_dist.callbacks.fit_checkpoints")
    monkeypatch.setattr(module, "agree", lambda what, fix, value, form=None: [value, []])
    with pytest.raises(ValueError, match=r"see the same.*\[6, 12, 18\] in process 0; \[\] in proc"):
        fit(made(ktd.TPUStrategy()), "arrays", ktd.callbacks.Checkpoint(tmp_path))
