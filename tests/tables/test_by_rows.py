"""Models whose embedding tables go by their rows, against one device."""

import logging

import keras
import numpy as np
import pytest
from helpers import assert_close, built, compiled
from keras import ops

import keras_tpu_dist as ktd
from keras_tpu_dist.programs.answers import words_of
from keras_tpu_dist.programs.tables import exchange
from keras_tpu_dist.programs.tables import step as tables_step

L = keras.layers
ROWS, WIDTH, IDS, STEPS, BATCH = 64, 8, 3, 3, 13
LAYOUTS = {
    "data8": ({"data": 8}, ("data", None)),
    "model": ({"data": 4, "model": 2}, ("model", None)),
    "data4_model2": ({"data": 4, "model": 2}, (("data", "model"), None)),
    "data2_fsdp2_model2": ({"data": 2, "fsdp": 2, "model": 2}, (("data", "fsdp"), "model")),
    "columns": ({"data": 2, "fsdp": 2, "model": 2}, ("model", "fsdp")),
    "width": ({"data": 4, "model": 2}, (None, "data")),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipped by value": lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.01),
    "scaled": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "schedule": lambda: keras.optimizers.Adagrad(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
}
DENSE = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.Adagrad(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adagrad(0.1), initial_scale=8.0
    ),
    "factored": lambda: keras.optimizers.Adafactor(0.1),
}
PATTERNS = {
    "random": lambda rng, shape: rng.integers(0, ROWS, shape),
    "equal": lambda rng, shape: np.full(shape, 5),
    "one owner": lambda rng, shape: rng.integers(0, 8, shape),
    "distinct": lambda rng, shape: np.arange(np.prod(shape)).reshape(shape) % ROWS,
    "beyond": lambda rng, shape: rng.integers(-ROWS, ROWS, shape),
}


def ranking(optimizer=OPTIMIZERS["adagrad"], steps=1, dtype=None, **table):
    """Ids to one number."""

    def build():
        ids = keras.Input((IDS,), dtype="int32")
        x = L.Embedding(ROWS, WIDTH, name="table", dtype=dtype, **table)(ids)
        x = L.Dense(8, activation="tanh", dtype=dtype)(L.Flatten()(x))
        model = keras.Model(ids, L.Dense(1, dtype="float32")(x))
        model.compile(optimizer(), "mse", steps_per_execution=steps)
        return model

    return build


def data(pattern="random", shape=(STEPS * BATCH, IDS)):
    rng = np.random.default_rng(3)
    x = PATTERNS[pattern](rng, shape).astype("int32")
    return x, rng.normal(size=(shape[0], 1)).astype("float32")


def strategy_of(layout, tables="rows", name="table/embeddings", **options):
    mesh, axes = LAYOUTS[layout]
    return ktd.TPUStrategy(mesh, [(name, axes)], tables=tables, **options)


def trained(build, strategy, x, y):
    model = built(build, strategy)
    history = model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    slots = [np.asarray(v.value) for v in model.optimizer.variables]
    names = [v.path for v in model.optimizer.variables]
    return model, {
        "loss": history["loss"],
        "weights": model.get_weights(),
        "slots": [s for s, name in zip(slots, names) if "seed" not in name],
    }


def compared(build, layout, x, y, tables="rows", tolerance=1e-5, **options):
    """Trains on one device and on a mesh; what the step made of its table."""
    _, one = trained(build, None, x, y)
    model, mesh = trained(build, strategy_of(layout, tables, **options), x, y)
    for part in one:
        assert_close(one[part], mesh[part], tolerance)
    return model, words_of(model, "tables")


# optimizer, layout, ids, steps in a launch, bound
CASES = [
    ("sgd", "data8", "random", 1, "wide"),
    ("adagrad", "data8", "equal", 3, "narrow"),
    ("adagrad", "model", "random", 3, "wide"),
    ("sgd", "data4_model2", "one owner", 1, "narrow"),
    ("adagrad", "data2_fsdp2_model2", "distinct", 3, "narrow"),
    ("clipped by value", "columns", "random", 1, "narrow"),
    ("schedule", "width", "one owner", 3, "wide"),
    ("scaled", "data8", "distinct", 1, "narrow"),
]
MORE = [
    (optimizer, layout, pattern, steps, "narrow")
    for i, optimizer in enumerate(OPTIMIZERS)
    for j, layout in enumerate(LAYOUTS)
    for pattern, steps in [(list(PATTERNS)[(i + j) % 4], 1 + 2 * ((i + j) % 2))]
]


@pytest.mark.parametrize("layout", ["data8", "columns"])
def test_prediction_and_evaluation_look_rows_up(layout, monkeypatch):
    monkeypatch.setattr(exchange, "_bound", narrow)
    x, y = data("one owner")
    results = []
    for strategy in (None, strategy_of(layout)):
        model = built(ranking(), strategy)
        results.append(
            [
                model.predict(x, batch_size=BATCH, verbose=0),
                model.evaluate(x, y, batch_size=BATCH, verbose=0),
            ]
        )
    assert_close(*results)
    assert words_of(model, "tables") == {"table/embeddings": tables_step.LOOKED_UP}


def narrow(count, parts):
    return max(1, count // (2 * parts))


def check(optimizer, layout, pattern, steps, bound, monkeypatch):
    if bound == "narrow":
        monkeypatch.setattr(exchange, "_bound", narrow)
    _, found = compared(ranking(OPTIMIZERS[optimizer], steps), layout, *data(pattern))
    assert found == {"table/embeddings": tables_step.BY_ROWS}


@pytest.mark.parametrize(("optimizer", "layout", "pattern", "steps", "bound"), CASES)
def test_used_rows_alone_are_updated(optimizer, layout, pattern, steps, bound, monkeypatch):
    check(optimizer, layout, pattern, steps, bound, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "layout", "pattern", "steps", "bound"), MORE)
def test_every_optimizer_on_every_layout(optimizer, layout, pattern, steps, bound, monkeypatch):
    check(optimizer, layout, pattern, steps, bound, monkeypatch)


QUICK = ("adam", "clipnorm", "loss scale")


@pytest.mark.parametrize(
    "optimizer",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DENSE],
)
def test_an_optimizer_that_needs_every_row_updates_every_row(optimizer, caplog, monkeypatch):
    monkeypatch.setattr(exchange, "_bound", narrow)
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        _, found = compared(ranking(DENSE[optimizer]), "data8", *data())
    assert "every row is updated" in found["table/embeddings"]
    said = [r.message for r in caplog.records if "every row is updated" in r.message]
    assert len(said) == 1, caplog.text
    assert "table/embeddings" in said[0]


def test_ids_beyond_the_rows_give_what_keras_gives():
    x, _ = data("beyond")
    x[0, 0], x[5, 1] = ROWS, -ROWS - 1
    one, mesh = (built(ranking(), s) for s in (None, strategy_of("data8")))
    table = one.get_layer("table")
    np.testing.assert_array_equal(
        keras.Model(one.inputs, table.output).predict(x, verbose=0),
        keras.Model(mesh.inputs, mesh.get_layer("table").output).predict(x, verbose=0),
    )


def test_negative_ids_count_from_the_end():
    _, found = compared(ranking(), "data8", *data("beyond"))
    assert found == {"table/embeddings": tables_step.BY_ROWS}


def several():
    """Two tables of one shape, one of them looked up twice, with ids of other shapes."""

    def build():
        words, user = keras.Input((IDS,), dtype="int32"), keras.Input((), dtype="int32")
        table = L.Embedding(ROWS, WIDTH, mask_zero=True, name="table")
        users = L.Embedding(ROWS, WIDTH, name="users")
        x = L.GlobalAveragePooling1D()(table(words))
        x = L.Concatenate()([x, table(user), users(user)])
        model = keras.Model([words, user], L.Dense(1)(x))
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        return model

    return build


@pytest.mark.parametrize("layout", ["data8", "columns"])
def test_several_tables_and_several_lookups(layout, monkeypatch):
    monkeypatch.setattr(exchange, "_bound", narrow)
    x, y = data()
    mesh, axes = LAYOUTS[layout]
    build = several()
    _, one = trained(build, None, [x, x[:, 0]], y)
    strategy = ktd.TPUStrategy(mesh, [("embeddings", axes)], tables="rows")
    model, other = trained(build, strategy, [x, x[:, 0]], y)
    for part in one:
        assert_close(one[part], other[part])
    assert words_of(model, "tables") == dict.fromkeys(
        ("table/embeddings", "users/embeddings"), tables_step.BY_ROWS
    )


class Tied(keras.Model):
    """A table that is a kernel, too."""

    def __init__(self):
        super().__init__()
        self.table = L.Embedding(ROWS, WIDTH, name="table")

    def call(self, ids):
        return ops.matmul(ops.mean(self.table(ids), 1), ops.transpose(self.table.embeddings))


def test_a_tied_table_updates_every_row(caplog):
    x, _ = data()

    def build():
        model = Tied()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adagrad(0.1), loss)
        model(x[:1])
        return model

    y = x[:, :1]
    _, found = compared(build, "data8", x, y, name="embeddings")
    (words,) = found.values()
    assert "transpose" in words or "dot_general" in words


class Looked(L.Layer):
    """A table of a user's own layer."""

    def build(self, shape):
        self.table = self.add_weight(shape=(ROWS, WIDTH), name="embeddings")

    def call(self, ids):
        return ops.take(self.table, ids, axis=0)


@pytest.mark.parametrize("mode", ["stock", "reversible", "own", "remat"])
def test_layers_with_tables(mode):
    kinds = {"reversible": L.ReversibleEmbedding, "own": None}

    def build():
        ids = keras.Input((IDS,), dtype="int32")
        kind = kinds.get(mode, L.Embedding)
        x = (kind(ROWS, WIDTH, name="table") if kind else Looked(name="table"))(ids)
        model = keras.Model(ids, L.Dense(1)(L.Flatten()(x)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    remat = {"remat": {"table": "full"}} if mode == "remat" else {}
    _, found = compared(build, "data8", *data(), **remat)
    if mode == "own":
        assert found == {}
        return
    (words,) = found.values()
    if mode == "remat":
        assert "its gradient is not only that of looked-up rows" in words
    else:
        assert words == tables_step.BY_ROWS


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16"])
def test_low_precision_gives_what_every_row_gives(dtype):
    x, y = data("distinct", (26, IDS))
    results = []
    for tables in (None, "rows"):
        model, result = trained(ranking(dtype=dtype), strategy_of("data8", tables), x, y)
        results.append(result)
    assert words_of(model, "tables") == {"table/embeddings": tables_step.BY_ROWS}
    assert_close(*[result["weights"] for result in results])
    assert_close(*[result["slots"] for result in results])


def test_a_frozen_table_is_looked_up():
    def build():
        model = ranking()()
        model.get_layer("table").trainable = False
        return compiled(model, keras.optimizers.Adam(0.01), "mse")

    _, found = compared(build, "data8", *data())
    assert found == {"table/embeddings": tables_step.LOOKED_UP}


def test_a_train_step_of_ones_own():
    class Own(keras.Model):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "twice": 2 * logs["loss"]}, state

    def build():
        model = ranking()()
        model = Own(model.inputs, model.outputs)
        return compiled(model, keras.optimizers.Adagrad(0.1), "mse")

    _, found = compared(build, "data8", *data())
    assert "train_step of its own" in found["table/embeddings"]
    _, found = compared(build, "data8", *data(), tables="lazy")
    assert found == {"table/embeddings": tables_step.LAZY}


def test_lazy_changes_used_rows_alone():
    x, y = data("one owner", (BATCH, IDS))

    def build():
        return ranking(lambda: keras.optimizers.Adam(0.01))()

    _, one = trained(build, None, x, y)
    # All ids come in every step: lazily or not, these rows get the same.
    model, lazy = trained(build, strategy_of("data8", "lazy"), x, y)
    assert words_of(model, "tables") == {"table/embeddings": tables_step.LAZY}
    for part in one:
        assert_close(one[part], lazy[part])
    before = model.get_layer("table").get_weights()[0]
    other, _ = data("random", (BATCH, IDS))
    other = np.maximum(other, 16)
    model.fit(other, y, batch_size=BATCH, verbose=0)
    after = model.get_layer("table").get_weights()[0]
    used = np.isin(np.arange(ROWS), other)
    np.testing.assert_array_equal(before[~used], after[~used])
    assert (before[used] != after[used]).any(1).all()


def test_tables_are_chosen_by_size_and_ids(monkeypatch):
    x, y = data()
    plain, _ = trained(ranking(), strategy_of("data8", "auto"), x, y)
    assert not words_of(plain, "tables")
    monkeypatch.setattr(tables_step, "LEAST_BYTES", 1)
    few, _ = trained(ranking(), strategy_of("data8", "auto"), x, y)
    assert words_of(few, "tables")["table/embeddings"] == (
        f"every row is updated: {BATCH * IDS} ids a step for {ROWS} rows"
    )
    monkeypatch.setattr(tables_step, "_MOST_IDS", 1)
    _, found = compared(ranking(), "data8", x, y, tables="auto")
    assert found == {"table/embeddings": tables_step.BY_ROWS}


def test_rows_that_do_not_divide_lie_by_width():
    """A plan then splits the width; ids go everywhere, columns come back."""
    x, y = data()

    def build():
        ids = keras.Input((IDS,), dtype="int32")
        x = L.Embedding(ROWS + 1, WIDTH, name="table")(ids)
        model = keras.Model(ids, L.Dense(1)(L.Flatten()(x)))
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        return model

    _, one = trained(build, None, x, y)
    planner = ktd.TPUStrategy({"data": 8}, ktd.Planner("fsdp", min_size=1), tables="rows")
    model, other = trained(build, planner, x, y)
    assert planner.explain(model, "table/embeddings").axes == (None, "data")
    for part in one:
        assert_close(one[part], other[part])
    assert words_of(model, "tables") == {"table/embeddings": tables_step.BY_ROWS}
