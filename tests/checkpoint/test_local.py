"""Checkpoints on a host's own disk: newer ones, of this run, whole; otherwise the shared ones."""

import json
import logging
import os
import pathlib
import shutil

import keras
import numpy as np
import pytest
from checkpoint_models import X, Y, made, numbers
from untrusted import rewrite

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint import local as local_tier
from keras_tpu_dist.checkpoint.store import Store

# 4 steps an epoch.
EPOCHS, STOPS_AT = 3, 9
SHARED_EVERY, LOCAL_EVERY = 4, 2


class Stop(Exception):
    pass


class StopAt(keras.callbacks.Callback):
    """Fails after so many train steps of this fit."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise Stop


def fit(folder, *callbacks, place="fsdp", epochs=EPOCHS, **options):
    """A fit that is saved on both tiers, from its beginning or where it stopped."""
    keras.utils.set_random_seed(1)
    model = made(place)
    saved = {"every_steps": SHARED_EVERY, "local_every_steps": LOCAL_EVERY} | options
    checkpoint = ktd.callbacks.Checkpoint(folder / "shared", local=folder / "local", **saved)
    callbacks = [checkpoint, *callbacks]
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)
    return model


def steps_of(folder):
    own = folder / "local" / "process_0"
    return sorted(int(path.name) for path in own.iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return numbers(fit(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The directories of a run that stopped after step 9."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stop):
        # Else one that is due while the one before is being written is left out.
        fit(folder, StopAt(STOPS_AT), asynchronous=False)
    assert steps_of(folder) == [6, 8]
    return folder


@pytest.fixture
def copied(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    # Steps 4 and 8 of the shared tier are there; without 8, the local one is the newer.
    shutil.rmtree(tmp_path / "run" / "shared" / "8")
    return tmp_path / "run"


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    return caplog


def goes_on_from(said):
    """The step and the place that a fit went on from."""
    found = [each.args for each in said.records if "training goes on with the run" in each.msg]
    assert len(found) == 1, said.text
    return found[0][2], pathlib.Path(found[0][5]).name


def ends_as(expected, model):
    for one, other in zip(numbers(model), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", ["fsdp", "tensor", "one"])
def test_a_fit_goes_on_from_the_newer_local_one_on_any_mesh(place, copied, expected, said):
    model = fit(copied, place=place)
    assert goes_on_from(said) == (8, "local")
    ends_as(expected, model)


def test_the_shared_one_is_taken_if_it_is_as_new(stopped, tmp_path, expected, said):
    shutil.copytree(stopped, tmp_path / "run")
    model = fit(tmp_path / "run")
    assert goes_on_from(said) == (8, "shared")
    ends_as(expected, model)


def test_a_host_that_was_replaced_has_nothing(copied, expected, said):
    shutil.rmtree(copied / "local")
    model = fit(copied)
    assert goes_on_from(said) == (4, "shared")
    ends_as(expected, model)


def test_before_the_first_shared_one(tmp_path, expected, said):
    with pytest.raises(Stop):
        fit(tmp_path, StopAt(3))
    said.clear()
    model = fit(tmp_path)
    assert goes_on_from(said) == (2, "local")
    ends_as(expected, model)


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [cut, flip, pathlib.Path.unlink])
@pytest.mark.parametrize("name", ["arrays/d/parts", "manifest/metadata"])
def test_what_is_damaged_is_left_out(damage, name, copied, expected, said):
    damage(copied / "local" / "process_0" / "8" / name)
    model = fit(copied)
    assert goes_on_from(said) == (6, "local")
    ends_as(expected, model)


def test_a_half_written_one_is_deleted(copied, said):
    own = copied / "local" / "process_0"
    os.rename(own / "8", own / "8.orbax-checkpoint-tmp")
    fit(copied)
    assert goes_on_from(said) == (6, "local")
    assert not [path for path in own.iterdir() if "tmp" in path.name]


def test_another_runs_files_are_not_of_this_run(copied, said):
    shutil.rmtree(copied / "shared")
    fit(copied, epochs=1, asynchronous=False)
    assert not [each for each in said.records if "goes on" in each.msg]
    # They give way to those of the new run.
    assert steps_of(copied) == [2, 4]


def test_a_run_that_takes_the_place_of_another(copied, said):
    options = {"resume": False, "overwrite": True}
    with pytest.raises(Stop):
        fit(copied, StopAt(3), **options)
    said.clear()
    fit(copied)
    assert goes_on_from(said) == (2, "local")


def test_a_run_that_went_on_without_its_local_ones(copied, said, monkeypatch):
    """What is on this disk is then of another course of the run."""
    later = Store(copied / "shared", read_only=True).manifest(4)
    monkeypatch.setitem(later.written, "at", "2999-01-01T00:00:00+00:00")
    rewrite(copied / "shared", 4, lambda data: data["written"].update(later.written))
    fit(copied)
    assert goes_on_from(said) == (4, "shared")


def test_resume_false_sees_local_ones(copied):
    shutil.rmtree(copied / "shared" / "4")
    with pytest.raises(ValueError, match=r"which has checkpoints of steps \[8\]"):
        fit(copied, resume=False)


def test_older_ones_stay_until_a_newer_one_is_whole_everywhere(tmp_path):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(steps_of(tmp_path))

    fit(tmp_path, Look(), asynchronous=False)
    assert seen[:9] == [[], [2], [2], [2, 4], [2, 4], [4, 6], [4, 6], [6, 8], [6, 8]]


def test_the_newest_with_finite_weights_stays(tmp_path, said):
    class Break(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.model.optimizer.iterations == 5:
                self.model.layers[0].kernel.assign_add(np.full((16, 32), np.nan, "float32"))

    fit(tmp_path, Break(), asynchronous=False)
    assert steps_of(tmp_path) == [4, 10, 12]


def test_a_full_disk_is_one_error_and_training_goes_on(tmp_path, expected, said, monkeypatch):
    real = local_tier._flush

    def full(file):
        if f"{os.sep}6." in file.name:
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(local_tier, "_flush", full)
    model = fit(tmp_path, asynchronous=False)
    ends_as(expected, model)
    errors = [each.getMessage() for each in said.records if each.levelno >= logging.ERROR]
    assert len(errors) == 1, errors
    assert "training goes on without this checkpoint" in errors[0]
    assert "No space left on device" in errors[0]
    assert steps_of(tmp_path) == [10, 12]


def test_one_that_is_still_being_written_is_not_waited_for(tmp_path, expected, said, monkeypatch):
    import threading

    may_write, real, started = threading.Event(), local_tier._flush, []

    def slow(file):
        may_write.wait(60)
        real(file)

    class LetWrite(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 9:
                begun = os.listdir(tmp_path / "local" / "process_0")
                started.extend(name for name in begun if name[0].isdigit())
                may_write.set()

    monkeypatch.setattr(local_tier, "_flush", slow)
    ends_as(expected, fit(tmp_path, LetWrite()))
    assert "no local checkpoint 4: the one before is being written" in said.text
    # At step 9 none but the first had begun, and that one was not complete.
    assert [name.partition(".")[0] for name in started] == ["2"]
    assert started != ["2"]


def test_one_fit_at_a_time_writes_there(tmp_path):
    first = local_tier.LocalTier(tmp_path / "local", True)
    with pytest.raises(ktd.CheckpointError, match="Only one fit at a time"):
        fit(tmp_path)
    first.close()


def odd_parts(**changes):
    def change(data):
        parts = data["parts"]
        for name, value in changes.items():
            parts[name] = value(parts[name]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("parts"),
        lambda data: data.update(parts=[1]),
        odd_parts(sets=[[]]),
        odd_parts(sets="0"),
        odd_parts(layouts=lambda old: [{"pieces": [2**31, 2**31], "holders": [0]}, *old[1:]]),
        odd_parts(layouts=lambda old: [{"pieces": [0], "holders": []}, *old[1:]]),
        odd_parts(layouts=lambda old: [{"pieces": [1, 1], "holders": [7]}, *old[1:]]),
        odd_parts(of=lambda old: dict.fromkeys(old, 99)),
        odd_parts(of={}),
        odd_parts(crc32=lambda old: {key: [] for key in old}),
        odd_parts(crc32=lambda old: {key: ["__class__"] for key in old}),
        odd_parts(process=-1),
        odd_parts(process=True),
    ],
)
def test_what_a_manifest_says_of_parts_is_checked(change, copied, said):
    rewrite(copied / "local" / "process_0", 8, lambda data: change(data) and None)
    fit(copied, epochs=2)
    assert goes_on_from(said) == (6, "local")
    assert "local checkpoint 8 is ignored" in said.text


def test_a_link_to_a_device_is_no_file_of_parts(copied, said):
    path = copied / "local" / "process_0" / "8" / "arrays" / "d" / "parts"
    path.unlink()
    path.symlink_to("/dev/zero")
    fit(copied, epochs=2)
    assert goes_on_from(said) == (6, "local")


@pytest.mark.parametrize(
    "options",
    [
        {"local": "here"},
        {"local_every_steps": 5},
        {"local": "gs://bucket/run", "local_every_steps": 5},
        {"local": "", "local_every_steps": 5},
        {"local": 3, "local_every_steps": 5},
        {"local": "here", "local_every_steps": 0},
    ],
)
def test_what_local_is(options):
    with pytest.raises(ValueError, match="local is a directory on the host's own disk"):
        ktd.callbacks.Checkpoint("run", **options)


def test_it_needs_the_loop_of_a_strategy(tmp_path):
    with pytest.raises(ValueError, match="local_every_steps=2"):
        fit(tmp_path, place="stock", every_steps=None)


def test_the_shell_lists_what_a_process_wrote(copied):
    from keras_tpu_dist.checkpoint.contents import contents

    assert [row.step for row in contents(copied / "local" / "process_0").rows] == [6, 8]
    json.dumps(contents(copied / "local" / "process_0").to_dict())
