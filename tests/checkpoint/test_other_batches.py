"""A fit that resumes within an epoch, with other batches than those with which it was begun."""

import logging

import keras
import numpy as np
import pytest
from helpers import Stop
from pydatasets import in_batches

import keras_tpu_dist as ktd

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
MESH = {"data": 4, "model": 2}


class Stops(keras.callbacks.Callback):
    """Notes the batches of each epoch, and interrupts after a number of them."""

    def __init__(self, after=None):
        super().__init__()
        self.left, self.epochs = after, {}

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs[epoch] = []

    def on_train_batch_end(self, batch, logs=None):
        self.epochs[max(self.epochs)].append(batch)
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise Stop


def of_unknown_length(rows, size):
    tf = pytest.importorskip("tensorflow")
    spec = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 2)))

    def batches():
        for i in range(0, rows, size):
            yield X[i : i + size], X[i : i + size, :2]

    return tf.data.Dataset.from_generator(batches, output_signature=spec)


INPUTS = {
    "arrays": lambda rows, size: {"x": X[:rows], "y": X[:rows, :2], "batch_size": size},
    "pydataset": lambda rows, size: {"x": in_batches(size, X[:rows], X[:rows, :2])},
    "unknown length": lambda rows, size: {"x": of_unknown_length(rows, size)},
    "steps": lambda rows, size: {
        "x": X,
        "y": X[:, :2],
        "batch_size": size,
        "steps_per_epoch": -(-rows // size),
    },
}


def resumed(tmp_path, first, then, feed="arrays", steps=1):
    """A fit with the input `first` that stops after 5 batches, and goes on with `then`."""
    keras.utils.set_random_seed(1)
    with ktd.TPUStrategy(MESH).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("adam", "mse", steps_per_execution=steps)
    for rows_and_size, stops in ((first, Stops(max(5 // steps, 1))), (then, Stops())):
        saved = ktd.callbacks.Checkpoint(tmp_path / "run", every_steps=1)
        options = {
            "epochs": 3,
            "verbose": 0,
            "callbacks": [saved, stops],
            "shuffle": feed == "arrays",
        }
        try:
            history = model.fit(**INPUTS[feed](*rows_and_size), **options)
        except Stop:
            continue
    return history, stops.epochs


@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("feed", "then"),
    [
        ("arrays", (64, 22)),
        pytest.param("arrays", (60, 8), marks=pytest.mark.slow),
        pytest.param("arrays", (20, 8), marks=pytest.mark.slow),
        pytest.param("arrays", (64, 9), marks=pytest.mark.slow),
        pytest.param("pydataset", (64, 22), marks=pytest.mark.slow),
        pytest.param("pydataset", (13, 8), marks=pytest.mark.slow),
        pytest.param("steps", (24, 8), marks=pytest.mark.slow),
        pytest.param("steps", (24, 11), marks=pytest.mark.slow),
    ],
)
def test_the_epoch_begins_anew(feed, then, steps, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        history, epochs = resumed(tmp_path, (64, 8), then, feed, steps)
    assert caplog.text.count("the epoch cannot be continued as it was begun") == 1
    assert "of 8 an epoch" in caplog.text
    number = -(-then[0] // then[1])
    # All batches of each epoch; Keras counts the last launch of several steps as a whole one.
    whole = list(range(steps - 1, number + (steps - 1 if number % steps else 0), steps))
    assert list(epochs.values()) == [whole] * 3
    assert history.epoch == [0, 1, 2]
    assert len(history.history["loss"]) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_epoch_of_unknown_length_ends_with_its_logs(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        history, epochs = resumed(tmp_path, (64, 8), (64, 22), "unknown length")
    assert caplog.text.count("the epoch ends without further steps") == 1
    assert [len(each) for each in epochs.values()][1:] == [3, 3]
    assert len(history.history["loss"]) == 3
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.slow
def test_more_steps_of_the_same_batches_go_on(tmp_path, caplog):
    history, epochs = resumed(tmp_path, (56, 8), (64, 8), "steps")
    assert "cannot be continued" not in caplog.text
    assert [each[-1] for each in epochs.values()] == [7, 7, 7]
    assert len(history.history["loss"]) == 3


@pytest.mark.slow
def test_other_batches_between_epochs_are_nothing_to_say(tmp_path, caplog):
    history, _ = resumed(tmp_path, (40, 8), (64, 22))
    assert "cannot be continued" not in caplog.text
    assert history.epoch == [0, 1, 2]
    assert len(history.history["loss"]) == 3
