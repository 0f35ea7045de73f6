"""What a forecast is made of: weights, products, what is kept, and what crosses the links."""

import jax
import keras
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.hlo import Wire, seconds_over
from keras_tpu_dist.planning.candidates import Candidate, candidates
from keras_tpu_dist.planning.facts import describing
from keras_tpu_dist.planning.forecast import Ground, forecast

L = keras.layers
SLICE = Topology.parse("v5e:2x4")
ROWS, WIDTH, HIDDEN = 64, 256, 1024


def pair():
    """A column and a row of Megatron."""
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            L.Dense(HIDDEN, "relu", use_bias=False, name="up"),
            L.Dense(WIDTH, use_bias=False, name="down"),
        ]
    )
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def described():
    with describing(pair, ktd.TPUStrategy({"data": 8}, topology=SLICE), {}, ROWS) as model:
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


def test_facts(described):
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
def test_state(described, candidate, ways_of_weights, ways_of_slots):
    bytes_ = 2 * 4 * WIDTH * HIDDEN
    found = forecast_of(described, candidate)
    assert found.state_bytes == bytes_ / ways_of_weights + 2 * bytes_ / ways_of_slots
    assert found.memory_bytes > found.state_bytes + found.kept_bytes


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
    rows = 2 * seconds_over(wire, "all-reduce", 4 * ROWS / 4 * WIDTH, ("model",))
    assert forecast_of(described, both).links_s == pytest.approx(gradients + rows)


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


def test_remat_keeps_less_and_computes_more(described):
    _, facts = described
    mesh = (("data", 8),)
    plain, dots, full = (
        forecast_of(described, Candidate(mesh, None, False, policy))
        for policy in (None, "dots", "full")
    )
    assert plain.kept_bytes > full.kept_bytes
    assert dots.kept_bytes >= full.kept_bytes
    assert full.compute_s > plain.compute_s
    assert facts.kept["full"].flops > facts.kept[None].flops


def test_rows_scale_all_but_the_state(described):
    candidate = Candidate((("data", 8),), None, False, None)
    one, two = (forecast_of(described, candidate, rows) for rows in (ROWS, 2 * ROWS))
    assert two.state_bytes == one.state_bytes
    assert two.kept_bytes == 2 * one.kept_bytes
    assert two.links_s == one.links_s


@pytest.mark.parametrize("devices", [1, 6, 8, 16])
def test_candidates(devices):
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
    assert f'TPUStrategy({{"data": {devices}}}, None)' in texts


def test_what_a_candidate_prints_makes_it():
    from keras_tpu_dist import Planner, TPUStrategy

    assert len(jax.devices()) == 8
    for candidate in candidates(8):
        strategy = eval(str(candidate), {"TPUStrategy": TPUStrategy, "Planner": Planner})
        own = candidate.strategy()
        assert dict(strategy.mesh.shape) == dict(own.mesh.shape)
        assert strategy.layouts.setting.layout == own.layouts.setting.layout
        assert strategy.layouts.setting.shard_optimizer == own.layouts.setting.shard_optimizer
