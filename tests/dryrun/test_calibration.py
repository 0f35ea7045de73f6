"""Ranges of quick effort, and what a check measured in the place of specifications."""

import json
from dataclasses import replace

import keras
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.calibration import Calibration, published
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.text import duration_text, span_text
from keras_tpu_dist.tools.dryrun.diff import diff
from keras_tpu_dist.tools.dryrun.figures import estimate
from keras_tpu_dist.tools.dryrun.measured import MeasuredSteps
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.tools.searches.ranking import Ranking, Tried
from tests.dryrun.made import EVIL, made_run

# What `python benchmarks/dry_run.py` printed, docs/numbers.md: the step of quick, and of exact.
MEASURED = {
    "transformer": (55.70e-3, 28.42e-3),
    "ktd.LSTM": (617.6e-6, 246.8e-6),
    "transformer scanned": (68.63e-3, 39.38e-3),
    "MobileNetV2": (3.81e-3, 1.81e-3),
    "ktd.GRU": (647.0e-6, 290.2e-6),
    "ktd.SimpleRNN": (229.3e-6, 80.8e-6),
}
V5E = Topology.parse("v5e:4x4")


def _quick(**options):
    cost = made_run().cost
    return estimate(cost, V5E, "quick", **options), estimate(cost, V5E, "exact")


def test_a_range_for_quick_effort_and_a_number_for_exact():
    quick, exact = _quick()
    assert quick.step == exact.step
    assert exact.span == (exact.step, exact.step)
    low, high = quick.span
    assert low < high
    assert low >= max(quick.compute, quick.link)
    assert high == pytest.approx(quick.kernels / 1.5 + quick.exposed_link)


@pytest.mark.parametrize("model", MEASURED)
def test_what_exact_effort_says_is_in_the_range_of_quick(model):
    """As if all of the step were the compiler's cycles; the benchmark has the true parts."""
    quick, exact = MEASURED[model]
    assert quick / 3.5 < exact < quick / 1.5


def test_no_number_of_quick_effort_stands_without_its_range():
    quick, _ = _quick()
    run = made_run(
        estimate=quick,
        model_flops=1e15,
        peak_flops=V5E.peak_flops(),
        tokens=2048,
        prompt_s=2e-3,
        prompt_range=(5e-4, 1e-3),
        token_limit_s=1e-6,
    )
    low, high = run.step_range
    text = str(run)
    assert 'effort="exact" narrows it' in " ".join(text.split())
    for name in (
        "step, estimate",
        "matrix units busy",
        "model FLOPs utilisation",
        "per second",
        "compiler's cycles at the clock",
        "prompts, before the first token",
        "weights and cache read once",
    ):
        lines = [line for line in text.splitlines() if name in line]
        assert lines, name
        assert all(" to " in line for line in lines), lines
    page = run._page()
    for word in ("step, estimate of effort quick", f"bound by {quick.bound}", "not overlapped"):
        assert word in page
    assert "matrix units busy</dt>" in page
    # The raw sum of a program of effort quick stands nowhere.
    raw = duration_text(quick.step)
    assert raw not in text
    assert raw not in page
    assert duration_text(quick.kernels) not in text
    plain = run.to_dict()
    assert plain["step_range"] == plain["ranges"]["step"] == (low, high)
    assert plain["ranges"]["prompt_s"] == (5e-4, 1e-3)
    for name in ("mfu", "samples_per_second", "tokens_per_second", "kernels"):
        assert plain["ranges"][name][0] < plain["ranges"][name][1], name
    exact = made_run(estimate=estimate(run.cost, V5E), effort="exact")
    assert " to " not in "".join(v for k, v in exact._time_rows())
    for name in ("  step ", "  kernels "):
        (line,) = (line for line in str(diff(run, exact)).splitlines() if line.startswith(name))
        # The first, which is of effort quick, and the ratio.
        assert line.count(" to ") == 2


@pytest.mark.parametrize("busy", [0.4, 0.97])
def test_a_utilisation_that_nobody_measured_says_so(busy):
    plain = replace(made_run(effort="exact"), peak_flops=197e12)
    done = busy * plain.devices * plain.peak_flops * plain.estimate.step
    exact = replace(plain, model_flops=done)
    (line,) = (line for line in str(exact).splitlines() if "model FLOPs utilisation" in line)
    assert f"{busy:.1%}" in line
    assert ("more than is published for TPUs" in line) == (busy > 0.75)
    assert "causal" not in str(exact).replace(line, "")
    half = replace(exact, hidden_flops=done / 4)
    assert half.mfu_causal == pytest.approx(busy * 3 / 4)
    (line,) = (line for line in str(half).splitlines() if "with half of causal attention" in line)
    assert f"{busy * 3 / 4:.1%}" in line


def test_rankings_of_quick_effort_have_ranges():
    quick, _ = _quick()
    candidate = Candidate((("data", 16),))
    ranking = Ranking("v5e:4x4", (Tried(candidate, 1024, run=made_run(estimate=quick)),))
    raw = duration_text(quick.step)
    assert " to " in ranking.limit
    for text in (str(ranking), ranking._page()):
        assert raw not in text
        assert span_text(*quick.span, duration_text) in text


def test_a_profile_beside_a_run_of_quick_effort():
    quick, _ = _quick()
    run = made_run(estimate=quick)
    found = {each.layer: 1e-3 for each in run.cost.layers}
    profile = MeasuredSteps(
        ((1, 2),), "tpu", "TPU v5 lite", 16, 1e-2, 1e-2, tuple(found.items()), ()
    )
    beside = run.compare(profile)
    for each in beside.layers:
        low, high = each.estimated
        assert high == pytest.approx(low * 3.5 / 1.5)
    rows = [line for line in str(beside).splitlines() if "block_1/dense" in line]
    assert rows
    assert all(line.count(" to ") == 2 for line in rows)


def test_a_calibration_replaces_rates_and_range():
    measured = Calibration(
        "v5e",
        {"bfloat16": 1e14},
        hbm_bandwidth=4e11,
        link_bandwidth=1e10,
        quick=(0.4, 0.6),
        exact=1.1,
        source="a v5e-16",
    )
    applied = measured.applied(V5E)
    assert applied.peak_flops() == 1e14
    assert (applied.hbm_bandwidth, applied.link_bandwidth) == (4e11, 1e10)
    assert applied.peak_flops("int8") == V5E.peak_flops("int8")
    assert published(applied) == V5E
    cost = made_run().cost
    quick = estimate(cost, applied, "quick", measured)
    assert quick.span == pytest.approx((0.4 * quick.step, 0.6 * quick.step))
    exact = estimate(cost, applied, "exact", measured)
    assert exact.span == pytest.approx((1.1 * exact.step, 1.1 * exact.step))
    run = made_run(estimate=quick, calibration=str(measured))
    assert "a v5e-16 (v5e: peak_flops, hbm_bandwidth" in run._page()
    assert run.to_dict()["calibration"] == str(measured)


def test_rates_are_those_of_one_device():
    v3 = Topology.parse("v3-8")
    applied = Calibration("v3", {"bfloat16": 5e13}, hbm_bandwidth=4e11).applied(v3)
    assert applied.peak_flops() == 5e13
    assert applied.hbm_bandwidth == 4e11
    assert applied.chip.hbm_bandwidth == 8e11


def test_a_calibration_saved_and_loaded_is_the_same(tmp_path):
    path = tmp_path / "v5e.json"
    measured = Calibration("v5e", {"int8": 3e14}, quick=(0.4, 0.5), source=EVIL)
    measured.save(path)
    assert Calibration.load(path) == measured
    assert EVIL not in made_run(calibration=str(measured))._page()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "JSON file"),
        ("[]", "one JSON object"),
        ("[" * 100_000, "one JSON object|JSON file"),
        ('{"chip": "v5e", "x": "' + "y" * 70_000 + '"}', "at most 64 KiB"),
        ('{"hbm_bandwidth": 1e12}', "has the chip"),
        ('{"chip": "v5e", "hbm_bandwith": 1e12}', "Did you mean 'hbm_bandwidth'"),
        ('{"chip": "v5e", "__class__": "os.system"}', "unknown"),
        ('{"chip": "v5e", "applied": 1}', "unknown"),
        ('{"chip": "v5e", "hbm_bandwidth": NaN}', "finite number above 0"),
        ('{"chip": "v5e", "hbm_bandwidth": Infinity}', "finite number above 0"),
        ('{"chip": "v5e", "hbm_bandwidth": ' + "9" * 5000 + "}", "JSON file|finite"),
        ('{"chip": "v5e", "exact": {"a": 1}}', "finite number|one factor"),
        ('{"chip": ["v5e"]}', "chip of Calibration is"),
    ],
)
def test_odd_files(text, words, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        Calibration.load(path)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="JSON file"):
        Calibration.load(tmp_path)


def test_another_chip_is_refused(tmp_path):
    words = r"only valid for the chip.*calibration of='v6e'.*v5e:4x4"
    with pytest.raises(ValueError, match=words):
        Calibration("v6e").applied(V5E)
    path = tmp_path / "v6e.json"
    path.write_text(json.dumps({"chip": "v6e"}))

    def build():
        raise AssertionError("is not built")

    strategy = ktd.TPUStrategy(topology="v5e:4x4")
    one = {"topology": "v5e:4x4", "meshes": [{"data": 16}], "batch_size": 16}
    for other in (Calibration("v6e"), path):
        with pytest.raises(ValueError, match=words):
            ktd.search(build, "v5e:4x4", 16, calibration=other)
        with pytest.raises(ValueError, match=words):
            ktd.compare(build, **one, calibration=other)
        with pytest.raises(ValueError, match=words):
            ktd.largest_batch(build, strategy, calibration=other)


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_compare_and_largest_batch_are_calibrated(tmp_path):
    def build():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, name="dense")])
        model.compile("adam", "mse")
        return model

    # A hundredth of the specification, so that the step is bound by it.
    measured = Calibration("v5e", hbm_bandwidth=8.2e9, quick=(0.5, 0.6), source="ours")
    measured.save(path := tmp_path / "v5e.json")
    words = "calibrated by ours (v5e: hbm_bandwidth, quick)"
    one = {"topology": "v5e:2x2", "meshes": [{"data": 4}], "batch_size": 4096}
    plain, found = (ktd.compare(build, **one, calibration=each) for each in (None, path))
    assert words in " ".join(str(found).split())  # the line of the title may be folded
    assert words in found._page()
    assert found.to_dict()["calibration"] == str(measured)
    assert words in ktd.compare_slices([found])._title()
    assert "calibrated" not in str(plain)
    before, after = plain.best.run.estimate, found.best.run.estimate
    assert after.step > 2 * before.step
    assert after.span == pytest.approx((0.5 * after.step, 0.6 * after.step))
    strategy = ktd.TPUStrategy(topology="v5e:2x2")
    largest = ktd.largest_batch(build, strategy, max_compiles=1, calibration=measured)
    assert words in str(largest)
    assert words in largest._page()
