"""The scripts of TensorFlow issues 18102 and 18103 train, scanned and unrolled, and compile."""

import importlib.util
import pathlib

import pytest
from helpers import assert_close

import keras_tpu_dist as ktd

FOLDER = pathlib.Path(__file__).parent.parent / "examples"
NAMES = ("lstm_unroll", "time_distributed_pooling")


def _example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_both_ways_train_as_on_one_device(name, capsys, monkeypatch):
    example = _example(name)
    # Two epochs: with the optimizations of XLA's CPU compiler off, as in these tests, the gradient
    # of a maximum over pixels comes out as NaN after that, in plain JAX on one device too.
    alone = example.train(False, 2)
    assert alone[1] < alone[0] < 1
    for unroll in (False, True):
        assert_close(example.train(unroll, 2, ktd.TPUStrategy()), alone)
    option = "--unroll_lstm" if name == "lstm_unroll" else "--unroll"
    monkeypatch.setattr("sys.argv", [name, option, "false", "--epochs", "1"])
    monkeypatch.setattr(ktd, "simulate", lambda devices: None)
    example.main()
    assert capsys.readouterr().out == f"epoch 1: loss {alone[0]:.6f}\n"


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("name", "unroll", "topology"),
    [
        ("lstm_unroll", False, "v5e:2x4"),
        ("lstm_unroll", True, "v4:2x2x2"),
        ("time_distributed_pooling", False, "v4:2x2x2"),
        ("time_distributed_pooling", True, "v5e:2x4"),
    ],
)
def test_both_ways_compile_for_tpu_slices(name, unroll, topology):
    run = _example(name).compiled(unroll, topology)
    assert run.compiled_for == topology
    assert run.fits
    assert run.batch_size == 1024
    assert {axis for c in run.cost.collectives for axis in c.axes} == {"data"}
