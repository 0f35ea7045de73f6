"""Models whose layers are assigned to logical devices."""

from collections.abc import Callable

import keras
import numpy as np
from keras import layers as kl

import keras_tpu_dist as ktd

ROWS = tuple(range(1, 18))
MESHES = ("4x2", "2x4")


def dense() -> keras.Model:
    x = keras.Input((6,))
    one = ktd.assign(kl.Dense(16, activation="relu"), 0)(x)
    other = ktd.assign(kl.Dense(16), 1)(x)
    return keras.Model(x, kl.Dense(2)(kl.Add()([one, other])))


def normalized() -> keras.Model:
    x = keras.Input((6,))
    # Without a bias: of its gradient normalization leaves nothing but rounding.
    before = kl.Dense(8, use_bias=False)
    inner = keras.Sequential([before, kl.BatchNormalization(), kl.Dense(8)])
    return keras.Model(x, kl.Dense(2)(ktd.assign(inner, 1)(x)))


@keras.saving.register_keras_serializable("conformance")
class Neighbours(keras.Layer):
    """Adds each row's next one, so that rows are exchanged also where they divide."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        x = x * self.scale
        return x + keras.ops.roll(x, 1, axis=0) + keras.ops.flip(x, axis=0)


def in_turn() -> keras.Model:
    """What one device computes is normalized by the other, which aborted the process at 10 rows."""
    x = keras.Input((6,))
    y = ktd.assign(kl.Dense(16, use_bias=False), 0)(x)
    return keras.Model(x, kl.Dense(2)(ktd.assign(kl.BatchNormalization(), 1)(y)))


def neighbours() -> keras.Model:
    x = keras.Input((6,))
    return keras.Model(x, kl.Dense(2)(ktd.assign(Neighbours(), 1)(x)))


CASES: dict[str, Callable[[], keras.Model]] = {
    f.__name__: f for f in (dense, normalized, in_turn, neighbours)
}


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    x, y = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 2))
    return x.astype("float32"), y.astype("float32")
