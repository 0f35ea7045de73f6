"""A mesh axis "sequence": activations split along time, and nothing else changes."""

import itertools
import logging
import pickle
from typing import ClassVar

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled, results
from jax.sharding import PartitionSpec as P

import keras_tpu_dist as ktd

kl = keras.layers
TIME, VOCABULARY = 8, 23
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, VOCABULARY, (13, TIME))
TARGETS = RNG.integers(0, VOCABULARY, (13, TIME))


class Seen(kl.Layer):
    """Notes where what flows through it lies."""

    specs: ClassVar[list] = []

    def call(self, x):
        jax.debug.inspect_array_sharding(x, callback=self.specs.append)
        return x


def decoder(masks=False, **options):
    def build():
        tokens = keras.Input((TIME,), dtype="int32")
        # Keras's 0.05 is what a normalization, which follows, blows up: rounding as well.
        x = kl.Embedding(
            VOCABULARY, 16, keras.initializers.RandomNormal(stddev=1.0), mask_zero=masks
        )(tokens)
        for _ in range(2):
            y = kl.LayerNormalization()(x)
            x = x + kl.GroupQueryAttention(4, 4, 2)(y, y, use_causal_mask=True)
            x = x + kl.Dense(16)(kl.Dense(32, "gelu")(kl.LayerNormalization()(x)))
        model = keras.Model(tokens, kl.Dense(VOCABULARY)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return compiled(model, keras.optimizers.SGD(0.02), loss, metrics=["accuracy"], **options)

    return build


def frames():
    """Convolutions, pooling, recurrences, normalization and cross-attention along time."""
    x = keras.Input((TIME, 6))
    y = kl.Conv1D(8, 3, padding="causal", activation="relu")(x)
    y = kl.BatchNormalization()(kl.SeparableConv1D(8, 3, padding="same")(y))
    y = y + ktd.layers.LSTM(8, return_sequences=True)(y)
    y = y + kl.Bidirectional(kl.GRU(4, return_sequences=True))(y)
    z = kl.AveragePooling1D(2)(y)
    y = y + kl.MultiHeadAttention(2, 4)(y, z)
    y = kl.Concatenate()([kl.GlobalAveragePooling1D()(y), kl.Flatten()(z)])
    model = keras.Model(x, kl.Dense(3)(y))
    model.compile(keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
    return model


MESHES = (
    {"sequence": 8},
    {"data": 2, "sequence": 4},
    {"sequence": 2, "data": 2, "model": 2},
    {"fsdp": 2, "sequence": 2, "model": 2},
)
LAYOUTS = (None, "fsdp", "tensor_parallel", "auto", ktd.Planner("auto", memory_bytes=1))
CASES = [
    (mesh, layout)
    for mesh, layout in itertools.product(MESHES, LAYOUTS)
    if layout != "tensor_parallel" or "model" in mesh
]
FIT = {"batch_size": 5, "epochs": 2, "shuffle": False}


def equal(build, mesh, layout, x, y, **options):
    """Fits, evaluates and predicts on a mesh as on one device; returns the model."""
    plan = ktd.Planner(layout, min_size=8) if isinstance(layout, str) else layout
    strategy = ktd.TPUStrategy(mesh, plan, **options)
    want = results(built(build, None), x, y, **FIT)
    model = built(build, strategy)
    assert_close(results(model, x, y, **FIT), want)
    return model, strategy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout"), [CASES[10], pytest.param(*CASES[1], marks=pytest.mark.slow)], ids=str
)
def test_a_decoder(mesh, layout):
    equal(decoder(), mesh, layout, TOKENS, TARGETS)


# Keras's grouped attention hands its query's mask on to its own projections, which know of none.
@pytest.mark.filterwarnings("ignore:.*'(query|key|value)' .* does not support masking")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mesh", "layout"),
    [({}, mesh, layout) for mesh, layout in CASES]
    + [({"masks": True}, mesh, "fsdp") for mesh in MESHES]
    + [({"steps_per_execution": 2}, mesh, "fsdp") for mesh in MESHES]
    # Every operation is compiled alone.
    + [({"run_eagerly": True}, MESHES[-1], "fsdp")],
    ids=str,
)
def test_decoders(options, mesh, layout):
    tokens = TOKENS * (TOKENS % 3 > 0) if options.get("masks") else TOKENS
    equal(decoder(**options), mesh, layout, tokens, TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "layout"), CASES, ids=str)
def test_convolutions_and_recurrences(mesh, layout):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(13, TIME, 6)).astype("float32")
    equal(frames, mesh, layout, x, rng.normal(size=(13, 3)).astype("float32"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("remat", [None, "full", "dots", "attention"])
def test_blocks_scanned_and_computed_again(mesh, remat):
    class Block(kl.Layer):
        def build(self, shape):
            self.attention, self.dense = kl.MultiHeadAttention(2, 8), kl.Dense(16, "gelu")
            self.attention.build(shape, shape)
            self.dense.build(shape)

        def call(self, x):
            x = x + self.attention(x, x, use_causal_mask=True)
            return x + self.dense(x)

    def build():
        tokens = keras.Input((TIME,), dtype="int32")
        x = kl.Embedding(VOCABULARY, 16)(tokens)
        for number in range(3):
            x = Block(name=f"block_{number}")(x)
        model = keras.Model(tokens, kl.Dense(VOCABULARY)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.02), loss)
        assert ktd.scan_blocks(model).runs
        return model

    equal(build, mesh, "fsdp", TOKENS, TARGETS, remat=remat)


@pytest.mark.slow
def test_activations_are_split_along_time():
    def build():
        tokens = keras.Input((TIME,), dtype="int32")
        x = Seen()(kl.Embedding(VOCABULARY, 16)(tokens))
        y = kl.LayerNormalization()(x)
        x = Seen()(x + kl.MultiHeadAttention(2, 8)(y, y, use_causal_mask=True))
        x = Seen()(kl.Dense(16)(kl.Dense(32)(x)))
        model = keras.Model(tokens, kl.Dense(VOCABULARY)(x))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    for layout in (None, "fsdp"):
        Seen.specs = []
        strategy = ktd.TPUStrategy({"data": 2, "sequence": 4}, layout)
        built(build, strategy).train_on_batch(TOKENS[:4], TARGETS[:4])
        shapes = {s.shard_shape((4, TIME, 16)) for s in Seen.specs}
        assert shapes == {(2, 2, 16)}


def test_what_of_a_batch_is_split():
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 4})
    batch = {
        "tokens": np.zeros((4, 8), "int32"),
        "mask": np.zeros((4, 8), bool),
        "sequence": np.zeros((4, 8, 3), "float32"),
        "features": np.zeros((4, 8), "float32"),
        "image": np.zeros((4, 8, 8, 3), "float32"),
        "label": np.zeros((4, 1), "int32"),
        "row": np.zeros(4, "int32"),
    }
    placed = strategy.placer.place(batch).data
    specs = {name: array.sharding.spec for name, array in placed.items()}
    rows, both = P("data"), P("data", "sequence")
    assert specs == {
        **{"tokens": both, "mask": both, "sequence": both},
        **{"features": rows, "image": rows, "label": rows, "row": rows},
    }
    stacked = strategy.placer.place_many([batch, batch]).data
    assert stacked["tokens"].sharding.spec == P(None, "data", "sequence")
    assert strategy.sequence_axis == "sequence"


def test_batches_with_time_first_are_split_over_sequence_and_data():
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 4}, batch_axis=1)
    placed = strategy.placer.place(np.zeros((8, 4, 3), "float32"))
    assert placed.data.sharding.spec == P("sequence", "data")


def test_a_batch_without_a_time_that_divides_is_whole_and_said(caplog):
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 4})
    tokens, rows = np.zeros((4, 6), "int32"), np.zeros((4, 8), "float32")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            placed = strategy.placer.place((tokens, rows))
        strategy.placer.place((np.zeros((4, 8), "int32"), rows))
    assert placed.data[0].sharding.spec == P("data")
    assert [record.getMessage() for record in caplog.records] == [
        "the 4 devices of the mesh axis 'sequence' compute the same: no array of the batch has a "
        "time that is divisible by their number, as (batch, time, features) or as integers "
        "(batch, time): x (4, 6), y (4, 8)"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [{"data": 2, "sequence": 4}, pytest.param({"sequence": 8}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_time_that_does_not_divide_equals_one_device(mesh):
    def build():
        tokens = keras.Input((6,), dtype="int32")
        x = kl.Embedding(VOCABULARY, 16)(tokens)
        x = x + kl.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
        model = keras.Model(tokens, kl.Dense(VOCABULARY)(x))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    equal(build, mesh, "fsdp", TOKENS[:, :6], TARGETS[:, :6])


def test_plans_split_state_over_it_and_no_weight_by_itself(caplog):
    with caplog.at_level(logging.WARNING):
        strategy = ktd.TPUStrategy({"sequence": 8}, "fsdp")
    assert not caplog.records  # no data axis, but no device computes what another does
    model = built(decoder(), strategy)
    axes = {v.path: strategy.plan(model).decision(v).axes for v in model.trainable_variables}
    assert not any(axes.values())  # small
    big = kl.Dense(1024)
    with strategy.scope():
        big.build((None, 64))
    assert big.kernel.value.sharding.spec == P(None, "sequence")
    cube = ktd.TPUStrategy({"data": 2, "sequence": 2, "model": 2}, "tensor_parallel")
    model = built(decoder(), cube)
    split = [a for v in model.trainable_variables for a in cube.plan(model).decision(v).axes if a]
    assert set(split) == {"model"}
    assert cube.lint(model).findings == ()
    assert "output of" in str(cube.explain(model))


def test_slots_are_split_over_it():
    strategy = ktd.TPUStrategy({"sequence": 8}, shard_optimizer=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4, 64)), kl.Dense(64)])
        model.compile("adam", "mse")
    model.fit(np.ones((2, 8, 64)), np.ones((2, 8, 64)), verbose=0)
    slot = next(v for v in model.optimizer.variables if v.shape == (64, 64))
    assert slot.value.sharding.spec == P("sequence")
    assert model.layers[0].kernel.value.sharding.spec == P()


def test_there_is_no_model_axis_in_it():
    with pytest.raises(ValueError, match=r"do not split the batch, such as \"model\""):
        ktd.TPUStrategy({"data": 2, "sequence": 4}, "tensor_parallel")


def test_it_splits_rows_where_data_axes_say_so():
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 4}, data_axes=("data", "sequence"))
    assert strategy.sequence_axis is None
    assert strategy.num_replicas_in_sync == 8
    assert ktd.TPUStrategy({"data": 8, "sequence": 1}).sequence_axis is None


def test_a_strategy_is_pickled_and_grows():
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 4}, "fsdp")
    again = pickle.loads(pickle.dumps(strategy))
    assert again.sequence_axis == "sequence"
    grown = strategy.on_topology("v5e:4x4")
    assert dict(grown.mesh.shape) == {"data": 4, "sequence": 4}
    alone = ktd.TPUStrategy({"sequence": 8}).on_topology("v5e:4x4")
    assert dict(alone.mesh.shape) == {"sequence": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [{"data": 2, "sequence": 4}, pytest.param({"sequence": 8}, marks=pytest.mark.slow)],
    ids=str,
)
def test_replica_code(mesh):
    """Rows are each replica's, its devices share its time."""
    strategy = ktd.TPUStrategy(mesh)
    model = built(decoder(), strategy)
    alone = built(decoder(), None)
    rows = TOKENS[:4]
    (batch,) = strategy.distribute_dataset([rows])
    outputs = strategy.run(lambda x: model(x, training=False), (batch,))
    assert_close(strategy.gather(outputs, 0), alone(rows, training=False))
