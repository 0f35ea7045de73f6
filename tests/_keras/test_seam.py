"""The names the seam needs, and stock Keras unchanged where no strategy is active."""

import subprocess
import sys
import types

import keras
import numpy as np
import pytest
from helpers import assert_close, data, mlp, results

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras


def test_this_keras_has_every_name():
    _keras.check_names()
    assert keras.__version__ in _keras.TESTED_KERAS, (
        f"run the tests with keras {keras.__version__} and add it to TESTED_KERAS"
    )


@pytest.mark.parametrize(
    "missing",
    [
        *_keras.REQUIRED_NAMES,
        *(f"{name}.{a}" for name, attributes in _keras.REQUIRED_NAMES.items() for a in attributes),
    ],
)
def test_a_name_that_moved_is_named(missing):
    trainer = types.SimpleNamespace(__name__="keras.src.backend.jax.trainer")
    for name, attributes in _keras.REQUIRED_NAMES.items():
        if name != missing:
            present = {a: None for a in attributes if f"{name}.{a}" != missing}
            setattr(trainer, name, types.SimpleNamespace(**present))
    if missing.endswith("__init__"):
        pytest.skip("every object has an __init__")
    with pytest.raises(
        ImportError, match=rf"keras=={keras.__version__}, missing in .*{missing}.*keras==3\.15\.0"
    ):
        _keras.check_names(trainer)


def test_a_distribute_tensor_that_moved_is_named(monkeypatch):
    monkeypatch.delattr(_keras.distribution_lib, "distribute_tensor")
    with pytest.raises(ImportError, match=r"distribution_lib\.distribute_tensor"):
        _keras.check_names()


def test_private_names_of_layers():
    assert _keras.Functional in type(mlp()).__mro__ or issubclass(_keras.Functional, keras.Model)
    variable = keras.Variable(np.ones(3), dtype="float32")
    with _keras.AutocastScope("bfloat16"):
        assert variable.value.dtype == "bfloat16"
        assert _keras.full_precision(variable).dtype == "float32"


def test_arguments_of_a_call():
    dense, lstm = keras.layers.Dense(2), keras.layers.LSTM(2)
    assert not _keras.call_takes(dense, "mask")
    assert not _keras.call_takes(keras.layers.Flatten(), "training")
    assert _keras.call_takes(lstm, "mask")
    assert _keras.call_takes(lstm, "training")
    assert _keras.sublayers(keras.layers.TimeDistributed(dense)) == [dense]


def test_private_names_of_variables():
    variable = keras.Variable(np.ones(3))
    assert _keras.variable_layout(variable) is None
    assert variable._value is variable.value
    assert callable(variable._direct_assign)


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
        found = {id(slot): weight for slot, weight in _keras.optimizer_slots(model)}
        assert all(id(v) in found for v in of_weights), name


def test_plain_sgd_has_no_slots():
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


def test_stock_keras_is_unchanged_by_the_import():
    done = [
        subprocess.run(
            [sys.executable, "-c", STOCK, how], capture_output=True, text=True, timeout=300
        )
        for how in ("with", "without")
    ]
    assert done[0].returncode == done[1].returncode == 0, done[0].stderr + done[1].stderr
    assert done[0].stdout == done[1].stdout
    assert "IndivisibleError" in done[0].stdout or "ValueError" in done[0].stdout


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
    with ktd.TPUStrategy().scope():
        model = mlp()
    with ktd.TPUStrategy().scope():
        state = {"trainable_variables": [1.0]}
        model._jax_state = state
        assert model._jax_state is state
    stock = mlp()
    stock._jax_state = state
    assert stock._jax_state is not state, "Keras tracks no more: _set_attribute can go"


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


def test_import_order_goes_one_way():
    import ast
    import pathlib

    order = [
        *("_keras", "errors", "notices", "text", "plain", "simulation", "partitioner", "chips"),
        *("topology", "assignment", "mesh"),
        *("layout", "planner_roles", "planner_tensor", "planner", "annotations"),
        *("planner_placement", "explain", "lint", "visualize", "reading", "data", "finite"),
        *("guard", "auto_steps", "loop", "attention", "adoption", "logical_call", "logical"),
        *(
            "replica",
            "hlo",
            "dryrun_worker",
            "dryrun_build",
            "dryrun_report",
            "dryrun_compile",
            "dryrun",
        ),
        *(
            "retarget",
            "pickling",
            "strategy",
            "recurrence",
            "layers",
            "dryrun_search",
            "host_metrics",
        ),
        *("backup", "callbacks", "__main__"),
    ]
    root = pathlib.Path(ktd.__file__).parent
    for path in root.rglob("*.py"):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        assert name in order, f"{name} has no place in the order"
        for node in ast.walk(ast.parse(path.read_text())):
            for module in _imported(node):
                assert order.index(module) <= order.index(name), f"{path} imports {module}"


def _imported(node):
    import ast

    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_tpu_dist"):
        parts = node.module.split(".")
        return [parts[1]] if len(parts) > 1 else [a.name for a in node.names]
    return []


def test_private_names_stand_in_one_module():
    import pathlib

    root = pathlib.Path(ktd.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name != "_keras":
            text = path.read_text()
            assert "keras.src" not in text, path
            assert "jax._src" not in text, path
