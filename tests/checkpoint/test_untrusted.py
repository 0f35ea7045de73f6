"""What a checkpoint says is data, whoever wrote it: no attribute, no code, no more memory."""

import json
import logging
import os
import pathlib
import re
import shutil
import tracemalloc
import zipfile

import h5py
import keras
import pytest
from checkpoint_models import X, Y, made
from helpers import assert_close, python
from untrusted import rewrite

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.manifest import OF_FIT
from keras_tpu_dist.checkpoint.reader import CheckpointReader
from keras_tpu_dist.checkpoint.restore import load_newest


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
    "a place of words": put(*ROW, "packed", "first"),
    "a place below 0": put(*ROW, "packed", [-1, 8]),
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
    "made of words": put(*POSITION, "made", "x"),
    "random words": put(*POSITION, "now", "numpy", ["MT19937", "AAAA", 0, 0, 0.0]),
    "no base64": put(*POSITION, "start", "python", [3, "\u00e9", None]),
    "a state of numbers": put(*POSITION, "state", {"bytes": 3}),
    "a deep state": put(*POSITION, "state", {"json": "[" * 10**5}),
    "written of a number": put("written", 3),
    "a mesh of words": put("written", "mesh", {"data": "x"}),
}


@pytest.fixture(scope="module")
def model():
    return made("stock")


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_manifest_of_another_form_is_refused(form, copied, model):
    rewrite(copied, 8, OTHER_FORMS[form])
    with pytest.raises(ktd.CheckpointError, match=r"Checkpoint 8 of .* Received: "):
        load_newest(model, CheckpointReader(copied), 8, needs=OF_FIT)


@pytest.mark.parametrize("form", ["a number", "no epoch", "no positions"])
def test_a_fit_passes_it_by(form, copied, model, caplog):
    rewrite(copied, 8, OTHER_FORMS[form])
    saved = ktd.callbacks.Checkpoint(copied, every_epochs=1)
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0, callbacks=[saved])
    assert "Trying the previous checkpoint." in caplog.text


def test_a_deep_manifest_is_passed_by(copied):
    path = copied / "8" / "manifest" / "metadata"
    path.write_text("[" * 10**6)
    assert ktd.restore(made("stock"), copied).step == 4


def test_a_large_manifest_is_not_read(copied):
    os.truncate(copied / "8" / "manifest" / "metadata", 2**36)
    with pytest.raises(ktd.CheckpointError, match="must have at most 64 MiB"):
        ktd.restore(made("stock"), copied, step=8)
    (copied / "8" / "manifest" / "metadata").unlink()
    (copied / "8" / "manifest" / "metadata").symlink_to("/dev/zero")
    with pytest.raises(ktd.CheckpointError, match="must have at most 64 MiB"):
        ktd.restore(made("stock"), copied, step=8)


def test_a_large_state_of_callbacks_is_left_out(copied, tmp_path, caplog):
    def change(data):
        rows = data["arrays"]["extra"]
        rows[0]["shape"] = [2**40]

    rewrite(copied, 8, change)
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        _, stopping, _ = resumed(copied, tmp_path)
    assert "more than the size of the model" in caplog.text
    assert len(stopping.best_weights) == 8


def test_chunks_are_no_larger_than_their_array(copied):
    tensorstore = pytest.importorskip("tensorstore")
    arrays = copied / "8" / "arrays"
    kvstore = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{arrays}/"}).result()
    key = "small/.zarray"
    described = json.loads(kvstore[key])
    described["chunks"] = [2**32]
    kvstore[key] = json.dumps(described).encode()
    with pytest.raises(ktd.CheckpointError, match="in chunks no larger than the array"):
        ktd.restore(made("stock"), copied, step=8)
    assert ktd.restore(made("stock"), copied).step == 4
    described |= {"chunks": [1], "shape": [2**32]}
    kvstore[key] = json.dumps(described).encode()
    with pytest.raises(ktd.CheckpointError, match=r"manifest=\(.*stored=\(4294967296,\)"):
        ktd.restore(made("stock"), copied, step=8)


@pytest.mark.parametrize("place", [[2**20, 2**20], [0, 1], [0, 2**20], [0, 2**40]])
def test_a_small_array_is_within_those_that_are_stored(copied, place):
    rewrite(copied, 8, put(*ROW, "packed", place))
    with pytest.raises(ktd.CheckpointError, match=r"within one array|stored as in the manifest"):
        ktd.restore(made("stock"), copied, step=8)
    assert ktd.restore(made("stock"), copied).step == 4


def test_small_arrays_that_are_stored_one_by_one_are_read(tmp_path, monkeypatch):
    """As version 1 of the format had them."""
    monkeypatch.setattr("keras_tpu_dist.checkpoint.manifest.VERSION", 1)
    monkeypatch.setattr("keras_tpu_dist.checkpoint.packed.MOST_BYTES", 0)
    model, _ = fit(tmp_path, tmp_path / "best.weights.h5", 1)
    monkeypatch.undo()
    assert not (tmp_path / "4" / "arrays" / "small").exists()
    other = made("stock")
    ktd.restore(other, tmp_path)
    assert_close(other.get_weights(), model.get_weights(), 0)


def keras_file(path, build=None):
    model = made("stock")
    model.save(path)
    return model


def rezipped(path, kind, content=None):
    """The same file, compressed, and with other weights."""
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    parts["model.weights.h5"] = content or parts["model.weights.h5"]
    with zipfile.ZipFile(path, "w", kind) as new:
        for name, part in parts.items():
            new.writestr(name, part)


def test_a_file_of_keras_is_read_from_where_it_lies(tmp_path):
    path = tmp_path / "a.keras"
    one, other = keras_file(path), made("stock")
    for how in (None, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        if how is not None:
            rezipped(path, how)
        other.set_weights([0 * w for w in other.get_weights()])
        assert ktd.restore(other, path).loaded
        assert_close(other.get_weights(), one.get_weights())


def most_memory(do):
    """The most bytes of Python and NumPy while something is done."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def fails(path, words):
    with pytest.raises(ktd.CheckpointError, match=words):
        ktd.restore(made("stock"), path)


def test_a_small_file_does_not_become_a_large_one(tmp_path):
    path = tmp_path / "a.keras"
    keras_file(path)
    rezipped(path, zipfile.ZIP_DEFLATED, bytes(256 * 2**20))
    assert path.stat().st_size < 2**20
    assert most_memory(lambda: fails(path, "when uncompressed")) < 32 * 2**20


def changed_h5(path, how):
    """A file of weights of which one array is stored otherwise."""
    made("stock").save_weights(path)
    with h5py.File(path, "a") as file:
        found = []
        file.visititems(
            lambda name, each: found.append(name) if isinstance(each, h5py.Dataset) else None
        )
        name = next(n for n in found if len(file[n].shape) == 2)
        shape = file[name].shape
        del file[name]
        how(file, name, shape)


def huge(file, name, shape):
    file.create_dataset(name, (2**16, 2**12), "f4", chunks=(64, 64), compression="gzip")


def huge_chunks(file, name, shape):
    huge = {"chunks": (2**12, 2**12), "maxshape": (None, None)}
    file.create_dataset(name, shape, "f4", compression="gzip", fillvalue=1, **huge)
    file[name][:] = 1


def elsewhere(file, name, shape):
    file[name] = h5py.ExternalLink("/etc/passwd", "/x")


def words(file, name, shape):
    file.create_dataset(name, shape, "S1000000")


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        (huge, ValueError, r"saved as \(65536, 4096\)"),
        (huge_chunks, ktd.CheckpointError, "in chunks"),
        (elsewhere, ktd.CheckpointError, "Not allowed: H5 file with ExternalLink"),
        (words, (ValueError, ktd.CheckpointError), "S1000000"),
    ],
)
def test_an_array_takes_what_its_weight_does(how, error, words, tmp_path):
    path = tmp_path / "a.weights.h5"
    changed_h5(path, how)

    def refused():
        with pytest.raises(error, match=words):
            ktd.restore(made("stock"), path)

    assert most_memory(refused) < 32 * 2**20


def test_what_is_no_file_is_not_waited_for(tmp_path):
    for name in ("a.keras", "a.weights.h5", "a.weights.json"):
        os.mkfifo(tmp_path / name)
        fails(tmp_path / name, "not a regular file")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["orbax", "keras"])
def test_reading_does_nothing_else(kind, tmp_path):
    # In a process of its own, as nothing takes a hook for audit events away again.
    python(pathlib.Path(__file__).parent / "reading.py", kind, tmp_path)


def test_what_the_page_names_is_there():
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs" / "security.md").read_text()
    sentence = "runs no code, allocates no more than the model and 64 MiB, and writes nowhere"
    assert all(sentence in text for text in (page, (root / "SECURITY.md").read_text()))
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page):
        assert f"def {test}" in (root / file).read_text()
