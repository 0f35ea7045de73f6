"""A program that was compiled before is not compiled again: it is found by its text."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import assert_close, sequential
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import keras_tpu_dist as ktd
from benchmarks.compilations import Notebook, counted, dropped, normalized
from keras_tpu_dist.input.batches import BatchPlacer
from keras_tpu_dist.programs.equal import EXECUTABLES
from keras_tpu_dist.programs.partitioner import Jitted

X = np.random.default_rng(0).standard_normal((26, 4)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl"]
OPTIMIZERS += ["Lion", "Adafactor", "Lamb", "Muon"]


def thinned():
    return [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.2, seed=3)]


def centred():
    return [keras.layers.Lambda(lambda x: x - keras.ops.median(x, axis=0))]


def built(strategy, hidden=thinned, optimizer="adam", **options):
    options = {"metrics": ["mae"]} | options
    with strategy.scope():
        keras.utils.set_random_seed(1)
        return sequential(4, *hidden(), keras.layers.Dense(1), optimizer=optimizer, **options)


def fitted(model, rows=13, **options):
    history = model.fit(X, Y, batch_size=rows, epochs=2, shuffle=False, verbose=0, **options)
    return [*history.history["loss"], *history.history["mae"]]


@pytest.mark.parametrize(
    "name",
    [*OPTIMIZERS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS[2:])],
)
@pytest.mark.parametrize("mesh", [{"data": 4, "model": 2}])
def test_another_learning_rate_is_no_other_program(name, mesh):
    strategy = ktd.TPUStrategy(mesh)
    optimizer = getattr(keras.optimizers, name)
    model = built(strategy, optimizer=optimizer(1e-3))
    with counted() as counts:
        fitted(model)
    assert counts == {"train_step": 1}
    start, seed = model.get_weights(), np.asarray(model.layers[1].seed_generator.state)
    with counted() as counts:
        with strategy.scope():
            model.compile(optimizer(1e-2), "mse", metrics=["mae"])
        losses = fitted(model)
    assert not counts
    EXECUTABLES.clear()
    again = built(strategy, optimizer=optimizer(1e-2))
    again.set_weights(start)
    again.layers[1].seed_generator.state.assign(seed)
    with counted() as counts:
        own = fitted(again)
    assert counts == {"train_step": 1}
    assert_close(losses, own)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_equal_model_built_again(steps):
    strategy = ktd.TPUStrategy({"data": 2, "fsdp": 2, "model": 2}, layout="fsdp")

    def run():
        model = built(strategy, steps_per_execution=steps)
        losses = fitted(model, validation_data=(X[:9], Y[:9]))
        return [*losses, model.evaluate(X, Y, verbose=0)[0], *model.predict(X, verbose=0)]

    first = run()
    keras.utils.clear_session()
    with counted() as counts:
        second = run()
    assert not counts
    assert_close(second, first)


def test_the_batch_of_another_call():
    """`train_on_batch` has weights, if only `None`, where `fit` has none."""
    model = built(ktd.TPUStrategy())
    fitted(model)
    model.evaluate(X, Y, batch_size=13, verbose=0)
    rows = model.predict(X, batch_size=13, verbose=0)[:13]
    with counted() as counts:
        model.train_on_batch(X[:13], Y[:13])
        model.test_on_batch(X[:13], Y[:13])
        assert model.predict_on_batch(X[:13]).shape == rows.shape
    assert not counts


def test_outputs_of_other_names():
    strategy = ktd.TPUStrategy()

    def run(name):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            x = keras.Input((4,))
            outputs = {n: keras.layers.Dense(1, name=n)(x) for n in ("a", name)}
            model = keras.Model(x, outputs)
            model.compile("sgd", dict.fromkeys(outputs, "mse"))
        history = model.fit(X, {n: Y * (n != "a") for n in outputs}, 13, verbose=0, shuffle=False)
        return history.history, model.predict(X, verbose=0)

    first, rows = run("b")
    with counted() as counts:
        second, others = run("c")
    assert not counts
    assert_close(second["c_loss"], first["b_loss"])
    assert set(others) == {"a", "c"}
    assert_close(others["c"], rows["b"])


class Shifted(keras.layers.Layer):
    """Adds an array that is no variable."""

    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def call(self, x):
        return x + self.shift


class CalledBack(Shifted):
    """The same, in Python."""

    def call(self, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.asarray(x) + self.shift, shape, x)


@pytest.mark.parametrize("layer", [Shifted, CalledBack])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, float])
def test_models_that_differ_in_an_array(layer, kind):
    found = []
    for shift in (1.0, 2.0):
        with ktd.TPUStrategy(devices=jax.devices()[:1]).scope():
            model = keras.Sequential([keras.Input((4,)), layer(kind(shift))])
        found.append(model.predict(X[:8], verbose=0))
    assert_close(found[0], X[:8] + 1.0)
    assert_close(found[1], X[:8] + 2.0)


def jitted(function, mesh, **options):
    function.__name__ = "train_step"
    return Jitted(function, mesh, lambda *args: [None] * len(args), **options)


def mesh_of(devices):
    return Mesh(np.asarray(devices), ("data",))


@pytest.mark.parametrize("devices", [8, 1])
def test_which_inputs_are_used(devices):
    """JAX drops the others: the texts of all of these are equal."""
    mesh = mesh_of(jax.devices()[:devices])
    whole = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.device_put(jnp.full(4, float(n)), whole) for n in range(3)]

    for number in range(3):
        used = jitted(lambda *args, n=number: args[n] * 2.0, mesh)
        assert_close(used(*arrays), [2.0 * number] * 4)
        passed = jitted(lambda *args, n=number: (args[n], args[0] * 2.0), mesh)
        assert_close(passed(*arrays)[0], [float(number)] * 4)
        inner = jax.jit(lambda *args, n=number: args[n] * 3.0)
        called = jitted(lambda *args, inner=inner: inner(*args), mesh)
        assert_close(called(*arrays), [3.0 * number] * 4)


def test_other_devices_are_another_program():
    halves = [mesh_of(jax.devices()[:4]), mesh_of(jax.devices()[4:]), mesh_of(jax.devices()[3::-1])]
    with counted() as counts:
        for mesh in halves:
            split = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("data")))
            result = jitted(lambda x: x * 2.0, mesh)(split)
            assert result.sharding.device_set == set(mesh.devices.flat)
            assert_close(result, 2.0 * np.arange(8))
    assert counts == {"train_step": 3}


def test_arrays_that_are_split_otherwise_later():
    mesh = mesh_of(jax.devices())
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("data", None))
    for _ in range(2):
        program = jitted(lambda x: x + 1.0, mesh)
        assert_close(program(jax.device_put(jnp.zeros(8), split)), np.ones(8))
        # Its shapes are those of the program that is there.
        result = program(jax.device_put(jnp.zeros(8), whole))
        assert_close(result, np.ones(8))
        assert result.sharding.is_equivalent_to(whole, 1)


@pytest.mark.parametrize("options", [{}, {"donate_argnums": (0,)}])
def test_donation_and_options_for_the_compiler(options):
    mesh = mesh_of(jax.devices())
    whole = NamedSharding(mesh, PartitionSpec())
    with counted() as counts:
        for more in ({}, options, {"compiler_options": {"xla_cpu_enable_fast_math": True}}):
            given = jax.device_put(jnp.zeros(8), whole)
            assert_close(jitted(lambda x: x + 1.0, mesh, **more)(given), np.ones(8))
            assert given.is_deleted() == ("donate_argnums" in more)
    assert counts == {"train_step": 2 + len(options)}


def test_an_executable_holds_no_model():
    strategy = ktd.TPUStrategy()
    model = built(strategy)
    fitted(model)
    gone = weakref.ref(model)
    weight = weakref.ref(model.trainable_variables[0])
    del model
    keras.utils.clear_session()
    gc.collect()
    assert gone() is None
    assert weight() is None
    with counted() as counts:
        fitted(built(strategy))
    assert not counts


def test_so_many_are_held(monkeypatch):
    monkeypatch.setattr("keras_tpu_dist.programs.equal._MOST", 2)
    mesh = mesh_of(jax.devices())
    given = jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec()))

    def compiled(number):
        with counted() as counts:
            jitted(lambda x: x + float(number), mesh)(given)
        return counts.total()

    assert [compiled(n) for n in (1, 2, 1, 3, 1, 2)] == [1, 1, 0, 1, 0, 1]


def test_threads():
    """Equal models that are trained at once, each in its thread."""
    strategies = [ktd.TPUStrategy(devices=jax.devices()[:1]) for _ in range(2)]
    found: dict[int, list] = {}

    def train(number):
        found[number] = fitted(built(strategies[number]))

    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.isfinite([*found[0], *found[1]]).all()


def by_row(strategy, **options):
    layers = keras.layers
    norms = layers.BatchNormalization, layers.LayerNormalization
    hidden = lambda: [layers.Dense(8, activation="gelu"), *(norm() for norm in norms)]  # noqa: E731
    return built(strategy, hidden, **options)


def of_many_sizes(model):
    """Batches of 8 rows, remainders of 5, 1, 7, 2 and 3, and calls with one batch."""
    weights = {"sample_weight": np.linspace(0, 1, 26)[:, None]}
    options = {"batch_size": 8, "verbose": 0}
    found = []
    for rows in (21, 25, 23):
        given = {name: value[:rows] for name, value in weights.items()}
        history = model.fit(X[:rows], Y[:rows], shuffle=False, **options, **given)
        found += [*history.history["loss"], *history.history["mae"]]
    for rows in (21, 26):
        found += model.evaluate(X[:rows], Y[:rows], **options)
    for rows in (21, 19, 3):
        found += [*model.predict(X[:rows], **options).ravel()]
    found += model.train_on_batch(X[:5], Y[:5])
    found += model.train_on_batch(X[:6], Y[:6])
    return [*found, *np.concatenate([w.ravel() for w in model.get_weights()])]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 4, "model": 2}, {}),
        pytest.param({"data": 2, "fsdp": 2, "model": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"data": 8}, {"steps_per_execution": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"data": 2, "fsdp": 2, "model": 2}, {"steps_per_execution": 4}, marks=pytest.mark.slow
        ),
    ],
)
def test_remainders_share_a_program(mesh, options, monkeypatch):
    strategy = ktd.TPUStrategy(mesh, layout="fsdp" if "fsdp" in mesh else None)
    with counted() as counts:
        found = of_many_sizes(by_row(strategy, **options))
    if not options:
        # With weights, the whole batch, remainders, and 1 row, which is traced otherwise; without,
        # 5 rows, and then those to 8. Predictions only leave out the further rows.
        assert counts == {"train_step": 5, "test_step": 2, "predict_step": 1}
    EXECUTABLES.clear()
    monkeypatch.setattr(BatchPlacer, "pads_rows", False)
    with counted() as before:
        assert_close(found, of_many_sizes(by_row(strategy, **options)), 2e-6)
    assert before.total() > counts.total()


@pytest.mark.slow
def test_bfloat16_rounds_as_before(monkeypatch):
    keras.config.set_dtype_policy("mixed_bfloat16")
    found = of_many_sizes(by_row(ktd.TPUStrategy()))
    monkeypatch.setattr(BatchPlacer, "pads_rows", False)
    assert_close(found, of_many_sizes(by_row(ktd.TPUStrategy())), 2e-2)


@pytest.mark.parametrize(
    "mesh",
    [{"data": 8}, pytest.param({"data": 2, "fsdp": 2, "model": 2}, marks=pytest.mark.slow)],
)
def test_numbers_that_are_drawn_by_row_are_those_of_fewer_rows(mesh, monkeypatch):
    with counted() as counts:
        found = of_many_sizes(built(ktd.TPUStrategy(mesh)))
    assert counts == {"train_step": 5, "test_step": 2, "predict_step": 1}
    EXECUTABLES.clear()
    monkeypatch.setattr(BatchPlacer, "pads_rows", False)
    with counted() as counts:
        assert_close(found, of_many_sizes(built(ktd.TPUStrategy(mesh))), 2e-6)
    # 8, 5, 1 and 7 rows with weights; 5 and 6 without.
    assert counts["train_step"] == 6


def test_draws_of_rows_that_are_not_the_first_dimension_share_nothing():
    def transposed():
        draw = keras.random.SeedGenerator(1)

        def noisy(x):
            drawn = keras.random.normal((keras.ops.shape(x)[1], keras.ops.shape(x)[0]), seed=draw)
            return x + keras.ops.transpose(drawn)

        return [keras.layers.Lambda(noisy)]

    model = built(ktd.TPUStrategy(), transposed)
    with counted() as counts:
        model.fit(X[:21], Y[:21], batch_size=8, verbose=0, shuffle=False)
    assert counts == {"train_step": 2}


@pytest.mark.parametrize("hidden", [thinned, lambda: []])
@pytest.mark.parametrize(
    ("mesh", "sizes", "call", "most"),
    [
        ({"data": 8}, range(17, 25), "fit", 3),
        ({"data": 8}, range(17, 25), "predict", 3),
        # 16 rows are their own program, and 17 are padded to 32.
        ({"data": 4, "model": 2}, range(10, 18), "fit", 5),
        ({"data": 4, "model": 2}, range(10, 18), "predict", 4),
    ],
)
def test_sizes_that_grow(mesh, sizes, call, most, hidden, monkeypatch):
    """From the third number of rows on, they are padded."""

    def found():
        model = built(ktd.TPUStrategy(mesh), hidden)
        batches = ((X[:n], Y[:n]) if call == "fit" else (X[:n],) for n in sizes)
        options = {"steps_per_epoch": len(sizes), "shuffle": False} if call == "fit" else {}
        options = options or {"steps": len(sizes)}
        given = getattr(model, call)(batches, verbose=0, **options)
        values = given if call == "predict" else given.history["loss"]
        return np.concatenate([np.ravel(v) for v in (values, *model.get_weights())])

    with counted() as counts:
        padded = found()
    assert counts.total() == most
    EXECUTABLES.clear()
    monkeypatch.setattr(BatchPlacer, "pads_rows", False)
    with counted() as counts:
        assert_close(padded, found(), 2e-6)
    assert counts.total() == len(sizes)


def test_smaller_batches_do_not_run_in_the_program_of_larger_ones():
    model = by_row(ktd.TPUStrategy())
    x, y = np.tile(X, (5, 1)), np.tile(Y, (5, 1))
    for rows in (64, 16):
        with counted() as counts:
            model.fit(x[:128], y[:128], batch_size=rows, verbose=0)
        assert counts == {"train_step": 1}


def test_predictions_of_each_size():
    model = by_row(ktd.TPUStrategy())
    x = np.tile(X, (4, 1))
    expected = model.predict(x, batch_size=104, verbose=0)
    with counted() as counts:
        for rows in range(1, 104, 6):
            assert_close(model.predict(x[:rows], batch_size=104, verbose=0), expected[:rows], 2e-6)
    # 1 to 8, 16, 32, 64 and 128; one of one row is traced otherwise.
    assert counts["predict_step"] <= 6


def test_a_warning_after_many_compilations(caplog):
    model = built(ktd.TPUStrategy(), centred)
    for rows in range(5, 15):
        model.train_on_batch(X[:rows], Y[:rows])
    (text,) = [r.getMessage() for r in caplog.records if "is compiled for" in r.getMessage()]
    assert "the train step of model 'sequential' is compiled for 8 batches: 5 rows, 6 rows" in text
    assert "They share no program: sort of" in text
    assert "Give batches of equal shapes: drop_remainder=True in tf.data" in text


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [normalized, dropped])
def test_a_notebook(hidden, monkeypatch):
    """Of 45 programs 13 are left."""
    notebook = Notebook(hidden)
    counts = [counts.total() for _, counts in notebook.run()]
    assert len(counts) == 23
    assert sum(counts) == 13
    keras.utils.clear_session()
    monkeypatch.setattr(BatchPlacer, "pads_rows", False)
    monkeypatch.setattr(EXECUTABLES, "find", lambda key: None)
    before = Notebook(hidden)
    assert sum(counts.total() for _, counts in before.run()) == 45
    for cell, values in before.results.items():
        assert_close(notebook.results[cell], values, 1e-5)
