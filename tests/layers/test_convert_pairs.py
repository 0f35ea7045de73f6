"""convert pairs layers and variables by their places: models in which lists by position differ.

Stock Keras on JAX carries no states of `stateful=True`: the reference is our layer, built directly.
"""

import keras
import numpy as np
import pytest
from helpers import assert_close, compiled
from keras import layers as stock

import keras_tpu_dist as ktd
from keras_tpu_dist import layers as fast

ROWS, STEPS, FEATURES = 16, 4, 3
BATCH = 8
MESHES = ({"data": 8}, {"data": 4, "model": 2})

register = keras.saving.register_keras_serializable("tests_convert_pairs")


def recurrent(kind="GRU", **options):
    def make(package):
        options.setdefault("return_sequences", True)
        return getattr(package, kind)(4, stateful=True, **options)

    return make


def in_line(*make, inputs=None):
    """A `Sequential` of what the functions return for a package of layers."""

    def build(package):
        inner = [one(package) for one in make]
        first = inputs or keras.Input(batch_shape=(BATCH, STEPS, FEATURES))
        return keras.Sequential([first, *inner])

    return build


def dense(units=3, **options):
    return lambda package: stock.Dense(units, **options)


frozen = {"trainable": False}
head = dense(1)


def dropout(package):
    return stock.Dropout(0.3, seed=5)


def shared(package):
    inputs = keras.Input(batch_shape=(BATCH, STEPS, FEATURES))
    carried, twice = recurrent("LSTM")(package), stock.Dense(FEATURES, trainable=False)
    x = stock.Dense(4)(carried(twice(twice(inputs))))
    return keras.Model(inputs, stock.Dense(1)(x))


def nested(package):
    inner = keras.Sequential(
        [keras.Input(batch_shape=(BATCH, STEPS, FEATURES)), recurrent()(package), stock.Dense(3)]
    )
    inner.layers[1].trainable = False
    inputs = keras.Input(batch_shape=(BATCH, STEPS, FEATURES))
    x = stock.Dense(2)(recurrent("SimpleRNN")(package)(inner(inputs)))
    return keras.Model(inputs, stock.Dense(1, trainable=False)(x))


@register
class Listed(keras.Model):
    """A model whose layers are in lists and dicts, and not in its config."""

    def __init__(self, ours=False, **options):
        super().__init__(**options)
        package = fast if ours else stock
        self.ours = ours
        self.blocks = [stock.Dense(3), recurrent("LSTM")(package), stock.Dense(4, trainable=False)]
        self.ends = {"dropped": [dropout(package)], "out": (stock.Dense(2), stock.Dense(1))}
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def build(self, shape):
        for layer in (*self.blocks, *self.ends["dropped"], *self.ends["out"]):
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def call(self, x, training=None):
        for layer in (*self.blocks, *self.ends["out"]):
            x = layer(x)
        return self.ends["dropped"][0](x * self.scale, training=training)

    def get_config(self):
        return {"ours": self.ours}


def listed(package):
    model = Listed(package is fast)
    model.build((BATCH, STEPS, FEATURES))
    return model


def bidirectional(package):
    return package.Bidirectional(recurrent("LSTM")(package))


def frozen_forward(package):
    layer = package.Bidirectional(recurrent("GRU")(package))
    layer.forward_layer.trainable = False
    return layer


def over_time(package):
    return package.TimeDistributed(stock.Dense(3, trainable=False))


MODELS = {
    "GRU": in_line(recurrent("GRU"), head),
    "LSTM": in_line(recurrent("LSTM"), head),
    "SimpleRNN": in_line(recurrent("SimpleRNN"), head),
    "frozen before and behind": in_line(
        dense(**frozen), recurrent(), dense(**frozen), recurrent("LSTM"), dense(2), head
    ),
    "frozen itself": in_line(recurrent(**frozen), dense(2), head),
    "two stacked, a seed behind": in_line(recurrent("LSTM"), recurrent(), dropout, head),
    "bidirectional": in_line(bidirectional, dense(2, **frozen), head),
    "frozen inside a wrapper": in_line(frozen_forward, over_time, dropout, head),
    "time distributed": in_line(recurrent(), over_time, recurrent("SimpleRNN"), head),
    "shared, used twice": shared,
    "nested": nested,
    "lists and dicts": listed,
}


def rows(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(ROWS, STEPS, FEATURES)), rng.normal(size=(ROWS, STEPS, 1))


def trained(model, epochs=2):
    x, y = rows()
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=epochs, verbose=0).history
    return history["loss"], model.get_weights(), model.predict(x, batch_size=BATCH, verbose=0)


def names_that_train(model):
    """Places of weights that train: Keras numbers names."""
    return [v.path.split("/")[-1] for v in model.trainable_variables]


def compare(build, mesh, steps=1, before=None, optimizer=lambda: keras.optimizers.Adam(0.01)):
    """A stock model that is converted, and our layers built directly, with the same weights."""
    strategy = ktd.TPUStrategy(mesh)
    both = []
    with strategy.scope():
        model, direct = build(stock), build(fast)
        for one, other in zip(model.weights, direct.weights, strict=True):
            other.assign(one.value)
            assert one.trainable == other.trainable
        for each in (model, direct):
            compiled(each, optimizer(), "mse", steps_per_execution=steps)
            if before is not None:
                before(each)
        weights = model.get_weights()
        clone = ktd.convert(model)
        assert_close(clone.get_weights(), weights, 0)
        assert names_that_train(clone) == names_that_train(direct)
        assert [v.path for v in clone.weights] == [v.path for v in model.weights]
        again = ktd.convert(clone)
    both = [trained(each) for each in (clone, direct, again)]
    assert_close(both[0], both[1])
    assert_close(both[0], both[2])


def called(model):
    model(rows(1)[0][:BATCH].astype("float32"))


@pytest.mark.parametrize("name", MODELS)
def test_converted_models_train_like_our_layers(name):
    compare(MODELS[name], MESHES[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_converted_models_train_like_our_layers_on_two_axes(name):
    compare(MODELS[name], MESHES[1], steps=4)


@pytest.mark.parametrize("name", ["GRU", "frozen before and behind", "bidirectional"])
def test_states_of_a_model_that_ran_are_carried_on(name):
    compare(MODELS[name], MESHES[0], before=called)
