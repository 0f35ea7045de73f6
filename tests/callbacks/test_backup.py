"""Training that is killed in the middle of an epoch and goes on ends with the same weights."""

import pathlib
import signal
import subprocess
import sys

import keras
import pytest
from helpers import At, assert_close, built, compiled, data, terminate

import keras_tpu_dist as ktd
from keras_tpu_dist.callbacks import BackupAndRestore, Checkpoint
from keras_tpu_dist.checkpoint import reader
from keras_tpu_dist.checkpoint.reader import CheckpointReader

# 19 batches an epoch, the last one ragged: with N=4 launches of 4, 4, 4, 4, and 3 single steps.
X, Y = data(4 * 18 + 3)
FIT = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}


class Preempted(Exception):
    """Raised by the handler that a program had for SIGTERM."""


def build(n=4):
    return compiled(
        keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, use_bias=False, name="hidden"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(3, activation="softmax", name="out"),
            ]
        ),
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 60)),
        "sparse_categorical_crossentropy",
        steps_per_execution=n,
    )


class Kill(keras.callbacks.Callback):
    """Sends this process SIGTERM in an epoch, while a launch runs."""

    def __init__(self, epoch, batch, times=1):
        super().__init__()
        self.at, self.times = (epoch, batch), times

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            terminate(self.times)


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


def _steps(folder):
    return Checkpoint(folder).steps


def _position(folder):
    store = CheckpointReader(folder)
    training = store.manifest(store.steps[-1]).training
    return training["epoch"], training["done"]


def _assert_never_stopped(model, history, uninterrupted):
    assert_close(_state(model), uninterrupted[0])
    assert history.epoch == list(range(FIT["epochs"]))
    assert_close(history.history, uninterrupted[1])


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
    epoch, done = _position(tmp_path / "backup")
    assert epoch == 1
    assert done in (12, 16)
    model, history = _resumed(BackupAndRestore(tmp_path / "backup"))
    _assert_never_stopped(model, history, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epoch", "batch", "saved", "n"),
    [(0, 0, (0, 4), 5), (1, 16, (1, 17), 4)],
)
def test_sigterm_finishes_the_launch_saves_and_goes_on(
    tmp_path, handler, uninterrupted, epoch, batch, saved, n
):
    model = built(build, ktd.TPUStrategy({"data": 4, "model": 2}))
    backup = BackupAndRestore(tmp_path / "backup")
    with pytest.raises(Preempted):
        model.fit(X, Y, **FIT, callbacks=[Kill(epoch, batch), backup])
    assert _position(tmp_path / "backup") == saved
    assert int(model.optimizer.iterations) == 19 * epoch + saved[1]
    model, history = _resumed(BackupAndRestore(tmp_path / "backup"), n)
    _assert_never_stopped(model, history, uninterrupted)
    assert not (tmp_path / "backup").exists()


@pytest.mark.slow
def test_a_crash_goes_back_to_the_last_backup(tmp_path, handler, uninterrupted):
    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 11 and int(self.model.optimizer.iterations) > 19:
                raise OSError("power cut")

    model = built(build, ktd.TPUStrategy())
    backup = BackupAndRestore(tmp_path / "backup", save_freq=8)
    with pytest.raises(OSError, match="power cut"):
        model.fit(X, Y, **FIT, callbacks=[Crash(), backup])
    # Saved after steps 8 and 16, and by the first launch that ends 8 or more later.
    assert _position(tmp_path / "backup") == (1, 8)
    model, history = _resumed(BackupAndRestore(tmp_path / "backup", save_freq=8))
    _assert_never_stopped(model, history, uninterrupted)


def test_a_second_signal_waits_for_the_backup(tmp_path, handler):
    model = built(build, ktd.TPUStrategy())
    with pytest.raises(Preempted):
        model.fit(
            X, Y, **FIT, callbacks=[Kill(0, 4, times=2), BackupAndRestore(tmp_path / "backup")]
        )
    assert int(model.optimizer.iterations) == 8
    assert _position(tmp_path / "backup") == (0, 8)


@pytest.mark.parametrize(
    "at", [pytest.param("on_epoch_end", marks=pytest.mark.slow), "on_train_end"]
)
def test_sigterm_after_the_last_launch_leaves_the_backup(tmp_path, handler, at):
    model = built(build, ktd.TPUStrategy())
    with pytest.raises(Preempted):
        model.fit(
            X,
            Y,
            **{**FIT, "epochs": 1},
            callbacks=[At(1, terminate, at), BackupAndRestore(tmp_path / "backup")],
        )
    assert _steps(tmp_path / "backup") == [19]


def test_sigterm_can_be_left_alone(tmp_path, handler):
    model = built(build, ktd.TPUStrategy())
    backup = BackupAndRestore(tmp_path / "backup", on_sigterm=False)
    with pytest.raises(Preempted):
        model.fit(X, Y, **FIT, callbacks=[Kill(0, 4), backup])
    assert not _steps(tmp_path / "backup")


def test_without_a_strategy(tmp_path):
    backup = BackupAndRestore(tmp_path / "backup", save_freq=8)
    with pytest.raises(ValueError, match=r"need the loop of a TPUStrategy.*every_steps=8"):
        built(build, None).fit(X, Y, **FIT, callbacks=[backup])
    model = built(build, None)
    backup = BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    model.fit(X, Y, **FIT, callbacks=[backup])
    assert _steps(tmp_path / "backup") == [3 * 19]


def test_a_finished_training_leaves_nothing(tmp_path):
    backup = BackupAndRestore(tmp_path / "backup")
    model = built(build, ktd.TPUStrategy())
    for epochs in (1, 2):  # not gone on with: the second begins anew
        history = model.fit(X, Y, **{**FIT, "epochs": epochs}, callbacks=[backup])
        assert history.epoch == list(range(epochs))
        assert not (tmp_path / "backup").exists()


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
def test_how_many_are_kept(tmp_path, double):
    backup = BackupAndRestore(
        tmp_path / "backup", 8, double_checkpoint=double, delete_checkpoint=False
    )
    built(build, ktd.TPUStrategy()).fit(X, Y, **{**FIT, "epochs": 1}, callbacks=[backup])
    assert _steps(tmp_path / "backup") == ([16, 19] if double else [19])


def test_a_backup_in_a_bucket_is_seen_and_deleted(tmp_path, monkeypatch):
    assert str(reader.folder("gs://bucket/backup")) == "gs://bucket/backup"
    bucket = reader.folder(tmp_path / "bucket")
    for module in ("checkpoint", "backup"):
        monkeypatch.setattr(f"keras_tpu_dist.callbacks.{module}.folder", lambda path: bucket)
    monkeypatch.setattr(
        "keras_tpu_dist.callbacks.checkpoint.CheckpointReader",
        lambda *args, **options: CheckpointReader(bucket),
    )
    backup = BackupAndRestore("gs://bucket/backup")
    assert backup.steps == []
    (bucket / "7").mkdir(parents=True)
    assert backup.steps == []  # not whole
    for part in ("arrays", "manifest"):
        (bucket / "7" / part).mkdir()
    (bucket / "7/manifest/metadata").write_text("{}")
    assert backup.steps == [7]
    backup._ended = True
    backup.after_fit()
    assert not bucket.exists()
