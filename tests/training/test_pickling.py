"""Copies and pickles of strategies and models keep the mesh; layers of two meshes are named."""

import copy
import pickle

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, data, mlp, sequential

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.assignment import DeviceAssignment

pytestmark = pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}


def layout_map(axis="model"):
    mesh = keras.distribution.DeviceMesh((4, 2), ("data", "model"), jax.devices())
    layout = keras.distribution.LayoutMap(mesh)
    layout["dense.*kernel"] = (None, axis)
    return ktd.TPUStrategy(layout=layout)


STRATEGIES = {
    "default": ktd.TPUStrategy,
    "plan": lambda: ktd.TPUStrategy({"data": 4, "model": 2}, "fsdp", shard_optimizer=True),
    "rules": lambda: ktd.TPUStrategy({"data": 4, "model": 2}, [("kernel", (None, "model"))]),
    "layout map": layout_map,
    "map on logical": lambda: ktd.TPUStrategy(
        DeviceAssignment.build("v5e:2x4", computation_shape=(2, 2)),
        layout_map("data").layouts.layout,
    ),
    "map on a slice": lambda: ktd.TPUStrategy(
        {"data": 4, "model": 2}, layout_map().layouts.layout, topology="v5e:2x4"
    ),
    "some devices": lambda: ktd.TPUStrategy({"data": 2}, devices=jax.devices()[5:7], prefetch=3),
    "logical": lambda: ktd.TPUStrategy(DeviceAssignment.build("v5e:2x4", computation_shape=(2, 2))),
    "logical here": lambda: ktd.TPUStrategy(
        DeviceAssignment.build(computation_shape=(2,), num_replicas=3), layout="fsdp"
    ),
    "slice": lambda: ktd.TPUStrategy({"data": 8, "model": 2}, "auto", topology="v5e:4x4"),
    "batch axis": lambda: ktd.TPUStrategy(batch_axis=({"a": 0, "b": None}, 0), donate_state=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_pickled_or_copied_strategy_is_the_same(kind, way):
    strategy = STRATEGIES[kind]()
    again = WAYS[way](strategy)
    assert again is not strategy
    assert again.mesh == strategy.mesh
    assert again.options == strategy.options
    assert again.topology == strategy.topology
    assert again.data_axes == strategy.data_axes
    assert type(again.layouts.layout) is type(strategy.layouts.layout)
    if kind in ("plan", "rules"):
        assert again.layouts.layout == strategy.layouts.layout
    if "map" in kind:
        assert (
            dict(again.layouts.layout.items()).keys()
            == dict(strategy.layouts.layout.items()).keys()
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_model_keeps_its_strategy_and_trains_on(way):
    x, y = data()
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "fsdp")
    model, stock = built(mlp, strategy), built(mlp, None)
    for each in (model, stock):
        each.fit(x, y, batch_size=32, verbose=0, shuffle=False)
    again = WAYS[way](model)
    assert again is not model
    assert all(v.value.sharding.mesh == strategy.mesh for v in again.weights)
    for each in (again, stock):
        each.fit(x, y, batch_size=32, verbose=0, shuffle=False)
    assert_close(again.get_weights(), stock.get_weights())
    assert keras.distribution.distribution() is None


def test_a_model_without_a_strategy_is_pickled_as_ever():
    model = built(mlp, None)
    again = pickle.loads(pickle.dumps(model))
    assert all(len(v.value.sharding.device_set) == 1 for v in again.weights)


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_keeps_its_layout(way):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("hidden/kernel", (None, "model"))])
    model = built(mlp, strategy)
    model.fit(*(each[:13] for each in data()), batch_size=13, verbose=0)
    kernel = model.layers[0].kernel
    again = WAYS[way](kernel)
    assert again.value.sharding == kernel.value.sharding
    assert again.path == kernel.path
    assert_close(again.numpy(), kernel.numpy())
    before = kernel.numpy()
    again.assign(before + 1)
    assert_close(kernel.numpy(), before)


def test_a_model_whose_devices_are_not_here(monkeypatch, caplog):
    strategy = ktd.TPUStrategy({"data": 2}, devices=jax.devices()[6:])
    made = built(mlp, strategy)
    pickled, alone = pickle.dumps(made), pickle.dumps(strategy)
    variable = pickle.dumps(made.layers[0].kernel)
    here = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: here)
    with pytest.raises(ValueError, match=r"whose devices \[6, 7\] are not among the 2 here"):
        pickle.loads(alone)
    model = pickle.loads(pickled)
    assert all(len(v.value.sharding.device_set) == 1 for v in model.weights)
    assert "a model that was unpickled is on one device" in caplog.text
    assert len(pickle.loads(variable).value.sharding.device_set) == 1
    assert "a variable that was unpickled is on one device" in caplog.text


def test_layers_of_two_strategies():
    first, second = (ktd.TPUStrategy({"data": 4}, devices=jax.devices()[i : i + 4]) for i in (0, 4))
    with first.scope():
        one = keras.layers.Dense(4, name="one")
        one.build((None, 6))
    with second.scope():
        other = keras.layers.Dense(4, name="other")
        other.build((None, 4))
    model = sequential(6, one, other)
    x, y = np.ones((8, 6)), np.ones((8, 4))
    with pytest.raises(ValueError, match=r"one mesh.*'one/kernel' on .*\[0, 1, 2, 3\].*'other/ker"):
        model.fit(x, y, verbose=0)
    with second.scope():
        model.fit(x, y, verbose=0)
    assert all(v.value.sharding.mesh == second.mesh for v in model.weights)


@pytest.mark.parametrize("layout", [None, "fsdp", "tensor_parallel", "auto"])
def test_a_trainer_that_is_no_model(layout):
    # Keras 3.16 gives it another name.
    module = keras.src.backend.jax.trainer.__name__
    (trainer,) = (kind for kind in keras.Model.__mro__ if kind.__module__ == module)

    class Plain(trainer, keras.layers.Layer):
        def __init__(self):
            keras.layers.Layer.__init__(self)
            trainer.__init__(self)
            self.dense = keras.layers.Dense(3)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    def trained(strategy):
        def make():
            return compiled(Plain(), "sgd", "mse")

        model = built(make, strategy)
        model.fit(*data(classes=3)[:1], np.ones((103, 3)), batch_size=32, verbose=0, shuffle=False)
        return [np.asarray(v.value) for v in model.variables]

    assert_close(trained(ktd.TPUStrategy({"data": 4, "model": 2}, layout)), trained(None))


@pytest.mark.slow
def test_what_costs_time_or_memory_is_a_warning_once(caplog):
    for _ in range(2):
        strategy = ktd.TPUStrategy({"date": 4, "model": 2})
    ktd.TPUStrategy({"model": 8}, data_axes=())
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 1
    assert "every device computes the whole batch" in warned[0]
    assert warned[0].endswith("Did you mean 'data'?")
    model = built(mlp, None)
    with strategy.scope():
        for _ in range(2):
            model.fit(*data(), verbose=0)
    moved = [r for r in caplog.records if "built outside of the scope" in r.message]
    assert [r.levelname for r in moved] == ["WARNING"]


def test_a_plan_that_falls_back_is_a_warning_once(caplog):
    strategy = ktd.TPUStrategy({"data": 1, "model": 8}, "tensor_parallel")

    def odd():
        return sequential(601, keras.layers.Dense(603))

    model = built(odd, strategy)
    for _ in range(2):
        model.fit(np.ones((8, 601)), np.ones((8, 603)), verbose=0)
    (warned,) = [r for r in caplog.records if "plan-falls-back" in r.getMessage()]
    assert warned.levelname == "WARNING"
    assert "are not divisible by {'model': 8}" in warned.getMessage()


def test_plans_and_findings_draw_themselves_in_a_notebook():
    strategy = ktd.TPUStrategy({"data": 8}, "fsdp")
    model = built(mlp, strategy)
    plan, report = strategy.plan(model)._repr_html_(), strategy.lint(model, 3)._repr_html_()
    assert "<table" in plan
    assert "below min_size" in plan
    assert "small-batch" in report
    assert "no findings" in strategy.lint(model)._repr_html_()


class OfItsOwn(keras.Model):
    """A model with a way of its own to be copied."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def __reduce__(self):
        return OfItsOwn, ()


@pytest.mark.parametrize("way", WAYS)
def test_a_model_with_its_own_way_of_copying_keeps_its_strategy_too(way):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    with strategy.scope():
        model = OfItsOwn()
    again = WAYS[way](model)
    again.compile("sgd", "mse")
    again.fit(*data(classes=3)[:1], np.ones((103, 3)), batch_size=32, verbose=0)
    assert all(v.value.sharding.mesh.shape == strategy.mesh.shape for v in again.weights)
    assert isinstance(WAYS[way](OfItsOwn()), OfItsOwn)
