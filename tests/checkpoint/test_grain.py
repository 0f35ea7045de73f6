"""Grain's inputs go on from their own state: nothing is read twice, and what comes is the same."""

import logging

import keras
import numpy as np
import pytest
from helpers import At, Stop, assert_close
from test_checkpoint import BATCH, EPOCHS, ROWS, X, Y, made

import keras_tpu_dist as ktd
from keras_tpu_dist.input.iterator import DeviceIterator

grain = pytest.importorskip("grain")
# Keras's, of every input whose length it does not know.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


class Source:
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return X[index], Y[index]


def shuffled(repeated=1):
    rows = grain.MapDataset.source(Source()).seed(3).shuffle().repeat(repeated)
    return rows.to_iter_dataset().batch(BATCH)


def loader():
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=5, num_epochs=1)
    return grain.DataLoader(
        data_source=Source(), sampler=sampler, operations=[grain.transforms.Batch(BATCH)]
    )


FEEDS = {
    "dataset": lambda: {"x": shuffled()},
    "dataset in parts": lambda: {"x": shuffled(9), "steps_per_epoch": 4},
    "loader": lambda: {"x": loader()},
}


@pytest.fixture
def reads(monkeypatch):
    """How many batches were read of inputs of `fit`."""
    counted = []
    stock = DeviceIterator._read

    def read(iterator):
        counted.append(1)
        return stock(iterator)

    monkeypatch.setattr(DeviceIterator, "_read", read)
    return counted


def fit(model, feed, *callbacks):
    fed = FEEDS[feed]()
    return model.fit(**fed, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[*callbacks])


@pytest.mark.parametrize(
    ("feed", "stop", "steps"),
    [
        pytest.param("dataset", 8, 1, marks=pytest.mark.slow),
        pytest.param("dataset", 3, 4, marks=pytest.mark.slow),
        pytest.param("dataset in parts", 6, 1, marks=pytest.mark.slow),
        pytest.param("dataset in parts", 4, 2, marks=pytest.mark.slow),
        pytest.param("loader", 8, 1, marks=pytest.mark.slow),
    ],
)
def test_goes_on_without_reading_again(feed, stop, steps, tmp_path, reads):
    whole = made(ktd.TPUStrategy())
    expected = fit(whole, feed).history
    all_reads = len(reads)
    first = ktd.callbacks.Checkpoint(tmp_path, every_steps=2)
    with pytest.raises(Stop):
        fit(made(ktd.TPUStrategy(), steps), feed, first, At(stop))
    done = ktd.callbacks.Checkpoint(tmp_path).steps[-1]
    reads.clear()
    again = made(ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel"), steps)
    history = fit(again, feed, ktd.callbacks.Checkpoint(tmp_path, every_steps=2))
    # The read that finds an epoch's end counts too.
    assert len(reads) <= all_reads - done + 1
    for name, values in expected.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, atol=1e-5)
    assert_close(again.get_weights(), whole.get_weights())


@pytest.mark.slow
def test_another_input_is_read_from_its_start(tmp_path, caplog, reads):
    saved = ktd.callbacks.Checkpoint(tmp_path, every_steps=2)
    with pytest.raises(Stop):
        fit(made(ktd.TPUStrategy()), "dataset", saved, At(8))
    whole = made(ktd.TPUStrategy())
    fit(whole, "loader")
    reads.clear()
    with caplog.at_level(logging.WARNING):
        again = made(ktd.TPUStrategy())
        fit(again, "loader", ktd.callbacks.Checkpoint(tmp_path))
    assert "does not accept the state in the checkpoint" in caplog.text
    assert len(reads) == 2 * (len(Source()) // BATCH + 2)
    assert np.isfinite(keras.ops.convert_to_numpy(again.get_weights()[0])).all()
