"""One kernel for several kinds of features in a row is cut by heads, and equals one device."""

import jax
import keras
import numpy as np
import pytest
from decoders import IN_A_ROW, TIME, WIDTH
from helpers import assert_close, built
from programs import collectives, compiled, program

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.device_groups import replica_groups
from keras_tpu_dist.programs.fused import taken_apart

BY_FOUR = {"data": 2, "model": 4}
MESHES = [{"data": 4, "model": 2}, BY_FOUR, {"data": 2, "fsdp": 2, "model": 2}]
slow = pytest.mark.slow
X, Y = np.random.default_rng(0).normal(size=(2, 26, TIME, WIDTH)).astype("float32")
QUICK = ("gpt2", "halved")


def names():
    return [pytest.param(n, marks=() if n in QUICK else slow) for n in IN_A_ROW]


@pytest.mark.parametrize("name", names())
def test_two_sums_a_block_and_only_kernels_are_sent(name):
    build, fused = IN_A_ROW[name]
    strategy = ktd.TPUStrategy(BY_FOUR, ktd.Planner("tensor_parallel", min_size=64))
    model = built(compiled(build, "sgd"), strategy)
    rows = [row for row in strategy.explain(model).rows if f"{fused}/kernel" in row.path]
    assert [row.axes for row in rows] == [("model", None)] * len(rows)
    assert all("used as" in row.reason and "column: feeds" in row.reason for row in rows)
    text = program(model, strategy, X[:4], Y[:4])
    along_model = [
        g for g in collectives(text) if replica_groups(g, 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    ]
    assert len(along_model) == {"graph": 2, "halved": 3}.get(name, 4)
    # The kernels, and their gradients.
    assert len(collectives(text, "all-to-all")) == 2 * len(rows)
    assert not collectives(text, "collective-permute")


def results(strategy, name, optimizer="sgd", change=lambda model: model, **options):
    def build():
        model = change(IN_A_ROW[name][0]())
        model.compile(optimizer, "mse", **options)
        return model

    return trained(built(build, strategy))


def trained(model):
    history = model.fit(X, Y, batch_size=13, epochs=2, shuffle=False, verbose=0).history
    return [history["loss"], model.predict(X[:5], verbose=0), model.get_weights()]


@slow
@pytest.mark.parametrize("name", IN_A_ROW)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_equal_to_one_device(name, mesh):
    expected = results(None, name, steps_per_execution=2)
    for kind in ("tensor_parallel", "auto"):
        strategy = ktd.TPUStrategy(mesh, ktd.Planner(kind, min_size=64))
        assert_close(results(strategy, name, steps_per_execution=2), expected)


def with_lora(model):
    for layer in model._flatten_layers():
        if layer.name in ("query_key_value", "both"):
            layer.enable_lora(2)
    return model


def assigned(model):
    ktd.assign(model.layers[1], 1)
    return model


def scanned(model):
    ktd.scan_blocks(model)
    return model


@slow
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("other", ["adamw", "eager", "lora", "assigned", "remat", "scanned"])
def test_beside_other_features(name, other, tmp_path):
    options = {"run_eagerly": True} if other == "eager" else {}
    changes = {"lora": with_lora, "assigned": assigned, "scanned": scanned}
    change = changes.get(other, lambda model: model)
    optimizer = "adamw" if other == "adamw" else "sgd"
    strategy = ktd.TPUStrategy(
        {"data": 4, "model": 2},
        "tensor_parallel",
        remat="full" if other == "remat" else None,
    )
    one, other = (results(s, name, optimizer, change, **options) for s in (None, strategy))
    # LoRA's second factor is zero at first, its first one random.
    assert_close(one, other)


@pytest.mark.parametrize("before", [True, pytest.param(False, marks=slow)])
def test_remat_on_the_layer_keeps_its_plan(before):
    def recomputed(model):
        return ktd.remat(model, {"*/attention" if before else "*/query_key_value": "full"})

    strategy = ktd.TPUStrategy(BY_FOUR, ktd.Planner("tensor_parallel", min_size=64))
    found = results(strategy, "gpt2", change=recomputed)
    assert_close(found, results(None, "gpt2"))
    model = built(lambda: recomputed(IN_A_ROW["gpt2"][0]()), strategy)
    (row,) = (r for r in strategy.explain(model).rows if "query_key_value/kernel" in r.path)
    assert "used as" in row.reason


@slow
def test_bfloat16_is_near():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        found = [results(s, "gpt2")[1] for s in (None, ktd.TPUStrategy(BY_FOUR, "tensor_parallel"))]
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(*found, atol=3e-2)


def test_what_is_also_read_as_it_is_stays_in_a_row():
    def call(kernel, x):
        y = x @ kernel
        return y.reshape(4, 3, 8) * y.sum(), y[:, :8]

    def twice(kernel, x):
        return (x @ kernel).reshape(4, 3, 8), (kernel**2).sum()

    def uneven(kernel, x):
        y = x @ kernel
        return y[:, :8], y[:, 4:12]

    def right(kernel, x):
        y = x @ kernel
        return y[:, :8], y[:, 16:]

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((6, 24), (4, 6))]

    programs = [jax.make_jaxpr(f)(*shapes) for f in (call, twice, uneven, right)]
    found = [taken_apart(each, 1, {})[1] for each in programs]
    assert found == [{}, {}, {}, {0: (6, 3, 8)}]
    x, kernel = (
        np.random.default_rng(0).normal(size=s.shape).astype("float32") for s in shapes[::-1]
    )
    apart, _ = taken_apart(jax.make_jaxpr(right)(*shapes), 1, {})
    assert_close(
        jax.core.eval_jaxpr(apart.jaxpr, apart.consts, kernel.reshape(6, 3, 8), x), right(kernel, x)
    )


class Single(keras.layers.Layer):
    """As Flux has it: one kernel for queries, keys, values and the feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(3 * 32 + 64), keras.layers.Dense(WIDTH)

    def call(self, x):
        y = self.first(x)
        heads = keras.ops.reshape(y[..., :96], (-1, TIME, 3, 4, 8))
        q, k, v = keras.ops.unstack(heads, axis=2)
        p = keras.ops.softmax(keras.ops.einsum("bqnh,bknh->bnqk", q, k) / 8**0.5)
        a = keras.ops.reshape(keras.ops.einsum("bnqk,bknh->bqnh", p, v), (-1, TIME, 32))
        return x + self.last(keras.ops.concatenate([a, keras.ops.gelu(y[..., 96:])], -1))


@slow
@pytest.mark.parametrize("mesh", MESHES[::2], ids=str)
def test_unequal_parts_equal_one_device(mesh):
    def build():
        x = keras.Input((TIME, WIDTH))
        return keras.Model(x, Single()(keras.layers.LayerNormalization()(x)))

    strategy = ktd.TPUStrategy(mesh, ktd.Planner("tensor_parallel", min_size=64))
    assert_close(*(trained(built(compiled(build, "sgd"), each)) for each in (strategy, None)))
