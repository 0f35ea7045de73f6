"""What a checkpoint says is data, whoever wrote it: no attribute, no code, no more memory."""

import logging
import os
import shutil

import keras
import pytest
from checkpoint_models import X, Y, made
from untrusted import rewrite

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.manifest import OF_FIT
from keras_tpu_dist.checkpoint.restore import load_newest
from keras_tpu_dist.checkpoint.store import Store


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory of two checkpoints, beside callbacks that are saved with them."""
    folder = tmp_path_factory.mktemp("saved")
    fit(folder, folder / "best.weights.h5", 2)
    return folder


def fit(directory, file, epochs):
    model = made("stock")
    callbacks = [
        ktd.callbacks.Checkpoint(directory, every_epochs=1),
        keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=9),
    ]
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)
    return model, callbacks


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def resumed(directory, tmp_path):
    """The callbacks of a run that goes on from a directory."""
    return fit(directory, tmp_path / "best.weights.h5", 3)[1]


def test_a_name_in_a_file_is_no_attribute(copied, tmp_path, caplog):
    def change(data):
        states = data["training"]["callbacks"]
        states[0]["attributes"] |= {"monitor": "val_loss", "model": None, "restore_best_weights": 1}
        states[1]["attributes"] |= {"factor": 1e9, "on_epoch_end": 3, "wait": "x" * 9}

    rewrite(copied, 8, change)
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        _, stopping, plateau = resumed(copied, tmp_path)
    assert (stopping.monitor, stopping.restore_best_weights) == ("loss", True)
    assert (plateau.factor, callable(plateau.on_epoch_end)) == (0.1, True)
    assert isinstance(plateau.wait, int)
    assert "'monitor'" in caplog.text
    assert "are left out" in caplog.text


DEEP = []
for _ in range(3000):
    DEEP = [DEEP]


def put(*path):
    """A change that writes a value at a place of the manifest."""
    *path, value = path

    def change(data):
        for name in path[:-1]:
            data = data[name]
        data[path[-1]] = value

    return change


def drop(*path):
    def change(data):
        for name in path[:-1]:
            data = data[name]
        del data[path[-1]]

    return change


ROW = ("arrays", "weights", 0)
POSITION = ("training", "positions", 0)
OTHER_FORMS = {
    "a list": lambda data: [1, 2],
    "a number": lambda data: 3,
    "no arrays": drop("arrays"),
    "arrays of a number": put("arrays", 3),
    "arrays of a list": put("arrays", []),
    "weights of a dict": put("arrays", "weights", {}),
    "a row of a number": put(*ROW, 3),
    "a row of nothing": put(*ROW, {}),
    "a path of a number": put(*ROW, "path", 3),
    "a key of a list": put(*ROW, "key", []),
    "a shape of words": put(*ROW, "shape", ["x"]),
    "a shape of nan": put(*ROW, "shape", [float("nan")]),
    "a shape below 0": put(*ROW, "shape", [-1, -1]),
    "a huge shape": put(*ROW, "shape", [2**40, 2**40]),
    "a dtype of objects": put(*ROW, "dtype", "object"),
    "a dtype of fields": put(*ROW, "dtype", "f4,f4"),
    "a dtype of words": put(*ROW, "dtype", "str"),
    "a dtype of nothing": put(*ROW, "dtype", ""),
    "no fingerprint": drop(*ROW, "fingerprint"),
    "axes of a number": put(*ROW, "axes", 7),
    "a version of words": put("version", "new"),
    "a version of nan": put("version", float("nan")),
    "no training": drop("training"),
    "training of a list": put("training", []),
    "no epoch": drop("training", "epoch"),
    "no step": drop("training", "step"),
    "an epoch below 0": put("training", "epoch", -1),
    "an epoch of nan": put("training", "epoch", float("nan")),
    "a huge step": put("training", "step", 10**400),
    "done of words": put("training", "done", "all"),
    "stopped of words": put("training", "stopped", "no"),
    "a seed of words": put("training", "global_seed", "x"),
    "no callbacks": drop("training", "callbacks"),
    "callbacks of a number": put("training", "callbacks", 3),
    "a callback without class": put("training", "callbacks", [{}, {}]),
    "attributes of a list": put("training", "callbacks", 0, "attributes", [1]),
    "no history": drop("training", "history"),
    "history of a list": put("training", "history", [1]),
    "logs of numbers": put("training", "history", "logs", {"loss": 3}),
    "no positions": put("training", "positions", []),
    "a position of words": put(*POSITION, "here"),
    "a position with more": put(*POSITION, "more", 3),
    "made of words": put(*POSITION, "made", "x"),
    "random words": put(*POSITION, "now", "numpy", ["MT19937", "AAAA", 0, 0, 0.0]),
    "no base64": put(*POSITION, "start", "python", [3, "\u00e9", None]),
    "a state of numbers": put(*POSITION, "state", {"bytes": 3}),
    "a deep state": put(*POSITION, "state", {"json": "[" * 10**5}),
    "written of a number": put("written", 3),
    "a mesh of words": put("written", "mesh", {"data": "x"}),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_manifest_of_another_form_is_passed_by(form, copied, tmp_path, caplog):
    rewrite(copied, 8, OTHER_FORMS[form])
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        model = made("stock")
        saved = ktd.callbacks.Checkpoint(copied, every_epochs=1)
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0, callbacks=[saved])
    assert "The one before it is tried." in caplog.text
    with pytest.raises(ktd.CheckpointError, match=r"Checkpoint 8 of .* Received: .* \[ktd e"):
        load_newest(model, Store(copied, read_only=True), 8, needs=OF_FIT)


def test_a_deep_manifest_is_passed_by(copied):
    path = copied / "8" / "manifest" / "metadata"
    path.write_text("[" * 10**6)
    assert ktd.restore(made("stock"), copied).step == 4


def test_a_large_manifest_is_not_read(copied):
    os.truncate(copied / "8" / "manifest" / "metadata", 2**36)
    with pytest.raises(ktd.CheckpointError, match="in files of at most 64 MiB"):
        ktd.restore(made("stock"), copied, step=8)
    (copied / "8" / "manifest" / "metadata").unlink()
    (copied / "8" / "manifest" / "metadata").symlink_to("/dev/zero")
    with pytest.raises(ktd.CheckpointError, match="in files of at most 64 MiB"):
        ktd.restore(made("stock"), copied, step=8)
