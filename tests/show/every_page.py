"""A page of every kind of result, at its extremes: nothing found, long names, 1 and 256 devices."""

import dataclasses

from dryrun.made import made_comparison, made_run

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.lint import Finding, LintReport
from keras_tpu_dist.show.pictures import Piece, TensorPicture
from keras_tpu_dist.tools.checkup.report import FAST, RIGHT, Check, CheckPart, Problem
from keras_tpu_dist.tools.dryrun.measured import Beside, Comparison, MeasuredSteps
from keras_tpu_dist.tools.goodput.report import WORDS, GoodputReport, StartOfRun
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.tools.searches.largest_batch import LargestBatch
from keras_tpu_dist.tools.searches.ranking import Ranking, Tried
from keras_tpu_dist.tools.searches.slices import SliceRanking

LONG = "a_model_within_a_model/" * 6 + "kernel"
SOLID = "x" * 150
SENTENCE = "Some words about what was found here and what it means for you. " * 6


def pages():
    """Every result that `to_html` writes, by a name of the case."""
    yield from runs()
    yield from rankings()
    yield from checks()
    yield from profiles()
    yield "goodput of nothing", goodput(0)
    yield "goodput of many starts", goodput(40)


def runs():
    one = {"topology": "v5e:1x1", "mesh": {"data": 1}}
    yield "dry run", made_run()
    yield "dry run of one device", made_run(**one)
    yield "dry run of 256 devices", made_run("v5e:16x16", {"data": 64, "model": 4})
    yield "dry run of a 3D torus", made_run("v5p:4x4x8", {"data": 16, "fsdp": 2, "model": 4})
    nothing = {"cost": None, "estimate": None, "memory": {}, "notes": ()}
    yield "dry run without a cost", made_run(**one, **nothing)
    too_large = {"fits": False, "error": SENTENCE, "sized_on": "v5e:16x16", "estimate": None}
    yield "dry run that does not fit", made_run(**too_large, total_bytes=900 * 2**30)
    yield "dry run with long names", long_names(made_run())
    for case, size, tried in (
        ("none", 0, ((8, False, 2**44),)),
        ("one", 1024, ((8, True, 2**20), (1024, True, 2**33), (2048, False, 0))),
    ):
        yield f"largest batch, {case}", LargestBatch(size, made_run(), tried, f"strategy = {SOLID}")


def long_names(run):
    """A dry run whose layers have very long names."""
    names = (LONG, SOLID, *(f"{LONG}_{n}" for n in range(20)))
    layers = [dataclasses.replace(c, layer=n) for c, n in zip(run.cost.layers, names)]
    collectives = [dataclasses.replace(c, layer=n) for c, n in zip(run.cost.collectives, names)]
    buffers = [dataclasses.replace(b, layer=LONG) for b in run.cost.largest_buffers]
    cost = dataclasses.replace(
        run.cost,
        layers=tuple(layers),
        collectives=tuple(collectives),
        largest_buffers=tuple(buffers),
    )
    return dataclasses.replace(run, cost=cost, notes=(SENTENCE, SOLID))


def rankings():
    found = made_comparison()
    yield "comparison", found
    yield "comparison of nothing", Ranking("v5e:4x4", ())
    error = Tried(Candidate((("data", 16),), SOLID), 8, error=SENTENCE + SOLID)
    yield "comparison of errors", Ranking("v5e:4x4", (error,), model=LONG, calibration=SENTENCE)
    yield "slices", SliceRanking((found, made_comparison("v6e:4x4")), (("v5e", 1.2), ("v6e", 2.7)))
    yield "slices of nothing", SliceRanking((Ranking("v5e:4x4", ()),))


def checks():
    right = [CheckPart(name, RIGHT, SENTENCE[:90]) for name in ("products", "collectives")]
    versions = (("keras_tpu_dist", "0.2.0"), ("jax", "0.10.1"))
    for devices in (1, 256):
        rates = {str(n): 1e12 + n for n in range(devices)}
        figures = [
            CheckPart("matrix units", FAST, SENTENCE[:60], figures={"float32": rates}),
            CheckPart("memory", FAST, SENTENCE, figures={"memory": rates}),
        ]
        parts = (*right, *figures)
        mesh = (("data", devices),)
        yield f"check of {devices}", Check("TPU v5", "tpu", mesh, 1, 3, 60, parts, versions)
    problems = tuple(Problem(SENTENCE + SOLID, SENTENCE, SENTENCE, (n,)) for n in range(6))
    parts = (
        CheckPart("products", RIGHT, SENTENCE, problems),
        CheckPart("links", FAST, left_out=LONG),
    )
    mesh = (("data", 4), ("model", 2))
    yield "check with problems", Check("cpu", "cpu", mesh, 8, 3, 600, parts, versions)
    yield "check of nothing", Check("cpu", "cpu", mesh, 1, 3, 0.1, (), ())


def profiles():
    times = ((LONG, 0.2), (SOLID, 0.1), ("dense", 1e-7))
    measured = MeasuredSteps(
        ((10, 13), (20, 23)), "tpu", "TPU v5 lite", 256, 1.5, 1.2, times, times
    )
    alone = MeasuredSteps(((1, 1),), "cpu", "cpu", 1, 0.0, 0.0, (), ())
    yield "profile", measured
    yield "profile of nothing", alone
    beside = (
        Beside(LONG, 0.2, (1e-6, 2e-6)),
        Beside(SOLID, 0.0, (0.0, 0.0)),
        Beside("dense", 1e-7, (0.1, 0.3)),
    )
    yield (
        "profile beside a dry run",
        Comparison(measured, "v5e:16x16", "quick", (1e-5, 1e-4), beside, beside, SENTENCE),
    )
    untimed = (Beside("dense", 0.1, None, 0.4),)
    yield "profile beside no times", Comparison(alone, "CPU", "quick", None, untimed, ())


def goodput(starts):
    seconds = dict.fromkeys(WORDS, 0.0) | (dict.fromkeys(WORDS, 3600.0) if starts else {})
    listed = tuple(
        StartOfRun(1.7e9 + n, 3600.0 * n, None if n % 2 else 256, n * 10**7 or None, "failed")
        for n in range(starts)
    )
    return GoodputReport(f"/runs/{LONG}.jsonl", sum(seconds.values()), seconds, listed, starts)


def fragments():
    """What a notebook shows of results that are no pages of their own."""
    yield "diff", ktd.diff(long_names(made_run()), made_run("v5e:16x16"))
    findings = (
        Finding("warning", "no-data-axis", LONG, SENTENCE, SENTENCE),
        Finding("info", "uneven-batch", SOLID, SENTENCE, ""),
    )
    yield "lint", LintReport(LONG, findings)
    yield "lint of nothing", LintReport("model", ())
    for topology, mesh in (("v5e:1x1", {"data": 1}), ("v5e:16x16", {"data": 64, "model": 4})):
        yield f"mesh of {topology}", ktd.TPUStrategy(mesh, topology=topology).show()
    for pieces, rows in ((1, None), (8, 0)):
        yield f"tensor in {pieces} pieces", tensor(pieces, rows)


def tensor(pieces, rows):
    """A tensor over 256 devices, of which each piece is on every eighth."""
    size, axes = 2**20 // pieces, ("model",) if pieces > 1 else (None,)
    found = tuple(
        Piece(((n * size, (n + 1) * size), (0, 128_256)), tuple(range(n, 2048, 8)))
        for n in range(pieces)
    )
    mesh = {"data": 256, "model": 8}
    shape = (2**20, 128_256)
    return TensorPicture(LONG[:60], shape, "layout", found, rows, 1, (*axes, None), mesh, SENTENCE)
