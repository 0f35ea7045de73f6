"""Trainings that stop and go on, on every kind of input: the weights are those of one that did not.

    python tests/_keras/resume.py           # prints the largest difference of each as JSON

Every case trains whole, trains until it fails, and goes on in a new model with other numbers.
`versions.py` runs it with other versions of Keras, tests/checkpoint/test_keras316.py a few cases by
Keras 3.16's rules.
"""

import contextlib
import functools
import json
import os
import random
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    # They compile much and run little.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import keras_tpu_dist as ktd

if __name__ == "__main__":
    ktd.simulate(8)

import keras
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from pydatasets import in_batches

ROWS, BATCH, EPOCHS = 45, 8, 5
X = np.random.default_rng(0).normal(size=(ROWS, 12)).astype("float32")
Y = X[:, :4]


def parallel():
    """A PyDataset whose batches workers make ahead, in the order of the epoch."""
    batches = in_batches(BATCH, X, Y)
    keras.utils.PyDataset.__init__(batches, workers=2)
    return batches


def from_tf():
    """A `tf.data.Dataset` that is shuffled, in every epoch in the same way."""
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    return rows.shuffle(ROWS, seed=3, reshuffle_each_iteration=False).batch(BATCH)


INPUTS = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays in parts": lambda: {"x": X, "y": Y, "batch_size": BATCH, "steps_per_epoch": 3},
    "rows of batches": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": "batch"},
    "pydataset": lambda: {"x": in_batches(BATCH, X, Y), "shuffle": True},
    "pydataset of workers": lambda: {"x": parallel(), "shuffle": True},
    "generator": lambda: {
        "x": in_batches(BATCH, X, Y).endless(),
        "steps_per_epoch": 4,
        "shuffle": False,
    },
    "tf.data": lambda: {"x": from_tf()},
}
# After how many steps training fails, and how often it was saved.
STOPS = {
    "in the first epoch": (5, {"every_steps": 2}),
    "in a later epoch": (11, {"every_steps": 2}),
    "after an epoch": (11, {"every_epochs": 1}),
    "after several epochs": (13, {"every_epochs": 1}),
}


class Stop(Exception):
    """Ends a training."""


class StopAfter(keras.callbacks.Callback):
    """Fails after a number of train batches."""

    def __init__(self, batches):
        super().__init__()
        self.left, self.last = batches, -1

    def on_epoch_begin(self, epoch, logs=None):
        """Begins to count from 0, as Keras does."""
        self.last = -1

    def on_train_batch_end(self, batch, logs=None):
        """Counts; a launch ends several batches."""
        self.left -= batch - self.last
        self.last = batch
        if self.left <= 0:
            raise Stop


def trained(feed, strategy, *callbacks, steps=1, numbers=None):
    """The weights after a fit, and how it went; `numbers` seeds NumPy's and Python's numbers."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential(
            [keras.Input((12,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=steps)
    if numbers is not None:
        np.random.seed(numbers)
        random.seed(numbers)
    data = INPUTS[feed]()
    history = model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=list(callbacks))
    return [*model.get_weights(), history.history["loss"]]


def difference(feed, stop, *, steps=1, stock=False):
    """The largest difference between a training that stopped and went on, and a whole one."""
    after, every = STOPS[stop]
    one = None if stock else ktd.TPUStrategy()
    other = None if stock else ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2}, "fsdp")
    whole = whole_training(feed, stock)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(Stop):
            saved = ktd.callbacks.Checkpoint(folder, **every)
            trained(feed, one, saved, StopAfter(after), steps=steps)
            raise AssertionError("it did not stop")
        saved = ktd.callbacks.Checkpoint(folder, **every)
        again = trained(feed, other, saved, steps=steps, numbers=99)
    return max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in zip(whole, again))


@functools.cache
def whole_training(feed, stock):
    """What `trained` returns without a stop; to be made anew when Keras's rules change."""
    return trained(feed, None if stock else ktd.TPUStrategy())


def cases():
    """All pairs of input and stop that are possible here."""
    with_tf = True
    try:
        import tensorflow  # noqa: F401
    except ImportError:
        with_tf = False
    return [(f, s) for f in INPUTS for s in STOPS if with_tf or f != "tf.data"]


def main():
    """Prints the largest difference of every case, by its words."""
    found = {f"{feed}, {stop}": difference(feed, stop) for feed, stop in cases()}
    for feed in ("arrays", "pydataset"):
        found[f"{feed}, after several epochs, no strategy"] = difference(
            feed, "after several epochs", stock=True
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
