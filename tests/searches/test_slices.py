"""Several slices in one ranking: by chip-hours, by price; strategies as lines to copy."""

import json
from dataclasses import replace

import keras
import pytest
from dryrun.made import made_comparison, made_run, tried

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.searches import search as searching
from keras_tpu_dist.tools.searches.candidates import Candidate, candidates
from keras_tpu_dist.tools.searches.forecast import Forecast
from keras_tpu_dist.tools.searches.ranking import Ranking, rank


def on_slice(topology, step_s, rows=1024, fits=True, price=None):
    """A candidate on a slice, of which a step takes so long."""
    run = made_run(topology, fits=fits, batch_size=rows)
    run = replace(run, estimate=replace(run.estimate, step=step_s, low=step_s, high=step_s))
    mesh = (("data", ktd.Topology.parse(topology).num_devices),)
    return tried(Candidate(mesh), topology, rows, run=run, price=price)


def ranking(*found):
    names = dict.fromkeys(one.topology.name for one in found)
    return Ranking(tuple(names), tuple(sorted(found, key=rank)))


def test_chip_hours_decide():
    # 16 x 3 ms, 4 x 10 ms, 64 x 1 ms, and one that does not fit.
    steps = {"v5e:4x4": 3e-3, "v6e:2x2": 1e-2, "v5p:4x4x4": 1e-3}
    too_large = on_slice("v5e:2x2", 1e-4, fits=False)
    found = ranking(too_large, *(on_slice(name, s) for name, s in steps.items()))
    names = [one.topology.name for one in found.candidates]
    assert names == ["v6e:2x2", "v5e:4x4", "v5p:4x4x4", "v5e:2x2"]
    assert found.best.chip_hours == pytest.approx(1e6 * 4e-2 / 1024 / 3600)
    text = str(found)
    assert "ranked by chips times hours for a million rows" in " ".join(text.split())
    assert "chip-h/1M" in text
    assert "price" not in text
    last = 'strategy = ktd.TPUStrategy({"data": 4})  # batch_size=1024 on v6e:2x2'
    assert text.splitlines()[-1] == last
    assert dict(found.strategy("v6e:2x2").mesh.shape) == {"data": 4}


def test_a_price_decides():
    found = ranking(on_slice("v5e:4x4", 3e-3, price=1.0), on_slice("v6e:2x2", 1e-2, price=2.0))
    assert found.best.topology.name == "v5e:4x4"
    # 16 chips x 3 ms / 1024 rows, at 1.00 an hour.
    million = 1e6 * 16 * 3e-3 / 1024 / 3600
    data = json.loads(json.dumps(found.to_dict()))
    assert data["topologies"] == ["v5e:4x4", "v6e:2x2"]
    first, second = data["candidates"]
    assert first["topology"] == "v5e:4x4"
    assert first["price_per_million_rows"] == pytest.approx(million)
    assert second["price_per_million_rows"] == pytest.approx(2 * 4e-2 / (16 * 3e-3) * million)
    assert first["chip_hours_per_million_rows"] == pytest.approx(million)
    text = str(found)
    assert f"{million:.3g}" in text
    assert "price/1M" in text
    assert "chip-h/1M" not in text
    assert "ranked by the price of a million rows" in " ".join(text.split())


def test_one_slice_with_a_price_has_its_column():
    text = str(ranking(on_slice("v5e:4x4", 3e-3, price=1.0)))
    assert "price/1M" in text
    assert "v5e:4x4  " not in text
    assert "price/1M" not in str(ranking(on_slice("v5e:4x4", 3e-3)))


def test_slices_are_ranked_by_a_row():
    """Twice the rows in the same time cost half."""
    found = ranking(on_slice("v5e:4x4", 3e-3), on_slice("v6e:4x4", 3e-3, rows=2048))
    assert found.best.topology.name == "v6e:4x4"
    assert "rows" in str(found)


def test_nothing_fits():
    found = ranking(*(on_slice(name, 3e-3, fits=False) for name in ("v5e:4x4", "v6e:4x4")))
    assert found.best is None
    assert "none fits" in str(found)
    assert "strategy = " not in str(found)
    with pytest.raises(ValueError, match="No tried strategy fits"):
        found.strategy()


def test_nothing_was_compiled():
    found = Ranking(("v5e:4x4", "v6e:4x4"), ())
    assert "none fits" in str(found)
    assert found.to_dict()["candidates"] == []
    assert "no candidate fits" in found.to_html() or "none has times" in found.to_html()


def test_the_page_escapes_names():
    both = (*made_comparison().compiled, *made_comparison("v6e:4x4").compiled)
    page = Ranking(("v5e:4x4", "v6e:4x4"), both).to_html()
    assert "<script>document.title" not in page
    assert page.count("<h2>") == 2
    assert page.count("<circle") == made_comparison().to_html().count("<circle") * 2


def test_a_search_of_several_slices_is_one_ranking(monkeypatch):
    """The same forecasts and compilations for each; a price is that of its chip."""

    def build():
        layers = [keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(8)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
        return model

    steps = {"v5e:2x2": 3e-3, "v6e:2x2": 2e-3}

    def compiled(how, one, lowered):
        name = one.topology.name
        return replace(one, run=on_slice(name, steps[name]).run)

    monkeypatch.setattr(searching, "lowered_step", lambda *_: "a program")
    monkeypatch.setattr(searching, "compiled_step", compiled)
    names, few = ["v5e-4", "v6e-4"], {"compilations": 2, "exact": 1, "cache": False}
    found = ktd.search(build, names, 64, **few)
    assert found.topologies == ("v5e:2x2", "v6e:2x2")
    assert [one.topology.name for one in found.compiled] == ["v6e:2x2"] * 2 + ["v5e:2x2"] * 2
    assert {one.topology.name for one in found.others} == {"v5e:2x2", "v6e:2x2"}
    assert f"... {len(found.others)} not compiled" in str(found)
    alone = ktd.search(build, names[0], 64, **few)
    assert len(found.candidates) == 2 * len(alone.candidates)
    priced = ktd.search(build, names, 64, price_per_chip_hour={"v5litepod": 1, "v6e": 3.0}, **few)
    assert [one.price for one in priced.compiled] == [1.0] * 2 + [3.0] * 2
    assert all(one.price is not None for one in priced.others)


@pytest.mark.parametrize(
    ("topology", "prices", "error"),
    [
        ([], None, "one slice or several, each of them once"),
        (["v5e-8", "v5e:2x4"], None, "one slice or several, each of them once"),
        ("v5e-8", 1.2, "by the names of chips"),
        ("v5e-8", {"v5f": 1.2}, "Did you mean 'v5"),
        ("v5e-8", {"v5e": 0}, "a number above 0"),
        (["v5e-8", "v6e-8"], {"v6e": 2.7}, 'Add "v5e" to it'),
    ],
)
def test_wrong_slices_and_prices(topology, prices, error):
    with pytest.raises(ValueError, match=error):
        ktd.search(lambda: None, topology, price_per_chip_hour=prices)


@pytest.mark.parametrize(
    "layout", [None, "fsdp", [("kernel", (None, "model"))], ktd.Planner("fsdp", min_size=8)]
)
def test_the_line_of_a_strategy_makes_it(layout):
    mesh = {"data": 4, "model": 2}
    candidate = Candidate(tuple(mesh.items()), layout, layout is None, "dots")
    own = candidate.strategy()
    names = {"ktd": ktd}
    exec(candidate.line, names)
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
    found = (
        tried(candidate, "v5e:2x4", forecast=ahead, run=replace(run, effort="exact")),
        tried(split, "v5e:2x4", forecast=ahead, run=replace(run, effort="quick")),
        tried(split, "v5e:2x4", forecast=ahead, run=replace(run, effort="quick", fits=False)),
        tried(split, "v5e:2x4", forecast=ahead),
        tried(split, "v5e:2x4", error="The mesh does not fit the slice."),
    )
    lines = str(Ranking(("v5e:2x4",), found)).splitlines()
    assert max(map(len, lines[:-1])) <= columns  # the last is to copy
    header = next(n for n, line in enumerate(lines) if line.split()[0] == "mesh")
    assert [line for line in lines[header + 1 :] if not line.startswith("  ")][:-1] == [
        "fits, effort exact:",
        "fits, effort quick:",
        "too large, effort quick:",
        "not compiled, forecasts:",
        "cannot be compiled:",
    ]
    assert sum(line.startswith("  data") for line in lines) == len(found)
    priced = [replace(one, price=1.0) for one in found]
    alone = str(Ranking(("v5e:2x4",), tuple(priced))).splitlines()
    (forecast,) = (n for n, line in enumerate(alone) if line == "not compiled, forecasts:")
    assert "0.137" in alone[forecast + 1]  # 8 chips x 63 ms / 1024 rows, at 1.00 an hour
    both = Ranking(("v5e:2x4", "v6e:2x4"), tuple(sorted(2 * priced, key=rank)))
    lines = str(both).splitlines()
    table = lines[: next(n for n, line in enumerate(lines) if line.startswith("strategy"))]
    assert max(map(len, table)) <= columns
    assert sum(line.startswith("  v5e:2x4") for line in lines) == 2 * len(found)
    assert any("price/1M" in line for line in lines)
