"""Masks cross whatever a layout puts on an output: Keras keeps them as attributes of arrays."""

import keras
import numpy as np
import pytest
from helpers import assert_close, built, sequential
from keras.src.backend.common import masking

import keras_tpu_dist as ktd

L = keras.layers
TIME, VOCABULARY = 8, 5
RNG = np.random.default_rng(0)
X = RNG.integers(0, VOCABULARY, (13, TIME)).astype("int32")
X[:, 0] = 1  # a row that is all mask has no mean
RULES = {"encoder/output": ("data",)}
CASES = [
    ({"data": 8}, "fsdp", False),
    ({"data": 2, "fsdp": 2, "model": 2}, "auto", False),
    ({"data": 2, "fsdp": 2, "model": 2}, ktd.Planner("auto", memory_bytes=1), False),
    ({"data": 2, "sequence": 4}, None, False),
    ({"data": 2, "sequence": 2, "model": 2}, "fsdp", False),
    ({"data": 4, "model": 2}, RULES, False),
    ({"data": 4, "model": 2}, None, True),
    ({"data": 8}, None, True),
]


@keras.saving.register_keras_serializable("test_masks")
class Masking(L.Layer):
    """Says in `call` what is masked, as layers of one's own may."""

    def call(self, x):
        y = x * 2.0
        masking.set_keras_mask(y, keras.ops.any(x > 0, axis=-1))
        return y

    def compute_output_shape(self, shape):
        return shape


def encoder(split):
    made = keras.Sequential(
        [
            keras.Input((TIME,), dtype="int32"),
            L.Embedding(VOCABULARY, 6, mask_zero=True),
            L.Dense(6, "tanh"),
        ],
        name="encoder",
    )
    return ktd.split(made, output=("data",)) if split else made


def model(last, split, eager=False):
    """A nested model whose mask the layer behind it, or the loss, uses."""

    def build():
        tokens = keras.Input((TIME,), dtype="int32")
        x = encoder(split)(tokens)
        made = keras.Model(tokens, x if last is None else L.Dense(3)(last()(x)))
        made.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
        return made

    return build


def results(model):
    y = np.random.default_rng(1).normal(size=(len(X), *model.output_shape[1:])).astype("float32")
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(X, y, **fit).history["loss"]
    evaluated = model.evaluate(X, y, batch_size=8, verbose=0)
    predicted = model.predict(X, batch_size=8, verbose=0)
    return [np.array(history), np.array(evaluated), predicted, *model.get_weights()]


@pytest.mark.parametrize(
    ("mesh", "layout", "split"),
    [*CASES[:1], *(pytest.param(*each, marks=pytest.mark.slow) for each in CASES[1:7]), *CASES[7:]],
)
@pytest.mark.parametrize(
    "last",
    [L.GlobalAveragePooling1D, pytest.param(lambda: L.LSTM(5), marks=pytest.mark.slow), None],
    ids=["pooling", "lstm", "loss"],
)
def test_a_mask_of_a_nested_model(mesh, layout, split, last):
    expected = results(built(model(last, split), None))
    assert_close(results(built(model(last, split), ktd.TPUStrategy(mesh, layout))), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout", "split"),
    [CASES[6], *(pytest.param(*CASES[i], marks=pytest.mark.slow) for i in (0, 3))],
)
def test_of_a_nested_model_that_is_not_compiled(mesh, layout, split):
    last = L.GlobalAveragePooling1D
    expected = results(built(model(last, split), None))
    strategy = ktd.TPUStrategy(mesh, layout)
    assert_close(results(built(model(last, split, eager=True), strategy)), expected)


@pytest.mark.parametrize("remat", [None, "full"])
def test_of_a_layer_that_says_it_in_call(remat):
    x = RNG.normal(size=(13, TIME, 3)).astype("float32") - 0.5
    x[:, 0] = 1

    def build():
        return sequential((TIME, 3), Masking(), L.GlobalAveragePooling1D(), L.Dense(2))

    expected = built(build, None).predict(x, verbose=0)
    for mesh, layout in (({"data": 8}, "fsdp"), ({"data": 2, "sequence": 4}, None)):
        strategy = ktd.TPUStrategy(mesh, layout, remat=remat)
        assert_close(built(build, strategy).predict(x, verbose=0), expected)


def test_of_a_tensor_that_is_split():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    tensor = keras.ops.ones((8, 4, 6))
    masking.set_keras_mask(tensor, keras.ops.ones((8, 4), "bool"))
    with strategy.scope():
        split = strategy.experimental_split_to_logical_devices(tensor, [1, 1, 2])
    assert masking.get_keras_mask(split) is masking.get_keras_mask(tensor)
