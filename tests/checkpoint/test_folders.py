"""Folders of checkpoints as users write them: `~`, `file://`, links, other storage, long names."""

import os

import keras
import numpy as np
import pytest
from helpers import assert_close, built, sequential

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint import CheckpointError, reader
from keras_tpu_dist.common.paths import absolute_path

X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")


def model(name="out"):
    return sequential(4, keras.layers.Dense(2, name=name))


@pytest.mark.parametrize("form", ["~/runs/7", "file://{}/home/runs/7", "{}/home/runs/7"])
def test_a_home_and_a_file_are_the_folder_that_they_name(form, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    where, folder = form.format(tmp_path), tmp_path / "home" / "runs" / "7"
    trained = built(model, ktd.TPUStrategy())
    trained.fit(X, Y, verbose=0, callbacks=[ktd.callbacks.Checkpoint(where, every_steps=1)])
    assert os.listdir(tmp_path) == ["home"]
    assert (folder / "1").is_dir()
    other = built(model, ktd.TPUStrategy(), seed=2)
    ktd.restore(other, where)
    assert_close(other.get_weights(), trained.get_weights())
    assert len(list(ktd.checkpoints(where))) == 1
    with ktd.LoopCheckpoint(where, other) as loop:
        loop.save(2)
    assert (folder / "2").is_dir()
    assert absolute_path(where) == str(folder)


def test_checkpoints_in_a_bucket_are_seen(tmp_path, monkeypatch):
    assert str(reader.folder("gs://bucket/run")) == "gs://bucket/run"
    bucket = reader.folder(tmp_path / "bucket")
    monkeypatch.setattr("keras_tpu_dist.callbacks.checkpoint.folder", lambda path: bucket)
    monkeypatch.setattr(
        "keras_tpu_dist.callbacks.checkpoint.CheckpointReader",
        lambda *args, **options: reader.CheckpointReader(bucket),
    )
    saved = ktd.callbacks.Checkpoint("gs://bucket/run")
    assert saved.steps == []
    (bucket / "7").mkdir(parents=True)
    assert saved.steps == []  # not complete
    for part in ("arrays", "manifest"):
        (bucket / "7" / part).mkdir()
    (bucket / "7/manifest/metadata").write_text("{}")
    assert saved.steps == [7]


def uses(where):
    made = model()
    yield lambda: made.fit(X, Y, verbose=0, callbacks=[ktd.callbacks.Checkpoint(where)])
    yield lambda: ktd.LoopCheckpoint(where, made)
    yield lambda: ktd.restore(made, where)


@pytest.mark.parametrize("where", ["memory://runs/7", "hdfs://runs/7", "file://host/runs/7"])
def test_other_storage_is_one_error(where):
    for use in uses(where):
        with pytest.raises(CheckpointError, match=r"in a folder, or in a bucket\. .* gs://bucket"):
            use()


def test_a_link_to_nothing_is_one_error(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for use in uses(str(tmp_path / "link")):
        with pytest.raises(CheckpointError, match=r"a link to nothing\. .*gone.*remove the link"):
            use()


def test_a_name_that_cannot_be_read_back_is_not_written(tmp_path):
    made = model("x" * 5000)
    with ktd.LoopCheckpoint(tmp_path, made) as loop:
        with pytest.raises(CheckpointError, match=r"at most 4,096 characters\. .*shorter names"):
            loop.save(1)
        assert loop.steps == []
