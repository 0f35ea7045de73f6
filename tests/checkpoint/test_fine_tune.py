"""examples/fine_tune.py: another head, another mesh, the encoder frozen first, LoRA."""

import pathlib
import re

import pytest
from helpers import assert_close, loaded

import keras_tpu_dist as ktd

PATH = pathlib.Path(__file__).parents[2] / "examples" / "fine_tune.py"


@pytest.mark.slow
def test_the_fine_tune_example_runs(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    example = loaded(PATH, "fine_tune")
    monkeypatch.setattr(ktd, "simulate", lambda devices: None)
    arguments = ["fine_tune", "--epochs", "3", "--directory", str(tmp_path), "--lora", "4"]
    monkeypatch.setattr("sys.argv", arguments)
    example.main()
    text = capsys.readouterr().out
    assert "9 variables loaded" in text
    assert "  kept   classifier/head/kernel" in text
    assert "->" not in text.replace("seed_generator/seed_generator_state ->", "")
    trained = re.search(r"trained: (.+)", text)[1].split(", ")
    assert "encoder/first/lora_kernel_a" in trained
    assert "encoder/first/bias" not in trained
    head = re.findall(r"head, epoch \d: loss ([\d.]+)", text)
    assert len(head) == 3
    assert float(head[-1]) < float(head[0])
    # The checkpoint on one device has the loss that the last epoch had on eight.
    last = re.findall(r"validation ([\d.]+)", text)[-1]
    shown = text.splitlines()[-1]
    assert_close(float(re.search(r"validation: loss ([\d.]+)", shown)[1]), float(last), 2e-4)
    monkeypatch.setattr("sys.argv", [*arguments, "--validate"])
    example.main()
    assert capsys.readouterr().out == f"{shown}\n"
