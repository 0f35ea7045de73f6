"""What a check measured, as dry runs and searches take it."""

import dataclasses
import json

import keras
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.chips import CHIPS
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools.checkup import timing
from keras_tpu_dist.tools.checkup.batch import Given
from keras_tpu_dist.tools.checkup.bench import Bench, Launcher
from keras_tpu_dist.tools.checkup.report import Check, CheckPart
from keras_tpu_dist.tools.dryrun.figures import estimate
from keras_tpu_dist.tools.shell.main import main
from tests.dryrun.made import made_run

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
    "step time": {"measured over estimate": {"quick": 0.5, "exact": 1.2}},
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
    assert (measured.quick, measured.exact) == ((0.5, 0.5), (1.2, 1.2))
    assert str(measured).startswith("a check of 8 TPU v5 lite (data 2 x model 4) (v5e: peak_flops")
    measured.save(tmp_path / "v5e.json")
    assert ktd.Calibration.load(tmp_path / "v5e.json") == measured
    assert made_check().calibration(source="our pod").source == "our pod"


def test_what_was_not_measured_stays_as_in_the_table():
    nothing = {name: {} for name in FIGURES}
    measured = made_check(**nothing).calibration()
    v5e = Topology.parse("v5e:2x4")
    assert measured.applied(v5e) == v5e
    assert (measured.quick, measured.exact) == (None, None)


def test_checks_of_several_models_widen_the_factors():
    other = made_check(**{"step time": {"measured over estimate": {"exact": 0.9}}})
    measured = made_check().calibration(other)
    assert (measured.quick, measured.exact) == ((0.5, 0.5), (0.9, 1.2))


def test_no_calibration_of_simulated_devices():
    with pytest.raises(ValueError, match=r"one kind of TPU.*device_kind=\['cpu'\].*say nothing"):
        made_check("cpu").calibration()
    with pytest.raises(ValueError, match=r"one kind of TPU.*TPU v5 lite.*TPU v4"):
        made_check().calibration(made_check("TPU v4"))


def test_the_shell_writes_a_calibration(tmp_path, monkeypatch, capsys):
    words = ["check", "--calibration", str(tmp_path / "v5e.json")]
    assert main(words) == 2
    assert "A calibration needs checks of one kind of TPU." in capsys.readouterr().err
    assert main(["check", "--calibration", str(tmp_path / "no" / "v5e.json")]) == 2
    assert "folder that exists" in capsys.readouterr().err
    monkeypatch.setattr("keras_tpu_dist.tools.shell.commands.chip_of", lambda kinds: None)
    monkeypatch.setattr("keras_tpu_dist.tools.checkup.method.run_check", lambda *args: made_check())
    assert main(words) == 0
    assert json.loads((tmp_path / "v5e.json").read_text())["hbm_bandwidth"] == 7e11


def test_a_step_beside_its_estimates(monkeypatch):
    """As on a TPU whose dry runs are known: factors are of estimates with the measured rates."""
    asked = {}

    def run_once(step, how):
        effort, calibration = how.effort, how.calibration
        asked[effort] = calibration
        run = made_run("v5e:2x4")
        seconds = estimate(run.cost, calibration.applied("v5e:2x4"), effort, calibration)
        return dataclasses.replace(run, estimate=seconds, effort=effort)

    monkeypatch.setattr(timing, "run_once", run_once)
    monkeypatch.setattr(Bench, "chip", CHIPS["v5e"])
    strategy = ktd.TPUStrategy({"data": 8})
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    measured = {n: f for n, f in FIGURES.items() if n != "step time"}
    bench = Bench(strategy, Launcher(), 60.0, measured)
    part = timing.own_step_time(bench, model, Given())
    assert asked["exact"] == asked["quick"]
    assert asked["exact"].hbm_bandwidth == 7e11
    assert asked["exact"].factor("exact") is None
    factors = part.figures["measured over estimate"]
    step = estimate(made_run("v5e:2x4").cost, asked["exact"].applied("v5e:2x4")).step
    assert factors == pytest.approx(dict.fromkeys(("exact", "quick"), part.figures["step"] / step))
    assert "effort exact; the dry run estimates" in part.words
    assert " to " in part.words.partition("effort exact; the dry run estimates")[2]
    assert any(row["estimated"] is not None for row in part.figures["by layer"])
    # A dry run of the same step with what was measured says what was measured.
    found = made_check(**{"step time": part.figures}).calibration()
    low, high = estimate(made_run("v5e:2x4").cost, found.applied("v5e:2x4"), "exact", found).span
    assert low == high == pytest.approx(part.figures["step"])


def test_there_may_be_no_time_for_estimates(monkeypatch):
    monkeypatch.setattr(Bench, "chip", CHIPS["v5e"])
    strategy = ktd.TPUStrategy({"data": 8})
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    part = timing.own_step_time(Bench(strategy, Launcher(), 0.01), model, Given())
    assert "no estimate of effort exact: it takes a minute" in part.words
    assert part.figures["measured over estimate"] == {}
