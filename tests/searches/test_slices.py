"""Slices compared: by chips times seconds, by price; strategies as lines to copy."""

import json
from dataclasses import replace

import pytest
from dryrun.made import made_comparison, made_run

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.searches.candidates import Candidate, candidates
from keras_tpu_dist.tools.searches.forecast import Forecast
from keras_tpu_dist.tools.searches.ranking import Ranking, Tried


def ranking(topology, step_s, rows=1024, fits=True):
    """One candidate on a slice, of which a step takes so long."""
    run = made_run(topology, fits=fits, batch_size=rows)
    run = replace(run, estimate=replace(run.estimate, step=step_s))
    mesh = (("data", ktd.Topology.parse(topology).num_devices),)
    return Ranking(topology, (Tried(Candidate(mesh), rows, run=run),))


def test_chips_times_seconds_decide():
    # 16 x 3 ms, 4 x 10 ms, 64 x 1 ms, and one that does not fit.
    steps = {"v5e:4x4": 3e-3, "v6e:2x2": 1e-2, "v5p:4x4x4": 1e-3}
    rankings = [ranking(name, s) for name, s in steps.items()]
    rankings.append(ranking("v5e:2x2", 1e-4, fits=False))
    found = ktd.compare_slices(rankings)
    assert [each.topology.name for each in found.candidates][:3] == [
        "v6e:2x2",
        "v5e:4x4",
        "v5p:4x4x4",
    ]
    assert found.best.chip_seconds == pytest.approx(4e-2)
    assert found.best.chip_seconds_a_row == pytest.approx(4e-2 / 1024)
    assert found.fastest.topology.name == "v5p:4x4x4"
    assert str(found).splitlines()[-2:] == [
        'strategy = ktd.TPUStrategy({"data": 64})  # v5p:4x4x4: fastest',
        'strategy = ktd.TPUStrategy({"data": 4})  # v6e:2x2: fewest chip-seconds',
    ]
    assert dict(found.strategy("v6e:2x2").mesh.shape) == {"data": 4}


def test_a_price_decides():
    found = ktd.compare_slices(
        [ranking("v5e:4x4", 3e-3), ranking("v6e:2x2", 1e-2)],
        price={"v5litepod": 1.0, "v6e": 2.0},
    )
    assert found.best.topology.name == "v5e:4x4"
    # 16 chips x 3 ms / 1024 rows, at 1.00 an hour.
    million = 1e6 * 16 * 3e-3 / 1024 / 3600
    data = json.loads(json.dumps(found.to_dict()))
    assert data["candidates"][0]["price_per_million_rows"] == pytest.approx(million)
    assert "price/1M" in str(found)
    assert "ranked by the price of a million rows" in str(found)
    assert "chip-s/1k rows" not in str(found)
    assert "cheapest, and fastest" in str(found).splitlines()[-1]


def test_slices_are_compared_by_the_price_of_a_row():
    """Twice the rows in the same time are half the price."""
    found = ktd.compare_slices([ranking("v5e:4x4", 3e-3), ranking("v6e:4x4", 3e-3, rows=2048)])
    assert found.best.topology.name == "v6e:4x4"
    assert "chip-s/1k rows" in str(found)


def test_nothing_fits():
    found = ktd.compare_slices([ranking("v5e:4x4", 3e-3, fits=False)])
    assert found.best is None
    assert found.fastest is None
    assert "nothing fits" in str(found)
    assert "strategy = " not in str(found)
    with pytest.raises(ValueError, match="No tried strategy fits"):
        found.strategy()


def test_nothing_was_compiled():
    found = ktd.compare_slices([Ranking("v5e:4x4", ())])
    assert str(found) == "v5e:4x4: nothing fits"
    assert found.to_dict()["candidates"] == []
    assert "nothing fits" in found.to_html()


def test_the_page_escapes_names():
    page = ktd.compare_slices([made_comparison(), made_comparison("v6e:4x4")]).to_html()
    assert "<script>document.title" not in page
    assert page.count("<h2>") == 2


@pytest.mark.parametrize(
    "layout", [None, "fsdp", [("kernel", (None, "model"))], ktd.Planner("fsdp", min_size=8)]
)
def test_the_line_of_a_strategy_makes_it(layout):
    mesh = {"data": 4, "model": 2}
    own = ktd.TPUStrategy(mesh, layout, remat={"dense*": "dots"}, shard_optimizer=layout is None)
    names = {"ktd": ktd}
    exec(Candidate.of(own).line, names)
    made = names["strategy"]
    assert dict(made.mesh.shape) == mesh
    assert made.layouts.layout == own.layouts.layout
    assert made.options == own.options


def test_the_lines_of_a_search_make_strategies():
    for candidate in candidates(8):
        names = {"ktd": ktd}
        exec(candidate.line, names)
        made, own = names["strategy"], candidate.strategy()
        assert made.layouts.layout == own.layouts.layout
        assert made.options == own.options


def test_a_ranking_ends_in_its_best():
    found = made_comparison()
    line = f"{found.best.candidate.line}  # batch_size={found.best.rows}"
    assert str(found).splitlines()[-1] == line
    assert str(found).count("TPUStrategy") == 1
    assert found.best.candidate.line.replace('"', "&quot;") in found.to_html()


@pytest.mark.parametrize(
    ("columns", "layout"), [(100, "fsdp and tensor_parallel"), (80, "tensor_parallel")]
)
def test_a_candidate_takes_one_line(columns, layout, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    run = made_run("v5e:2x4", batch_size=1024)
    run = replace(run, estimate=replace(run.estimate, low=1.16e-2, high=3.63e-2))
    candidate = Candidate((("data", 2), ("model", 4)), layout, remat="dots")
    split = Candidate((("data", 8),), "tensor_parallel", shard_optimizer=True)
    ahead = Forecast(2**33, 2**32, 2**34, 1e-3, 2e-3, 60e-3)
    tried = (
        Tried(candidate, 1024, ahead, replace(run, effort="exact")),
        Tried(split, 1024, ahead, replace(run, effort="quick")),
        Tried(split, 1024, ahead, replace(run, effort="quick", fits=False)),
        Tried(split, 1024, ahead),
        Tried(split, 1024, error="The mesh does not fit the slice."),
    )
    first = Ranking("v5e:2x4", tried)
    lines = str(first).splitlines()
    assert max(map(len, lines[:-1])) <= columns  # the last is to copy
    header = next(n for n, line in enumerate(lines) if line.split()[0] == "mesh")
    assert [line for line in lines[header + 1 :] if not line.startswith("  ")][:-1] == [
        "fits, effort exact:",
        "fits, effort quick:",
        "too large, effort quick:",
        "not compiled, forecasts:",
        "cannot be compiled:",
    ]
    assert sum(line.startswith("  data") for line in lines) == len(tried)
    both = ktd.compare_slices([first, first], price=1.0)
    lines = str(both).splitlines()
    table = lines[: next(n for n, line in enumerate(lines) if line.startswith("strategy"))]
    assert max(map(len, table)) <= columns
    assert sum(line.startswith("  v5e:2x4") for line in lines) == 2 * len(tried)
    assert ("memory" in str(both)) == (columns == 100)
