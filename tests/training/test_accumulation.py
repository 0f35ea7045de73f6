"""Accumulated gradients: results are those of one device, and the devices' sums are made once."""

import logging

import jax
import keras
import numpy as np
import pytest
from helpers import assert_close, built, sequential

import keras_tpu_dist as ktd

L = keras.layers
BATCHES = 4
PLANS = {
    "data": ({"data": 8}, None, {}),
    "data_model": ({"data": 4, "model": 2}, ktd.Planner("tensor_parallel", min_size=4), {}),
    "fsdp": ({"data": 8}, ktd.Planner("fsdp", min_size=4), {}),
    "fsdp_model": ({"fsdp": 4, "model": 2}, ktd.Planner("fsdp", min_size=4), {}),
    "shard_optimizer": ({"data": 8}, None, {"shard_optimizer": True}),
}


def dense():
    return keras.Sequential(
        [
            keras.Input((8,)),
            L.Dense(16, activation="relu", kernel_regularizer="l2"),
            L.BatchNormalization(),
            L.Dropout(0.3),
            L.Dense(8),
        ]
    )


def convolutions():
    return keras.Sequential(
        [
            keras.Input((8,)),
            L.Reshape((4, 2, 1)),
            L.Conv2D(8, (3, 2), padding="same", activation="relu"),
            L.DepthwiseConv2D(2, padding="same"),
            L.GlobalAveragePooling2D(),
            L.Dense(8),
        ]
    )


class Decoder(keras.Model):
    """A block with attention, whose table of words is its last kernel too."""

    def __init__(self):
        super().__init__()
        self.words = L.Embedding(11, 8)
        self.attention = L.MultiHeadAttention(2, 4)
        self.norm = L.LayerNormalization()
        self.head = ktd.remat(L.Dense(8, activation="gelu"))

    def call(self, x):
        ids = keras.ops.cast(keras.ops.abs(x) * 3, "int32") % 11
        h = self.words(ids)
        h = self.head(self.norm(h + self.attention(h, h, use_causal_mask=True)))
        logits = keras.ops.matmul(h, keras.ops.transpose(self.words.embeddings))
        return keras.ops.mean(logits, axis=1)[:, :8]


MODELS = {"dense": dense, "convolutions": convolutions, "decoder": Decoder}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=BATCHES),
    "everything": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.05, 20),
        momentum=0.9,
        weight_decay=0.01,
        global_clipnorm=0.5,
        use_ema=True,
        ema_overwrite_frequency=3,
        gradient_accumulation_steps=BATCHES,
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, gradient_accumulation_steps=BATCHES)
    ),
}


def model(kind, optimizer, steps):
    def build():
        made = MODELS[kind]()
        made.compile(OPTIMIZERS[optimizer](), "mse", steps_per_execution=steps)
        return made

    return build


def results(trained):
    """Losses, weights and slots after two epochs of 13 rows a batch, the last of 5."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(13 * 9 + 5, 8)).astype("float32") for _ in range(2))
    history = trained.fit(x, y, batch_size=13, epochs=2, shuffle=False, verbose=0).history
    slots = [np.asarray(slot.value) for slot in trained.optimizer.variables]
    return [np.array(history["loss"]), *trained.get_weights(), *slots]


def cases():
    fast = [("dense", "adam", "data_model", 4), ("dense", "everything", "shard_optimizer", 3)]
    chosen = [
        *fast,
        *(("dense", "adam", plan, 4) for plan in PLANS),
        *(("dense", "everything", plan, 3) for plan in PLANS),
        *((kind, "adam", plan, 8) for kind in MODELS for plan in ("data_model", "fsdp")),
        ("dense", "scaled", "data", 4),
    ]
    for case in dict.fromkeys(chosen):
        yield pytest.param(*case, marks=() if case in fast else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "optimizer", "plan", "steps"), list(cases()))
def test_results_are_those_of_one_device(kind, optimizer, plan, steps):
    """Launches begin and end within an update, too: 3 steps a launch, 9 batches and a tail."""
    expected = results(built(model(kind, optimizer, 1), None))
    mesh, layout, options = PLANS[plan]
    assert_close(
        results(built(model(kind, optimizer, steps), ktd.TPUStrategy(mesh, layout, **options))),
        expected,
    )


class ReadsGradients(keras.Model):
    """Its own train step reports the norm of the gradients."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(8)

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, non_trainable, slots, metrics = state
        x, y = data[:2]

        def loss(weights):
            outputs, _ = self.stateless_call(weights, non_trainable, x)
            return keras.ops.mean((outputs - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        norm = sum(keras.ops.sum(g**2) for g in gradients)
        return {"loss": value, "norm": norm}, (trainable, non_trainable, slots, metrics)


def every_batch(caplog):
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "at every small batch" in text]


@pytest.mark.parametrize(
    ("kind", "steps", "words"),
    [
        ("reads", 4, "reads_gradients/dense/kernel"),
        pytest.param("dense", 1, "steps_per_execution=4", marks=pytest.mark.slow),
        pytest.param("lstm", 4, "lstm_cell/kernel", marks=pytest.mark.slow),
        pytest.param("scaled", 4, "scales the loss", marks=pytest.mark.slow),
    ],
)
def test_what_is_summed_at_every_batch_is_said_once(kind, steps, words, caplog, monkeypatch):
    recurrent = lambda: keras.Sequential([keras.Input((8,)), L.Reshape((4, 2)), L.LSTM(8)])  # noqa: E731
    monkeypatch.setitem(MODELS, "reads", ReadsGradients)
    monkeypatch.setitem(MODELS, "lstm", recurrent)
    monkeypatch.setitem(MODELS, "scaled", dense)
    build = model(kind, "scaled" if kind == "scaled" else "adam", steps)
    expected = results(built(build, None))
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        assert_close(results(built(build, ktd.TPUStrategy())), expected)
    (text,) = every_batch(caplog)
    assert words in text


def wide():
    return sequential(
        256,
        L.Dense(512, activation="relu"),
        L.Dense(256, name="out"),
        optimizer=keras.optimizers.Adam(gradient_accumulation_steps=BATCHES),
        steps_per_execution=2 * BATCHES,
    )


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("mesh", "plan", "options", "kind"),
    [
        pytest.param({"data": 8}, None, {}, "all-reduce", marks=pytest.mark.slow),
        ({"data": 8}, "fsdp", {}, "reduce-scatter"),
        pytest.param(
            {"data": 8}, None, {"shard_optimizer": True}, "reduce-scatter", marks=pytest.mark.slow
        ),
        pytest.param(
            {"data": 4, "model": 2}, "tensor_parallel", {}, "all-reduce", marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_are_summed_once_for_each_update(mesh, plan, options, kind, caplog):
    """By the TPU compiler: as many bytes of sums in an update as one gradient has."""
    layout = plan and ktd.Planner(plan, min_size=4)
    strategy = ktd.TPUStrategy(mesh, layout, topology="v5e:2x4", **options)
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        run = ktd.dry_run(wide, strategy, batch_size=104)
    assert not every_batch(caplog)
    summed = [
        c
        for c in run.cost.collectives
        if c.kind in ("all-reduce", "reduce-scatter") and "data" in c.axes and c.bytes > 2**10
    ]
    # Of two sums that are scattered, the compiler joins one with those of the biases.
    assert kind in {c.kind for c in summed if c.bytes > 2**16}
    gradients = 4 * (256 * 512 + 512 + 512 * 256 + 256) // mesh.get("model", 1)
    sent = sum(c.bytes * c.times for c in summed)
    assert sent == pytest.approx(gradients / BATCHES, rel=0.05)
