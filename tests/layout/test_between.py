"""Sums between blocks, split along time: equal to one device, and what `explain` says of them."""

import decoders
import keras
import numpy as np
import pytest
from conformance.precision import in_float64
from helpers import assert_close, built

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.planner import Planner

L = keras.layers
MESHES = ({"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2})
MODELS = {
    **{name: build for name, (build, _) in decoders.FAMILIES.items()},
    **{name: build for name, (build, _) in decoders.IN_A_ROW.items()},
    **decoders.VOCABULARIES,
}


def strategy_of(mesh, kind="tensor_parallel", between_blocks="split", **options):
    planner = Planner(kind, 1, memory_bytes=1, between_blocks=between_blocks)
    return ktd.TPUStrategy(mesh, planner, **options)


def compiled(build, **options):
    def make():
        model = build()
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", **options)
        return model

    return make


def trained(model, steps=2):
    """Losses and weights after steps of 13 rows, and what the model predicts."""
    rng = np.random.default_rng(0)
    shape = (13 * steps, *model.input_shape[1:])
    is_text = model.inputs[0].dtype == "int32"
    x = rng.integers(0, decoders.WORDS, shape) if is_text else rng.normal(size=shape)
    y = rng.normal(size=(13 * steps, *model.output_shape[1:]))
    history = model.fit(x, y, batch_size=13, verbose=0, shuffle=False).history
    return [history["loss"], model.get_weights(), model.predict(x[:13], verbose=0)]


def answers(strategy, model):
    return [answer for answer in strategy.explain(model).passes if answer.name == "between"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if n != "gpt"])
def test_every_block_equals_one_device(name):
    expected = trained(built(compiled(MODELS[name]), None))
    for mesh in MESHES:
        for kind in ("tensor_parallel", "auto"):
            strategy = strategy_of(mesh, kind)
            model = built(compiled(MODELS[name]), strategy)
            assert_close(trained(model), expected)


def transformer(**heads):
    """Tokens, Keras's attention, dropout, norms of both kinds, logits."""
    tokens = keras.Input((8,), dtype="int32")
    x = L.Embedding(decoders.WORDS, 16)(tokens)
    for k in range(2):
        h = L.LayerNormalization()(x)
        attention = L.GroupQueryAttention(4, 4, **heads) if heads else L.MultiHeadAttention(4, 4)
        x = x + L.Dropout(0.2, seed=k)(attention(h, h, use_causal_mask=True))
        h = L.RMSNormalization()(x)
        x = x + L.Dense(16, name=f"down_{k}")(L.Dense(64, "gelu", name=f"up_{k}")(h))
    return keras.Model(tokens, L.Dense(decoders.WORDS, name="head")(x))


def with_lora():
    model = transformer()
    for k in range(2):
        model.get_layer(f"down_{k}").enable_lora(2)
        model.get_layer(f"up_{k}").enable_lora(2)
    return model


def with_lora_by_heads():
    """Products whose gradients are sums over rows, times and heads."""
    x = keras.Input((6, 64))
    by_heads = {"output_shape": (6, 4, 16), "bias_axes": "nh", "name": "one"}
    y = L.EinsumDense("btd,dnh->btnh", **by_heads)(x)
    y = L.EinsumDense("btnh,nhd->btd", output_shape=(6, 64), name="two")(y)
    model = keras.Model(x, L.Dense(1)(y))
    for name in ("one", "two"):
        layer = model.get_layer(name)
        layer.enable_lora(4)
        factor = np.random.default_rng(0).normal(size=layer.lora_kernel_b.shape)
        layer.lora_kernel_b.assign(factor * 0.1)
    return model


def mixing():
    """Values between blocks that other times are mixed with."""
    x = start = keras.Input((8, 16))
    for k in range(2):
        x = x + L.Dense(16, name=f"down_{k}")(L.Dense(32, "gelu")(x))
        x = x + L.Conv1D(16, 3, padding="causal")(x) + L.DepthwiseConv1D(3, padding="same")(x)
        x = x + keras.ops.cumsum(x, axis=1) + keras.ops.flip(x, axis=1) - x[:, :1]
    return keras.Model(start, L.Dense(4)(L.Bidirectional(L.GRU(4))(x)))


FEATURES = {
    "plain": (transformer, {}, {}),
    "few heads of keys": (lambda: transformer(num_key_value_heads=1), {}, {}),
    "four steps a launch": (transformer, {"steps_per_execution": 4}, {}),
    "LoRA": (with_lora, {}, {}),
    "LoRA by heads": (with_lora_by_heads, {}, {}),
    "recomputed": (transformer, {}, {"remat": "full"}),
    "head in pieces": (transformer, {}, {"head": "pieces"}),
    "split slots": (transformer, {}, {"shard_optimizer": True}),
    "mixed times": (mixing, {}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_beside_other_features(name):
    build, compiling, options = FEATURES[name]
    # Four steps of Adam amplify what float32 rounds.
    with in_float64():
        expected = trained(built(compiled(build, **compiling), None), steps=4)
        for mesh in MESHES:
            strategy = strategy_of(mesh, **options)
            model = built(compiled(build, **compiling), strategy)
            assert_close(trained(model, steps=4), expected, 1e-6)
            assert any(answer.done for answer in answers(strategy, model)), name


def test_a_step_equals_one_device_and_is_explained():
    expected = trained(built(compiled(transformer), None), steps=1)
    strategy = strategy_of(MESHES[0])
    model = built(compiled(transformer), strategy)
    assert answers(strategy, model) == []
    assert_close(trained(model, steps=1), expected)
    found = answers(strategy, model)
    assert all(answer.done for answer in found)
    paths = {answer.path.rpartition("/")[2] for answer in found}
    assert {"attention_output", "down_0", "down_1"} <= paths
    assert not {"up_0", "query", "head"} & paths
    assert "its sums are split along time over 'model'" in str(strategy.explain(model))


@pytest.mark.parametrize(
    ("time", "between_blocks", "words"),
    [
        (6, "auto", "its sums are whole on every device: 1248 bytes a device are below 1048576"),
        (7, "split", "its sums are whole on every device: a time of 7 is not divisible by 2"),
        (6, "whole", None),
    ],
)
def test_sums_that_are_whole_say_why(time, between_blocks, words):
    def build():
        layers = [L.Dense(32, "relu", name="up"), L.Dense(16, name="down")]
        return keras.Sequential([keras.Input((time, 16)), *layers])

    x = np.random.default_rng(0).normal(size=(13, time, 16))
    results = []
    for strategy in (None, strategy_of(MESHES[0], between_blocks=between_blocks)):
        model = built(compiled(build), strategy)
        model.fit(x, x, batch_size=13, verbose=0)
        results.append([model.get_weights(), model.predict(x, verbose=0)])
    assert_close(results[1], results[0])
    found = [(answer.path, answer.done, answer.words) for answer in answers(strategy, model)]
    assert found == ([("sequential/down", False, words)] if words else [])


def test_features_without_time_are_not_spoken_of():
    layers = [L.Dense(32, "relu"), L.Dense(16)]
    build = compiled(lambda: keras.Sequential([keras.Input((16,)), *layers]))
    strategy = strategy_of(MESHES[0])
    model = built(build, strategy)
    model.fit(np.ones((8, 16)), np.ones((8, 16)), verbose=0)
    assert answers(strategy, model) == []


def test_another_plan_takes_the_marks_off():
    strategy = strategy_of(MESHES[0])
    model = built(compiled(transformer), strategy)
    trained(model, steps=1)
    other = ktd.TPUStrategy({"data": 8})
    with other.scope():
        again = keras.models.clone_model(model)
        again.compile("sgd", "mse")
    trained(again, steps=1)
    assert answers(other, again) == []


def test_a_wrong_word_is_one_error():
    with pytest.raises(ValueError, match="between_blocks") as raised:
        Planner("tensor_parallel", between_blocks="spilt")
    assert "split" in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("fsdp", {"data": 2, "model": 4}), ("fsdp", {"data": 8}), ("auto", {"data": 8})],
)
def test_split_without_an_axis_that_splits_weights_is_one_error(kind, mesh):
    with pytest.raises(ValueError, match="between_blocks") as raised:
        ktd.TPUStrategy(mesh, Planner(kind, between_blocks="split"))
    assert f"{mesh!r}" in str(raised.value)
    assert 'Write ktd.Planner("tensor_parallel", between_blocks="split")' in str(raised.value)
    ktd.TPUStrategy(mesh, Planner(kind, between_blocks="auto"))  # where it pays: here nowhere


def wide():
    """Two blocks whose sums have 4 MiB on each of two groups of devices."""
    x = start = keras.Input((1024, 512))
    for _ in range(2):
        h = L.LayerNormalization()(x)
        x = x + L.Dense(512, use_bias=False)(L.Dense(1024, "gelu", use_bias=False)(h))
    model = keras.Model(start, x)
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_an_all_reduce_becomes_two_halves_with_as_many_bytes():
    sent, kinds = {}, {}
    for choice in ("whole", "auto"):
        planner = Planner("tensor_parallel", between_blocks=choice)
        strategy = ktd.TPUStrategy({"data": 2, "model": 4}, planner, topology="v5e:2x4")
        run = ktd.dry_run(wide, strategy, batch_size=4, effort="exact")
        over_model = [c for c in run.cost.collectives if "model" in c.axes and c.bytes > 1e6]
        kinds[choice] = {c.kind for c in over_model}
        sent[choice] = sum(c.sent_bytes * c.times for c in over_model)
    assert kinds == {"whole": {"all-reduce"}, "auto": {"all-gather", "reduce-scatter"}}
    assert sent["auto"] <= 1.01 * sent["whole"]


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("mesh", MESHES)
def test_the_program_of_a_tpu_equals_one_device(mesh):
    strategy = strategy_of(mesh, topology="v5e:2x4")
    x = np.random.default_rng(0).integers(0, decoders.WORDS, (13, 8))
    y = np.random.default_rng(1).normal(size=(13, 8, decoders.WORDS))
    verified = ktd.verify(compiled(transformer), strategy, x=x, y=y, batch_size=13)
    assert verified.equal, verified
