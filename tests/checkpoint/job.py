"""A training that `kill.py` kills and starts again: one of the runs of `RUNS`, on some mesh."""

import json
import pathlib
import sys
import time

import jax
import keras
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from pydatasets import in_batches

import keras_tpu_dist as ktd

ROWS, BATCH, EPOCHS = 53, 8, 4
X = np.random.default_rng(0).normal(size=(ROWS, 12)).astype("float32")
Y = X[:, :4]
MESHES = {
    "data": ({"data": -1}, None),
    "fsdp": ({"fsdp": -1}, "fsdp"),
    "tensor": ({"data": 2, "model": -1}, "tensor_parallel"),
    "cube": ({"data": 2, "fsdp": 2, "model": -1}, "auto"),
}
# Input, steps of a launch, optimizer, how often to save.
RUNS = {
    "arrays": ("arrays", 1, "momentum", {"every_steps": 3}),
    "launches": ("arrays", 8, "adam", {"every_steps": 5}),
    "pydataset": ("pydataset", 1, "accumulation", {"every_steps": 4}),
    "grain": ("grain", 1, "adam", {"every_steps": 3}),
    "epochs": ("arrays", 8, "momentum", {"every_epochs": 1}),
}


def fed(kind):
    if kind == "arrays":
        return {"x": X, "y": Y, "batch_size": BATCH}
    if kind == "pydataset":
        return {"x": in_batches(BATCH, X, Y)}
    import grain

    rows = grain.MapDataset.range(ROWS).seed(3).shuffle()
    return {"x": rows.map(lambda i: (X[i], Y[i])).batch(BATCH)}


def optimizer(kind):
    return {
        "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    }[kind]()


def network(dropout=0.2):
    """A model with random and with moving state."""
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(4),
        ]
    )


class Slow(keras.callbacks.Callback):
    """Leaves time to be killed in."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)

    def on_test_batch_end(self, batch, logs=None):
        time.sleep(0.03)


def main(name, mesh, directory, result):
    ktd.initialize(timeout_s=60, peer_timeout_s=8)
    feed, steps, kind, every = RUNS[name]
    keras.utils.set_random_seed(2)
    with ktd.TPUStrategy(*MESHES[mesh]).scope():
        model = network()
        model.compile(optimizer(kind), "mse", metrics=["mae"], steps_per_execution=steps)
    callbacks = [ktd.callbacks.Checkpoint(directory, **every), Slow()]
    print("begins", flush=True)
    history = model.fit(
        **fed(feed),
        epochs=EPOCHS,
        verbose=0,
        validation_data=(X[:9], Y[:9]),
        callbacks=callbacks,
    )
    weights = [w.tolist() for w in model.get_weights()]
    if jax.process_index() == 0:
        with open(result, "w") as file:
            json.dump({"weights": weights, "history": history.history}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
