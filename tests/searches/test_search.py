"""search: candidates ranked, the best few compiled, the best a strategy that trains."""

import dataclasses
import functools
import math
import os
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from helpers import assert_close, built

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools.dryrun import run as dryrun
from keras_tpu_dist.tools.dryrun import worker
from keras_tpu_dist.tools.dryrun.inputs import Inputs
from keras_tpu_dist.tools.searches import parallel
from keras_tpu_dist.tools.searches import search as searching
from keras_tpu_dist.tools.searches.candidates import Candidate, candidates
from keras_tpu_dist.tools.searches.forecast import Forecast
from keras_tpu_dist.tools.searches.ranking import Tried, rank

L = keras.layers
SLICE = Topology.parse("v5e:2x4")


def build(width=512):
    model = keras.Sequential(
        [keras.Input((64,)), L.Dense(width, "relu"), L.Dense(width, "relu"), L.Dense(8)]
    )
    model.compile("adam", "mse")
    return model


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_the_best_fits_and_trains_as_one_device(tmp_path):
    lines = []
    search = functools.partial(ktd.search, build, "v5e:2x4", cache=tmp_path)
    found = search(batch_size=64, compilations=3, exact=2, progress=lines.append)
    # The two that are fastest at first are looked at once more, and that decides.
    assert [tried.run.effort for tried in found.compiled] == ["exact", "exact", "quick"]
    steps = [tried.run.estimate.step for tried in found.compiled]
    assert steps[:2] == sorted(steps[:2])
    assert found.best.run.fits
    assert "candidates" in " ".join(lines)
    text = str(found)
    assert found.best.candidate.line in text
    assert "matrix units are busy" in text
    assert found.to_dict()["candidates"][0]["strategy"] == str(found.best.candidate)
    # As many rows as each has memory for.
    filled = search(compilations=1, exact=0)
    assert filled.best.rows > 64
    assert filled.best.run.effort == "quick"

    x = np.random.default_rng(0).normal(size=(13, 64)).astype("float32")
    fit = {"epochs": 2, "batch_size": 8, "shuffle": False, "verbose": 0}
    one, model = built(build, None), built(build, found.strategy())
    one.fit(x, x[:, :8], **fit)
    model.fit(x, x[:, :8], **fit)
    assert_close(model.get_weights(), one.get_weights())


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_what_does_not_fit_is_no_best():
    def large():
        model = keras.Sequential(
            [keras.Input((8,)), L.Dense(2**16, use_bias=False), L.Dense(2**16, use_bias=False)]
        )
        model.compile("adam", "mse")
        return model

    whole = Candidate((("data", 4),), None, False, None)
    found = ktd.search(large, "v5e:2x2", batch_size=8, among=[whole], cache=False)
    assert found.best is None
    assert "none fits" in str(found)
    with pytest.raises(ValueError, match="No tried strategy fits the model"):
        found.strategy()


@pytest.mark.slow
def test_a_second_search_compiles_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(dryrun, "has_libtpu", lambda: False)
    processes = []
    run = worker.run

    def counted(*paths, **options):
        processes.append(paths)
        return run(*paths, **options)

    monkeypatch.setattr(worker, "run", counted)
    among = [Candidate((("data", 4),), None, split, None) for split in (False, True)]
    search = functools.partial(ktd.search, build, "v5e:2x2", batch_size=64, among=among)
    first = search(cache=tmp_path)
    assert len(processes) == 2
    second = search(cache=tmp_path)
    assert len(processes) == 2
    assert [str(t.candidate) for t in first.compiled] == [str(t.candidate) for t in second.compiled]
    assert [t.run.memory for t in first.compiled] == [t.run.memory for t in second.compiled]
    next(tmp_path.iterdir()).write_bytes(b"damaged")
    search(cache=tmp_path)
    assert len(processes) == 3
    search(cache=False, compilations=1)
    assert len(processes) == 4


def test_what_is_compiled():
    """One of each mesh and layout first, then others of the best."""
    step = {"a": 3.0, "b": 1.0, "c": 2.0}
    left = [tried(mesh, remat) for mesh in "abc" for remat in (None, "dots", "full")]

    def names(found):
        return [(t.candidate.mesh[0][0], t.candidate.remat) for t in found]

    first = searching._of_other_ways(left, 3)
    assert names(first) == [("a", None), ("b", None), ("c", None)]
    assert searching._of_other_ways(left, 2) == first[:2]
    compiled = []
    for one in first:
        left.remove(one)
        name = one.candidate.mesh[0][0]
        run = dry(step[name])
        compiled.append(dataclasses.replace(one, run=run))
    second = searching._like_the_best(left, compiled, 3)
    assert names(second) == [("b", "dots"), ("b", "full"), ("a", "dots")]


def test_what_is_looked_at_once_more():
    """The fastest that fit, and then they stand first, whatever the others were said to take."""
    tries = [tried(axis, None) for axis in "abcde"]
    runs = [dry(3.0), dry(1.0), dry(0.5, fits=False), dry(2.0), None]
    compiled = [dataclasses.replace(one, run=run) for one, run in zip(tries, runs)]
    fastest, rest = searching._fastest(compiled, 2)
    assert [one.candidate.mesh[0][0] for one in fastest] == ["b", "d"]
    assert sorted(one.candidate.mesh[0][0] for one in rest) == ["a", "c", "e"]
    assert searching._fastest(compiled, 0)[0] == []
    # Of one mesh in two orders, the faster, as long as there are others.
    there, back = (("a", 2), ("b", 4)), (("b", 4), ("a", 2))
    orders = [
        dataclasses.replace(one, candidate=dataclasses.replace(one.candidate, mesh=mesh), run=run)
        for one, mesh, run in zip(tries, (there, back), (dry(1.1), dry(1.0)))
    ]
    for number, expected in ((2, [back, (("d", 8),)]), (3, [back, (("d", 8),), there])):
        chosen, rest = searching._fastest([*orders, compiled[3]], number)
        assert [one.candidate.mesh for one in chosen] == expected
        assert len(chosen) + len(rest) == 3
    again = [dataclasses.replace(fastest[0], run=dry(0.9, effort="exact"))]
    again += [dataclasses.replace(fastest[1], run=dry(0.7, effort="exact"))]
    faster = dataclasses.replace(tries[0], run=dry(0.1))
    ranked = sorted([*again, faster], key=rank)
    assert [one.candidate.mesh[0][0] for one in ranked] == ["d", "b", "a"]


def test_memory_of_a_program_that_fits_is_what_it_needs_at_one_time():
    gib = 2**30
    run = SimpleNamespace(
        fits=True, total_bytes=21 * gib, limit_bytes=16 * gib, peak_bytes=14 * gib
    )
    assert Tried(Candidate(()), SLICE, 64, run=run).memory_bytes == 14 * gib
    for changed in ({"fits": False}, {"total_bytes": 15 * gib}, {"peak_bytes": 0}):
        other = SimpleNamespace(**{**vars(run), **changed})
        assert Tried(Candidate(()), SLICE, 64, run=other).memory_bytes == other.total_bytes


def test_several_at_a_time(monkeypatch):
    monkeypatch.setattr(parallel, "at_once", lambda: 2)
    chosen = [tried(axis, None) for axis in "abcde"]
    started, running, most = [], set(), []

    def lower(one):
        if one is chosen[1]:
            return dataclasses.replace(one, error="none")
        return one.candidate.mesh[0][0]

    def compile_(one, lowered):
        running.add(lowered)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(lowered)
        return dataclasses.replace(one, error=lowered)

    def all_of(until, first=True):
        return parallel.compiled_together(
            chosen, lower, compile_, begin=started.append, until=until, first=first
        )

    done, left = all_of(math.inf)
    assert [t.error for t in done] == ["a", "none", "c", "d", "e"]
    assert left == []
    assert max(most) == 2
    assert started == [str(t.candidate) for t in chosen]
    # No time: one, if none has been compiled.
    assert [len(found) for found in all_of(0.0)] == [1, 4]
    assert [len(found) for found in all_of(0.0, first=False)] == [0, 5]


def test_an_interrupt_ends_what_is_being_compiled(monkeypatch, tmp_path):
    script = tmp_path / "compiler.py"
    script.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(worker, "__file__", str(script))
    monkeypatch.setattr(parallel, "at_once", lambda: 2)
    chosen, codes = [tried(axis, None) for axis in "abcd"], []

    def lower(one):
        if one is chosen[1]:
            raise KeyboardInterrupt
        return "a program"

    def compile_(one, lowered):
        log = str(tmp_path / "log")
        codes.append(worker.run("job", "result", env=dict(os.environ), log=log, timeout=60))

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        parallel.compiled_together(
            chosen, lower, compile_, begin=lambda name: None, until=math.inf, first=True
        )
    assert time.monotonic() - started < 20
    assert codes == [None]
    assert worker.STOP.get() is None


def test_a_container_leaves_less(monkeypatch, tmp_path):
    monkeypatch.setattr(parallel, "_CONTAINER", tmp_path)
    free = parallel.available_memory()
    assert parallel.container_processors() > 1000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert parallel.container_processors() > 1000
    assert parallel.available_memory() == pytest.approx(free, rel=0.2)
    (tmp_path / "memory.max").write_text("9000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 4000\ninactive_file 1000\n")
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert parallel.available_memory() == 5000
    assert parallel.container_processors() == 2
    assert parallel.at_once() == 1


class Tabled(L.Layer):
    """Takes rows of weights of another number of dimensions than an embedding's."""

    def build(self, shape):
        self.one = self.add_weight(shape=(64,), name="one")
        self.three = self.add_weight(shape=(64, 16, 128), name="three")

    def call(self, x):
        rows = keras.ops.cast(keras.ops.sum(x, axis=1), "int32") % 64
        taken = keras.ops.take(self.three, rows, axis=0)
        return keras.ops.sum(taken, axis=1) + keras.ops.take(self.one, rows, axis=0)[:, None]


def test_tables_of_any_dimensions_are_forecast():
    def build():
        model = keras.Sequential([keras.Input((64,)), Tabled(), L.Dense(128)])
        model.compile("adam", "mse")
        return model

    _, found = searching._forecasts(build, Topology.parse("v5e:2x4"), 64, Inputs(), None)
    assert len(found) == len(list(candidates(8, Topology.parse("v5e:2x4"))))


@pytest.mark.parametrize("rows", [1, 3, 4, 6])
def test_fewer_rows_than_devices(rows):
    _, found = searching._forecasts(build, Topology.parse("v5e:2x4"), rows, Inputs(), None)
    for one in found:
        axes = dict(one.candidate.mesh)
        assert axes.get("data", 1) * axes.get("fsdp", 1) <= rows
    assert {one.rows for one in found} == {rows}
    assert {dict(one.candidate.mesh).get("model", 1) for one in found} >= {8}


def test_memory_limits_how_many_compile_at_once(monkeypatch):
    monkeypatch.setattr(parallel, "available_memory", lambda: 9 * 2**30)
    assert 1 <= parallel.at_once() <= 2
    monkeypatch.setattr(parallel, "available_memory", lambda: 0)
    assert parallel.at_once() == 1


def dry(step, fits=True, effort="quick"):
    return SimpleNamespace(
        fits=fits, estimate=SimpleNamespace(step=step), effort=effort, total_bytes=0
    )


def tried(axis, remat):
    times = Forecast(0, 0, 0, compute_s=1, traffic_s=0, links_s=0)
    return Tried(Candidate(((axis, 8),), None, False, remat), SLICE, 64, times)


def test_a_batch_without_a_row_for_each_part():
    among = [Candidate((("data", 8),), None, False, None)]
    with pytest.raises(ValueError, match="batch"):
        ktd.search(build, "v5e:2x4", 2, among=among)


def test_strategies_that_you_name_are_all_compiled_and_what_cannot_be_built_says_why(monkeypatch):
    among = [
        {"mesh": {"data": 8}},
        {"mesh": {"data": -1, "model": 2}, "layout": [("kernel", (None, "model"))]},
        {"mesh": {"data": 8}, "shard_optimizer": True, "remat": "dots"},
        {"mesh": {"data": 8}, "layout": "tensor_parallel"},
        {"mesh": {"data": 3}},
        Candidate((("fsdp", 8),), "fsdp"),
    ]
    monkeypatch.setattr(searching, "lowered_step", lambda *_: "a program")
    run = functools.partial(dataclasses.replace, run=dry(1.0))
    monkeypatch.setattr(searching, "compiled_step", lambda how, one, lowered: run(one))
    found = ktd.search(build, "v5e:2x4", 64, among=among, exact=0, cache=False)
    compiled = [one for one in found.compiled if one.run is not None]
    assert {(one.candidate.mesh_text, one.candidate.remat) for one in compiled} == {
        ("data 8", None),
        ("data 4 x model 2", None),
        ("data 8", "dots"),
        ("fsdp 8", None),
    }
    assert found.others == ()
    refused = [one for one in found.candidates if one.error]
    assert found.candidates[-2:] == tuple(refused)
    assert 'such as "model"' in refused[0].error
    assert "multiply to 3" in refused[1].error


@pytest.mark.parametrize(
    ("among", "error"),
    [
        ({"mesh": {"data": 8}}, "among is a list of strategies"),
        ([], "among is a list of strategies"),
        ([{"data": 8}], "of which mesh is needed"),
        ([{"mesh": "data"}], "of which mesh is needed"),
        ([{"mesh": {"data": 8}, "layuot": "fsdp"}], "Did you mean 'layout'"),
        ([{"mesh": {"data": 8}, "remat": {"dense": "dots"}}], "remat of a strategy to compare is"),
        ([{"mesh": {"data": 8}, "layout": "fsdq"}], "Did you mean 'fsdp'"),
    ],
)
def test_wrong_strategies_to_compare(among, error):
    with pytest.raises(ValueError, match=error):
        ktd.search(build, "v5e:2x4", 64, among=among, cache=False)
