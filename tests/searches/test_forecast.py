"""What a forecast is made of: weights, products, what is kept, and what crosses the links."""

import importlib.util
import json
import pathlib
from types import SimpleNamespace

import keras
import pytest
from helpers import compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools.dryrun.inputs import Inputs
from keras_tpu_dist.tools.hlo import Wire, latency_over, seconds_over
from keras_tpu_dist.tools.searches.activations import peak_bytes
from keras_tpu_dist.tools.searches.candidates import Candidate, candidates
from keras_tpu_dist.tools.searches.facts import describing
from keras_tpu_dist.tools.searches.forecast import (
    Ground,
    Placed,
    forecast,
    padding,
    part_of,
    parts_on,
    ring_of,
)

L = keras.layers
SLICE = Topology.parse("v5e:2x4")
ROWS, WIDTH, HIDDEN = 64, 256, 1024


def pair(shape=(WIDTH,)):
    """A column and a row of Megatron."""
    model = keras.Sequential(
        [
            keras.Input(shape),
            L.Dense(HIDDEN, "relu", use_bias=False, name="up"),
            L.Dense(WIDTH, use_bias=False, name="down"),
        ]
    )
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def described():
    with describing(pair, ktd.TPUStrategy({"data": 8}, topology=SLICE), Inputs(), ROWS) as model:
        yield model, model.facts(ROWS, (None, "dots", "full"))


def ground_of(candidate):
    strategy = candidate.strategy(SLICE)
    wire = Wire.of(dict(strategy.mesh.shape), strategy.mesh.devices.flatten(), SLICE)
    ground = Ground(wire, SLICE, tuple(strategy.data_axes), candidate.shard_optimizer)
    return strategy, ground


def forecast_of(described, candidate, rows=ROWS):
    model, facts = described
    strategy, ground = ground_of(candidate)
    return forecast(facts, model.specs(strategy), ground, rows, candidate.remat)


def test_facts_are_weights_slots_products_and_bytes(described):
    _, facts = described
    weights = [(w.shape, w.itemsize, w.slot_bytes) for w in facts.weights]
    bytes_ = 4 * WIDTH * HIDDEN
    assert weights == [
        ((WIDTH, HIDDEN), 4, 2 * bytes_),  # Adam has two
        ((HIDDEN, WIDTH), 4, 2 * bytes_),
    ]
    assert [p.weight for p in facts.products] == [0, 1]
    assert facts.input_bytes == 2 * 4 * ROWS * WIDTH
    assert facts.output_bytes == 4 * ROWS * WIDTH


def test_where_weights_lie_is_what_each_strategy_says(described):
    model, _ = described
    for candidate, expected in (
        (Candidate((("data", 8),), None, False, None), [((), ()), ((), ())]),
        (
            Candidate((("data", 4), ("model", 2)), "tensor_parallel", False, None),
            [((), ("model",)), (("model",), ())],
        ),
        (
            Candidate((("fsdp", 4), ("model", 2)), "fsdp and tensor_parallel", False, None),
            [(("fsdp",), ("model",)), (("model",), ("fsdp",))],
        ),
    ):
        assert model.specs(candidate.strategy(SLICE)) == expected


@pytest.mark.parametrize(
    ("candidate", "ways_of_weights", "ways_of_slots"),
    [
        (Candidate((("data", 8),), None, False, None), 1, 1),
        (Candidate((("data", 8),), None, True, None), 1, 8),
        (Candidate((("fsdp", 8),), "fsdp", False, None), 8, 8),
        (Candidate((("data", 4), ("model", 2)), "tensor_parallel", False, None), 2, 2),
        (Candidate((("data", 4), ("model", 2)), "tensor_parallel", True, None), 2, 8),
    ],
)
def test_state_bytes_are_divided_by_the_axes_that_split_them(
    described, candidate, ways_of_weights, ways_of_slots
):
    bytes_ = 2 * 4 * WIDTH * HIDDEN
    found = forecast_of(described, candidate)
    assert found.state_bytes == bytes_ / ways_of_weights + 2 * bytes_ / ways_of_slots
    assert found.memory_bytes > found.state_bytes + found.held_bytes


def test_links_are_those_of_the_collectives(described):
    bytes_ = 4 * WIDTH * HIDDEN
    alone = Candidate((("data", 8),), None, False, None)
    wire = ground_of(alone)[1].wire
    whole = 2 * seconds_over(wire, "all-reduce", bytes_, ("data",))
    assert forecast_of(described, alone).links_s == pytest.approx(whole)

    both = Candidate((("data", 4), ("model", 2)), "tensor_parallel", False, None)
    wire = ground_of(both)[1].wire
    gradients = 2 * seconds_over(wire, "all-reduce", bytes_ / 2, ("data",))
    # The row's output forwards, the gradient of the column's input backwards.
    # So few bytes that they take a microsecond there and one back.
    assert seconds_over(wire, "all-reduce", 4 * ROWS / 4 * WIDTH, ("model",)) < 2e-6
    rows = 2 * latency_over(wire, "all-reduce", ("model",))
    assert rows == pytest.approx(4e-6)
    assert forecast_of(described, both).links_s == pytest.approx(gradients + rows)


def of_model(build, candidate, rows=ROWS, topology=SLICE):
    strategy = candidate.strategy(topology)
    wire = Wire.of(dict(strategy.mesh.shape), strategy.mesh.devices.flatten(), topology)
    ground = Ground(wire, topology, tuple(strategy.data_axes), candidate.shard_optimizer)
    with describing(build, strategy, Inputs(), rows) as model:
        facts = model.facts(rows, (None,))
        return Placed(facts, tuple(model.specs(strategy)), ground, 1.0)


def whole_forecast(placed):
    rows = placed.facts.rows
    return forecast(placed.facts, placed.specs, placed.ground, rows, None)


WHOLE = Candidate((("data", 8),), None, False, None)
SPLIT = Candidate((("data", 8),), None, True, None)
FSDP = Candidate((("fsdp", 8),), "fsdp", False, None)
HALVES = Candidate((("data", 4), ("model", 2)), "tensor_parallel", False, None)
BOTH = Candidate((("fsdp", 4), ("model", 2)), "fsdp and tensor_parallel", False, None)


def test_a_table_that_is_stored_split_is_not_gathered():
    """Each device looks up what is of its part; no gradient is summed over the table."""

    def build(vocabulary):
        ids = keras.Input((4,), dtype="int32")
        model = keras.Model(ids, L.Dense(8, use_bias=False)(L.Embedding(vocabulary, 64)(ids)))
        model.compile("adam", "mse")
        return model

    small, large = (of_model(lambda n=n: build(n), FSDP) for n in (8192, 65536))
    assert [(t.weight, t.taken_bytes) for t in large.facts.lookups] == [(0, 4 * ROWS * 4 * 64)]
    assert large.tables == {0}
    assert whole_forecast(small).links_s == whole_forecast(large).links_s
    small, large = (of_model(lambda n=n: build(n), WHOLE) for n in (8192, 65536))
    assert whole_forecast(large).links_s > 4 * whole_forecast(small).links_s


def test_narrow_pieces_are_padded():
    assert padding(128) == padding(256) == 1
    assert padding(64) == 2
    assert padding(16) == 8
    assert padding(192) == pytest.approx(256 / 192)

    def build():
        model = keras.Sequential([keras.Input((256,)), L.Dense(128, use_bias=False)])
        model.compile("adam", "mse")
        return model

    wide, narrow = of_model(build, WHOLE), of_model(build, HALVES)
    (product,) = wide.facts.products
    # Half of the columns and twice the rows, at columns of 64.
    assert part_of(narrow, product).forward_s == 2 * part_of(wide, product).forward_s


def test_gradients_that_end_split_are_made_in_rings_on_few_chips():
    def ring(candidate, topology=SLICE):
        placed = of_model(lambda: pair((4, WIDTH)), candidate, topology=topology)
        return ring_of(placed, placed.facts.products[0])

    assert ring(WHOLE).seconds == ring(HALVES).seconds == 0
    assert ring(FSDP).seconds == ring(SPLIT).seconds > 0
    two = Candidate((("fsdp", 2), ("model", 4)), "fsdp and tensor_parallel", False, None)
    assert ring(two).seconds == 0
    many = Candidate((("fsdp", 16),), "fsdp", False, None)
    assert ring(many, Topology.parse("v5e:4x4")).seconds == 0  # told to leave products whole


def test_gradients_of_flat_rows_are_summed_and_scattered_at_once():
    """Rings are for sums over a time or an image too."""

    def ring(shape):
        model = keras.Sequential([keras.Input(shape), L.Dense(WIDTH, use_bias=False)])
        model.compile("adam", "mse")
        placed = of_model(lambda: model, FSDP)
        return ring_of(placed, placed.facts.products[0])

    assert ring((WIDTH,)).seconds == 0
    assert ring((4, WIDTH)).seconds > 0


def test_rows_of_a_table_that_is_split_over_the_batch():
    """Summed and scattered where its rows are split, sent to and fro where its columns are."""

    def build():
        ids = keras.Input((4,), dtype="int32")
        return compiled(keras.Model(ids, L.Embedding(8192, 64)(ids)), "adam", "mse")

    rows = of_model(build, FSDP)
    assert rows.specs == ((("fsdp",), ()),)
    taken, ground = rows.facts.lookups[0].taken_bytes, rows.ground
    there = ground.seconds("reduce-scatter", taken, ("fsdp",))
    assert whole_forecast(rows).links_s == there + ground.seconds("all-gather", taken, ("fsdp",))

    both = of_model(build, BOTH)
    assert both.specs == ((("model",), ("fsdp",)),)
    ground = both.ground
    there = ground.seconds("all-to-all", taken / 4, ("fsdp",))
    summed = ground.seconds("all-reduce", taken / 4, ("model",))
    assert whole_forecast(both).links_s == pytest.approx(2 * there + summed)


def decoder_table(rows, features, time=512):
    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        ids = keras.Input((time,), dtype="int32")
        model = keras.Model(ids, L.Dense(8)(L.Embedding(rows, features, name="table")(ids)))
        model.compile("adam", "mse")
        return model

    return build


@pytest.fixture
def policy():
    yield
    keras.config.set_dtype_policy("float32")


def test_a_table_by_its_width_exchanges_features(policy):
    """Its rows become columns, its features go to and fro; few ids are left to the compiler."""
    rows, features, batch = 64_000, 2048, 128
    placed = of_model(decoder_table(rows, features), FSDP, batch)
    assert placed.specs[0] == (("fsdp",), ())
    assert placed.by_width == {0}
    ground, ids = placed.ground, 512 * batch

    def seconds(kind, whole):
        return 2 * ground.seconds(kind, whole, ("fsdp",))

    exchanged = seconds("all-to-all", 2 * features * (ids + rows) / 8)
    found = whole_forecast(placed)
    assert found.links_s == pytest.approx(exchanged, rel=0.01)
    assert found.compute_s > seconds("all-gather", 1250 * ids)
    assert not of_model(decoder_table(rows, features, 4), FSDP, 8).by_width
    assert not of_model(decoder_table(rows, features), WHOLE, batch).by_width


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "features"), [(64_000, 2048), (64_000, 4096)])
def test_a_table_by_its_width_takes_what_the_compiler_says(rows, features, policy):
    build, batch = decoder_table(rows, features), 128
    found = whole_forecast(of_model(build, FSDP, batch))
    run = ktd.dry_run(build, FSDP.strategy(SLICE), batch_size=batch)
    assert any(each.kind == "all-to-all" for each in run.cost.collectives)
    assert found.links_s == pytest.approx(run.estimate.exposed_link, rel=0.1)
    assert found.step_s == pytest.approx(run.estimate.step, rel=0.2)


def test_features_are_split_alike_whether_weights_are_also_split_over_the_batch():
    whole, both = of_model(pair, HALVES), of_model(pair, BOTH)
    for product in whole.facts.products:
        assert part_of(both, product) == part_of(whole, product)

    def activations(placed):
        held = [b for b in placed.facts.kept[None].buffers if b.gradient is None]
        return peak_bytes(held, parts_on(placed), lambda weight: 1)

    assert activations(both) == activations(whole)


def test_a_loop_gathers_its_weights_once():
    def build(steps):
        x = keras.Input((steps, 32))
        return compiled(keras.Model(x, ktd.layers.LSTM(128)(x)), "adam", "mse")

    few, many = (of_model(lambda n=n: build(n), FSDP) for n in (16, 64))
    assert any(map(many.in_a_loop, many.facts.products))
    assert whole_forecast(few).links_s == whole_forecast(many).links_s > 0


def test_attention_keeps_no_weights_of_its_own():
    """On a TPU it is a kernel, which makes them again."""

    def build():
        x = keras.Input((512, 64))
        return compiled(keras.Model(x, L.MultiHeadAttention(2, 32)(x, x)), "adam", "mse")

    buffers = of_model(build, WHOLE).facts.kept[None].buffers
    assert buffers
    assert not [b for b in buffers if b.shape[-2:] == (512, 512)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least_memory"),
    [
        *(("decoder", 0.9), ("ViT", 0.9), ("CNN", 0.6), ("LSTM", 0.9), ("ranking", 0.9)),
        *(("MoE", 0.85), ("encoder-decoder", 0.7)),
    ],
)
def test_the_forecast_ranks_as_the_compiler(name, least_memory):
    """Against what `python benchmarks/search.py --all` had the compiler say (libtpu 0.0.42.1)."""
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "search.py"
    spec = importlib.util.spec_from_file_location("benchmarks_search", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    recorded = json.loads((pathlib.Path(__file__).parent / "compiled.json").read_text())[name]
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        arguments = SimpleNamespace(topology="v5e:2x4", cache=False)
        found = benchmark.Measured(name, arguments).forecasts(None)
    finally:
        keras.config.set_dtype_policy(policy)
    known = [tried for tried in found if str(tried.candidate) in recorded]
    assert len(known) > 20
    steps = [recorded[str(tried.candidate)][0] for tried in known]
    assert benchmark.spearman([t.forecast.step_s for t in known], steps) > 0.9
    # Convolutions that gather weights piece by piece are where the compiler's choices are its own.
    sizes = [1024 * recorded[str(tried.candidate)][1] for tried in known]
    memory = [tried.forecast.memory_bytes for tried in known]
    assert benchmark.spearman(memory, sizes) >= least_memory
    ratios = sorted(m / s for m, s in zip(memory, sizes))
    assert 0.8 < ratios[len(ratios) // 2] < 1.2


def test_links_of_a_mesh():
    """What `describe` says of a compiled collective over the same axis."""
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, topology=SLICE)
    wire = Wire.of(dict(strategy.mesh.shape), strategy.mesh.devices.flatten(), SLICE)
    assert seconds_over(wire, "all-reduce", 2**20, ()) == 0
    ring = seconds_over(wire, "all-reduce", 2**20, ("data",))
    assert ring > seconds_over(wire, "all-gather", 2**20, ("data",)) > 0
    every = seconds_over(wire, "all-reduce", 2**20, ("data", "model"))
    assert every != ring
    assert seconds_over(Wire.of({"data": 4}), "all-reduce", 2**20, ("data",)) == 0


def test_remat_holds_less_and_computes_more():
    def build():
        x = inputs = keras.Input((128, 256))
        for _ in range(4):
            x = x + L.MultiHeadAttention(4, 256)(x, x)
        return compiled(keras.Model(inputs, x), "adam", "mse")

    base = ktd.TPUStrategy({"data": 8}, topology=SLICE)
    with describing(build, base, Inputs(), ROWS) as model:
        found = model, model.facts(ROWS, (None, "dots", "full"))
        plain, dots, full = (
            forecast_of(found, Candidate((("data", 8),), None, False, policy))
            for policy in (None, "dots", "full")
        )
    assert plain.held_bytes > dots.held_bytes > full.held_bytes
    assert full.compute_s > plain.compute_s
    assert found[1].kept["full"].flops > found[1].kept[None].flops


def test_a_state_that_is_not_donated_is_there_twice():
    """As `donate_state="auto"` keeps small ones."""

    def build(layers):
        def build():
            model = keras.Sequential([keras.Input((256,))])
            for _ in range(layers):
                model.add(L.Dense(256, use_bias=False))
            return compiled(model, "adam", "mse")

        return build

    def beside(layers):
        found = whole_forecast(of_model(build(layers), WHOLE))
        return (found.memory_bytes - found.state_bytes) / found.state_bytes

    # More than 64 variables are donated: gradients take a third of the state.
    program = 50 * 2**20
    states = 3 * 4 * 256 * 256
    assert beside(8) == pytest.approx(1 + program / (8 * states), rel=0.05)
    assert beside(40) == pytest.approx(1 / 3 + program / (40 * states), rel=0.05)


def test_rows_scale_all_but_the_state(described):
    candidate = Candidate((("data", 8),), None, False, None)
    one, two = (forecast_of(described, candidate, rows) for rows in (999 * ROWS, 1998 * ROWS))
    assert two.state_bytes == one.state_bytes
    # But for gradients, which are as large for any rows.
    assert 1.95 * one.held_bytes < two.held_bytes <= 2 * one.held_bytes
    assert two.links_s == one.links_s


@pytest.mark.parametrize("devices", [1, 6, 8, 16])
def test_candidates_differ_and_use_all_devices(devices):
    found = list(candidates(devices))
    assert len(set(found)) == len(found)
    for candidate in found:
        sizes = [size for _, size in candidate.mesh]
        product = 1
        for size in sizes:
            product *= size
        assert product == devices
    texts = [str(candidate) for candidate in found]
    assert len(set(texts)) == len(texts)
    assert f'ktd.TPUStrategy({{"data": {devices}}})' in texts


def test_orders_of_axes_that_the_links_tell_apart():
    plain = list(candidates(8))
    ordered = list(candidates(8, SLICE))
    others = [c for c in ordered if c not in plain]
    assert {c.mesh for c in others} >= {(("model", 2), ("data", 4)), (("model", 4), ("data", 2))}
    assert all(dict(c.mesh) in [dict(p.mesh) for p in plain] for c in others)
    # A square torus lays sides of four on it alike; pairs may be neighbours, or share the middle.
    square = {c.mesh for c in candidates(16, Topology.parse("v5e:4x4"))}
    assert (("model", 4), ("data", 4)) not in square
    assert (("model", 2), ("data", 8)) in square
