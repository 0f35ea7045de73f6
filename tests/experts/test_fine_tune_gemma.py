"""examples/fine_tune_gemma.py: a mixture of experts in full, then with LoRA."""

import importlib.util
import pathlib
import re

import pytest

import keras_tpu_dist as ktd

PATH = pathlib.Path(__file__).parents[2] / "examples" / "fine_tune_gemma.py"


@pytest.mark.slow
def test_the_gemma_example_trains(capsys, monkeypatch):
    pytest.importorskip("keras_hub", reason="there is no KerasHub here")
    spec = importlib.util.spec_from_file_location("fine_tune_gemma", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(ktd, "simulate", lambda devices: None)
    monkeypatch.setattr("sys.argv", ["fine_tune_gemma", "--epochs", "4"])
    example.main()
    text = capsys.readouterr().out
    assert "2,816 of 49,242 parameters train" in text
    for first, last in re.findall(r"loss ([\d.]+) to ([\d.]+)", text):
        assert float(last) < 0.8 * float(first)
    assert len(re.findall(r"loss ", text)) == 2
