"""What `explain` says of four models: what is computed otherwise, and why the rest is not."""

import importlib.util

import keras
import numpy as np
import pytest
from helpers import built, compiled
from keras import ops

import keras_tpu_dist as ktd
from keras_tpu_dist.programs import passes
from keras_tpu_dist.programs.answers import Level
from keras_tpu_dist.programs.head import pieces
from keras_tpu_dist.programs.head import step as steps

L = keras.layers
WORDS = 64


@pytest.fixture(autouse=True)
def _small_heads_too(monkeypatch):
    monkeypatch.setattr(steps, "LEAST_WORDS", WORDS)
    monkeypatch.setattr(pieces, "PIECE_BYTES", WORDS)


class Block(L.Layer):
    """A block of a decoder, without attention."""

    def build(self, shape):
        self.up, self.down = L.Dense(16, "gelu", name="up"), L.Dense(shape[-1], name="down")
        self.up.build(shape)
        self.down.build((*shape[:-1], 16))

    def call(self, x):
        return x + self.down(self.up(x))


def decoder():
    ids = keras.Input((4,), dtype="int32")
    x = L.Embedding(WORDS, 8, name="words")(ids)
    blocks = [Block(name=f"block_{i}") for i in range(2)]
    for block in blocks:
        x = block(x)
    model = keras.Model(ids, L.Dense(WORDS, name="head")(x), name="decoder")
    for block in blocks:
        block.up.enable_lora(2)
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(model, optimizer, loss, steps_per_execution=2)


@keras.saving.register_keras_serializable("test_explained")
class Mixture(L.Layer):
    """Eight experts, of which each token chooses two; the others have a weight if it is soft."""

    def __init__(self, least=0.0, **kwargs):
        super().__init__(**kwargs)
        self.least = least

    def build(self, shape):
        self.router = self.add_weight(shape=(shape[-1], 8), name="router")
        self.up = self.add_weight(shape=(8, shape[-1], 16), name="up")
        self.down = self.add_weight(shape=(8, 16, shape[-1]), name="down")

    def call(self, x):
        best, which = ops.top_k(ops.softmax(x @ self.router), 2)
        weights = ops.sum(ops.one_hot(which, 8) * best[..., None], -2)
        weights = weights + self.least if self.least else weights
        y = ops.silu(ops.einsum("btd,edh->bteh", x, self.up))
        return ops.einsum("bteh,ehd,bte->btd", y, self.down, weights)

    def get_config(self):
        return super().get_config() | {"least": self.least}


def mixture():
    layers = [Mixture(name="sparse"), Mixture(0.01, name="soft"), L.Dense(1, name="end")]
    model = keras.Sequential([keras.Input((4, 8)), *layers], name="mixture")
    return ktd.convert(compiled(model, "sgd", "mse"))


def ranking():
    ids = keras.Input((3,), dtype="int32")
    x = L.Flatten()(L.Embedding(1024, 8, name="items")(ids))
    x = L.Dense(WORDS, "softmax", name="next")(x)
    return compiled(
        keras.Model(ids, x, name="ranking"), "adagrad", "sparse_categorical_crossentropy"
    )


def waves():
    x = inputs = keras.Input((8, 4))
    for i in range(3):
        block = [L.Conv1D(4, 3, padding="same", name="conv"), L.Dropout(0.1)]
        x = keras.Sequential(block, name=f"block_{i}")(x)
    x = L.LSTM(4, name="lstm")(x)
    model = compiled(keras.Model(inputs, L.Dense(1)(x), name="waves"), "sgd", "mse")
    ktd.scan_blocks(model)
    return ktd.remat(model, {"lstm": "full"})


def ids(time, labels):
    x = np.random.default_rng(0).integers(0, WORDS, (32, time))
    return x, x if labels is None else x[:, labels]


def floats(*shape):
    return np.ones((13, *shape)), np.ones((13, 1))


BY_FACTORS = "inputs are multiplied by the kernel, and by one factor after the other"
PIECES = "head in pieces: logits of {} of 64 words at a time, computed {} times"
ASKED = {"tables": "rows", "head": "pieces"}
CASES = {
    "decoder": (
        decoder,
        ids(4, None),
        ({"data": 4, "model": 2}, "tensor_parallel", {"remat": {"block_1": "dots"}, **ASKED}),
        [
            "otherwise, sums: decoder: gradients are summed over the devices once in 2 small "
            "batches",
            "as written, sums: head/kernel, head/bias: gradients are summed over the devices at "
            "every small batch, not once in 2: the step uses them otherwise, or sums them up in a "
            "loop",
            f"otherwise, head: head/kernel: {PIECES.format(4, 2)}",
            "otherwise, remat: block_1: recomputed in the backward pass ('dots' keeps the products "
            "with weights: of dense layers, projections and convolutions)",
            f"otherwise, lora: block_0/up: {BY_FACTORS}",
            f"otherwise, lora: block_1/up: {BY_FACTORS}",
        ],
    ),
    "mixture": (
        mixture,
        floats(4, 8),
        ({"data": 4, "model": 2}, "tensor_parallel", {}),
        [
            "otherwise, faults: Scatter of unevenly split rows: rows are added with an index "
            "beyond the end, which XLA drops",
            "otherwise, experts: mixture/sparse: only the chosen experts of each token are "
            "computed",
            "as written, experts: mixture/soft: computes all experts for every token: its call "
            "does not show a sum over experts that top_k has chosen",
        ],
    ),
    "ranking": (
        ranking,
        ids(3, 0),
        ({"data": 8}, [("items/embeddings", ("data", None))], ASKED),
        [
            "otherwise, tables: items/embeddings: by rows: ids and rows are exchanged, and only "
            "the used rows are updated",
            f"otherwise, head: next/kernel: {PIECES.format(16, 5)}",
        ],
    ),
    "waves": (
        waves,
        floats(8, 4),
        ({"data": 8}, None, {}),
        [
            "as written, rows: train step: each number of rows has a program of its own: a loop or "
            "a branch has other numbers in reduce_sum of lstm_cell",
            "otherwise, finite: waves: a step with NaN or infinity, and all behind it, leave the "
            "state as it was",
            "otherwise, scan: waves/block_0 to waves/block_2: 3 blocks Sequential are one loop",
            "otherwise, remat: lstm: recomputed in the backward pass ('full' keeps nothing but the "
            "layer's inputs)",
            "as written, tables: no Embedding has a table of 64 MiB or more that is split",
        ],
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_computed_otherwise_and_why_the_rest_is_not(name):
    build, (x, y), (mesh, layout, options), lines = CASES[name]
    strategy = ktd.TPUStrategy(mesh, layout, **options)
    model = built(build, strategy)
    callbacks = [ktd.callbacks.NameNaN()] if name == "waves" else []
    model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
    explanation = strategy.explain(model)
    said = list(map(str, explanation.passes))
    assert [line for line in lines if line not in said] == [], "\n".join(said)
    text = " ".join(str(explanation).split())
    assert all(row.words in text for row in explanation.passes)


def test_answers_go_with_what_was_asked_for():
    model = waves()
    strategy = ktd.TPUStrategy()

    def names():
        return {row.name for row in strategy.explain(model).passes}

    assert {"scan", "remat"} <= names()
    ktd.remat(model, {"lstm": None})
    ktd.scan_blocks(model, False)
    assert names().isdisjoint({"scan", "remat"})


def test_a_pass_is_in_the_list_once_and_what_decides_exists():
    names = [pass_.name for pass_ in passes.PASSES]
    assert len(names) == len(set(names))
    levels = [list(Level).index(pass_.level) for pass_ in passes.PASSES]
    assert levels == sorted(levels)
    for pass_ in passes.PASSES:
        is_elsewhere = isinstance(pass_, passes.Elsewhere)
        program = isinstance(pass_, passes.ProgramPass | passes.LayerPass)
        assert is_elsewhere != program, pass_.name
        if isinstance(pass_, passes.Elsewhere):
            assert importlib.util.find_spec(f"keras_tpu_dist.{pass_.module}") is not None
