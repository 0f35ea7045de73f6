"""The names the seam needs, and stock Keras unchanged where no strategy is active."""

import importlib
import re

import keras
import numpy as np
import pytest
from helpers import assert_close, data, mlp, python, results

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist._keras import callers, seam


def test_this_keras_has_every_name():
    _keras.check_keras()
    if ".dev" in keras.__version__:  # each night another one: `tests/versions/newest.py`
        return
    assert keras.__version__ in _keras.TESTED_KERAS, (
        f"run the tests with keras {keras.__version__} and add it to TESTED_KERAS"
    )


EVERY_OBJECT_HAS = ("__init__", "__setattr__", "__reduce__")


@pytest.mark.parametrize(
    "replacement", [r for r in _keras.table() if r.name not in EVERY_OBJECT_HAS], ids=str
)
def test_a_name_that_moved_is_named(replacement, monkeypatch):
    stock = _keras.Replacement.holder
    monkeypatch.setattr(
        *(_keras.Replacement, "holder"),
        lambda self: object() if self is replacement else stock(self),
    )
    said = rf"keras=={keras.__version__}: .*{replacement} is missing.*keras==3\.15\.0"
    with pytest.raises(ImportError, match=said):
        _keras.check_keras()


@pytest.mark.parametrize(
    "replacement", [each for each in _keras.table() if each.parameters], ids=str
)
def test_a_parameter_that_moved_is_named(replacement, monkeypatch):
    holder = type("Holder", (), {replacement.name: staticmethod(lambda other: None)})
    monkeypatch.setattr(type(replacement), "holder", lambda self: holder)
    assert f"has no parameter {', '.join(replacement.parameters)}" in replacement.fault()


def test_no_function_calls_a_replaced_name_that_is_not_declared():
    assert callers.new_callers() == []
    # Python calls those with underscores.
    by_name = [r for r in _keras.table() if not r.on_instances and not r.name.startswith("__")]
    of_table = {replacement.name for replacement in by_name}
    assert of_table == callers.CALLERS.keys() - {"set_distribution"}


def test_a_function_that_a_new_keras_lets_call_a_name_is_named(tmp_path, monkeypatch, caplog):
    (tmp_path / "backend").mkdir()
    (tmp_path / "torch").mkdir()
    source = "class A:\n    def forget(self, free):\n        lib.set_distribution(None)\n"
    (tmp_path / "backend" / "state.py").write_text(source + "next(iter([set_weights()]))\n")
    (tmp_path / "torch" / "state.py").write_text("def other():\n    set_distribution(None)\n")
    (tmp_path / "state_test.py").write_text("def test_a():\n    set_distribution(None)\n")
    new = callers.new_callers(tmp_path)
    assert new == ["forget calls set_distribution", "a module calls set_weights"]
    monkeypatch.setattr(keras, "__version__", "3.16.0")
    monkeypatch.setattr(seam, "new_callers", lambda: new)
    monkeypatch.setattr(seam, "_installed", {})
    monkeypatch.setattr(seam, "_put_in_place", lambda entry: None)
    seam.install()
    (said,) = [r.getMessage() for r in caplog.records if "was not tested with" in r.getMessage()]
    assert "keras 3.16.0, in which forget calls set_distribution; a module calls" in said


def test_every_name_says_why_and_what_would_replace_it():
    for table in (_keras.table(), _keras.names()):
        names = [str(each) for each in table]
        assert len(names) == len(set(names))
        assert all(each.why and each.hook for each in table)
    assert len(_keras.names()) > 27 + 14 + 3


REQUIRED = [each for each in _keras.names() if each not in _keras.OPTIONAL]


class Without:
    """A part of a Keras whose methods know other names alone."""

    def __init__(self):
        self._another = None


@pytest.mark.parametrize("name", REQUIRED, ids=str)
def test_a_name_that_is_read_and_moved_is_named(name, monkeypatch):
    module = importlib.import_module("keras_tpu_dist._keras.names")
    stock = module.at
    monkeypatch.setattr(
        module, "at", lambda owner: Without if owner == name.owner else stock(owner)
    )
    said = rf"keras=={re.escape(keras.__version__)}: .*{re.escape(str(name))} is missing.*3\.15\.0"
    with pytest.raises(ImportError, match=said):
        _keras.check_keras()


def test_names_have_a_place_in_this_keras_or_in_the_next():
    stock = {str(name) for name in _keras.OPTIONAL if name.fault()}
    newer = {str(name) for name in _keras.OPTIONAL if name.name == "_epoch"}
    if not _has_keras_hub():
        newer |= {str(name) for name in _keras.OPTIONAL if str(name).startswith("keras_hub.")}
    assert stock <= newer


def _has_keras_hub():
    """Whether KerasHub is there, and can be imported with this Keras."""
    try:
        importlib.import_module("keras_hub")
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("version", ["3.14.2", "3.17.0", "4.0.0"])
def test_an_unknown_keras_is_refused_unless_asked_for(version, monkeypatch):
    monkeypatch.delenv("KTD_ANY_KERAS", raising=False)
    monkeypatch.setattr(keras, "__version__", version)
    said = rf"works with Keras 3\.15 and 3\.16\. Received: keras=={version}\. .*KTD_ANY_KERAS=1"
    with pytest.raises(ImportError, match=said):
        _keras.check_keras()
    monkeypatch.setenv("KTD_ANY_KERAS", "1")
    _keras.check_keras()


UNTOUCHED = """
import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
import inspect
table = _keras.table()
def found(each):
    return inspect.getattr_static(each.holder(), each.name, None)
def stock(each):
    if type(found(each)).__module__.startswith("keras_tpu_dist"):
        return False
    code = getattr(getattr(found(each), "fget", found(each)), "__code__", None)
    return code is None or "keras_tpu_dist" not in code.co_filename
assert 20 < len(table) <= 51, len(table)
assert all(map(stock, table)), [str(e) for e in table if not stock(e)]
import keras
keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
assert all(map(stock, table))
ktd.TPUStrategy()
assert not any(stock(each) for each in table), [str(e) for e in table if stock(e)]
ours = list(map(found, table))
ktd.TPUStrategy()
assert all(before is found(each) for before, each in zip(ours, table))
"""


def test_keras_is_as_it_was_until_there_is_a_strategy():
    python("-c", UNTOUCHED)


def test_slots_of_every_optimizer():
    names = [
        name
        for name in dir(keras.optimizers)
        if isinstance(getattr(keras.optimizers, name), type)
        and issubclass(getattr(keras.optimizers, name), keras.optimizers.Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    ]
    assert len(names) >= 12
    for name in names:
        model = mlp()
        model.optimizer = getattr(keras.optimizers, name)(learning_rate=0.1)
        model.optimizer.build(model.trainable_variables)
        shapes = {tuple(w.shape) for w in model.trainable_variables}
        of_weights = [v for v in model.optimizer.variables if tuple(v.shape) in shapes]
        found = {id(slot): weight for _, slot, weight in _keras.optimizer_slots(model)}
        assert all(id(v) in found for v in of_weights), name
    # Plain SGD has none.
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    assert len(model.optimizer.variables) == len(model.trainable_variables) == 2
    assert _keras.optimizer_slots(model) == []


STOCK = """
import sys, os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.update(PJRT_NPROC="32", JAX_PLATFORMS="cpu", KERAS_BACKEND="jax")
import warnings; warnings.simplefilter("ignore")
if sys.argv[1] == "with":
    import keras_tpu_dist
    keras_tpu_dist.TPUStrategy()
import keras, numpy as np
rng = np.random.default_rng(0)
x, y = rng.normal(size=(48, 6)).astype("float32"), rng.integers(0, 3, 48)
def run():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.2),
        keras.layers.BatchNormalization(), keras.layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_data=(x, y)).history
    predictions = model.predict(x, verbose=0)
    print(history, model.evaluate(x, y, verbose=0), float(np.sum(predictions[:, 0])))
    print(model.train_on_batch(x, y), [float(np.sum(w)) for w in model.get_weights()])
    clone = keras.models.clone_model(model); print(clone.compiled)
    try: model.fit(x[:, :5], y, verbose=0)
    except Exception as error: print(type(error).__name__)
run()
with keras.distribution.DataParallel().scope():
    run()
    try: keras.Sequential([keras.layers.Dense(2)]).predict(x[:13], verbose=0)
    except Exception as error: print(type(error).__name__)
"""


@pytest.mark.slow
def test_stock_keras_is_unchanged_where_no_strategy_is_active():
    done = [python("-c", STOCK, how) for how in ("with", "without")]
    assert done[0].stdout == done[1].stdout
    assert "IndivisibleError" in done[0].stdout or "ValueError" in done[0].stdout


@pytest.mark.slow
def test_one_process_can_go_back_and_forth():
    x, y = data(40)

    def run():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        return results(mlp(), x, y, batch_size=8, epochs=2)

    before = run()
    with ktd.TPUStrategy().scope():
        under = run()
    with keras.distribution.DataParallel().scope():
        stock = run()
    assert_close(under, before)
    assert_close(stock, before)
    assert_close(run(), before, 0)


class Listener(keras.callbacks.Callback):
    def __init__(self, name):
        super().__init__()
        self.heard = []
        setattr(self, name, lambda batch, logs=None: self.heard.append((batch, logs)))


@pytest.mark.parametrize("name", ["on_batch_end", "on_train_batch_end", "on_test_batch_end"])
def test_callbacks_hear_every_batch(name):
    x, y = data(40)
    with ktd.TPUStrategy().scope():
        model = mlp()
    listener = Listener(name)
    model.fit(x, y, batch_size=8, validation_data=(x, y), verbose=0, callbacks=[listener])
    assert [batch for batch, _ in listener.heard] == [0, 1, 2, 3, 4]
    assert all(isinstance(logs["loss"], float) for _, logs in listener.heard)


def test_no_thread_waits_for_logs_that_nobody_reads(monkeypatch):
    threads = []
    monkeypatch.setattr(
        keras.callbacks.CallbackList, "_async_dispatch", lambda self, *a: threads.append(a)
    )
    x, y = data(40)
    with ktd.TPUStrategy().scope():
        model = mlp()
    model.fit(x, y, batch_size=8, verbose=0)
    assert not threads
    keras.distribution.set_distribution(None)
    stock = mlp()
    stock.fit(x, y, batch_size=8, verbose=0)
    assert len(threads) == 5


def test_the_training_state_is_not_searched_for_layers():
    noted = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: noted.append(model._jax_state)
    )
    x, y = data(40)
    with ktd.TPUStrategy().scope():
        model = mlp()
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[look])
    groups = [group for state in noted for group in state.values()]
    assert len(groups) == 5 * 4
    assert all(type(group) is _keras.StateGroup for group in groups)
    stock, state = mlp(), {"trainable_variables": [1.0]}
    stock._jax_state = state
    searched = type(stock._jax_state["trainable_variables"])
    assert searched is not list, "Keras tracks no more: StateGroup can go"


class Counting(keras.metrics.MeanSquaredError):
    """A metric whose result is also counted in a variable."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.asked = self.add_variable((), "zeros", name="asked")

    def reset_state(self):
        self.total.assign(0.0)
        self.count.assign(0.0)

    def result(self):
        self.asked.assign(self.asked + 1)
        return super().result()


def test_metric_results_are_worked_out_on_one_device():
    x, y = data(40)
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        model = mlp()
        model.compile("sgd", "mse", metrics=[Counting(name="counting")])
    one_hot = np.eye(3, dtype="float32")[y]
    model.fit(x, one_hot, batch_size=8, verbose=0)
    with strategy.scope():
        before = float(model.metrics[1].metrics[0].asked.value)
        result = model.get_metrics_result()
    assert all(len(value.devices()) == 1 for value in result.values())
    asked = model.metrics[1].metrics[0].asked
    assert float(asked.value) == before + 1
    assert len(asked.value.sharding.device_set) == 8


CALLBACKS = """
import sys
import keras_tpu_dist as ktd, keras, numpy as np
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
model.compile("sgd", "mse")
x = np.ones((45, 4), "float32")
mean = ktd.callbacks.HostMetrics({"mean": lambda y_true, y_pred: y_true.mean()})
saved = ktd.callbacks.Checkpoint(sys.argv[1])
of_fit = {"validation_data": (x, x), "callbacks": [mean, saved]}
history = model.fit(x, x, batch_size=8, epochs=3, verbose=0, **of_fit)
assert history.history["val_mean"] == [1.0, 1.0, 1.0]
assert saved.steps == [6, 12, 18], saved.steps
"""


@pytest.mark.slow
def test_callbacks_see_the_fit_where_there_never_was_a_strategy(tmp_path):
    python("-c", CALLBACKS, tmp_path)


class Own(keras.Variable):
    """A variable of a user's class."""

    @property
    def value(self):
        return super().value * 2


def test_a_variable_of_a_users_class_stays_one():
    with ktd.TPUStrategy().scope():
        variable = Own(np.ones(3))
    assert isinstance(variable, Own)
    assert_close(variable.numpy(), np.full(3, 2.0))


def test_functions_made_before_a_call_are_ours():
    x, _ = data(13)
    with ktd.TPUStrategy().scope():
        model = mlp()
        model.predict(x, verbose=0)
        model.make_predict_function(force=True)
        model.make_train_function(force=True)
        found = model.predict(x, verbose=0)
    assert found.shape == (13, 3)
    model.fit(*data(13), batch_size=5, verbose=0)


class WithItsOwn(keras.Sequential):
    made = 0

    def make_predict_function(self, force=False):
        self.made += 1
        super().make_predict_function(force)
        ours = self.predict_function

        def predict(state, iterator):
            outputs, state = ours(state, iterator)
            return outputs + 1, state

        self.predict_function = predict


def test_a_function_of_the_users_is_called():
    x, _ = data(16)
    with ktd.TPUStrategy().scope():
        model = WithItsOwn([keras.Input((x.shape[1],)), keras.layers.Dense(3)])
    found = model.predict(x, batch_size=8, verbose=0)
    assert model.made == 1
    kernel, bias = model.get_weights()
    assert_close(found, x @ kernel + bias + 1)


def test_a_users_iterator_of_an_epoch_is_met(monkeypatch):
    module = importlib.import_module("keras.src.backend.jax.trainer")
    stock, made = module.JAXEpochIterator, []

    class Iterator(stock):
        def _get_iterator(self):
            made.append(super()._get_iterator())
            return made[-1]

    x, y = data(13)
    with ktd.TPUStrategy().scope():
        model = mlp()
    monkeypatch.setattr(module, "JAXEpochIterator", Iterator)
    model.fit(x, y, batch_size=5, verbose=0)
    assert {type(each).__name__ for each in made} == {"DeviceIterator"}


class Twice(keras.Variable):
    """A variable of a user's class, to which everything is added twice."""

    def assign_add(self, value):
        super().assign_add(value)
        return super().assign_add(value)


def test_what_a_users_class_overrides_stays_in_front():
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        variable = Twice(0.0, dtype="float32", aggregation="sum")
    strategy.run(lambda: variable.assign_add(1.0))
    assert float(variable.value) == 2 * 8
    variable.assign_add(1.0)
    assert float(variable.value) == 2 * 8 + 2


def test_a_variable_that_is_made_with_a_layout_is_ours():
    with ktd.TPUStrategy().scope():
        model = mlp()
        model.optimizer.build(model.trainable_variables)
        kinds = {type(slot) for slot in model.optimizer.variables}
    assert kinds == {type(model.trainable_variables[0])}
    assert kinds != {keras.Variable}


def test_step_functions_are_ours_as_keras_316_asks_for_them():
    with ktd.TPUStrategy().scope():
        model = mlp()
        made = model._make_function(model.test_step, out_shardings=None)
    assert made.serves()


def test_a_function_that_a_user_wraps_is_made_anew_for_other_weights():
    x, _ = data(16)
    with ktd.TPUStrategy().scope():
        model = WithItsOwn([keras.Input((x.shape[1],)), keras.layers.Dense(3)])
    model.predict(x, verbose=0)
    model.trainable = False
    model.predict(x, verbose=0)
    assert model.made >= 2


class WithoutForce(keras.Sequential):
    made = 0

    def make_predict_function(self):
        if self.predict_function is None:
            self.made += 1
            super().make_predict_function()


def test_an_override_need_not_take_force():
    x, _ = data(16)
    with ktd.TPUStrategy().scope():
        model = WithoutForce([keras.Input((x.shape[1],)), keras.layers.Dense(3)])
    before = model.predict(x, verbose=0)
    model.trainable = False
    assert_close(model.predict(x, verbose=0), before)
    assert model.made >= 2


class PredictsOtherwise(keras.Sequential):
    def make_predict_function(self, force=False):
        def double(state, data):
            outputs, non_trainable = self.predict_step(state, data)
            return 2 * outputs, (state[0], non_trainable)

        step = self._make_function(double, concatenate_outputs=True)

        def predict(state, iterator):
            outputs, (trainable, non_trainable) = step(state, iterator)
            return outputs, (trainable, non_trainable)

        self.predict_function = predict


def test_a_users_own_step_of_predict_is_made():
    x, _ = data(16)
    with ktd.TPUStrategy().scope():
        model = PredictsOtherwise([keras.Input((x.shape[1],)), keras.layers.Dense(3)])
    kernel, bias = model.get_weights()
    assert_close(model.predict(x, batch_size=8, verbose=0), 2 * (x @ kernel + bias))


class Noting(keras.callbacks.CallbackList):
    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)
        super().on_train_batch_end(batch, logs)


def test_a_users_list_of_callbacks_sees_every_batch():
    x, y = data(20)
    with ktd.TPUStrategy().scope():
        model = mlp()
    callbacks = Noting([], add_history=True, model=model)
    model.fit(x, y, batch_size=5, verbose=0, callbacks=callbacks)
    assert callbacks.seen == [0, 1, 2, 3]


def test_a_step_that_failed_without_a_strategy_does_not_fail_a_fit_with_one():
    class Breaks(keras.Sequential):
        breaks = True

        def train_step(self, *args):
            if self.breaks:
                raise FloatingPointError
            return super().train_step(*args)

    x, y = data(16)
    model = Breaks([keras.Input((x.shape[1],)), keras.layers.Dense(3)])
    loss = "sparse_categorical_crossentropy"
    model.compile("sgd", loss, run_eagerly=True)
    ktd.TPUStrategy()
    with pytest.raises(FloatingPointError):
        model.train_on_batch(x, y)
    model.breaks = False
    with ktd.TPUStrategy().scope():
        model.compile("sgd", loss)
    model.fit(x, y, batch_size=8, verbose=0)
