"""Nothing is deleted before its successor is whole; a directory has one run, and one writer."""

import logging
import os
import pathlib
import tempfile

import keras
import numpy as np
import pytest
from helpers import loaded, python

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint import keeping
from keras_tpu_dist.checkpoint.keeping import Keep, Known, staying
from keras_tpu_dist.checkpoint.reader import CheckpointReader

disk = loaded(pathlib.Path(__file__).with_name("disk.py"), "checkpoint_disk")
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")


def fit(*callbacks, epochs=2, y=X):
    keras.utils.set_random_seed(1)
    with ktd.TPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    model.fit(X, y, batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "keras_tpu_dist")
    return caplog


@pytest.mark.parametrize("stops", [False, True])
def test_the_first_operation_of_the_disk_fails(stops):
    assert disk.fault_at(1, stops) == ""


@pytest.mark.slow
def test_a_sample_of_operations_that_fail():
    """All of them: `python tests/checkpoint/disk.py`."""
    # Orbax's threads raise what they also hand on, which pytest takes for a failure.
    environment = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    done = python(disk.__file__, "--every", "61", timeout=500, env=environment)
    assert ", 0 wrong," in done.stdout


def test_a_save_at_the_end_of_an_epoch_is_judged_not_deleted(tmp_path, said):
    """It deleted what was still being written, and then could not be written itself."""
    saved = ktd.callbacks.Checkpoint(tmp_path, every_steps=3, monitor="loss", keep=1)
    fit(saved, epochs=3)
    assert saved.steps == [9]
    assert not [r for r in said.records if r.levelno >= logging.ERROR]
    store = CheckpointReader(tmp_path)
    assert keeping.metrics_of(tmp_path / "9", store.manifest(9).training).keys() == {"loss"}


@pytest.mark.parametrize(
    ("known", "keep", "best", "stay"),
    [
        ({1: {}, 2: {}, 3: {}}, 2, None, {2, 3}),
        ({1: {}, 2: {}}, None, None, {1, 2}),
        ({1: {}, 2: {"finite": False}, 3: {"finite": False}}, 2, None, {1, 2, 3}),
        ({1: {"metrics": {"a": 2}}, 2: {"metrics": {"a": 3}}, 3: {}}, 1, ("a", "min"), {1, 3}),
        ({1: {"metrics": {"a": 2}}, 2: {"metrics": {"a": 3}}, 3: {}}, 1, ("a", "max"), {2, 3}),
        ({1: {}, 2: {"whole": False}, 3: {}}, 1, None, {3}),
        ({1: {}, 2: {"whole": False}}, 1, None, {1, 2}),
    ],
)
def test_which_stay(known, keep, best, stay):
    facts = {s: Known(**{"whole": True, **k}) for s, k in known.items()}
    assert staying(facts, Keep(keep, best)) == stay


def test_weights_that_are_not_finite_do_not_replace_the_last_good_ones(tmp_path, said):
    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.layers[0].bias.assign([np.nan] * 4)

    saved = ktd.callbacks.Checkpoint(tmp_path, keep=2)
    fit(saved, Breaks(), epochs=5)
    assert saved.steps == [3, 12, 15]
    fit(ktd.callbacks.Checkpoint(tmp_path, keep=2), epochs=6)
    assert "weights of checkpoint 15 are not finite" in said.text


def test_a_directory_has_one_run(tmp_path, said):
    first = fit(ktd.callbacks.Checkpoint(tmp_path), epochs=4)
    words = r"holds the checkpoints of one run.*\[6, 9, 12\].*overwrite=True"
    with pytest.raises(ValueError, match=words):
        fit(ktd.callbacks.Checkpoint(tmp_path, resume=False))
    assert ktd.restore(first, tmp_path).step == 12
    saved = ktd.callbacks.Checkpoint(tmp_path, resume=False, overwrite=True)
    fit(saved, epochs=1)
    assert saved.steps == [3]
    assert sorted(os.listdir(tmp_path)) == ["3"]
    assert not said.text
    fit(ktd.callbacks.Checkpoint(tmp_path))
    assert "training goes on with the run of" in said.text
    store = CheckpointReader(tmp_path)
    runs = {store.manifest(step).training["run"] for step in store.steps}
    assert len(runs) == 1


def test_two_at_once_are_refused(tmp_path):
    two = [ktd.callbacks.Checkpoint(tmp_path), ktd.callbacks.Checkpoint(tmp_path)]
    words = rf"Only one fit at a time.*process {os.getpid()} of .*different directory"
    with pytest.raises(ktd.CheckpointError, match=words):
        fit(*two)
    fit(two[0])  # which the error let go of
    assert two[0].steps == [3, 6]


def test_the_directory_goes_while_training(tmp_path, said):
    class Goes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                os.rename(tmp_path / "a", tmp_path / "b")
                (tmp_path / "a").write_text("")

    fit(ktd.callbacks.Checkpoint(tmp_path / "a"), Goes())
    errors = [r for r in said.records if r.levelno >= logging.ERROR]
    assert len(errors) == 2
    assert all("Not a directory" in r.getMessage() for r in errors)


def test_a_path_that_orbax_takes_for_a_pattern_is_refused(tmp_path):
    with pytest.raises(ktd.CheckpointError, match=r"must not contain \[ \] \* \?.*another name"):
        fit(ktd.callbacks.Checkpoint(tmp_path / "run[1]"))


NO_PERMISSION = """
import os, sys
sys.path[:0] = {folders!r}
import conftest, test_disk
import keras_tpu_dist as ktd

class Forbids(test_disk.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        os.chmod(sys.argv[1], 0o555)

test_disk.fit(ktd.callbacks.Checkpoint(sys.argv[1] + "_first"))
os.chmod(sys.argv[1], 0o777)
os.setuid(65534)
test_disk.fit(ktd.callbacks.Checkpoint(sys.argv[1]), Forbids())
print("ended")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="becomes a user with fewer rights")
def test_no_permission_and_the_process_ends(tmp_path):
    """Orbax's threads waited ten minutes for directories that could not be made."""
    folder = tmp_path / "saved"
    folder.mkdir()
    shared = pathlib.Path(tempfile.gettempdir())
    for each in (tmp_path, *tmp_path.parents):
        if each in (shared, *shared.parents):
            break
        each.chmod(0o755)
    os.chown(folder, 65534, 65534)
    code = NO_PERMISSION.format(folders=[str(f) for f in pathlib.Path(__file__).parents[:2]])
    done = python("-c", code, folder, code=None)
    assert "ended" in done.stdout, done.stderr[-2000:]
    assert done.stderr.count("training goes on without this checkpoint") >= 1
    assert sorted(n for n in os.listdir(folder) if n != ".in_use") == []
