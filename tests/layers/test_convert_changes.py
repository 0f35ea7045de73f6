"""What was done to a model since it was made, in layers whose config does not say so: convert."""

import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled

import keras_tpu_dist as ktd

FEATURES, STEPS = 6, 4


@keras.saving.register_keras_serializable("tests_convert_changes")
class Block(keras.layers.Layer):
    """Layers that its config does not have."""

    def build(self, shape):
        self.query = keras.layers.EinsumDense("btd,df->btf", (None, 8), name="query")
        self.query.build(shape)
        self.out = keras.layers.Dense(shape[-1], name="out")
        self.out.build((*shape[:-1], 8))
        self.time = keras.layers.LSTM(shape[-1], return_sequences=True, name="time")
        self.time.build(shape)

    def call(self, x):
        return self.time(x + self.out(self.query(x)))


def model_of(change):
    def build():
        layers = [Block(name="block"), keras.layers.Dense(1, name="head")]
        model = keras.Sequential([keras.Input((STEPS, FEATURES)), *layers])
        change(model.layers[0])
        return compiled(model, keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")

    return build


def lora(block):
    block.query.enable_lora(2, lora_alpha=3)
    block.out.trainable = False


def frozen(block):
    block.query.trainable = False
    block.time.trainable = False


def single(block):
    block.query.kernel.trainable = False


def quantized(block):
    block.out.quantize("int8")
    block.query.enable_lora(2)
    block.query.quantize("int4")


def check(change):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(13, STEPS, FEATURES)), rng.normal(size=(13, STEPS, 1))
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    model = built(model_of(change), strategy)
    model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    with strategy.scope():
        clone = ktd.convert(model)
    trained, expected = (
        [v.path.removeprefix("sequential/") for v in each.trainable_variables]
        for each in (clone, model)
    )
    assert trained == expected
    both = []
    for each in (model, clone):
        history = each.fit(x, y, batch_size=5, shuffle=False, verbose=0).history
        both.append([history["loss"], each.get_weights(), each.predict(x, verbose=0)])
    assert_close(*both)
    return clone


def test_lora_is_enabled_in_the_converted_model():
    query = check(lora).layers[0].query
    assert query.lora_enabled
    assert query.lora_alpha == 3


def test_what_is_frozen_stays_frozen():
    check(frozen)
    check(single)


def test_quantized_layers_are_quantized_in_the_converted_model():
    block = check(quantized).layers[0]
    assert (block.query.quantization_mode, block.out.quantization_mode) == ("int4", "int8")
    assert block.query.lora_enabled


def test_what_freeze_froze_can_be_unfrozen_in_the_converted_model():
    model = model_of(lambda block: block.query.enable_lora(2))()
    ktd.freeze(model, ["block/out", "*/bias"])
    converted = ktd.convert(model)
    assert ktd.freeze(converted, ["block/query"]) == ktd.freeze(model, ["block/query"])
    trained = [weight.path for weight in converted.trainable_weights]
    assert trained == [weight.path for weight in model.trainable_weights]
    assert any("out/kernel" in path for path in trained)


def test_the_converted_model_is_laid_out_by_the_paths_of_the_original():
    rules = {"^sequential/block/out/kernel": (None, "model"), "^sequential/head/kernel": ("model",)}
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, rules)
    model = built(model_of(lambda block: None), strategy)
    assert [v.path for v in model.weights][-2] == "sequential/head/kernel"
    with strategy.scope():
        clone = ktd.convert(model)
    x = np.zeros((8, STEPS, FEATURES))
    for each in (model, clone):
        each.fit(x, x[..., :1], verbose=0)
    for one, other in zip(model.variables, clone.variables, strict=True):
        assert (one.path, one.value.sharding) == (other.path, other.value.sharding)
    assert not clone.weights[-2].value.sharding.is_fully_replicated


def test_an_optimizer_that_compile_wrapped_is_copied_with_its_scale():
    keras.utils.set_random_seed(0)
    layer = keras.layers.LSTM(2, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((STEPS, FEATURES)), layer])
    model.dtype_policy = "mixed_float16"
    compiled(model, keras.optimizers.SGD(0.1), "mse")
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    x = np.ones((8, STEPS, FEATURES), "float32")
    model.fit(x, x[:, 0, :2] * 1e6, verbose=0)  # the scale is halved
    clone = ktd.convert(model)
    scales = [float(each.optimizer.dynamic_scale) for each in (model, clone)]
    assert scales[0] == scales[1] < 2**15
    assert clone.optimizer.inner_optimizer is not model.optimizer.inner_optimizer


@keras.saving.register_keras_serializable("tests_convert_changes")
class Counting(keras.layers.Layer):
    """A layer with a state that is no variable, and methods that save it."""

    factor = 1.0

    def call(self, x):
        return x * self.factor

    def save_own_variables(self, store):
        store["factor"] = np.asarray(self.factor)

    def load_own_variables(self, store):
        self.factor = float(store["factor"])


def test_what_layers_hold_beside_variables_is_copied():
    pytest.importorskip("tensorflow")  # for its lookup tables
    x = np.random.default_rng(0).normal(3, 2, size=(13, 4)).astype("float32")
    numbers = np.arange(40).reshape(10, 4) % 7
    inputs = keras.Input((4,)), keras.Input((4,), dtype="int32")
    layers = keras.layers
    norm, bins = layers.Normalization(), layers.Discretization(num_bins=4)
    lookup = layers.IntegerLookup(output_mode="tf_idf")
    for layer, data in ((norm, x), (bins, x), (lookup, numbers)):
        layer.adapt(data)
    counting = Counting()
    counting.factor = 3.0
    values = [counting(norm(inputs[0])), keras.ops.cast(bins(inputs[0]), "float32")]
    values.append(lookup(inputs[1]))
    model = keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(values)))
    clone = ktd.convert(model)
    given = [x, numbers[np.arange(13) % 10]]
    assert_close(clone.predict(given, verbose=0), model.predict(given, verbose=0))
