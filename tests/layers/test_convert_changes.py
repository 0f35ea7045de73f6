"""What was done to a model since it was made, in layers whose config does not say so: convert."""

import keras
import numpy as np
from helpers import assert_close, built

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
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
        return model

    return build


def lora(block):
    block.query.enable_lora(2, lora_alpha=3)
    block.out.trainable = False


def frozen(block):
    block.query.trainable = False
    block.time.trainable = False


def single(block):
    block.query.kernel.trainable = False


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
