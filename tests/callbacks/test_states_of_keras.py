"""What a checkpoint has of Keras's callbacks; `tests/laws/interrupted.py` tries them in pairs."""

import logging

import keras
import numpy as np
import pytest
from helpers import At, Stop

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks import states

ROWS = np.random.default_rng(0).normal(size=(13, 6)).astype("float32")


@pytest.fixture(autouse=True)
def quiet(caplog):
    # Keras's callbacks that cannot go on are said, each time.
    caplog.set_level(logging.ERROR, "keras_tpu_dist")


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
    known, _, _ = states.states_of([keras.callbacks.EarlyStopping()])
    assert [(each["class"], each["attributes"]) for each in known] == [
        ("EarlyStopping", {"wait": 0})
    ]
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
    known, arrays, _ = states.states_of([*stops, keras.callbacks.ReduceLROnPlateau()])
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
            model.fit(
                ROWS,
                ROWS[:, :2],
                batch_size=3,
                epochs=3,
                verbose=0,
                callbacks=[saved, note, stop],
            )
        except Stop:
            # Step 8 is batch 2 of the second epoch: it was saved before its end was announced.
            continue
    assert heard[:3] == [("end", 2), ("begin", 3), ("end", 3)]
