"""How far estimates are off: published measurements over estimates, in reports and searches."""

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from keras_tpu_dist.hardware import measured
from keras_tpu_dist.hardware.measured import RATIOS, spread_of
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.tools.searches.ranking import Ranking
from tests.dryrun.made import made_run, tried

RECORD = Path(__file__).parents[2] / "benchmarks" / "published.jsonl"
ALIKE = [("v5e", "train", "compute", "exact", ratio, n) for n, ratio in enumerate((1.1, 0.9, 1.0))]
ALIKE += [("v5e", "train", "compute", "quick", ratio, 7) for ratio in (0.3, 0.5)]


OTHER_MESH = ("v5e 128B", "2 x v5e 128B", "32 x v5e 128B")


def run_bound_by(bound, **changes):
    run = made_run(effort="exact", **changes)
    return replace(run, estimate=replace(run.estimate, bound=bound))


def recorded(searches=False):
    """The newest recorded line of each row and effort."""
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    found = {(data["row"], data["effort"]): data for data in lines}
    return [data for (row, _), data in found.items() if row.endswith(": search") == searches]


def test_the_ratios_are_those_of_the_recorded_compilations():
    # Every row that has an estimate, whether it is good or bad, and the mesh of its source.
    found = [
        (*(data[name] for name in ("chip", "mode", "bound", "effort")), ratio, data["parameters"])
        for data in recorded()
        if data["estimate_s"] and data["row"] not in OTHER_MESH
        for ratio in [data["published_s"] / data["estimate_s"]]
    ]
    for ours, theirs in zip(sorted(RATIOS), sorted(found), strict=True):
        assert ours[:4] == theirs[:4]
        assert ours[4] == pytest.approx(theirs[4], abs=6e-4)
        assert ours[5] == theirs[5]


def test_the_page_shows_every_recorded_row():
    page = (RECORD.parents[1] / "docs" / "published.md").read_text()
    for data in recorded():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {data['row']} |"))
        if data["estimate_s"]:
            assert f"{data['published_s'] / data['estimate_s']:.2f}" in line


def test_a_search_finds_a_plan_as_fast_as_the_published_one():
    found = recorded(searches=True)
    assert len(found) >= 2
    for data in found:
        spread = spread_of(data["chip"], data["mode"], data["bound"], data["effort"])
        error = max(map(abs, spread.left_out))
        assert data["estimate_s"] == pytest.approx(data["published_s"], rel=error), data["row"]


def test_a_ratio_is_foretold_by_the_others():
    with mock.patch.object(measured, "RATIOS", ALIKE):
        spread = spread_of("v5e", "train", "compute", "exact")
    assert (spread.low, spread.high) == (0.9, 1.1)
    means = [math.sqrt(1.0 * 1.1), math.sqrt(0.9 * 1.1), math.sqrt(0.9 * 1.0)]
    errors = [ratio / mean - 1 for ratio, mean in zip((0.9, 1.0, 1.1), means, strict=True)]
    assert spread.left_out == pytest.approx(errors)
    assert spread.error == pytest.approx(sum(map(abs, errors)) / 3)
    with mock.patch.object(measured, "RATIOS", ALIKE):
        quick = spread_of("v5e", "train", "compute", "quick")
    assert (quick.low, quick.high) == (0.3, 0.5)


def test_a_report_says_what_such_programs_took():
    with mock.patch.object(measured, "RATIOS", ALIKE):
        here, elsewhere = run_bound_by("compute"), run_bound_by("compute", topology="v6e:4x4")
        unknown = run_bound_by("links")
        words = "when measured", "0.90 to 1.10 of that", "3 published programs", "on v5e"
        words += (f"mean error {here.spread.error:.1%} (leave one out)",)
        for text in (" ".join(str(here).split()), here._page()):
            assert all(word in text for word in words)
        assert here.to_dict()["spread"]["ratios"] == (0.9, 1.0, 1.1)
        assert "on other chips" in " ".join(str(elsewhere).split())
        assert elsewhere.spread.chip == ""
        assert unknown.spread is None
        assert unknown.to_dict()["spread"] is None
        words = "not known: at effort exact, no published step is bound by links"
        assert words in " ".join(str(unknown).split())
        # An estimate of effort quick is a range: what it was measured as is a time.
        quick = replace(here, effort="quick", estimate=replace(here.estimate, step=2.0))
        assert "600.00 ms to 1.00 s: 2 published programs like this of one model" in " ".join(
            str(quick).split()
        )


@pytest.mark.parametrize(("ahead", "close"), [(0.03, True), (0.3, False)])
def test_a_search_says_if_its_first_two_are_too_close_to_tell(ahead, close):
    first = run_bound_by("compute")
    second = replace(
        first, estimate=replace(first.estimate, step=first.estimate.step * (1 + ahead))
    )
    found = [
        tried(Candidate((("data", devices),)), rows=64, run=run)
        for devices, run in ((8, first), (4, second))
    ]
    with mock.patch.object(measured, "RATIOS", ALIKE):
        ranking = Ranking(("v5e:4x4",), tuple(found))
        assert bool(ranking.undecided) == close
        assert ("measure both" in " ".join(str(ranking).split())) == close
        assert ("measure both" in ranking._page()) == close
        quick = Ranking(
            ("v5e:4x4",), (found[0], replace(found[1], run=replace(second, effort="quick")))
        )
        assert not quick.undecided
    assert not Ranking(("v5e:4x4",), tuple(found[:1])).undecided
