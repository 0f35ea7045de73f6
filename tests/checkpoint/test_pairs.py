"""A `Checkpoint` beside any two callbacks: the run that was cut ends as the whole one."""

import functools
import logging
import pathlib

import keras
import pytest
from helpers import At, Stop, loaded

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks import states

pairs = loaded(pathlib.Path(__file__).with_name("pairs.py"), "checkpoint_pairs")
MESHES = {1: None, 4: {"data": 4, "model": 2}}


@functools.cache
def trainer(steps):
    return pairs.Trainer(MESHES[steps], steps)


@pytest.fixture(autouse=True)
def quiet(caplog):
    # Keras's callbacks that cannot go on are said, each time.
    caplog.set_level(logging.ERROR, "keras_tpu_dist")


# What was wrong: a callback whose attributes were unknown, an `on_epoch_begin` that came twice,
# batches that were counted twice.
KNOWN = [
    ("ModelCheckpoint", "LearningRateScheduler"),
    ("our HostMetrics", "ModelCheckpoint of batches"),
    ("Counts", "BackupAndRestore of batches"),
]


@pytest.mark.parametrize("cut", pairs.CUTS)
@pytest.mark.parametrize("names", KNOWN, ids=" + ".join)
def test_pairs_that_differed(names, cut, tmp_path):
    assert pairs.difference(trainer(1), names, cut, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("cut", pairs.CUTS)
@pytest.mark.parametrize("names", pairs.pairs()[::30], ids=" + ".join)
def test_a_sample_of_pairs(names, cut, steps, tmp_path):
    """All of them: `python tests/checkpoint/pairs.py`."""
    assert pairs.difference(trainer(steps), names, cut, tmp_path) == ""


@pytest.mark.parametrize("table", [_keras.CHANGING, _keras.ARRAYS], ids=["values", "arrays"])
def test_this_keras_has_every_attribute(table, tmp_path):
    lacks = []
    paths = {"ModelCheckpoint": "a.keras", "OrbaxCheckpoint": "b", "BackupAndRestore": "c"}
    for kind, names in table.items():
        path = [tmp_path / paths[kind]] if kind in paths else []
        made = getattr(keras.callbacks, kind)(*path)
        if kind == "EarlyStopping":
            made.on_train_begin()
        lacks += [f"{kind}.{name}" for name in names if not hasattr(made, name)]
    assert not lacks


def test_an_attribute_that_is_missing_is_said_not_taken_for_none(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "keras_tpu_dist")
    monkeypatch.setitem(_keras.CHANGING, "EarlyStopping", ("wait", "waits"))
    known, _ = states.states_of([keras.callbacks.EarlyStopping()])
    assert known == [{"class": "EarlyStopping", "attributes": {"wait": 0}}]
    assert "EarlyStopping of keras" in caplog.text
    assert "has no attribute waits" in caplog.text


def test_names_come_from_our_list_not_from_the_checkpoint():
    kept = keras.callbacks.ModelCheckpoint("mine.keras")
    states.give_back(
        [kept],
        [{"class": "ModelCheckpoint", "attributes": {"filepath": "x.keras", "best": 1.5}}],
        {},
    )
    assert (kept.filepath, kept.best) == ("mine.keras", 1.5)


def test_each_of_a_class_gets_what_it_knew_and_new_ones_begin_anew(caplog):
    caplog.set_level(logging.WARNING, "keras_tpu_dist")
    stops = [keras.callbacks.EarlyStopping() for _ in range(2)]
    stops[0].wait, stops[1].wait = 3, 5
    known, arrays = states.states_of([*stops, keras.callbacks.ReduceLROnPlateau()])
    again = [keras.callbacks.EarlyStopping() for _ in range(3)]
    states.give_back(again, known, arrays)
    assert [each.wait for each in again] == [3, 5, 0]
    assert "['EarlyStopping'] begin anew" in caplog.text


def test_batches_made_before_an_interruption_are_not_announced_again(tmp_path):
    heard = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: heard.append(("begin", batch)),
        on_train_batch_end=lambda batch, logs: heard.append(("end", batch)),
    )
    for stop in (At(9), At(0)):
        del heard[:]
        keras.utils.set_random_seed(1)
        with ktd.TPUStrategy().scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
        saved = ktd.callbacks.Checkpoint(tmp_path, every_steps=4)
        try:
            model.fit(pairs.X, pairs.Y, callbacks=[saved, note, stop], **pairs.FIT)
        except Stop:
            # Step 8 is batch 2 of the second epoch: it was saved before its end was announced.
            continue
    assert heard[:3] == [("end", 2), ("begin", 3), ("end", 3)]
