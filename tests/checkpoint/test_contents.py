"""What the command says of a directory of checkpoints."""

import json

import keras
import numpy as np
import pytest
from helpers import assert_close

import keras_tpu_dist as ktd
from keras_tpu_dist.show.progress import listening
from keras_tpu_dist.tools.shell import given
from keras_tpu_dist.tools.shell.main import main

X, Y = np.ones((16, 4), "float32"), np.ones((16, 2), "float32")


def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, name="body"), keras.layers.Dense(2, name="head")],
        name="small",
    )
    model.compile("adam", "mse")
    return model


def trained(directory, epochs=2):
    with ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel").scope():
        model = build()
    saved = ktd.callbacks.Checkpoint(directory)
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[saved])
    return model


def command(*words):
    return main(["checkpoint", *map(str, words)])


def test_the_table_of_checkpoints_in_a_directory(tmp_path, capsys):
    trained(tmp_path)
    assert command(tmp_path) == 0
    text = capsys.readouterr().out
    assert "data 4 x model 2" in text
    assert [line.split()[:3] for line in text.splitlines()[-2:]] == [
        ["2", "2", "0"],
        ["4", "3", "0"],
    ]
    assert command(tmp_path, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["step"] for row in rows] == [2, 4]
    # Adam: two slots for each of 4 * 8 + 8 + 8 * 2 + 2 weights, and its count and learning rate.
    assert rows[0]["parameters"] == 58
    assert rows[0]["bytes"] == 3 * 58 * 4 + 8


@pytest.mark.slow
def test_to_keras(tmp_path, capsys, monkeypatch):
    model = trained(tmp_path / "a")
    monkeypatch.setattr(given, "build_function", lambda name: build)
    for file in ("plain.keras", "plain.weights.h5"):
        heard = []
        with listening(heard.append):
            arguments = ("--to-keras", tmp_path / file, "--build", "x:build")
            assert command(tmp_path / "a", *arguments) == 0
        assert [s.words for s in heard if s.depth == 0][:2] == ["building", "reading"]
        assert [s.done for s in heard if s.work == "restoring"] == [0, 1]
    plain = keras.saving.load_model(tmp_path / "plain.keras")
    assert_close(plain.get_weights(), model.get_weights())
    plain = build()
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "plain.weights.h5")
    assert_close(plain.get_weights(), model.get_weights())


@pytest.mark.parametrize("words", [["nowhere"], ["a", "--to-keras", "x"]])
def test_mistakes_are_one_line(words, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert command(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
