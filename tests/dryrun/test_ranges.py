"""Ranges of quick effort."""

import json
from dataclasses import replace

import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.text import duration_text, span_text
from keras_tpu_dist.tools.dryrun.diff import diff
from keras_tpu_dist.tools.dryrun.figures import estimate
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.tools.searches.ranking import Ranking
from tests.dryrun.made import made_run, tried

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


def _quick():
    cost = made_run().cost
    return estimate(cost, V5E, "quick"), estimate(cost, V5E, "exact")


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
    ranking = Ranking(("v5e:4x4",), (tried(candidate, run=made_run(estimate=quick)),))
    raw = duration_text(quick.step)
    assert " to " in ranking.limit
    for text in (str(ranking), ranking._page()):
        assert raw not in text
        assert span_text(*quick.span, duration_text) in text


@pytest.mark.parametrize("mode", ["train", "predict"])
def test_rows_give_the_time_of_an_epoch(mode):
    run = replace(made_run(mode=mode, effort="exact"), rows=1_000_001)
    assert "rows" not in "".join(name for name, _ in replace(run, rows=None)._time_rows())
    assert run.epoch_steps == 977  # of 1024 rows, the last one of fewer
    assert run.epoch_range == (977 * run.estimate.step,) * 2
    (line,) = (line for line in str(run).splitlines() if "1,000,001 rows" in line)
    what = "an epoch" if mode == "train" else mode
    assert line.split() == f"{what} of 1,000,001 rows {_text(run)} in 977 step(s)".split()
    plain = run.to_dict()
    assert (plain["epoch_steps"], plain["epoch_range"]) == (977, run.epoch_range)
    assert json.loads(run.to_json())["rows"] == 1_000_001


def _text(run):
    return duration_text(977 * run.estimate.step)


@pytest.mark.parametrize(("seconds", "text"), [(119, "119.00 s"), (120, "2.0 min"), (9e3, "2.5 h")])
def test_long_times_have_units(seconds, text):
    assert duration_text(seconds) == text


def test_rows_of_one_token_have_no_time():
    with pytest.raises(ValueError, match=r"one token.*rows=8.*Leave rows out"):
        ktd.dry_run(lambda: None, rows=8, mode="generate")


@pytest.mark.parametrize(
    ("mode", "hidden", "why"),
    [
        ("train", 0.0, "counts a gradient of the input"),
        ("train", 0.5, "counts causal attention in full"),
        ("predict", 0.0, "has fewer products than the model"),
    ],
)
def test_a_utilisation_above_the_share_of_busy_units_says_why(mode, hidden, why):
    plain = replace(made_run(effort="exact"), peak_flops=197e12, mode=mode)
    runs = plain.devices * plain.peak_flops * plain.estimate.compute
    assert plain.estimate.compute < 0.5 * plain.estimate.step
    for times in (1.0, 1.2):
        run = replace(plain, model_flops=runs * times, hidden_flops=runs * hidden)
        assert (why in " ".join(str(run).split())) == (times > 1)
