"""What plans cost and save: bytes per device, and the collectives of the compiled train step."""

import re

import keras
import numpy as np
import pytest
from helpers import assert_close, built, mlp
from programs import KINDS, collectives, compiled, program

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.planner import Planner

L = keras.layers


def transformer(blocks, width=128, heads=8):
    x = h = keras.Input((8, width))
    for _ in range(blocks):
        a = L.LayerNormalization()(h)
        h = L.Add()([h, L.MultiHeadAttention(heads, width // heads)(a, a)])
        f = L.Dense(4 * width, activation="gelu")(L.LayerNormalization()(h))
        h = L.Add()([h, L.Dense(width)(f)])
    return keras.Model(x, h)


@pytest.mark.slow
def test_fsdp_of_twelve_blocks_holds_an_eighth():
    strategy = ktd.TPUStrategy({"data": 8}, "fsdp")
    model = built(compiled(lambda: transformer(12)), strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    explanation = strategy.explain(model)
    assert explanation.bytes > 3 * 4 * 12 * 12 * 128**2
    assert explanation.bytes_per_device <= 1.1 * explanation.bytes / 8
    state = [*model.weights, *(v for v in model.optimizer.variables if v.shape)]
    held = sum(v.value.addressable_shards[0].data.nbytes for v in state)
    assert held == explanation.bytes_per_device


@pytest.mark.slow
def test_tensor_parallel_splits_every_kernel_of_a_transformer_four_ways():
    strategy = ktd.TPUStrategy({"data": 2, "model": 4}, "tensor_parallel")
    model = built(lambda: transformer(2), strategy)
    kernels = [row for row in strategy.explain(model).rows if row.path.endswith("kernel")]
    assert len(kernels) == 12
    assert all(row.bytes == 4 * row.bytes_per_device for row in kernels)


def test_collectives_of_data_parallel():
    strategy = ktd.TPUStrategy({"data": 8})
    model = built(compiled(mlp_regression), strategy)
    text = program(model, strategy, np.ones((16, 6), "float32"), np.ones((16, 3), "float32"))
    weights = len(model.trainable_variables)
    # At most one for each gradient and one for the loss; XLA may join them.
    assert 1 <= len(collectives(text)) <= weights + 1
    for kind in KINDS:
        assert not collectives(text, kind), kind


def mlp_regression():
    return keras.Sequential([keras.Input((6,)), L.Dense(16, activation="relu"), L.Dense(3)])


def test_split_optimizer_slots_hold_an_eighth_and_survive_a_checkpoint(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(39, 6)), np.zeros((39, 8))

    def build():
        return keras.Sequential([keras.Input((6,)), L.Dense(16, activation="tanh"), L.Dense(8)])

    def run(model):
        model.fit(x, y, batch_size=13, shuffle=False, verbose=0)
        return model.get_weights()

    expected = run(built(compiled(build), None))
    strategy = ktd.TPUStrategy({"data": 8}, shard_optimizer=True)
    model = built(compiled(build), strategy)
    assert_close(run(model), expected)
    slots = [v for v in model.optimizer.variables if v.shape]
    assert len(slots) == 8
    for slot in slots:
        assert slot.value.addressable_shards[0].data.size * 8 == slot.value.size, slot.path
    assert all(v.value.sharding.is_fully_replicated for v in model.trainable_variables)
    explanation = strategy.explain(model)
    assert sum(r.slot_bytes_per_device for r in explanation.rows) * 8 == sum(
        r.slot_bytes for r in explanation.rows
    )
    model.save(tmp_path / "m.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "m.keras")
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables):
        assert_close(a.value, b.value)
    keras.utils.set_random_seed(3)
    again = run(model)
    keras.utils.set_random_seed(3)
    assert_close(run(loaded), again)
    slots = [v for v in loaded.optimizer.variables if v.shape]
    assert all(v.value.addressable_shards[0].data.size * 8 == v.value.size for v in slots)


def test_a_plan_is_printed_edited_and_passed_back():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, Planner("tensor_parallel", min_size=1))
    model = built(mlp, strategy)
    plan = strategy.plan(model)
    assert "sequential/hidden/kernel" in str(plan)
    rules = ktd.LayoutRules.from_json(plan.rules().to_json())
    assert dict(rules.rules)["sequential/hidden/kernel"] == (None, "model")
    edited = ktd.LayoutRules([("hidden/bias", ()), *rules.rules])
    again = ktd.TPUStrategy({"data": 4, "model": 2}, edited)
    other = built(mlp, again)
    rows = {row.path: row for row in again.explain(other).rows}
    for row in strategy.explain(model).rows:
        if not row.path.endswith("hidden/bias"):
            assert any(rows[row.path].axes) == any(row.axes)
    assert rows["sequential/hidden/bias"].axes == ()
    assert again.lint(other, strict=True).ok
    whole = built(mlp, ktd.TPUStrategy({"data": 4, "model": 2}, plan))
    assert tuple(whole.layers[0].kernel.value.sharding.spec) == (None, "model")


@pytest.mark.parametrize(
    ("mesh", "layout", "options", "words"),
    [
        (
            {"data": 8},
            "tensor_parallel",
            {},
            r"'tensor_parallel' splits over mesh axes that do not",
        ),
        ({"model": 8}, "fsdp", {}, r"'fsdp' splits over mesh axes that split the batch"),
        ({"model": 8}, None, {"shard_optimizer": True}, r"optimizer slots over the data axes"),
    ],
)
def test_plans_that_the_mesh_cannot_serve(mesh, layout, options, words):
    with pytest.raises(ValueError, match=words):
        ktd.TPUStrategy(mesh, layout, **options)


def test_outputs_are_laid_only_where_the_batch_comes_first():
    for batch_axis, expected in ((0, {"sequential/hidden", "sequential/out"}), ((1, 0), set())):
        strategy = ktd.TPUStrategy({"data": 8}, "fsdp", batch_axis=batch_axis)
        placement = strategy.placement(built(mlp, strategy))
        assert set(placement.layouts_of_outputs()) == expected


@pytest.mark.slow
def test_features_that_a_plan_splits_stay_split():
    """The outputs of blocks are laid by rows alone: what is wide between two kernels is not
    gathered."""
    strategy = ktd.TPUStrategy({"fsdp": 2, "model": 4}, Planner("auto", memory_bytes=1))
    model = built(compiled(lambda: transformer(1)), strategy)
    x = np.ones((4, 8, 128), "float32")
    text = program(model, strategy, x, x)
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text)
    assert gathered
    assert not [shape for shape in gathered if shape.endswith(",8,512")]
    with strategy.scope():
        assert model(x[:3]).shape == (3, 8, 128)  # not compiled
    rules = strategy.plan(model).rules()
    again = ktd.TPUStrategy({"fsdp": 2, "model": 4}, rules)
    text = program(built(compiled(lambda: transformer(1)), again), again, x, x)
    by_rules = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text)
    assert sorted(by_rules) == sorted(gathered)
    assert "^layer_normalization/output$" in dict(rules.rules)
