"""convert stays in its process: functions and classes in configs are used as they are."""

import functools

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, scoped
from keras import layers, ops

import keras_tpu_dist as ktd

FACTOR = 3.0
STEPS, FEATURES = 5, 3


def scaled(x):
    return x * FACTOR


def halved(x):
    return x / 2


other_scaled = halved
other_scaled.__name__ = "scaled"


class Unregistered(layers.Layer):
    """A class that Keras could not find by its name, with a function."""

    def __init__(self, function, units=2, **options):
        super().__init__(**options)
        self.function, self.units = function, units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units))

    def call(self, x):
        return self.function(x @ self.kernel)

    def get_config(self):
        return {**super().get_config(), "function": self.function, "units": self.units}

    @classmethod
    def from_config(cls, config):
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(**{**config, "function": function})


class Holder(layers.Layer):
    def __init__(self, inner, **options):
        super().__init__(**options)
        self.inner = inner

    def call(self, x):
        return self.inner(x)

    def get_config(self):
        inner = keras.saving.serialize_keras_object(self.inner)
        return {**super().get_config(), "inner": inner}

    @classmethod
    def from_config(cls, config):
        inner = keras.saving.deserialize_keras_object(config["inner"])
        return cls(**{**config, "inner": inner})


@keras.saving.register_keras_serializable("tests")
class Rule:
    """What a layer makes by name and from a config, as KerasHub's tasks do their samplers."""

    def __init__(self, factor=2.0):
        self.factor = factor

    def get_config(self):
        return {"factor": self.factor}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


class Ruled(layers.Layer):
    """A layer whose `__init__` writes a config and reads it."""

    def __init__(self, **options):
        super().__init__(**options)
        config = keras.saving.serialize_keras_object(Rule(FACTOR))
        self.rule = keras.saving.deserialize_keras_object(config)

    def call(self, x):
        return x * self.rule.factor


def local_class():
    class Local(layers.Dense):
        def call(self, x):
            return super().call(x) + 1

    return Local


closed = np.float32(7)
LAYERS = {
    # Functions from a file would find neither `ops` nor FACTOR.
    "globals": lambda: [layers.Lambda(lambda x: ops.abs(x) * closed * FACTOR)],
    "two alike": lambda: [layers.Lambda(lambda x, n=n: x * n, name=f"by_{n}") for n in (2, 3)],
    "closures": lambda: [layers.Lambda((lambda n: lambda x: x * n)(n)) for n in (2, 3)],
    "arguments": lambda: [layers.Lambda(lambda x, by: x * by, arguments={"by": 4.0})],
    "shape": lambda: [layers.Lambda(lambda x: x[..., :1], output_shape=lambda s: (*s[:-1], 1))],
    "mask": lambda: [
        layers.Masking(),
        layers.Lambda(lambda x: x, mask=lambda x, mask: ~mask),
        layers.LSTM(2),
    ],
    "named": lambda: [layers.Lambda(scaled), layers.Lambda(other_scaled)],
    "partial": lambda: [layers.Lambda(functools.partial(ops.multiply, 3.0))],
    "activations": lambda: [
        layers.Dense(3, activation=lambda x: ops.tanh(x) * FACTOR),
        layers.Dense(2, activation=scaled),
        layers.Dense(2, activation=jax.nn.silu),
        layers.Dense(2, activation="relu"),
    ],
    "initializer, regularizer": lambda: [
        layers.Dense(
            3,
            kernel_initializer=lambda shape, dtype=None: ops.ones(shape, dtype),
            kernel_regularizer=lambda weight: ops.sum(weight**2),
        )
    ],
    "unregistered": lambda: [
        Unregistered(lambda x: x * 5),
        Unregistered(scaled),
        Unregistered(keras.activations.relu),
        Unregistered(jax.nn.relu),
    ],
    "classes of one name": lambda: [local_class()(3), local_class()(2)],
    "config in __init__": lambda: [Ruled(), layers.Dense(2, activation=scaled)],
    "inside others": lambda: [
        layers.TimeDistributed(layers.Lambda(lambda x: x * FACTOR)),
        Holder(layers.Dense(3, activation=lambda x: x * 2)),
        Holder(layers.LSTM(2, return_sequences=True)),
    ],
}


# Keras 3.16 says so of its own LSTM too.
@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize("name", LAYERS)
def test_functions_and_classes_are_those_of_the_original(name):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((STEPS, FEATURES)), *LAYERS[name]()])
    x = np.random.default_rng(0).normal(size=(4, STEPS, FEATURES)).astype("float32")
    x[:, 0] = 0
    clone = ktd.convert(model)
    again = ktd.convert(clone)
    for each in (clone, again):
        assert_close(each.predict(x, verbose=0), model.predict(x, verbose=0))
    for one, other in zip(model.layers, clone.layers, strict=True):
        assert isinstance(other, type(one))
        if isinstance(one, layers.Lambda):
            assert other.function is one.function


def test_configs_for_files_are_unchanged():
    model = keras.Sequential([keras.Input((3,)), layers.Lambda(lambda x: x)])
    config = model.get_config()
    ktd.convert(model)
    assert model.get_config() == config
    with pytest.raises(ValueError, match="safe_mode"):
        keras.Sequential.from_config(config)


class Silent(layers.Layer):
    """Its `get_config` does not return its argument."""

    def __init__(self, scale, **options):
        super().__init__(**options)
        self.scale = scale

    def call(self, x):
        return x * self.scale

    def get_config(self):
        return super().get_config()


def test_a_layer_that_cannot_be_rebuilt_is_named():
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(3), Silent(2.0, name="culprit")])
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3), inner])
    with pytest.raises(ValueError, match=r"layer 'culprit' \(Silent\).*Give .* a get_config"):
        ktd.convert(model)


def test_a_layer_that_models_share_is_named():
    layer, inputs = layers.Dense(3, name="tied"), [keras.Input((3,)) for _ in range(3)]
    inner = [keras.Model(x, layer(x)) for x in inputs[:2]]
    model = keras.Model(inputs[2], [one(inputs[2]) for one in inner])
    with pytest.raises(ValueError, match="layer 'tied', which several models or layers hold"):
        ktd.convert(model)


def test_a_layer_that_a_wrapper_shares_is_one_layer():
    layer, x = layers.Dense(2), keras.Input((STEPS, 3))
    model = keras.Model(x, [layer(x), layers.TimeDistributed(layer)(x)])
    clone = ktd.convert(model)
    assert len(clone.weights) == len(model.weights) == 2
    values = np.ones((2, STEPS, 3), "float32")
    assert_close(clone.predict(values, verbose=0), model.predict(values, verbose=0))


@pytest.mark.parametrize("steps", [STEPS, None])
@pytest.mark.parametrize("mesh", [None, {"data": 8}])
def test_recurrent_layers_inside_of_custom_ones_tell_their_shapes(steps, mesh):
    """Keras asks a layer without `compute_output_shape` with a batch of no size."""
    fast = ktd.layers
    with scoped(mesh and ktd.TPUStrategy(mesh)):
        for inner in (
            fast.LSTM(2, return_sequences=True, unroll=2),
            fast.GRU(2, return_sequences=True),
            fast.SimpleRNN(2, return_sequences=True),
            fast.Bidirectional(fast.LSTM(1, return_sequences=True)),
        ):
            inner.build((None, steps, FEATURES))
            model = keras.Sequential([keras.Input((steps, FEATURES)), Holder(inner)])
            assert model.output_shape == (None, steps, 2)
            x = np.ones((8, STEPS, FEATURES), "float32")
            assert_close(model.predict(x, verbose=0), inner(x))
