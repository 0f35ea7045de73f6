"""Training that is killed in the middle of an epoch and goes on ends with the same weights."""

import json
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import assert_close, built, data

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks import BackupAndRestore

# 19 batches an epoch, the last one ragged: with N=4 launches of 4, 4, 4, 4, and 3 single steps.
X, Y = data(4 * 18 + 3)
FIT = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}


class Preempted(Exception):
    """Raised by the handler that a program had for SIGTERM."""


def build(n=4):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, use_bias=False, name="hidden"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3, activation="softmax", name="out"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 60)),
        "sparse_categorical_crossentropy",
        steps_per_execution=n,
    )
    return model


class Kill(keras.callbacks.Callback):
    """Sends this process SIGTERM in an epoch, while a launch runs."""

    def __init__(self, epoch, batch, times=1):
        super().__init__()
        self.at, self.times = (epoch, batch), times

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def handler():
    def raise_preempted(number, frame):
        raise Preempted

    before = signal.signal(signal.SIGTERM, raise_preempted)
    yield raise_preempted
    assert signal.getsignal(signal.SIGTERM) is raise_preempted
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def uninterrupted():
    model = built(build, ktd.TPUStrategy({"data": 4, "model": 2}))
    history = model.fit(X, Y, **FIT).history
    return _state(model), history


def _state(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def _resumed(backup, n=4, strategy=None, **fit):
    model = built(lambda: build(n), strategy or ktd.TPUStrategy(), seed=7)
    history = model.fit(X, Y, **FIT, callbacks=[backup], **fit)
    return model, history


CHILD = """
import sys
sys.path[:0] = {folders!r}
import conftest, keras, test_backup
import keras_tpu_dist as ktd
from helpers import built

class Say(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("batch", batch, flush=True)
        if batch == 11:
            sys.stdin.readline()

model = built(test_backup.build, ktd.TPUStrategy({{"data": 4, "model": 2}}))
backup = ktd.callbacks.BackupAndRestore(sys.argv[1])
model.fit(test_backup.X, test_backup.Y, callbacks=[Say(), backup], **test_backup.FIT)
"""


@pytest.mark.slow
def test_sigterm_from_outside(tmp_path, uninterrupted):
    code = CHILD.format(folders=[str(folder) for folder in pathlib.Path(__file__).parents[:2]])
    command = [sys.executable, "-c", code, str(tmp_path / "backup")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:

        def go_on():
            child.stdin.write("\n")
            child.stdin.flush()

        # The child waits for us in the third launch of each epoch; in the second it is killed.
        waits = 0
        for line in child.stdout:
            waits += line == "batch 11\n"
            if waits == 2:
                break
            if line == "batch 11\n":
                go_on()
        child.send_signal(signal.SIGTERM)
        go_on()
        rest = child.stdout.read()
    assert child.returncode == -signal.SIGTERM
    assert rest in ("", "batch 15\n")
    metadata = json.loads((tmp_path / "backup/training_metadata.json").read_text())
    assert metadata["epoch"] == 1
    assert metadata["batches_done"] in (12, 16)
    model, history = _resumed(BackupAndRestore(tmp_path / "backup"))
    assert history.epoch == [1, 2]
    assert_close(_state(model), uninterrupted[0])
    assert_close(history.history["loss"][-1], uninterrupted[1]["loss"][-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epoch", "batch", "saved", "n"),
    [(0, 0, (0, 4), 5), (1, 16, (1, 20), 4)],
)
def test_sigterm_finishes_the_launch_saves_and_goes_on(
    tmp_path, handler, uninterrupted, epoch, batch, saved, n
):
    model = built(build, ktd.TPUStrategy({"data": 4, "model": 2}))
    backup = BackupAndRestore(tmp_path / "backup")
    with pytest.raises(Preempted):
        model.fit(X, Y, **FIT, callbacks=[Kill(epoch, batch), backup])
    assert _keras.backup_position(backup) == saved
    done = 19 * epoch + min(batch + 4, 19)
    assert int(model.optimizer.iterations) == done
    model, history = _resumed(BackupAndRestore(tmp_path / "backup"), n)
    assert_close(_state(model), uninterrupted[0])
    assert history.epoch == list(range(epoch, 3))
    # Whole epochs after the one that was interrupted have the logs they would have had.
    assert_close(history.history["loss"][-1], uninterrupted[1]["loss"][-1])
    assert not (tmp_path / "backup").exists()


@pytest.mark.slow
def test_a_crash_goes_back_to_the_last_backup(tmp_path, handler, uninterrupted):
    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 15 and int(self.model.optimizer.iterations) > 19:
                raise OSError("power cut")

    model = built(build, ktd.TPUStrategy())
    backup = BackupAndRestore(tmp_path / "backup", save_freq=8)
    with pytest.raises(OSError, match="power cut"):
        model.fit(X, Y, **FIT, callbacks=[Crash(), backup])
    # Saved after batches 8, 16 and 24: 24 is the fifth, so the eighth, of the second epoch.
    assert _keras.backup_position(backup)[0] == 1
    assert 0 < _keras.backup_position(backup)[1] < 16
    model, _ = _resumed(BackupAndRestore(tmp_path / "backup", save_freq=8))
    assert_close(_state(model), uninterrupted[0])


def test_a_second_signal_is_not_held_back(tmp_path, handler):
    model = built(build, ktd.TPUStrategy())
    with pytest.raises(Preempted):
        model.fit(
            X, Y, **FIT, callbacks=[Kill(0, 4, times=2), BackupAndRestore(tmp_path / "backup")]
        )
    assert int(model.optimizer.iterations) == 4
    assert not (tmp_path / "backup").exists()


def test_sigterm_can_be_left_alone(tmp_path, handler):
    model = built(build, ktd.TPUStrategy())
    backup = BackupAndRestore(tmp_path / "backup", on_sigterm=False)
    with pytest.raises(Preempted):
        model.fit(X, Y, **FIT, callbacks=[Kill(0, 4), backup])
    assert not (tmp_path / "backup").exists()


def test_without_a_strategy(tmp_path):
    with pytest.raises(ValueError, match="TPUStrategy"):
        built(build, None).fit(X, Y, **FIT, callbacks=[BackupAndRestore(tmp_path / "backup")])
    assert np.isfinite(X).all()
