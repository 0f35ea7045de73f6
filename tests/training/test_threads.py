"""Fits and dry runs in several threads at once: each is what it is alone."""

import contextlib
import threading
import warnings

import jax
import keras
import numpy as np
import pytest
from helpers import At, assert_close, compiled, data

import keras_tpu_dist as ktd
from keras_tpu_dist.training import turns

X, Y = data(40)
MESHES = ({"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2})


def model(seed, units):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), keras.layers.Dense(units, name="hidden"), keras.layers.Dense(3)]
    return compiled(keras.Sequential(layers), "adam", "mse", steps_per_execution="auto")


def fit(trained, epochs=4):
    history = trained.fit(X, np.eye(3)[Y], batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return history.history["loss"], trained.get_weights()


def in_threads(*functions):
    """What each gives, run at once; an error in one is raised here."""
    results, start = [None] * len(functions), threading.Barrier(len(functions))

    def run(number, function):
        start.wait()
        with contextlib.suppress(StopIteration):
            try:
                results[number] = function()
            except BaseException as error:
                results[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_a_thread_saves_a_model_that_another_trains(tmp_path):
    """Keras makes an optimizer to save one."""
    with ktd.TPUStrategy().scope():
        trained = model(1, 8)
    path = tmp_path / "one.keras"

    def save(batch, logs):
        if batch == 2:
            in_threads(lambda: trained.save(path))

    saves = keras.callbacks.LambdaCallback(on_train_batch_end=save)
    trained.compile("adam", "mse")
    trained.fit(X, np.eye(3)[Y], batch_size=8, verbose=0, callbacks=[saves])
    assert keras.saving.load_model(path).predict(X, verbose=0).shape == (40, 3)


@pytest.mark.parametrize("call", ["fit", "train_on_batch"])
def test_a_callback_of_a_second_fit_waits_for_a_thread_that_predicts(call):
    """The second fit uses the function of the first one, or of `train_on_batch`."""
    with ktd.TPUStrategy().scope():
        trained = model(1, 8)
    beside = []

    def predict():
        beside.append(trained.predict(X, verbose=0).shape)

    def begin(epoch, logs):
        thread = threading.Thread(target=predict, daemon=True)
        thread.start()
        threads.append(thread)

    def end(epoch, logs):
        threads[-1].join(60)
        assert not threads[-1].is_alive()

    threads = []
    waits = keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
    if call == "fit":
        fit(trained, epochs=1)
    else:
        trained.train_on_batch(X[:8], np.eye(3, dtype="float32")[Y[:8]])
    trained.fit(X, np.eye(3)[Y], batch_size=8, epochs=2, verbose=0, callbacks=[waits])
    assert beside == [(40, 3)] * 2


class OwnFunction(keras.Sequential):
    """Makes its own train function, which calls nothing of Keras's."""

    def make_train_function(self, force=False):
        step = jax.jit(self.train_step)
        self.train_function = lambda state, iterator: step(state, next(iterator))


MOMENTS = ("on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end")


@pytest.mark.parametrize("moment", [*MOMENTS, "on_epoch_end", "on_train_end"])
@pytest.mark.parametrize("own", [False, True], ids=["keras", "own"])
def test_a_callback_joins_a_thread_that_predicts(own, moment):
    """Whatever moment of a fit it is, the first or a second one: neither waits for the other."""
    with ktd.TPUStrategy().scope():
        trained = (OwnFunction if own else keras.Sequential)([*normalized().layers])
        trained.compile("sgd", "mse")
    beside = []

    class Joins(keras.callbacks.Callback):
        pass

    def joins(self, *args, **kwargs):
        thread = threading.Thread(
            target=lambda: beside.append(trained.predict(X[:3], verbose=0).shape), daemon=True
        )
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    setattr(Joins, moment, joins)
    for _ in range(2):
        trained.fit(X[:16], np.eye(3)[Y[:16]], batch_size=8, verbose=0, callbacks=[Joins()])
    assert set(beside) == {(3, 3)}
    assert len(beside) == (4 if "batch" in moment else 2)


def test_a_generator_that_waits_for_a_prediction_is_told_why(monkeypatch, caplog):
    """Keras reads a batch to build the model, so the two would wait for each other for ever."""
    monkeypatch.setattr(turns, "_WARN_AFTER_S", 0.0)
    monkeypatch.setattr(turns, "_LOOK_AFTER_S", 0.01)
    with ktd.TPUStrategy().scope():
        trained = keras.Sequential([keras.layers.Dense(3)])
        trained.compile("sgd", "mse")
    predicts = threading.Thread(target=lambda: trained.predict(X[:3], verbose=0))
    words = "waits until the fit that another thread began has built it; if that thread waits for"

    def batches():
        predicts.start()
        for _ in range(1000):
            predicts.join(0.05)
            if words in caplog.text:
                break
        while True:
            yield X[:8], np.eye(3, dtype="float32")[Y[:8]]

    trained.fit(batches(), steps_per_epoch=1, shuffle=False, verbose=0)
    predicts.join(60)
    assert words in caplog.text
    assert not predicts.is_alive()


def test_a_step_function_beside_a_thread_that_builds(monkeypatch):
    """Metrics that another thread makes now have no value yet, and no warning is due."""
    with ktd.TPUStrategy(MESHES[1]).scope():
        trained = normalized()
    trained.evaluate(X[:13], np.eye(3)[Y[:13]], verbose=0)
    made = trained.metrics_variables[-1]
    monkeypatch.setattr(made, "_value", None)
    monkeypatch.setattr(made, "_initializer", keras.initializers.Zeros(), raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained.predict(X[:13], verbose=0).shape == (13, 3)


def test_weights_that_are_read_while_a_fit_begins():
    """A reader that began before the first launch sees one state, not parts of two."""
    with ktd.TPUStrategy(MESHES[0]).scope():
        trained = normalized()
    before = trained.get_weights()
    fitted = []

    class Waits(type(trained.weights[3])):
        """Another thread trains between the third and the fourth read."""

        def __array__(self, *args, **kwargs):
            if not fitted:
                fitted.append(True)
                in_threads(lambda: fit_13(trained, epochs=1))
            return super().__array__(*args, **kwargs)

    trained.weights[3].__class__ = Waits
    read = trained.get_weights()
    assert fitted
    after = trained.get_weights()
    for state in (before, after):
        same = [np.array_equal(a, b) for a, b in zip(read, state)]
        assert all(same) or not any(same[:6])
    assert_close(read, after, 0)


@pytest.mark.parametrize("layout", [None, "fsdp"])
def test_two_fits_of_one_strategy(layout):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, layout)
    with strategy.scope():
        alone = [fit(model(seed, units)) for seed, units in ((1, 8), (2, 16))]
        models = [model(seed, units) for seed, units in ((1, 8), (2, 16))]
    together = in_threads(*(lambda each=each: fit(each) for each in models))
    assert_close(together, alone)


def test_a_dry_run_beside_a_fit():
    """Variables of a dry run get no values; those that another thread makes meanwhile do."""
    with ktd.TPUStrategy().scope():
        alone = fit(model(1, 8))
        trained = model(1, 8)
    described = ktd.TPUStrategy(topology="v5e:2x4")
    made = threading.Event()

    def dry():
        with described.scope():
            layer = keras.layers.Dense(4)
            layer.build((None, 2))
            made.wait(60)
            return layer.kernel._value

    def beside():
        layer = keras.layers.Dense(4)
        layer.build((None, 2))
        made.set()
        return layer.kernel._value, fit(trained)

    abstract, (value, result) = in_threads(dry, beside)
    assert abstract is None
    assert value is not None
    assert_close(result, alone)


def normalized():
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((6,)),
        *(keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization()),
        *(keras.layers.Dropout(0.2), keras.layers.Dense(3)),
    ]
    return compiled(keras.Sequential(layers), "sgd", "mse", metrics=["mae"])


def fit_13(trained, *callbacks, epochs=12):
    options = {"batch_size": 5, "epochs": epochs, "shuffle": False, "verbose": 0}
    return trained.fit(X[:13], np.eye(3)[Y[:13]], callbacks=list(callbacks), **options).history


BESIDE = {
    "predict": lambda each: each.predict(X[:13], batch_size=5, verbose=0),
    "evaluate": lambda each: each.evaluate(X[:13], np.eye(3)[Y[:13]], batch_size=5, verbose=0),
    "get_weights": lambda each: each.get_weights(),
}


def _flat(values):
    return np.concatenate([np.ravel(each) for each in keras.tree.flatten(values)])


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "donate"), [(MESHES[0], True), (MESHES[1], False)], ids=str)
def test_one_model_in_several_threads(mesh, donate):
    """What runs beside a fit changes nothing of it, and sees the state between two of its steps."""
    with ktd.TPUStrategy(mesh, donate_state=donate).scope():
        alone, beside, at = normalized(), normalized(), normalized()
    states = [alone.get_weights()]
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: states.append(alone.get_weights())
    )
    expected = fit_13(alone, keep), alone.get_weights()
    seen, done = {name: [] for name in BESIDE}, threading.Event()

    def trained():
        try:
            return fit_13(beside), beside.get_weights()
        finally:
            done.set()

    def watch(name):
        while not done.is_set():
            seen[name].append(_flat(BESIDE[name](beside)))

    found, *_ = in_threads(trained, *(lambda name=name: watch(name) for name in BESIDE))
    assert_close(found, expected, 1e-6)
    possible = {name: [] for name in BESIDE}
    for state in states:
        at.set_weights(state)
        for name, call in BESIDE.items():
            possible[name].append(_flat(call(at)))
    for name, each in seen.items():
        assert each
        for value in each:
            assert min(np.max(np.abs(value - other)) for other in possible[name]) < 1e-5, name


class FromAThread(keras.callbacks.Callback):
    """Calls a function in another thread at the first step, and keeps what it raised."""

    def __init__(self, call):
        super().__init__()
        self.call, self.error = call, None

    def _run(self):
        try:
            self.call(self.model)
        except Exception as error:
            self.error = error

    def on_train_batch_end(self, batch, logs=None):
        if self.error is None:
            thread = threading.Thread(target=self._run, name="other")
            thread.start()
            thread.join(60)


@pytest.mark.parametrize(
    "call",
    [
        lambda each: each.fit(X, np.eye(3)[Y], verbose=0),
        lambda each: each.train_on_batch(X, np.eye(3)[Y]),
        lambda each: each.compile("adam", "mse"),
    ],
    ids=["fit", "train_on_batch", "compile"],
)
def test_a_model_trains_in_one_thread_at_a_time(call):
    with ktd.TPUStrategy(MESHES[0]).scope():
        trained = model(1, 8)
    other = FromAThread(call)
    losses = trained.fit(X, np.eye(3)[Y], batch_size=8, verbose=0, callbacks=[other]).history
    assert isinstance(other.error, RuntimeError)
    said = "One thread at a time trains a model, or compiles it. Received: "
    assert str(other.error).startswith(said)
    assert "in thread 'other', while fit of it runs in thread 'MainThread'" in str(other.error)
    assert np.isfinite(losses["loss"]).all()
    call(trained)  # afterwards it may


def test_two_threads_evaluate_one_model():
    with ktd.TPUStrategy(MESHES[0]).scope():
        model = normalized()
    alone = BESIDE["evaluate"](model)
    results = in_threads(*[lambda: [BESIDE["evaluate"](model) for _ in range(4)]] * 2)
    assert_close(results, [[alone] * 4] * 2)
    assert_close(model.get_metrics_result()["mae"], alone[1])


def test_a_callback_that_compiles():
    with ktd.TPUStrategy(MESHES[0]).scope():
        trained = model(1, 8)
    compiles = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: trained.compile("sgd", "mse")
    )
    with pytest.raises(RuntimeError, match=r"as it was compiled before.*in on_train_end"):
        fit_13(trained, compiles, epochs=2)
    assert all(np.isfinite(each).all() for each in trained.get_weights())
    fit_13(trained, epochs=1)
    fit_13(trained, compiles, epochs=1)  # after the last epoch nothing is left to train
    fit_13(trained, epochs=1)


@pytest.mark.parametrize("donate", [True, False])
def test_a_callback_that_assigns(donate):
    """What a callback assigns counts from the next step on, also without `jax_state_sync`."""
    with ktd.TPUStrategy(MESHES[0], donate_state=donate).scope():
        trained = model(1, 8)
    kernel = trained.layers[-1].kernel
    zeros = np.zeros(kernel.shape, "float32")

    def assign(batch, logs=None):
        kernel.assign(zeros)
        trained.optimizer.learning_rate = 0.0

    fit_13(trained, keras.callbacks.LambdaCallback(on_train_batch_end=assign), epochs=2)
    assert_close(np.asarray(kernel.value), zeros, 0)


def test_two_threads_choose_steps_of_their_own():
    """An evaluate of one batch beside a fit of many: neither counts by the other's launches."""
    with ktd.TPUStrategy(MESHES[0]).scope():
        alone, beside = model(1, 8), model(1, 8)
    expected = fit(alone, epochs=8)
    evaluated, started = [], threading.Event()

    def trained():
        with contextlib.ExitStack() as at_end:
            at_end.callback(started.set)
            return fit(beside, epochs=8)

    def watch():
        while not started.is_set():
            evaluated.append(beside.evaluate(X[:3], np.eye(3)[Y[:3]], batch_size=1, verbose=0))

    found, _ = in_threads(trained, watch)
    assert_close(found, expected, 1e-6)
    assert int(beside.optimizer.iterations) == int(alone.optimizer.iterations) == 40
    assert beside.steps_per_execution == "auto"
    assert evaluated


def test_a_callback_compiles_with_other_steps():
    """What a callback says of the next fit stays, though the fit before chose its own."""
    with ktd.TPUStrategy(MESHES[0]).scope():
        trained = model(1, 8)
    compiles = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: trained.compile("sgd", "mse", steps_per_execution=4)
    )
    fit_13(trained, compiles, epochs=1)
    assert trained.steps_per_execution == 4


def test_a_first_fit_within_a_predict_leaves_it_its_function():
    """The fit places the optimizer's variables, which the predict's program knows nothing of."""
    strategy = ktd.TPUStrategy(MESHES[0])
    with strategy.scope():
        trained, alone = model(1, 8), model(1, 8)

    fits = At(1, lambda: in_threads(lambda: fit(trained, 1)), "on_predict_batch_begin")
    expected = fit(alone, 1)[1]
    trained.predict(X, batch_size=len(X), callbacks=[fits], verbose=0)
    assert_close(trained.get_weights(), expected)
    assert_close(trained.predict(X, verbose=0), alone.predict(X, verbose=0))


def averaged_fit(trained):
    """At its end, an optimizer assigns its averages to the weights."""
    trained.fit(X, np.eye(3)[Y], batch_size=8, verbose=0)


def given_weights(trained):
    trained.set_weights([weight + 0.1 for weight in trained.get_weights()])


def swapped(trained):
    """Keras's callback has the averages in the model while it is evaluated."""
    trained.evaluate(X, np.eye(3)[Y], verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])


def averaging():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)


def several_averaging():
    """One for the first kernel, another for the rest."""
    optimizers = keras.optimizers.OptimizerMap(averaging(), {".*first/.*": averaging()})
    return keras.optimizers.MultiOptimizer(optimizers)


@pytest.mark.parametrize(
    ("assign", "optimizer"),
    [
        (averaged_fit, averaging),
        (averaged_fit, several_averaging),
        (given_weights, averaging),
        (swapped, averaging),
    ],
)
def test_weights_that_are_assigned_one_by_one_are_not_mixed(assign, optimizer, monkeypatch):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        names = ("first", "second", "third")
        layers = [keras.layers.Dense(8, use_bias=False, name=name) for name in names]
        trained = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
        compiled(trained, optimizer(), "mse")
    trained.fit(X, np.eye(3)[Y], batch_size=8, epochs=2, verbose=0)
    # A fit ends with its averages; these steps do not.
    for _ in range(3):
        trained.train_on_batch(X[:8], np.eye(3)[Y[:8]])
    trained.evaluate(X, np.eye(3)[Y], verbose=0)
    trained.predict(X, verbose=0)
    weights = trained.trainable_variables
    states, begun, done = [], threading.Event(), threading.Event()
    kind = type(weights[0])
    plain = kind.assign

    def values():
        return [np.asarray(weight.value) for weight in weights]

    def slowly(variable, value):
        """Long enough for a prediction between any two of the model's weights."""
        if variable is weights[0]:
            states.append(values())
            begun.set()
        assigned = plain(variable, value)
        if any(variable is weight for weight in weights):
            done.wait(0.1)
        if variable is weights[-1]:
            states.append(values())
        return assigned

    def predictions():
        assert begun.wait(60)
        found = []
        while not done.is_set():
            found.append(trained.predict(X, verbose=0))
        return found

    def assigned():
        try:
            assign(trained)
        finally:
            done.set()

    monkeypatch.setattr(kind, "assign", slowly)
    found, _ = in_threads(predictions, assigned)
    assert found
    possible = []
    for *kernels, bias in states:
        outputs = X
        for kernel in kernels:
            outputs = outputs @ kernel
        possible.append(outputs + bias)
    for predicted in found:
        gaps = [np.abs(predicted - one).max() for one in possible]
        assert min(gaps) < 1e-5 * np.abs(predicted).max(), gaps
