"""What follows a run: checkpoints that stay for long, and new ones as they come."""

import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from helpers import At, Stop, assert_close

import keras_tpu_dist as ktd
from keras_tpu_dist.callbacks import Checkpoint
from keras_tpu_dist.checkpoint.keeping import Keep, Known, staying

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")


def made():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with ktd.TPUStrategy({"data": 4, "model": 2}).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile("adam", "mse")
    return model


def fit(model, *callbacks, epochs=6):
    return model.fit(X, X, epochs=epochs, batch_size=16, verbose=0, callbacks=list(callbacks))


@pytest.mark.parametrize(
    ("hours", "stay"),
    [
        ([0, 1, 2, 3, 4, 5, 6], {1, 4, 7}),
        ([0, 2, 4, 6, 8], {1, 3, 5}),
        ([5, 5, 5, 9], {1, 4}),  # a clock that was set back: see `Store.save`
    ],
)
def test_one_stays_of_so_many_hours(hours, stay):
    known: dict[int, Known] = {}
    for step, hour in enumerate(hours, 1):
        # As in a run: each time what does not stay is gone.
        known[step] = Known(True, at_s=3600.0 * hour)
        stays = staying(known, Keep(1, every_s=3 * 3600.0))
        known = {each: known[each] for each in stays}
    assert set(known) == stay


def test_a_run_keeps_one_of_so_many_hours(tmp_path, monkeypatch):
    hours = iter(range(9))
    clock = SimpleNamespace(time=lambda: 1.8e9 + 3600 * next(hours))
    monkeypatch.setattr("keras_tpu_dist.checkpoint.store.time", clock)
    saved = Checkpoint(tmp_path, keep=1, keep_every_hours=2)
    fit(made(), saved)
    assert saved.steps == [2, 6, 10, 12]
    fit(made(), Checkpoint(tmp_path, keep=1, keep_every_hours=2), epochs=8)
    assert saved.steps == [2, 6, 10, 14, 16]


class Waits(keras.callbacks.Callback):
    """Trains on once somebody has seen the checkpoint of the epoch before."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            assert self.seen.acquire(timeout=60)


def test_checkpoints_as_they_come(tmp_path, monkeypatch):
    """Evaluation beside training sees each, and ends with the run."""
    monkeypatch.setattr("keras_tpu_dist.checkpoint.follow._POLL_S", 0.01)
    directory, seen = tmp_path / "run", threading.Semaphore(0)
    model, beside = made(), made()
    train = threading.Thread(target=fit, args=(model, Waits(seen), Checkpoint(directory)))
    found = []
    iterator = ktd.checkpoints(directory, timeout_s=60)
    train.start()
    for step in iterator:
        ktd.restore(beside, directory, step=step)
        found.append(step)
        seen.release()
    train.join()
    assert found == [2, 4, 6, 8, 10, 12]
    assert_close(beside.get_weights(), model.get_weights())
    # Who comes late gets the last one, and no more.
    assert list(ktd.checkpoints(directory)) == [12]


def test_it_ends_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("keras_tpu_dist.checkpoint.follow._POLL_S", 0.01)
    began = time.monotonic()
    assert list(ktd.checkpoints(tmp_path / "none", timeout_s=0.2)) == []
    assert 0.2 < time.monotonic() - began < 5

    with pytest.raises(Stop):
        fit(made(), Checkpoint(tmp_path / "run"), At(3, method="on_epoch_end"))
    assert list(ktd.checkpoints(tmp_path / "run", timeout_s=0.2)) == [4]
    fit(made(), Checkpoint(tmp_path / "run"), epochs=3)
    assert list(ktd.checkpoints(tmp_path / "run")) == [6]


def test_a_run_that_goes_on_has_not_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("keras_tpu_dist.checkpoint.follow._POLL_S", 0.01)
    fit(made(), Checkpoint(tmp_path), epochs=1)
    ends = []

    class Looks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            began = time.monotonic()
            assert list(ktd.checkpoints(tmp_path, timeout_s=0.2))
            ends.append(time.monotonic() - began > 0.2)

    fit(made(), Checkpoint(tmp_path), Looks(), epochs=3)
    assert ends == [True, True]
    fit(made(), Checkpoint(tmp_path), epochs=3)  # nothing is left to do
    assert list(ktd.checkpoints(tmp_path)) == [6]


def test_a_run_that_returns_to_an_earlier_step_is_followed(tmp_path):
    """What was written later but has a smaller number was never yielded."""
    value = keras.Variable(1.0)
    with ktd.LoopCheckpoint(tmp_path, value) as saved:
        for step in (10, 20, 30):
            saved.save(step)
        found = ktd.checkpoints(tmp_path, timeout_s=3)
        assert next(found) == 30
        saved.restore(step=10)
        saved.save(15)
        assert next(found) == 15
        saved.save(15)
        assert next(found) == 15
        assert list(found) == []
