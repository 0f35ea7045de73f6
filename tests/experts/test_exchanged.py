"""Layers that send tokens to experts by one-hot products, with experts over the batch's axes."""

import re

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built
from keras import ops

import keras_tpu_dist as ktd
from keras_tpu_dist.experts import exchange

L = keras.layers
COUNT, WIDTH, HIDDEN, TIME = 8, 6, 10, 16


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
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


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


def compiled_step(mesh):
    """The text of a train step, as the CPU compiler partitions it."""
    strategy = strategy_of(mesh)
    model = built(lambda: model_of(True), strategy)
    model.predict(np.zeros((16, TIME, WIDTH), "float32"), verbose=0)

    def loss(trained, rest, x):
        return ops.mean(ops.square(model.stateless_call(trained, rest, x)[0]))

    weights = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]
    rows = jax.sharding.PartitionSpec(strategy.data_axes)
    x = jax.device_put(
        np.zeros((16, TIME, WIDTH), "float32"), jax.sharding.NamedSharding(strategy.mesh, rows)
    )
    with strategy.scope():
        step = jax.jit(jax.grad(loss), out_shardings=[w.sharding for w in weights])
        return step.lower(weights, rest, x).compile().as_text()


@pytest.mark.parametrize("mesh", ["data8", "data4_model2", "expert"])
def test_tokens_are_exchanged_and_no_kernel_is_gathered(mesh):
    text = compiled_step(mesh)
    assert " all-to-all(" in text
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text)
    assert not [shape for shape in gathered if shape in ("8,6,10", "8,10,6")]


def test_a_layer_that_computes_all_experts_is_left(monkeypatch):
    """Its tokens go to no expert, so that nothing can be exchanged for them."""

    class All(GShard):
        def call(self, x):
            hidden = ops.einsum("btd,edf->ebtf", x, self.up)
            return ops.mean(ops.einsum("ebtf,efd->ebtd", hidden, self.down), axis=0)

    def model():
        inputs = keras.Input((TIME, WIDTH))
        made = keras.Model(inputs, L.Dense(3)(All(name="mixture_0")(inputs)))
        rng = np.random.default_rng(0)
        made.set_weights([rng.normal(size=w.shape) * 0.4 for w in made.weights])
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    found = []
    monkeypatch.setattr(exchange._Exchange, "evaluate", lambda self, inputs: found.append(1))
    result = built(model, strategy_of("data8"))
    assert_close(trained(result), trained(built(model, None)))
    assert not found
