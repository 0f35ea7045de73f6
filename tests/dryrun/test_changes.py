"""What a report says to change: the counts, their words, and what the compiler says of them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest
from compile_only import lower
from made import GIB, collective, made_run

import keras_tpu_dist as ktd
from keras_tpu_dist.tools.dryrun.changes import Levers, orders_of, what_to_change
from keras_tpu_dist.tools.dryrun.report import collective_rows, layer_rows
from keras_tpu_dist.tools.hlo.analysis import LayerCost

L = keras.layers
MESH = {"data": 8}
LEVERS = Levers(
    in_float32=frozenset(),
    recurrent={},
    plan="",
    planned_bytes=0,
    largest_bytes=0,
    blocks=0,
    block_bytes=0,
    logits_bytes=0,
    rows=0,
    optimizer="adam",
    data_axes=("data",),
    steps=32,
    topology=ktd.Topology.parse("v5e:4x4"),
)


def blocks(width=256, count=4):
    x = inputs = keras.Input((width,))
    for n in range(count):
        x = x + keras.Sequential([L.Dense(4 * width, "gelu"), L.Dense(width)], name=f"b_{n}")(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model


def lstm(units=128):
    layers = [keras.Input((16, 64)), L.LSTM(units, return_sequences=True), L.GRU(units)]
    model = keras.Sequential([*layers, L.Dense(8)])
    model.compile("adam", "mse")
    return model


def changes(run, **levers):
    found = what_to_change(run, replace(LEVERS, **levers))
    return {change.kind: change for change in found}


# --- what could be changed -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "layout", "split"),
    [
        ({"data": 8}, None, {"layout": "fsdp"}),
        ({"data": 2, "model": 4}, None, {"layout": "fsdp"}),
        (
            {"data": 2, "model": 4},
            "tensor_parallel",
            {"layout": ktd.Planner("auto", memory_bytes=1)},
        ),
    ],
)
def test_the_bytes_of_a_plan_are_those_of_a_step_under_it(mesh, layout, split):
    counted = lower(blocks, ktd.TPUStrategy(mesh, layout), batch_size=16, platform="cpu")
    made = lower(blocks, ktd.TPUStrategy(mesh, **split), batch_size=16, platform="cpu")
    assert counted.levers.plan
    assert counted.levers.planned_bytes == made.state.lasting < counted.state.lasting
    assert made.levers.planned_bytes == made.state.lasting
    assert made.levers.plan == ""


def test_what_a_model_could_change():
    levers = lower(blocks, ktd.TPUStrategy({"data": 8}), batch_size=16, platform="cpu").levers
    assert (levers.blocks, levers.block_bytes) == (4, 4 * 16 * 256 * 4 // 8)
    assert (levers.rows, levers.recurrent, levers.steps) == (2, {}, 1)
    assert "b_0" in levers.in_float32
    kept = ktd.TPUStrategy({"data": 8}, remat="full")
    assert lower(blocks, kept, batch_size=16, platform="cpu").levers.blocks == 0
    levers = lower(lstm, ktd.TPUStrategy({"data": 8}), batch_size=16, platform="cpu").levers
    assert levers.recurrent == {"lstm": 2 * 128 / (3 * 192), "gru": 2 * 128 / (3 * 256)}
    assert levers.rows == 2


def test_logits_that_could_be_in_pieces():
    def build(words=8192, activation=None):
        tokens = keras.Input((None,), dtype="int32")
        h = L.Dense(words, activation)(L.Embedding(words, 8)(tokens))
        model = keras.Model(tokens, h)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=activation is None)
        model.compile("adam", loss)
        return model

    def counted(build, mesh=(("data", 8),), **options):
        strategy = ktd.TPUStrategy(dict(mesh), **options)
        return lower(
            build, strategy, batch_size=16, sequence_length=32, platform="cpu"
        ).levers.logits_bytes

    whole = 1.5 * 16 * 32 * 8192 * 4 / 8
    assert counted(build) == counted(build, head="whole") == whole
    assert counted(lambda: build(activation="softmax")) == whole
    assert counted(lambda: build(2048)) == 0
    assert counted(build, (("data", 2), ("sequence", 4))) == 0


def test_ours_and_other_modes_have_nothing_to_convert():
    def ours():
        layers = [keras.Input((16, 64)), ktd.layers.LSTM(8), L.Dense(8)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
        return model

    found = lower(ours, ktd.TPUStrategy({"data": 8}), batch_size=16, platform="cpu")
    assert not found.levers.recurrent
    predicts = lower(
        ours, ktd.TPUStrategy({"data": 8}), batch_size=16, mode="predict", platform="cpu"
    )
    assert predicts.levers is None


def orders(mesh, topology="v5e:2x4", layout="tensor_parallel"):
    strategy = ktd.TPUStrategy(mesh, layout, topology=topology)
    return lower(blocks, strategy, batch_size=16).levers.orders


def test_orders_of_axes_are_those_of_a_mesh_that_its_sizes_place():
    assert [dict(wire.axes) for wire in orders({"data": 2, "model": 4})] == [
        {"data": 2, "model": 4},
        {"model": 4, "data": 2},
    ]
    assert len(orders({"data": 2, "fsdp": 2, "model": 2}, layout="auto")) == 6
    assert orders({"data": 8}, layout=None) == ()
    topology = ktd.Topology.parse("v5e:2x4")
    own = jax.sharding.Mesh(np.reshape(topology.devices()[::-1], (2, 4)), ("data", "model"))
    assert orders_of(SimpleNamespace(mesh=own, topology=topology)) == ()
    part = jax.sharding.Mesh(np.reshape(topology.devices()[:4], (2, 2)), ("data", "model"))
    assert orders_of(SimpleNamespace(mesh=part, topology=topology)) == ()


# --- which changes are named -----------------------------------------------------------------


def test_another_order_of_axes_is_named_if_its_links_are_faster():
    found = orders({"data": 2, "model": 4})
    sums = [collective(("data",), size=2**30, times=1)]
    run = made_run("v5e:2x4", {"data": 2, "model": 4})
    cost = replace(run.cost, collectives=sums)
    # First, an axis of two gets one link; last, it gets two.
    run = replace(run, cost=cost, estimate=replace(run.estimate, step=0.1))
    change = changes(run, orders=found)["mesh"]
    assert change.value == {"model": 4, "data": 2}
    assert change.line == 'TPUStrategy({"model": 4, "data": 2}, ...)'
    assert change.factor == pytest.approx(0.5)
    assert str(change).startswith("collectives 42.95 ms to 21.47 ms a step: ")
    # Not for what is little of the step, nor where the order is the best one already.
    slow = replace(run, estimate=replace(run.estimate, step=1.0))
    assert "mesh" not in changes(slow, orders=found)
    assert "mesh" not in changes(run, orders=found[::-1])
    assert "mesh" not in changes(run)


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_the_compiler_s_program_has_the_times_of_the_other_order():
    def build():
        return blocks(width=2048, count=2)

    def run(mesh):
        strategy = ktd.TPUStrategy(mesh, "tensor_parallel", topology="v5e:2x4")
        return ktd.dry_run(build, strategy, batch_size=64, effort="quick")

    first = run({"data": 2, "model": 4})
    change = {change.kind: change for change in first.changes}["mesh"]
    second = run(change.value)
    assert change.of(second) / change.of(first) == pytest.approx(change.factor, rel=0.05)
    assert second.estimate.step < first.estimate.step


def test_a_report_that_does_not_fit_begins_with_why_and_the_fix():
    error = "RESOURCE_EXHAUSTED: too much\n" + "an allocation\n" * 280
    run = made_run(fits=False, total_bytes=20 * GIB, error=error, estimate=None)
    # 3 of 11 GiB are weights and optimizer, 5 activations, 1 gradients
    found = changes(run, plan="fsdp", planned_bytes=GIB, blocks=5, block_bytes=GIB)
    assert list(found) == ["remat", "layout"]
    assert found["remat"].after == run.breakdown_bytes - 5 * GIB + 2 * GIB
    assert found["layout"].after == run.breakdown_bytes - 2 * GIB
    text = str(replace(run, changes=tuple(found.values()))).splitlines()
    assert text[0].endswith("does NOT fit")
    assert text[1].startswith(
        "why: 20.00 GiB of 15.75 GiB a device: weights and optimizer 3.00 GiB"
    )
    assert text[2].startswith("what to change")
    assert text[3].endswith('TPUStrategy(..., remat="full")')
    assert text[4].endswith('TPUStrategy(..., layout="fsdp")')
    assert text[5] == "the compiler says: RESOURCE_EXHAUSTED: too much (all of it: run.error)"
    assert not any("an allocation" in line for line in text)
    page = run.to_html()
    assert page.count("an allocation") == 280
    assert page.index("<details>") < page.index("an allocation") < page.index("</details>")


def test_rows_and_slices_are_named_if_nothing_else_suffices():
    state = replace(made_run().state, weights=10 * GIB, optimizer=20 * GIB)
    memory = {**made_run().memory, "arguments": 31 * GIB}
    run = made_run(fits=False, total_bytes=40 * GIB, state=state, memory=memory, estimate=None)
    found = changes(run, planned_bytes=30 * GIB)
    assert list(found) == ["slice"]
    assert found["slice"].line == 'TPUStrategy(..., topology="v5e:8x8")'
    assert found["slice"].after < 0.85 * run.limit_bytes
    # A weight that is larger than a chip is gathered on a slice of any size.
    memory = {**memory, "temporaries": 16 * GIB}
    run = replace(run, memory=memory)
    assert not changes(run, planned_bytes=30 * GIB, largest_bytes=16 * GIB)
    memory = {**made_run().memory, "temporaries": 20 * GIB}
    small = made_run(fits=False, total_bytes=25 * GIB, memory=memory, estimate=None)
    rows = changes(small)["batch"]
    assert rows.value > 0
    assert rows.after < small.limit_bytes


def test_a_short_step_gets_launches_and_a_long_one_bfloat16():
    run = made_run()
    short = replace(run, estimate=replace(run.estimate, low=1e-5, high=2e-5))
    assert next(iter(changes(short, steps=1))) == "steps"
    assert "steps" not in changes(short, steps=32)
    long = replace(run, estimate=replace(run.estimate, low=2.0, high=3.0, bound="HBM"))
    layers = tuple(replace(c, float32_bytes=c.hbm_bytes) for c in run.cost.layers)
    long = replace(long, cost=replace(run.cost, layers=layers))
    long = replace(long, state=replace(run.state, weights=2**24))
    names = frozenset(c.layer.split("/")[0] for c in run.cost.layers)
    found = changes(long, in_float32=names)["bfloat16"]
    assert found.after == run.cost.hbm_bytes - (run.cost.hbm_bytes - 3 * 2**24) / 2
    assert "bfloat16" not in changes(
        replace(long, estimate=replace(long.estimate, bound="compute")), in_float32=names
    )


def test_a_head_in_pieces_is_named_if_its_logits_crowd_the_memory():
    run = made_run(total_bytes=15 * GIB)
    found = changes(run, logits_bytes=3 * GIB)["head"]
    assert found.after == run.breakdown_bytes - 3 * GIB + 2**29
    assert found.line == 'TPUStrategy(..., head="pieces")'
    assert "head" not in changes(made_run(), logits_bytes=3 * GIB)
    assert "head" not in changes(run, logits_bytes=2**29)


def test_without_a_limit_or_training_nothing_is_named():
    run = made_run()
    assert not changes(replace(run, limit_bytes=None), steps=1)
    assert not changes(replace(run, mode="predict"), steps=1)
    assert not changes(replace(run, cost=None), steps=1)


# --- folded tables ---------------------------------------------------------------------------


def test_collectives_of_equal_blocks_share_a_row_with_a_total():
    blocks_ = [collective(("data",), layer=f"block_{n}/dense_{n} and 2 more") for n in range(6)]
    other = collective(("model",), "all-gather", "head", 2**20)
    little = replace(collective(("data",), "all-to-all", "tail", 8), seconds=1e-9)
    cost = replace(made_run().cost, collectives=(*blocks_, other, little))
    rows = collective_rows(cost)
    assert [row[0] for row in rows] == ["all-reduce", "all-gather", "... 1 more", "all"]
    assert rows[0][4] == "18"
    assert rows[0][7] == "block_*/dense_* and 12 more"
    assert rows[0][3] == f"{18 * 2**22 / 1e6:,.3f}"
    assert rows[-1][4] == "24"


def test_layers_of_equal_blocks_share_a_row_with_a_total():
    layers = [LayerCost(f"block_{n}/up", 10, 20, 1000, 500, 0.0) for n in range(5)]
    layers += [LayerCost("adam", 0, 30, 400, 0, 0.0), LayerCost("(other)", 0, 0, 1, 0, 0.0)]
    rows = layer_rows(replace(made_run().cost, layers=tuple(layers), cycles=5401))
    assert [row[0] for row in rows] == ["block_*/up (5)", "adam", "... 1 more", "all"]
    assert rows[0][3] == "5,000"
    assert rows[-1][3] == "5,401"


def test_layers_of_one_place_in_a_block_share_a_row_whatever_their_sizes():
    sizes = {"block1a_dwconv": 10, "block2b_dwconv": 10**6, "dense": 10, "dense_1": 10**6}
    layers = tuple(LayerCost(name, n, 20, 1000, 500, 0.0) for name, n in sizes.items())
    rows = layer_rows(replace(made_run().cost, layers=layers, cycles=4000))
    assert [row[0] for row in rows] == ["block*_dwconv (2)", "dense", "dense_1", "all"]


def test_the_first_line_has_both_spellings_of_the_slice():
    assert "on v5e-16 (v5e:4x4), data 4 x model 4" in made_run()._title()
    assert ktd.Topology.parse("v4-16").names == "v4-16 (v4:2x2x2)"
    assert ktd.Topology.parse("2*v5e:4x4").names == "2*v5e:4x4"
    for name in ("v5e-8", "v5p-128", "v6e-256", "tpu7x-8"):
        assert ktd.Topology.parse(name).names.split(" ")[0] == name


def test_a_range_says_how_to_narrow_it():
    run = made_run()
    wide = replace(run, estimate=replace(run.estimate, low=0.04, high=0.1), effort="quick")
    assert 'effort="exact" narrows it' in " ".join(str(wide).split())
    assert "narrows" not in str(run)


# --- values between blocks --------------------------------------------------------------------


def sequences(width=256, count=4, times=128):
    x = inputs = keras.Input((times, width))
    for n in range(count):
        layers = [L.LayerNormalization(), L.Dense(4 * width, "gelu"), L.Dense(width)]
        x = x + keras.Sequential(layers, name=f"b_{n}")(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    ("mesh", "layout", "remat", "times", "found"),
    [
        ({"data": 2, "model": 4}, "tensor_parallel", "full", 128, True),
        ({"data": 2, "model": 4}, ktd.Planner("auto", memory_bytes=1), "dots", 128, True),
        ({"data": 2, "model": 4}, "tensor_parallel", None, 128, False),
        ({"data": 2, "model": 4}, "tensor_parallel", "full", 126, False),
        ({"data": 8}, "fsdp", "full", 128, False),
        ({"data": 2, "model": 4}, None, "full", 128, False),
        ({"data": 4, "model": 2}, [("kernel", (None, "model"))], "full", 128, False),
        (
            {"data": 2, "model": 4},
            ktd.Planner("tensor_parallel", between_blocks="split"),
            "full",
            128,
            False,
        ),
    ],
)
def test_outputs_of_recomputed_blocks_could_be_split_along_time(mesh, layout, remat, times, found):
    strategy = ktd.TPUStrategy(mesh, layout, remat=remat)
    made = lower(lambda: sequences(times=times), strategy, batch_size=16, platform="cpu").levers
    if not found:
        assert (made.between, made.between_bytes) == (None, 0)
        return
    plan = layout if isinstance(layout, ktd.Planner) else ktd.Planner(layout)
    assert made.between == replace(plan, between_blocks="auto")
    # Four blocks on two devices of the data axis, of which each keeps a quarter of the times.
    assert made.between_bytes == 4 * (16 // 2) * 128 * 256 * 4 * 3 // 4


def test_the_line_of_a_split_between_blocks():
    planner = ktd.Planner("auto", memory_bytes=2**30, between_blocks="auto")
    run = made_run(fits=False, total_bytes=20 * GIB, estimate=None)
    found = changes(run, between=planner, between_bytes=2 * GIB)
    assert found["between"].after == run.breakdown_bytes - 2 * GIB
    assert str(found["between"]).endswith(
        " a device: TPUStrategy(..., "
        "layout=ktd.Planner(\"auto\", memory_bytes=1073741824, between_blocks='auto'))"
    )
    (written,) = replace(run, changes=(found["between"],)).to_dict()["changes"]
    assert json.loads(json.dumps(written))["value"]["between_blocks"] == "auto"


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_the_compiler_s_program_keeps_as_few_bytes_between_blocks():
    def build():
        return sequences(1024, 8, 2048)

    def under(layout):
        return ktd.TPUStrategy({"data": 2, "model": 4}, layout, topology="v5e:2x4", remat="full")

    first = ktd.dry_run(build, under("tensor_parallel"), batch_size=8, effort="quick")
    levers = lower(build, under("tensor_parallel"), batch_size=8).levers
    found = what_to_change(replace(first, limit_bytes=first.total_bytes), levers)
    change = {change.kind: change for change in found}["between"]
    second = ktd.dry_run(build, under(change.value), batch_size=8, effort="quick")
    assert change.of(second) / change.of(first) == pytest.approx(change.factor, abs=0.1)


# --- what the compiler says ------------------------------------------------------------------


def wide():
    model = keras.Sequential([keras.Input((1024,)), L.Dense(2**21)])
    model.compile("adam", "mse")
    return model


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("build", "rows", "kinds"),
    [
        (lstm, 64, {"convert": None}),
        (blocks, 8192, {"batch": 0.4}),
        (wide, 8, {"layout": 0.05}),
    ],
    ids=["recurrent", "blocks", "does not fit"],
)
def test_a_count_is_near_what_the_compiler_says(build, rows, kinds):
    strategy = ktd.TPUStrategy(MESH, topology="v5e-8")
    run = ktd.dry_run(build, strategy, batch_size=rows)
    found = {change.kind: change for change in run.changes}
    assert kinds.keys() <= found.keys()
    for kind, error in kinds.items():
        change = found[kind]
        with_it = {
            "batch": lambda value: (build, strategy, value),
            "convert": lambda _: (lambda: ktd.convert(build()), strategy, rows),
            "layout": lambda plan: (build, ktd.TPUStrategy(MESH, plan, topology="v5e-8"), rows),
        }
        changed, under, batch = with_it[kind](change.value)
        compiled = change.of(ktd.dry_run(changed, under, batch_size=batch)) / change.of(run)
        counted = change.factor
        assert (counted - 1) * (compiled - 1) > 0, kind
        if error is None:  # at least so much is saved
            assert compiled <= 1.05 * counted, kind
        else:
            assert compiled == pytest.approx(counted, rel=error), kind
