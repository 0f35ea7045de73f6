"""What a check measured, as dry runs and searches take it."""

import json

import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.chips import CHIPS
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools.checkup.report import Check, CheckPart
from keras_tpu_dist.tools.shell.main import main

FIGURES = {
    "matrix units": {
        "bfloat16": {"0": 1.6e14, "1": 1.8e14, "2": 1.7e14},
        "int8": {"0": 3e14, "1": 3e14, "2": 3e14},
    },
    "memory": {"memory": {"0": 6e11, "1": 7e11, "2": 8e11}},
    "links": {
        "axes": {
            "data": {"network": "ICI", "of the table": {"all-reduce": 0.7, "all-gather": 0.8}},
            "model": {"network": "ICI", "of the table": {"all-reduce": 0.6}},
            "slice": {"network": "DCN", "of the table": {"all-reduce": 0.5}},
        },
        "neighbours": {},
    },
}


def made_check(kind="TPU v5 lite", **figures):
    parts = [CheckPart(n, "fast", "", (), f) for n, f in {**FIGURES, **figures}.items()]
    mesh = (("data", 2), ("model", 4))
    return Check(kind, "tpu", mesh, 1, 3.0, 60.0, tuple(parts), ())


def test_a_calibration_of_a_check(tmp_path):
    measured = made_check().calibration()
    chip = CHIPS["v5e"]
    assert measured.chip == "v5e"
    assert measured.peak_flops == {"bfloat16": 1.7e14, "int8": 3e14}
    assert measured.hbm_bandwidth == 7e11
    assert measured.link_bandwidth == pytest.approx(0.8 * chip.link_bandwidth)
    assert measured.dcn_bandwidth == pytest.approx(0.5 * chip.dcn_bandwidth)
    assert str(measured).startswith("a check of 8 TPU v5 lite (data 2 x model 4) (v5e: peak_flops")
    measured.save(tmp_path / "v5e.json")
    assert ktd.Calibration.load(tmp_path / "v5e.json") == measured
    assert made_check().calibration(source="our pod").source == "our pod"


def test_what_was_not_measured_stays_as_in_the_table():
    nothing = {name: {} for name in FIGURES}
    measured = made_check(**nothing).calibration()
    v5e = Topology.parse("v5e:2x4")
    assert measured.applied(v5e) == v5e


def test_no_calibration_of_simulated_devices():
    with pytest.raises(ValueError, match=r"check of a TPU.*device_kind='cpu'.*say nothing"):
        made_check("cpu").calibration()


def test_the_shell_writes_a_calibration(tmp_path, monkeypatch, capsys):
    words = ["check", "--calibration", str(tmp_path / "v5e.json")]
    assert main(words) == 2
    assert "A calibration needs a check of a TPU." in capsys.readouterr().err
    assert main(["check", "--calibration", str(tmp_path / "no" / "v5e.json")]) == 2
    assert "folder that exists" in capsys.readouterr().err
    monkeypatch.setattr("keras_tpu_dist.tools.shell.commands.chip_of", lambda kind: None)
    monkeypatch.setattr("keras_tpu_dist.tools.checkup.method.run_check", lambda *args: made_check())
    assert main(words) == 0
    assert json.loads((tmp_path / "v5e.json").read_text())["hbm_bandwidth"] == 7e11
