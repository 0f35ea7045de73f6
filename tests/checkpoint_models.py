"""Models of the tests of checkpoints, where they lie, and what of them is compared."""

import contextlib

import jax
import keras
import numpy as np

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.names import named_state

X = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")
Y = X[:, :8]
PLACES = {
    "data": ({"data": 8}, None),
    "fsdp": ({"fsdp": 8}, "fsdp"),
    "tensor": ({"data": 2, "model": 4}, "tensor_parallel"),
    "auto": ({"data": 4, "model": 2}, "auto"),
    "one": ({"data": 1}, None),
    "stock": None,
}


def strategy_of(place):
    if PLACES[place] is None:
        return None
    mesh, layout = PLACES[place]
    devices = None if place != "one" else jax.devices()[:1]
    return ktd.TPUStrategy(mesh, layout, devices=devices)


def mlp(name=None, classes=8):
    return keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(classes, name="head"),
        ],
        name=name,
    )


def made(place, build=mlp, optimizer="adam", compiled=True):
    strategy = strategy_of(place)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = build()
        if compiled:
            model.compile(optimizer, "mse", metrics=["mae"])
    return model


def numbers(model):
    state = named_state(model)
    kinds = ("weights", "slots", "optimizer")
    return [np.asarray(v.value) for kind in kinds for _, v in state[kind]]


def functional():
    inputs = keras.Input((16,))
    x = keras.layers.Dense(8)(inputs)
    shared = keras.layers.Dense(8, name="shared")
    return keras.Model(inputs, shared(shared(x)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(8)
        self.blocks = [keras.layers.Dense(8) for _ in range(3)]

    def call(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def subclassed():
    model = Subclassed()
    model(X[:8])
    return model


def nested():
    inner = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(16)])
    return keras.Sequential([inner, mlp()])
