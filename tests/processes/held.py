"""Models whose layers keep arrays that are no variables; `test_held.py` compares with one device.

python -m keras_tpu_dist launch --processes 2 --devices 4 held.py FOLDER CASE ...
"""

import pathlib
import sys

import jax
import keras
import numpy as np
from keras import layers, ops

import keras_tpu_dist as ktd

NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(29, 8)).astype("float32")
Y = NUMBERS.normal(size=(29, 4)).astype("float32")
SEQUENCES = NUMBERS.normal(size=(24, 6, 8)).astype("float32")


class Scaled(layers.Layer):
    """Multiplies by an array that its first build computed from a weight."""

    def __init__(self, compiled=False, **kwargs):
        super().__init__(**kwargs)
        self._compiled = compiled

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
        self.scale = ops.abs(self.kernel.value) + 1

    def call(self, x):
        def scaled(x):
            return x @ (self.scale / 4)

        return x @ self.kernel + (jax.jit(scaled) if self._compiled else scaled)(x)


class Kept(layers.Layer):
    """Multiplies by the array that its weight has first, and by an array of this process alone."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
        self.first = self.kernel.value
        self.here = jax.device_put(np.linspace(0.5, 1, 8, dtype="float32"), jax.local_devices()[0])

    def call(self, x):
        return x @ (self.kernel + self.first * self.here)


def kept():
    return [keras.Input((8,)), Kept(), layers.Dense(4)]


def normalized():
    first = layers.Normalization()
    first.adapt(X)
    return [keras.Input((8,)), first, layers.Dense(4)]


def scaled(**options):
    return [keras.Input((8,)), Scaled(**options), layers.Dense(4)]


def stateful():
    return [keras.Input(batch_shape=(8, 6, 8)), layers.LSTM(8, stateful=True), layers.Dense(4)]


# Layers, options of the strategy, and of `compile`.
CASES = {
    "normalized": (normalized, {}, {}),
    "normalized, launches": (normalized, {}, {"steps_per_execution": 4}),
    "normalized, eager": (normalized, {}, {"run_eagerly": True}),
    "scaled": (scaled, {}, {}),
    "scaled, remat": (scaled, {"remat": "full"}, {}),
    "scaled, compiled": (lambda: scaled(compiled=True), {}, {}),
    "stateful": (stateful, {}, {}),
    "kept": (kept, {}, {}),
    "kept, donated": (kept, {"donate_state": True}, {}),
    "kept, launches": (kept, {"donate_state": True}, {"steps_per_execution": 4}),
}


def results(case, strategy):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    made, on_mesh, compiled = CASES[case]
    with strategy(**on_mesh).scope():
        model = keras.Sequential(made())
        model.compile("sgd", "mse", **compiled)
    x, y, rows = (SEQUENCES, Y[:24], 8) if case == "stateful" else (X, Y, 13)
    model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), model.predict(x, batch_size=rows, verbose=0)]


def main(folder, *cases):
    ktd.initialize(timeout_s=240, peer_timeout_s=120)

    def strategy(**options):
        plan = ktd.Planner("fsdp", min_size=4)
        return ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2}, plan, **options)

    for case in cases:
        found = results(case, strategy)
        if jax.process_index() == 0:
            np.savez(pathlib.Path(folder) / f"{case}.npz", *found)


if __name__ == "__main__":
    main(*sys.argv[1:])
