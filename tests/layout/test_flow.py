"""Pairs of kernels by data flow: what a traced call shows, whatever its layers are called."""

import jax
import keras
import numpy as np
import pytest
from decoders import FAMILIES, TIME, WIDTH, Attention, Block, stacked
from helpers import assert_close, built, results
from programs import KINDS, collectives, compiled, program

import keras_tpu_dist as ktd
from keras_tpu_dist.layout import flow
from keras_tpu_dist.layout.planner import Planner
from keras_tpu_dist.programs.device_groups import replica_groups

L = keras.layers
BY_FOUR = {"data": 2, "model": 4}


def layouts(build, mesh=None):
    strategy = ktd.TPUStrategy(mesh or BY_FOUR, "tensor_parallel")
    with strategy.scope():
        model = build()
    rows = strategy.explain(model).rows
    return {row.path: (row.axes, row.reason) for row in rows}


def kernels(found, name):
    """The layouts of the kernels of layers of this name, wherever they are."""
    end = f"/{name}/kernel"
    return [axes for path, (axes, _) in found.items() if f"/{path}".endswith(end)]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_paired(name):
    found = layouts(FAMILIES[name][0])
    assert not [path for path, (_, why) in found.items() if "without a partner" in why]
    for column in ("q", "query_key_value", "gate", "up"):
        for axes in kernels(found, column):
            assert axes[:2] == (None, "model"), column
    for axes in kernels(found, "down"):
        assert axes == ("model", None)
    output = [axes for path, (axes, why) in found.items() if "row:" in why and "kernel" in path]
    assert output
    assert {axes[0] for axes in output} == {"model"}


def test_heads_that_do_not_divide_are_whole_for_those_that_do():
    found = layouts(lambda: stacked(Block(Attention(kv=2))))
    assert kernels(found, "q") == [(None, "model")]
    assert kernels(found, "k") == kernels(found, "v") == [()]
    found = layouts(lambda: stacked(Block(Attention(kv=2))), {"data": 4, "model": 2})
    assert kernels(found, "k") == kernels(found, "v") == [(None, "model")]


def test_a_scale_of_any_size_is_whole():
    """Of a norm over 4096 features or more: were it split, so would be all that it scales."""
    strategy = ktd.TPUStrategy(BY_FOUR, Planner("tensor_parallel", min_size=WIDTH))
    model = built(compiled(FAMILIES["llama"][0], "sgd"), strategy)
    scales = [row for row in strategy.explain(model).rows if row.path.endswith("scale")]
    assert [row.axes for row in scales] == [()] * 2
    x = np.ones((4, TIME, WIDTH), "float32")
    assert not collectives(program(model, strategy, x, x), "all-gather")


def test_a_router_is_whole():
    found = layouts(FAMILIES["mixtral"][0])
    (router,) = [each for path, each in found.items() if "router" in path]
    assert router[0] == ()
    assert "searched" in router[1]


def test_a_learned_bias_by_distance_is_split_by_heads():
    found = layouts(FAMILIES["t5"][0])
    tables = [axes for path, (axes, _) in found.items() if path.endswith("embeddings")]
    assert tables == [(None, "model")] * 2


def test_features_that_are_mixed_are_not_split():
    """A gate of every other feature, and what is added to the row before it is halved."""

    class Mixed(L.Layer):
        def __init__(self):
            super().__init__()
            self.up, self.down = L.Dense(64, name="up"), L.Dense(WIDTH, name="down")

        def call(self, x):
            y = self.up(x)
            a, b = keras.ops.split(y * keras.ops.mean(y, -1, keepdims=True), 2, axis=-1)
            return self.down(keras.ops.concatenate([a * y[..., ::2], b], -1))

    found = layouts(lambda: stacked(Mixed()))
    assert not any("row" in why or "column" in why for _, why in found.values())


def test_what_cannot_be_traced_has_no_partner_and_says_so():
    class Untraceable(L.Layer):
        def __init__(self):
            super().__init__()
            self.up, self.down = L.Dense(64), L.Dense(WIDTH)

        def build(self, shape):
            self.up.build(shape)
            self.down.build((*shape[:-1], 64))

        def call(self, x):
            raise RuntimeError("only on Sundays")

        def compute_output_shape(self, shape):
            return shape

    strategy = ktd.TPUStrategy(BY_FOUR, Planner("tensor_parallel", min_size=1))
    model = built(lambda: stacked(Untraceable()), strategy)
    kernels = [row for row in strategy.explain(model).rows if row.path.endswith("kernel")]
    assert len(kernels) == 2
    for row in kernels:
        assert "without a partner, as the call of 'untraceable' cannot be traced" in row.reason
        assert "RuntimeError: only on Sundays" in row.reason


def test_arguments_of_a_call_in_the_graph_are_used():
    """The decoder's default `build` knows the first of its inputs alone."""
    found = layouts(FAMILIES["t5"][0])
    assert not [why for _, why in found.values() if "cannot be traced" in why]
    assert all("model" in axes for path, (axes, _) in found.items() if "/q/kernel" in path)


def test_equal_blocks_are_traced_once(monkeypatch):
    traced = []
    real = flow._traced
    monkeypatch.setattr(flow, "_traced", lambda *given: traced.append(1) or real(*given))
    flow._known_flows.clear()
    layouts(lambda: stacked(*(Block(Attention(kv=4)) for _ in range(6))))
    assert len(traced) == 2  # an attention, and a block


def test_variables_have_no_value_by_it():
    """Keras gives variables that wait for one what the innermost scope computes: a tracer."""
    with keras.StatelessScope(initialize_variables=False):
        model = FAMILIES["llama"][0]()
    strategy = ktd.TPUStrategy(BY_FOUR, "tensor_parallel")
    strategy.explain(model)
    assert all(isinstance(v.value, jax.Array) for v in model.weights)
    assert not any(isinstance(v.value, jax.core.Tracer) for v in model.weights)


def test_factors_of_lora_beside_kernels_that_are_whole():
    def build():
        model = stacked(Block(Attention(kv=2)), Block(Attention(kv=4), experts=True))
        for layer in model._flatten_layers():
            if layer.name in ("k", "v", "router"):
                layer.enable_lora(2)
        return model

    found = layouts(build)
    assert kernels(found, "k")[0] == ()
    assert [axes for path, (axes, _) in found.items() if "lora" in path and "/k/" in path]


class Odd(L.Layer):
    """Built by its parent with something that is no shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = L.Dense(64, name="up"), L.Dense(WIDTH, name="down")

    def build(self, width):
        self.up.build((None, TIME, WIDTH))
        self.down.build((None, TIME, 64))

    def call(self, x):
        return self.down(self.up(x))


class Parent(L.Layer):
    def __init__(self):
        super().__init__()
        self.inner = Odd()

    def build(self, shape):
        self.inner.build(WIDTH)

    def call(self, x):
        return self.inner(x)


def test_what_a_layer_was_built_with_stops_no_plan():
    found = layouts(lambda: stacked(Parent()))
    assert kernels(found, "up") == [(None, "model")]
    assert kernels(found, "down") == [("model", None)]


def test_models_of_equal_layers_in_another_order_are_not_one():
    def build(permuted):
        x = keras.Input((64,))
        y = L.Reshape((8, 8))(L.Dense(64, name="up")(x))
        y = L.Permute((2, 1))(y) if permuted else L.Permute((1, 2))(y)
        return keras.Model(x, L.Dense(WIDTH, name="down")(L.Flatten()(y)))

    straight = layouts(lambda: build(False))
    turned = layouts(lambda: build(True))
    assert straight["up/kernel"][0] == (None, "model")
    # By its second factor, which comes first once it is turned.
    assert turned["up/kernel"][0] == ("model", None)
    assert "dimension 2 split" in turned["up/kernel"][1]


def test_a_layer_that_is_frozen_changes_no_plan():
    """Its variables come last then, in the program too that a model's flow is read from."""
    strategy = ktd.TPUStrategy(BY_FOUR, Planner("tensor_parallel", min_size=1))

    def build():
        x = keras.Input((WIDTH,))
        y = L.Dense(WIDTH, name="up")(x)
        return keras.Model(x, L.Dense(WIDTH, name="down")(L.Activation("relu")(y)))

    model = built(build, strategy)
    before = {row.path: row.layout for row in strategy.explain(model).rows}
    assert before["up/kernel"] != before["down/kernel"]
    model.get_layer("up").trainable = False
    assert {row.path: row.layout for row in strategy.explain(model).rows} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, count) in FAMILIES.items() if count])
def test_two_sums_forward_and_two_backward(name):
    build, count = FAMILIES[name]
    strategy = ktd.TPUStrategy(BY_FOUR, "tensor_parallel")
    model = built(compiled(build, "sgd"), strategy)
    x = np.ones((4, TIME, WIDTH), "float32")
    text = program(model, strategy, x, x)
    along_model = [
        g for g in collectives(text) if replica_groups(g, 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    ]
    assert len(along_model) == count, collectives(text)
    for kind in KINDS:
        assert not collectives(text, kind), kind


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_one_device(name):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 26, TIME, WIDTH)).astype("float32")

    def run(strategy):
        model = built(compiled(FAMILIES[name][0], "sgd"), strategy)
        return results(model, x, y, x[:5], evaluate=False, batch_size=13, shuffle=False)

    expected = run(None)
    for mesh in ({"data": 4, "model": 2}, BY_FOUR, {"data": 2, "fsdp": 2, "model": 2}):
        assert_close(run(ktd.TPUStrategy(mesh, "tensor_parallel")), expected)


def test_a_fit_traces_a_model_once_for_its_plan(monkeypatch):
    """It plans again once the optimizer has slots; nothing that the model computes has changed."""
    traced, stock = [], flow._traced
    monkeypatch.setattr(flow, "_traced", lambda *given: traced.append(1) or stock(*given))
    inputs = keras.Input((8,))
    hidden = L.Dense(32, activation="relu")(inputs)
    strategy = ktd.TPUStrategy(BY_FOUR, "tensor_parallel")
    with strategy.scope():
        model = keras.Model(inputs, L.Dense(8)(hidden))
        model.compile("adam", "mse")
        model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0)
        model.evaluate(np.ones((8, 8)), np.ones((8, 8)), verbose=0)
    assert len(traced) == 1
