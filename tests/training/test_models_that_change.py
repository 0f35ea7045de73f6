"""A model whose variables change sides between calls, without being compiled anew."""

import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, scoped

import keras_tpu_dist as ktd

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.random((13, 8)).astype("float32")
Y = RNG.integers(0, 8, 13)
# Keras counts in int64, which JAX shortens.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
MESHES = [
    ({"data": 8}, None),
    ({"data": 4, "model": 2}, None),
    ({"data": 2, "fsdp": 2, "model": 2}, ktd.Planner("auto", memory_bytes=1)),
]


def model():
    """Two layers of one shape, which could be taken for each other; a metric that scatters."""
    made = keras.Sequential(
        [
            keras.Input((8,)),
            L.Dense(8, "relu", bias_initializer="random_normal"),
            L.Dense(8, "softmax", bias_initializer="random_normal"),
        ]
    )
    metrics = [keras.metrics.MeanIoU(8, sparse_y_pred=False)]
    return compiled(made, "sgd", "sparse_categorical_crossentropy", metrics=metrics)


def seen(model):
    return [model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)]


def freeze(model):
    model.layers[0].trainable = False


def lora(model):
    model.layers[1].enable_lora(2)


def all_calls(strategy, change):
    one = built(model, strategy)
    found = [seen(one)]
    with scoped(strategy):
        change(one)
    found.append(seen(one))
    return found


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [*(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in MESHES[:-1]), MESHES[-1]],
)
@pytest.mark.parametrize("change", [freeze, lora])
def test_it_sees_the_same(mesh, layout, change):
    expected = all_calls(None, change)
    assert_close(all_calls(ktd.TPUStrategy(mesh, layout), change), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [MESHES[2], *(pytest.param(*each, marks=pytest.mark.slow) for each in MESHES[:2])],
)
def test_another_optimizer_between_fits(mesh, layout):
    def fitted(strategy):
        one = built(model, strategy)
        one.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        with scoped(strategy):
            one.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        one.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return one.get_weights()

    assert_close(fitted(ktd.TPUStrategy(mesh, layout)), fitted(None))


def test_what_is_the_same_is_compiled_once():
    one = built(model, ktd.TPUStrategy({"data": 4, "model": 2}))
    one.predict(X, verbose=0)
    predicts = one.predict_function
    one.fit(X, Y, verbose=0, validation_data=(X, Y))
    trains, tests = one.train_function, one.test_function
    one.fit(X, Y, verbose=0, validation_data=(X, Y))
    one.predict(X, verbose=0)
    assert (trains, tests) == (one.train_function, one.test_function)
    assert one.predict_function is predicts
    freeze(one)
    one.predict(X, verbose=0)
    assert one.predict_function is not predicts
