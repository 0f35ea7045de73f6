"""Models whose embedding tables are used by their width, against one device."""

import re

import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled
from keras import ops
from test_by_rows import (
    BATCH,
    DENSE,
    IDS,
    LAYOUTS,
    OPTIMIZERS,
    ROWS,
    WIDTH,
    compared,
    data,
    ranking,
    strategy_of,
    trained,
)

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.answers import words_of
from keras_tpu_dist.programs.tables import step as tables_step
from keras_tpu_dist.programs.tables import width
from keras_tpu_dist.programs.tables.exchange import TableSplit
from keras_tpu_dist.programs.tables.step import BY_WIDTH

L = keras.layers
BY_BATCH = {
    "data8": LAYOUTS["data8"],
    "width": LAYOUTS["width"],
    "both": ({"data": 2, "fsdp": 2, "model": 2}, ("fsdp", "data")),
    "first": ({"data": 2, "fsdp": 2, "model": 2}, ("data", None)),
    "two": ({"data": 2, "fsdp": 2, "model": 2}, (("data", "fsdp"), None)),
}
LAYOUTS.update({name: layout for name, layout in BY_BATCH.items() if name not in LAYOUTS})
ALL = {**OPTIMIZERS, **DENSE}


@pytest.fixture(autouse=True)
def _small_tables_too(monkeypatch):
    monkeypatch.setattr(tables_step, "LEAST_BYTES", 1)
    monkeypatch.setattr(width, "BYTES_PER_ROW", 0)
    monkeypatch.setattr(width, "_EXCHANGE_FACTOR", 0)


CASES = [
    ("adam", "data8", "equal", 3),
    ("momentum", "both", "random", 1),
    ("clipnorm", "two", "beyond", 3),
    ("sgd", "width", "one owner", 1),
    ("ema", "first", "distinct", 3),
]
MORE = [
    (optimizer, layout, pattern, 1 + 2 * ((i + j) % 2))
    for i, optimizer in enumerate(ALL)
    for j, layout in enumerate(BY_BATCH)
    for pattern in [("random", "equal", "one owner", "distinct", "beyond")[(i + j) % 5]]
]


def check(optimizer, layout, pattern, steps):
    x, y = data(pattern)
    if pattern == "beyond":  # one device has such rows full of NaN
        x = np.maximum(x, 0)
    _, found = compared(ranking(ALL[optimizer], steps), layout, x, y, tables="auto")
    assert found == {"table/embeddings": BY_WIDTH}


@pytest.mark.parametrize(("optimizer", "layout", "pattern", "steps"), CASES)
def test_training_equals_one_device(optimizer, layout, pattern, steps):
    check(optimizer, layout, pattern, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "layout", "pattern", "steps"), MORE)
def test_every_optimizer_and_layout_equals_one_device(optimizer, layout, pattern, steps):
    check(optimizer, layout, pattern, steps)


@pytest.mark.parametrize("layout", BY_BATCH)
def test_prediction_and_evaluation(layout):
    x, y = data()
    results = []
    for strategy in (None, strategy_of(layout, "auto")):
        model = built(ranking(), strategy)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        results.append([predicted, model.evaluate(x, y, batch_size=BATCH, verbose=0)])
    assert_close(*results)
    assert words_of(model, "tables") == {"table/embeddings": BY_WIDTH}


def twice():
    """One table for two inputs, of which one has three dimensions."""
    first = keras.Input((IDS,), dtype="int32")
    second = keras.Input((2, IDS), dtype="int32")
    table = L.Embedding(ROWS, WIDTH, name="table")
    x = L.LSTM(4)(table(first))
    x = L.Concatenate()([x, L.GlobalAveragePooling2D()(table(second))])
    model = keras.Model([first, second], L.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    return model


def test_a_table_of_two_lookups():
    x, y = data()
    pair = [x, np.stack([x, x[::-1]], 1)]
    _, found = compared(twice, "data8", pair, y, tables="auto")
    assert found == {"table/embeddings": BY_WIDTH}


class Tied(L.Layer):
    """Logits from the table that ids were looked up in."""

    def __init__(self, table, **kwargs):
        super().__init__(**kwargs)
        self.table = table

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.table.embeddings))


def test_a_tied_table_is_left_to_the_compiler():
    """It is gathered for the logits anyway."""
    x, _ = data()

    def build():
        ids = keras.Input((IDS,), dtype="int32")
        table = L.Embedding(ROWS, WIDTH, name="table")
        model = keras.Model(ids, Tied(table)(L.Dense(WIDTH)(table(ids))))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return compiled(model, keras.optimizers.Adam(0.01, epsilon=1e-3), loss)

    _, found = compared(build, "data8", x, x, tables="auto")
    assert found["table/embeddings"].startswith("every row is updated")


def test_without_the_option_nothing_changes():
    x, y = data()
    _, found = compared(ranking(DENSE["adam"]), "data8", x, y, tables=None)
    assert not found


def test_no_device_gathers_the_table():
    rows, features = 512, 64

    def build():
        ids = keras.Input((16,), dtype="int32")
        x = L.Embedding(rows, features, name="table")(ids)
        return compiled(keras.Model(ids, L.Dense(1)(L.Flatten()(x))), "adam", "mse")

    largest = {}
    for tables in (None, "auto"):
        strategy = strategy_of("data8", tables)
        run = ktd.dry_run(build, strategy, batch_size=64)
        largest[tables] = max(each.bytes for each in run.cost.collectives)
    assert largest[None] >= rows * features * 4
    assert largest["auto"] <= rows * features * 4 / 2


def test_a_frequent_row_of_bfloat16_goes_on_growing():
    """One device adds up what all have for a row; bfloat16 would stop at some hundred times one."""
    count, batch = 64, 64

    def build():
        ids = keras.Input((count,), dtype="int32")
        x = L.Embedding(ROWS, WIDTH, name="table", dtype="mixed_bfloat16")(ids)
        model = keras.Model(ids, L.Dense(1, dtype="float32")(L.GlobalAveragePooling1D()(x)))
        model.compile(keras.optimizers.SGD(64.0, momentum=0.9), lambda y, p: p)
        return model

    x, y = np.full((batch, count), 5, "int32"), np.zeros((batch, 1), "float32")
    with strategy_of("data8", "auto").scope():
        model = build()
    kernel = model.layers[-1].kernel
    kernel.assign(np.ones(kernel.shape, "float32"))
    before = model.get_layer("table").get_weights()[0]
    model.fit(x, y, batch_size=batch, verbose=0)
    moved = before[5] - model.get_layer("table").get_weights()[0][5]
    assert words_of(model, "tables") == {"table/embeddings": BY_WIDTH}
    # 4,096 uses of the row, each with a gradient of 1 / 4,096.
    np.testing.assert_allclose(moved, 64.0, rtol=0.01)


def test_what_cannot_be_used_by_its_width_is_said(monkeypatch):
    mesh = ktd.TPUStrategy({"data": 4, "model": 2}).mesh
    for rows, columns, shape, words in (
        (("model",), (), (64, 8), r"over \['model'\], which do not split the batch"),
        ((), (), (64, 8), "it is replicated"),
        (("data",), (), (64, 6), "6 is not divisible by 4"),
    ):
        split = TableSplit(mesh, rows, columns, ("data",), shape)
        assert re.search(words, width.trouble(split))
    x, y = data()
    monkeypatch.setattr(width, "_EXCHANGE_FACTOR", 1e9)
    plain, _ = trained(ranking(DENSE["adam"]), strategy_of("data8", "auto"), x, y)
    assert words_of(plain, "tables")["table/embeddings"].startswith("every row is updated")


# Slice, rows and width of a table, ids of a step, whether it is taken by its width: those of
# benchmarks/lookups.py, whose estimates are the reason.
CHOICES = [
    ("v5e:4x4", (32_000, 2048), 65_536, True),
    ("v5e:2x4", (256_000, 2048), 32_768, False),
    ("v5e:4x4", (128_256, 4096), 65_536, True),
    ("v5e:8x8", (32_000, 4096), 262_144, False),
    ("v5e:8x8", (128_256, 4096), 262_144, True),
    ("v5e:16x16", (128_256, 4096), 1_048_576, True),
    ("v5p:2x2x4", (32_000, 4096), 131_072, False),
    ("v5p:2x2x4", (128_256, 4096), 131_072, True),
    ("v6e:4x4", (128_256, 4096), 131_072, True),
]


@pytest.mark.parametrize(("slice_name", "shape", "ids", "taken"), CHOICES)
def test_the_choice_follows_the_estimates(slice_name, shape, ids, taken, monkeypatch):
    monkeypatch.undo()
    mesh = ktd.TPUStrategy(None, "fsdp", topology=slice_name).mesh
    split = TableSplit(mesh, ("data",), (), ("data",), shape)
    assert width.is_shorter(split, ids, 2, trains=True) == taken
