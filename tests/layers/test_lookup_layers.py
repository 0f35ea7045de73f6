"""Lookup layers in compiled models: integers by a sorted table on the devices, others an error."""

import re

import keras
import numpy as np
import pytest
from helpers import assert_close

import keras_tpu_dist as ktd

pytest.importorskip("tensorflow")
L = keras.layers
VALUES = np.random.RandomState(0).randint(-2, 12, (26, 3)).astype("int32")
VOCABULARY = [9, 2, 5, 7]
MESHES = [{"data": 8}, {"data": 4, "model": 2}]


def predicted(layer, x, strategy):
    with strategy.scope():
        inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
        model = keras.Model(inputs, layer(inputs))
        model.compile("sgd", "mse")
    assert model.jit_compile
    return model.predict(x, batch_size=13, verbose=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_token": 0},
        {"num_oov_indices": 3},
        {"num_oov_indices": 2, "mask_token": 0},
        {"output_mode": "multi_hot"},
        {"output_mode": "multi_hot", "mask_token": 0},
        {"output_mode": "multi_hot", "max_tokens": 9, "pad_to_max_tokens": True},
        {"output_mode": "count", "num_oov_indices": 2},
        {"output_mode": "count", "mask_token": 0},
        {"output_mode": "one_hot"},
        {"output_mode": "tf_idf", "idf_weights": [0.5, 0.25, 1.0, 2.0]},
        {"invert": True},
        {"invert": True, "mask_token": 0},
    ],
    ids=str,
)
def test_an_integer_lookup_equals_tensorflows(options):
    layer = L.IntegerLookup(vocabulary=VOCABULARY, **options)
    x = VALUES[:, :1] if options.get("output_mode") == "one_hot" else VALUES
    expected = np.asarray(layer(x))
    found = predicted(layer, x, ktd.TPUStrategy(MESHES[1]))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_an_adapted_lookup_and_one_without_a_match():
    layer = L.IntegerLookup()
    layer.adapt(VALUES)
    x = np.int32([[-7], [100], [2], [-2], [11]])
    np.testing.assert_array_equal(predicted(layer, x, ktd.TPUStrategy()), np.asarray(layer(x)))


def tokens_and_lengths(places):
    """A model of tokens, looked up in it or before, and of numbers in bins."""
    keras.utils.set_random_seed(0)
    ids, numbers = keras.Input((3,), dtype="int32"), keras.Input((1,))
    h = L.Flatten()(L.Embedding(5, 4)(places(ids)))
    bins = L.Flatten()(L.Discretization([0.0, 0.5], output_mode="one_hot")(numbers))
    model = keras.Model([ids, numbers], L.Dense(1)(L.Concatenate()([h, bins])))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_equals_lookups_made_before(mesh):
    numbers = np.linspace(-1, 1, 26).astype("float32")[:, None]
    y = VALUES.sum(1, keepdims=True).astype("float32")
    lookup = L.IntegerLookup(vocabulary=VOCABULARY)
    options = {"batch_size": 13, "epochs": 2, "shuffle": False, "verbose": 0}
    with ktd.TPUStrategy(mesh).scope():
        model = tokens_and_lengths(lookup)
    model.fit([VALUES, numbers], y, **options)
    reference = tokens_and_lengths(lambda ids: ids)
    reference.fit([np.asarray(lookup(VALUES)), numbers], y, **options)
    assert_close(model.get_weights(), reference.get_weights())


def test_in_replica_code():
    strategy = ktd.TPUStrategy(MESHES[1])
    layer = L.IntegerLookup(vocabulary=VOCABULARY)
    (batch,) = strategy.distribute_dataset(VALUES[:8], batch_size=8)
    found = strategy.gather(strategy.run(lambda x: layer(x), (batch,)), 0)
    np.testing.assert_array_equal(found, np.asarray(layer(VALUES[:8])))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda: L.IntegerLookup(vocabulary=[1], num_oov_indices=0), "num_oov_indices=1"),
        (
            lambda: L.IntegerLookup(vocabulary=[1], num_oov_indices=2, oov_method="farmhash"),
            'oov_method="floormod"',
        ),
        (lambda: L.IntegerLookup(vocabulary=[1, 2**40]), "JAX_ENABLE_X64=1"),
    ],
)
def test_what_cannot_be_in_a_program_says_what_to_do(layer, said):
    with pytest.raises(Exception, match=said) as caught:
        predicted(layer(), VALUES, ktd.TPUStrategy())
    assert re.search(r"Received: layer=.+ Apply the layer in the input", str(caught.value))


def test_hashing_says_to_go_into_the_input():
    with ktd.TPUStrategy().scope():
        inputs = keras.Input((3,), dtype="int32")
        model = keras.Model(inputs, L.Embedding(5, 2)(L.Hashing(5)(inputs)))
        model.compile("sgd", "mse")
    said = r"Hashing computes on the host.*Received: layer='hashing.*dataset\.map"
    with pytest.raises(ValueError, match=said):
        model.fit(VALUES, np.ones((26, 3, 2)), verbose=0)
    # A step that is not compiled calls it with arrays, as stock Keras does.
    hashed = np.asarray(L.Hashing(5)(VALUES))
    embedded = np.asarray(model.layers[-1].embeddings)[hashed]
    assert_close(model.predict(VALUES, verbose=0), embedded)


def test_stock_keras_is_left_alone():
    ktd.TPUStrategy()
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Model(inputs, L.IntegerLookup(vocabulary=VOCABULARY)(inputs))
    model.compile("sgd", "mse")
    assert not model.jit_compile


def test_ragged_values_have_their_own_words():
    import tensorflow as tf

    ragged = tf.ragged.constant([[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0]] * 2)
    strategy = ktd.TPUStrategy()
    rows = tf.data.Dataset.from_tensor_slices(ragged)
    for source in (rows.batch(8), [ragged], [(np.ones(8), ragged)]):
        with pytest.raises(ValueError, match=r"ragged one differ.*Received: .*to_tensor\(\)"):
            next(iter(strategy.distribute_dataset(source)))
    (batch,) = strategy.distribute_dataset(rows.batch(8).map(lambda x: x.to_tensor()))
    total = strategy.reduce("sum", strategy.run(lambda x: x.sum(), (batch,)))
    assert float(total) == float(tf.reduce_sum(ragged))
    with pytest.raises(ValueError, match="Encode text"):
        next(iter(strategy.distribute_dataset([np.array(["a", "b"])])))


def test_a_layer_that_a_strategy_had_compiled_works_in_a_stock_model():
    layer = L.IntegerLookup(vocabulary=VOCABULARY)
    expected = predicted(layer, VALUES, ktd.TPUStrategy())
    inputs = keras.Input((3,), dtype="int32")
    stock = keras.Model(inputs, layer(inputs))
    stock.compile("sgd", "mse")
    np.testing.assert_array_equal(stock.predict(VALUES, verbose=0), expected)
