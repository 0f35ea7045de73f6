"""Layers that send tokens to experts by one-hot products: plans and rules equal one device."""

import re

import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled
from keras import ops

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.planner import Planner

L = keras.layers
COUNT, WIDTH, HIDDEN, TIME = 8, 6, 64, 16


class GShard(L.Layer):
    """Each token goes to one expert, of which each takes so many of a row.

    References:
        https://arxiv.org/abs/2006.16668
    """

    def __init__(self, gated=False, **kwargs):
        super().__init__(**kwargs)
        self.gated = gated

    def build(self, shape):
        self.router = self.add_weight(shape=(WIDTH, COUNT), name="router")
        self.up = self.add_weight(shape=(COUNT, WIDTH, HIDDEN), name="up")
        if self.gated:
            self.gate = self.add_weight(shape=(COUNT, WIDTH, HIDDEN), name="gate")
        self.down = self.add_weight(shape=(COUNT, HIDDEN, WIDTH), name="down")

    def call(self, x):
        gates = ops.softmax(ops.cast(x @ self.router, "float32"))
        chosen = ops.one_hot(ops.argmax(gates, -1), COUNT)
        place = ops.cumsum(chosen, 1) * chosen - 1
        sent = ops.one_hot(ops.cast(place, "int32"), 2 * x.shape[1] // COUNT)
        weighed = ops.cast(sent * ops.expand_dims(chosen * gates, -1), x.dtype)
        inner = ops.einsum("btec,btd->ebcd", ops.cast(sent, x.dtype), x)
        hidden = ops.gelu(ops.einsum("ebcd,edf->ebcf", inner, self.up))
        if self.gated:
            hidden = hidden * ops.einsum("ebcd,edf->ebcf", inner, self.gate)
        inner = ops.einsum("ebcf,efd->ebcd", hidden, self.down)
        return ops.einsum("ebcd,btec->btd", inner, weighed)


RULES = "mixture_./(up|gate|down)"
MESHES = {
    "data8": ({"data": 8}, ("data",), {}),
    "data4_model2": ({"data": 4, "model": 2}, ("data",), {}),
    "data2_fsdp2_model2": ({"data": 2, "fsdp": 2, "model": 2}, (("data", "fsdp"),), {}),
    "a part of the axes": ({"data": 2, "fsdp": 4}, ("fsdp",), {}),
    "expert": ({"data": 2, "expert": 4}, ("expert",), {"data_axes": ("data", "expert")}),
}


def model_of(gated):
    x = inputs = keras.Input((TIME, WIDTH))
    for number in range(2):
        x = x + GShard(gated, name=f"mixture_{number}")(L.LayerNormalization()(x))
    model = keras.Model(inputs, L.Dense(3)(x))
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=w.shape) * 0.4 for w in model.weights])
    return compiled(model, keras.optimizers.SGD(0.1), "mse")


def strategy_of(mesh):
    axes, experts, options = MESHES[mesh]
    return ktd.TPUStrategy(axes, ktd.LayoutRules([(RULES, experts)]), **options)


def trained(model):
    rng = np.random.default_rng(1)
    found = []
    for rows in (16, 13):
        x = rng.normal(size=(rows, TIME, WIDTH)).astype("float32")
        y = rng.normal(size=(rows, TIME, 3)).astype("float32")
        found += [model.train_on_batch(x, y), model.predict(x, verbose=0)]
    return [*found, *(w.numpy() for w in model.weights)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "gated", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "gated"]
)
@pytest.mark.parametrize(
    "mesh", [n if n == "data8" else pytest.param(n, marks=pytest.mark.slow) for n in MESHES]
)
def test_meshes_equal_one_device(mesh, gated):
    model = built(lambda: model_of(gated), strategy_of(mesh))
    assert_close(trained(model), trained(built(lambda: model_of(gated), None)))


PLANNED = {
    "data8": ({"data": 8}, "fsdp", ("data",)),
    "data4_model2": ({"data": 4, "model": 2}, "auto", (("model", "data"),)),
    "data2_fsdp2_model2": (
        {"data": 2, "fsdp": 2, "model": 2},
        "auto",
        (("model", "data", "fsdp"),),
    ),
}


def planned(mesh):
    axes, kind, _ = PLANNED[mesh]
    return ktd.TPUStrategy(axes, Planner(kind, min_size=64, memory_bytes=1))


@pytest.mark.parametrize("mesh", PLANNED)
def test_a_plan_stores_experts_by_expert(mesh):
    strategy = planned(mesh)
    rows = strategy.explain(built(lambda: model_of(True), strategy)).rows
    kernels = {row.path: row.axes for row in rows if re.search("/(up|gate|down)$", row.path)}
    assert len(kernels) == 6
    assert set(kernels.values()) == {(*PLANNED[mesh][2], None, None)}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", PLANNED)
def test_plans_equal_one_device(mesh):
    model = built(lambda: model_of(True), planned(mesh))
    assert_close(trained(model), trained(built(lambda: model_of(True), None)))


LAUNCHES = {
    "data4_model2": {"data": 4, "model": 2},
    "data2_fsdp2_model2": {"data": 2, "fsdp": 2, "model": 2},
}


def fitted(strategy, steps, batch_size):
    """Losses, predictions and weights after epochs of four whole batches and a smaller one."""
    model = built(lambda: model_of(True), strategy)
    model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=steps)
    rng = np.random.default_rng(2)
    rows = 4 * batch_size + min(batch_size - 3, 13)
    x = rng.normal(size=(rows, TIME, WIDTH)).astype("float32")
    y = rng.normal(size=(rows, TIME, 3)).astype("float32")
    fit = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return [fit.history["loss"], model.predict(x[:13], verbose=0), *model.get_weights()]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [13, 16])
@pytest.mark.parametrize("mesh", LAUNCHES)
def test_launches_of_four_steps_equal_one_device(mesh, batch_size):
    strategy = ktd.TPUStrategy(LAUNCHES[mesh], Planner("fsdp", min_size=64))
    assert_close(fitted(strategy, 4, batch_size), fitted(None, 1, batch_size))


class Bank(L.Layer):
    """The experts of a mixture, as a layer of their own, which is given tokens by expert."""

    def build(self, shape):
        self.up = self.add_weight(shape=(COUNT, WIDTH, HIDDEN), name="up")
        self.down = self.add_weight(shape=(COUNT, HIDDEN, WIDTH), name="down")

    def call(self, inner):
        hidden = ops.gelu(ops.einsum("ebcd,edf->ebcf", inner, self.up))
        return ops.einsum("ebcf,efd->ebcd", hidden, self.down)


class Around(L.Layer):
    """A mixture that routes tokens to a bank."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.bank = Bank(name="bank")

    def build(self, shape):
        self.router = self.add_weight(shape=(WIDTH, COUNT), name="router")
        self.bank.build((COUNT, shape[0], 2 * shape[1] // COUNT, WIDTH))

    def call(self, x):
        chosen = ops.one_hot(ops.argmax(x @ self.router, -1), COUNT)
        place = ops.cumsum(chosen, 1) * chosen - 1
        sent = ops.one_hot(ops.cast(place, "int32"), 2 * x.shape[1] // COUNT)
        return ops.einsum("ebcd,btec->btd", self.bank(ops.einsum("btec,btd->ebcd", sent, x)), sent)


@pytest.mark.slow
def test_a_bank_of_its_own_equals_one_device():
    def build():
        x = inputs = keras.Input((TIME, WIDTH))
        model = keras.Model(inputs, L.Dense(3)(x + Around()(x)))
        rng = np.random.default_rng(0)
        model.set_weights([rng.normal(size=w.shape) * 0.4 for w in model.weights])
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    strategy = planned("data8")
    model = built(build, strategy)
    rows = strategy.explain(model).rows
    assert {row.axes for row in rows if "bank" in row.path} == {("data", None, None)}
    assert_close(trained(model), trained(built(build, None)))
