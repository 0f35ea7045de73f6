"""Training that is killed in the middle of an epoch and goes on ends with the same weights."""

import signal

import keras
import pytest
from helpers import At, assert_close, built, data, sequential, terminate

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
    return sequential(
        6,
        keras.layers.Dense(16, use_bias=False, name="hidden"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3, activation="softmax", name="out"),
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 60)),
        loss="sparse_categorical_crossentropy",
        steps_per_execution=n,
    )


@pytest.fixture
def handler():
    def raise_preempted(number, frame):
        raise Preempted

    before = signal.signal(signal.SIGTERM, raise_preempted)
    yield raise_preempted
    assert signal.getsignal(signal.SIGTERM) is raise_preempted
    signal.signal(signal.SIGTERM, before)


def _steps(folder):
    return Checkpoint(folder).steps


@pytest.mark.slow
@pytest.mark.parametrize(("launches", "saved", "n"), [(1, 4, 5), (10, 19 + 17, 4)])
def test_sigterm_finishes_the_launch_saves_and_goes_on(tmp_path, handler, launches, saved, n):
    def trained(*callbacks, n=4, mesh=None):
        model = built(lambda: build(n), ktd.TPUStrategy(mesh or {"data": 4, "model": 2}))
        history = model.fit(X, Y, **FIT, callbacks=[*callbacks, backup()]).history
        state = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
        return [state, history]

    def backup():
        return BackupAndRestore(tmp_path / "backup")

    expected = trained()
    with pytest.raises(Preempted):
        trained(At(launches, terminate, "on_train_batch_begin"))
    assert _steps(tmp_path / "backup") == [saved]
    assert_close(trained(n=n, mesh={"data": 8}), expected)
    assert not (tmp_path / "backup").exists()


def test_sigterm_can_be_left_alone(tmp_path, handler):
    model = built(build, ktd.TPUStrategy())
    backup = BackupAndRestore(tmp_path / "backup", on_sigterm=False)
    with pytest.raises(Preempted):
        model.fit(X, Y, **FIT, callbacks=[At(2, terminate, "on_train_batch_begin"), backup])
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
