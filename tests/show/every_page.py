"""A page of every kind of result, at its extremes: nothing found, long names, 1 and 256 devices."""

import dataclasses

from dryrun.made import made_comparison, made_run, tried

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.lint import Finding, LintReport
from keras_tpu_dist.show.pictures import Piece, TensorPicture
from keras_tpu_dist.tools.checkup.report import Check, CheckPart, Problem
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.tools.searches.ranking import Ranking

LONG = "a_model_within_a_model/" * 6 + "kernel"
SOLID = "x" * 150
SENTENCE = "Some words about what was found here and what it means for you. " * 6


def pages():
    """Every result that `to_html` writes, by a name of the case."""
    yield from runs()
    yield from rankings()
    yield from checks()


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
    yield "comparison of nothing", Ranking(("v5e:4x4",), ())
    error = tried(Candidate((("data", 16),), SOLID), rows=8, error=SENTENCE + SOLID)
    yield "comparison of errors", Ranking(("v5e:4x4",), (error,), model=LONG)
    both = (*found.compiled, *made_comparison("v6e:4x4").compiled)
    slices = ("v5e:4x4", "v6e:4x4")
    yield "slices", Ranking(slices, both)
    prices = tuple(dataclasses.replace(one, price=1.2) for one in both)
    yield "slices by price", Ranking(slices, prices)
    yield "slices of nothing", Ranking(slices, ())


def checks():
    right = tuple(CheckPart(name, SENTENCE[:90]) for name in ("products", "collectives"))
    versions = (("keras_tpu_dist", "0.2.0"), ("jax", "0.10.1"))
    for devices in (1, 256):
        mesh = (("data", devices),)
        yield f"check of {devices}", Check("TPU v5", "tpu", mesh, 1, 3, 60, right, versions)
    problems = tuple(Problem(SENTENCE + SOLID, SENTENCE, SENTENCE, (n,)) for n in range(6))
    parts = (
        CheckPart("products", SENTENCE, problems),
        CheckPart("programs", left_out=LONG),
    )
    mesh = (("data", 4), ("model", 2))
    yield "check with problems", Check("cpu", "cpu", mesh, 8, 3, 600, parts, versions)
    yield "check of nothing", Check("cpu", "cpu", mesh, 1, 3, 0.1, (), ())


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
