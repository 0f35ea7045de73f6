"""SIGTERM in each phase of a fit: the state is saved within one launch, and the run goes on."""

import signal
import time

import keras
import numpy as np
import pytest
from helpers import At, Stop, assert_close, built, data, sequential, terminate
from test_checkpoint import BATCH, EPOCHS, X, Y, callbacks, network

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.reader import CheckpointReader
from keras_tpu_dist.checkpoint.store import Store

MESHES = ({"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2})
slow = pytest.mark.slow


@pytest.fixture
def handled():
    """The signals that the program's own handler gets, which ends the fit."""
    calls = []

    def end(number, frame):
        calls.append(number)
        raise Stop

    before = signal.signal(signal.SIGTERM, end)
    yield calls
    assert signal.getsignal(signal.SIGTERM) is end
    signal.signal(signal.SIGTERM, before)


class Traced(keras.layers.Layer):
    """Calls something while the model is built, or its step traced."""

    act = staticmethod(lambda phase: None)

    def build(self, shape):
        self.act("build")

    def call(self, x, training=False):
        if training:
            self.act("compile")
        return x


class Counts(keras.callbacks.Callback):
    """Knows how often it was called; a resumed run must know the same."""

    def __init__(self):
        super().__init__()
        self.batches = self.epochs = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        logs["epochs_seen"] = float(self.epochs)

    def state_dict(self):
        return {"batches": self.batches, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.batches, self.epochs = state["batches"], state["epochs"]


class Within(keras.callbacks.Callback):
    """Runs evaluate or predict itself, at the end of epochs or of batches."""

    def __init__(self, method, name, *callbacks):
        super().__init__()
        self.name, self.callbacks = name, list(callbacks)
        setattr(self, method, self.called)

    def called(self, *args, **kwargs):
        data = (X, Y) if self.name == "evaluate" else (X,)
        run = getattr(self.model, self.name)
        run(*data, batch_size=BATCH, verbose=0, callbacks=self.callbacks)


def made(strategy, steps=1, unbuilt=False):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network(0.3)
        layers = model.layers
        model = keras.Sequential([*([] if unbuilt else [keras.Input((12,))]), Traced(), *layers])
        model.compile(
            keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=steps
        )
    return model


def fit(model, *more, **options):
    keeps = [*callbacks(), Counts()]
    options = {"validation_data": (X[:21], Y[:21]), "validation_batch_size": 8} | options
    history = model.fit(
        X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[*keeps, *more], **options
    )
    return history, keeps[-1]


# What a callback runs, and when; where the signal comes, with the number of the call; the epoch
# and its batches that are saved then, with launches of one step and of four.
PHASES = {
    "first compile": (None, "compile", 1, (0, 1), (0, 4)),
    "first batch": (None, "on_train_batch_begin", 1, (0, 1), (0, 4)),
    "batch": (None, "on_train_batch_begin", 4, (0, 4), (1, 5)),
    "batch end": (None, "on_train_batch_end", 3, (0, 4), (1, 5)),
    "epoch begin": (None, "on_epoch_begin", 2, (1, 1), (1, 4)),
    "validation begins": (None, "on_test_begin", 2, (1, 6), (1, 6)),
    "validation": (None, "on_test_batch_begin", 2, (0, 6), (1, 6)),
    "validation ends": (None, "on_test_end", 2, (2, 1), (2, 4)),
    "epoch end": (None, "on_epoch_end", 2, (2, 1), (2, 4)),
    "evaluate in a callback": (
        *(("on_epoch_end", "evaluate"), "on_test_batch_begin", 2),
        *((0, 6), (0, 6)),
    ),
    "predict in a callback": (
        *(("on_epoch_end", "predict"), "on_predict_batch_begin", 4),
        *((0, 6), (1, 6)),
    ),
    "evaluate in an epoch": (
        *(("on_train_batch_end", "evaluate"), "on_test_batch_begin", 8),
        *((0, 2), (1, 6)),
    ),
    "save": (None, "save", 1, (1, 1), (1, 4)),
}


def phase(name, monkeypatch, times=1):
    """The callbacks that send SIGTERM there."""
    nested, method, n, *_ = PHASES[name]
    act = At(n, lambda: terminate(times), method)
    if method == "compile":

        def traced(phase):
            if phase == "compile":
                act.called()

        monkeypatch.setattr(Traced, "act", staticmethod(traced))
        return []
    if method == "save":
        save = Store.save
        monkeypatch.setattr(Store, "save", lambda *args: (act.called(), save(*args))[1])
        return []
    return [Within(*nested, act)] if nested else [act]


def position(folder):
    store = CheckpointReader(folder)
    training = store.manifest(store.steps[-1]).training
    return training["epoch"], training["done"]


@pytest.fixture(scope="module")
def whole():
    """From steps of a launch and what a callback runs to a run that nobody cut."""
    known = {}

    def run(steps, nested):
        if (steps, nested) not in known:
            model = made(ktd.TPUStrategy(), steps)
            known[steps, nested] = model, *fit(model, *([Within(*nested)] if nested else []))
        return known[steps, nested]

    return run


def assert_same(found, expected):
    (model, history, counts), (other, record, counted) = found, expected
    assert history.epoch == record.epoch
    assert sorted(history.history) == sorted(record.history)
    for key, values in record.history.items():
        np.testing.assert_allclose(history.history[key], values, rtol=1e-5, atol=1e-5)
    assert_close(model.get_weights(), other.get_weights())
    assert (counts.batches, counts.epochs) == (counted.batches, counted.epochs)


@pytest.mark.parametrize(
    ("name", "steps", "times"),
    [
        ("validation", 1, 1),
        *(pytest.param(name, 1, 2, marks=slow) for name in PHASES),
        *(pytest.param(name, 4, 1, marks=slow) for name in PHASES),
    ],
)
def test_a_signal_in_each_phase(name, steps, times, tmp_path, monkeypatch, handled, whole):
    nested = PHASES[name][0]
    model = made(ktd.TPUStrategy(MESHES[0], "auto"), steps)
    with pytest.raises(Stop):
        fit(model, *phase(name, monkeypatch, times), ktd.callbacks.Checkpoint(tmp_path))
    assert handled == [signal.SIGTERM]
    monkeypatch.undo()
    assert position(tmp_path) == PHASES[name][3 if steps == 1 else 4]
    again = made(ktd.TPUStrategy(MESHES[1], "fsdp", donate_state=True), steps)
    np.random.seed(99)
    beside = [Within(*nested)] if nested else []
    found = again, *fit(again, *beside, ktd.callbacks.Checkpoint(tmp_path))
    assert_same(found, whole(steps, nested))


def test_a_signal_while_the_model_is_built(tmp_path, monkeypatch, handled):
    """Nothing was trained yet, and nothing is waited for."""
    monkeypatch.setattr(Traced, "act", staticmethod(lambda phase: terminate()))
    # Keras makes one error of all that is raised there.
    with pytest.raises(RuntimeError, match="Unable to automatically build the model"):
        fit(made(ktd.TPUStrategy(), unbuilt=True), ktd.callbacks.Checkpoint(tmp_path))
    assert handled == [signal.SIGTERM]
    assert ktd.callbacks.Checkpoint(tmp_path).steps == []


@slow
@pytest.mark.parametrize("steps", [1, 4])
def test_a_signal_in_validation_after_the_last_step(steps, tmp_path, handled):
    def run(*more, mesh=MESHES[0]):
        model = made(ktd.TPUStrategy(mesh), steps)
        return model, *fit(model, ktd.callbacks.StopAtStep(8), *more)

    expected = run()
    act = At(5 if steps == 1 else 2, terminate, "on_test_batch_begin")
    with pytest.raises(Stop):
        run(act, ktd.callbacks.Checkpoint(tmp_path))
    assert position(tmp_path) == (1, 2)
    found = run(ktd.callbacks.Checkpoint(tmp_path), mesh=MESHES[1])
    assert int(found[0].optimizer.iterations) == 8
    assert_same(found, expected)


@slow
def test_averages_that_validation_swaps_in(tmp_path, handled):
    def run(*more):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with ktd.TPUStrategy(MESHES[0]).scope():
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
            model.compile(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9), "mse")
        return model, *fit(model, keras.callbacks.SwapEMAWeights(), *more)

    expected = run()
    with pytest.raises(Stop):
        run(At(5, terminate, "on_test_batch_begin"), ktd.callbacks.Checkpoint(tmp_path))
    assert position(tmp_path) == (1, 6)
    assert_same(run(ktd.callbacks.Checkpoint(tmp_path)), expected)


@slow
@pytest.mark.parametrize(("launches", "saved", "steps"), [(1, 4, 5), (10, 19 + 17, 4)])
def test_it_goes_on_in_launches_of_another_length(launches, saved, steps, tmp_path, handled):
    # 19 batches an epoch, the last one ragged: launches of 4, 4, 4, 4, and 3 single steps.
    x, y = data(4 * 18 + 3)

    def build(steps):
        rate = keras.optimizers.schedules.CosineDecay(0.01, 60)
        return sequential(
            6,
            keras.layers.Dense(16, use_bias=False, name="hidden"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3, activation="softmax", name="out"),
            optimizer=keras.optimizers.Adam(rate),
            loss="sparse_categorical_crossentropy",
            steps_per_execution=steps,
        )

    def trained(*more, steps=4, mesh=MESHES[0]):
        model = built(lambda: build(steps), ktd.TPUStrategy(mesh))
        options = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, **options, callbacks=list(more)).history
        return [[v.numpy() for v in (*model.variables, *model.optimizer.variables)], history]

    expected = trained()
    with pytest.raises(Stop):
        trained(At(launches, terminate, "on_train_batch_begin"), ktd.callbacks.Checkpoint(tmp_path))
    assert ktd.callbacks.Checkpoint(tmp_path).steps[-1] == saved
    again = trained(ktd.callbacks.Checkpoint(tmp_path), steps=steps, mesh={"data": 8})
    assert_close(again, expected)


def test_a_signal_after_the_grace_ends_at_once(tmp_path, handled):
    def twice():
        terminate()
        time.sleep(0.1)
        terminate()

    saved = ktd.callbacks.Checkpoint(tmp_path, grace_s=0.05)
    with pytest.raises(Stop):
        fit(made(ktd.TPUStrategy()), saved, At(3, twice, "on_train_batch_begin"))
    assert handled == [signal.SIGTERM]
    assert saved.steps == []
