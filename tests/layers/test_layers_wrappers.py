"""Bidirectional in one loop, TimeDistributed of constant size, convert."""

import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers as stock
from recurrent import close, mask_for, without_loops
from test_layers_recurrent import compare

import keras_tpu_dist as ktd
from keras_tpu_dist import layers as fast
from keras_tpu_dist.layers.place import find

# Keras reads its own variables with numpy's old protocol when it serializes an optimizer.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

BATCH, STEPS, FEATURES, UNITS = 4, 5, 3, 4


def random_weights(*models):
    rng = np.random.default_rng(0)
    for values in zip(*(model.weights for model in models)):
        value = rng.uniform(0.1, 0.6, size=values[0].shape)
        for variable in values:
            variable.assign(value)


def loops_in(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("scan[")


@pytest.mark.slow
@pytest.mark.parametrize("loop", [True, False])
def test_bidirectional_equals_keras(loop, monkeypatch):
    if not loop:
        without_loops(monkeypatch)
    cases = []
    for number, (name, merge, mask, sequences, state) in enumerate(
        [
            ("LSTM", "concat", "none", True, True),
            ("LSTM", None, "arbitrary", True, False),
            ("LSTM", "sum", "row", False, True),
            ("GRU", "mul", "padded", True, True),
            ("GRU", "ave", "none", False, False),
            ("SimpleRNN", "concat", "arbitrary", False, True),
        ]
    ):
        config = {"return_sequences": sequences, "return_state": True}
        pair = []
        for package in (stock, fast):
            inner = getattr(package, name)(UNITS, **config)
            layer = package.Bidirectional(inner, merge_mode=merge)
            layer.build((BATCH, STEPS, FEATURES))
            pair.append(layer)
        random_weights(*pair)
        rng = np.random.default_rng(number)
        x = jnp.asarray(rng.normal(size=(BATCH, STEPS, FEATURES)), np.float32)
        count = 4 if name == "LSTM" else 2
        initial = [jnp.asarray(rng.normal(size=(BATCH, UNITS)), np.float32) for _ in range(count)]
        cases.append((*pair, x, initial if state else None, mask_for(mask, rng, BATCH, STEPS)))
    compare(cases)


def test_bidirectional_runs_in_one_loop(monkeypatch):
    x = jnp.ones((BATCH, STEPS, FEATURES))
    other = fast.GRU(UNITS, activation="relu", go_backwards=True)
    for package, backward, loops in ((fast, None, 1), (stock, None, 2), (fast, other, 2)):
        layer = package.Bidirectional(package.GRU(UNITS), backward_layer=backward)
        layer(x)
        assert loops_in(layer, x) == loops
    without_loops(monkeypatch)
    layer = fast.Bidirectional(fast.GRU(UNITS))
    layer(x)
    assert loops_in(layer, x) == 0


def wrapped(kind):
    return {
        "dense": lambda: stock.Dense(2),
        "conv": lambda: stock.Conv1D(2, 2),
        "model": lambda: keras.Sequential([stock.Dense(3, activation="relu"), stock.Dense(2)]),
        "recurrent": lambda: stock.LSTM(2, seed=7),
        "batch_norm": lambda: stock.BatchNormalization(),
        "dropout": lambda: stock.Dropout(0.5, seed=7),
        "model_with_both": lambda: keras.Sequential(
            [stock.BatchNormalization(), stock.Dropout(0.5, seed=7), stock.Dense(2)]
        ),
    }[kind]()


def distributed(inner, x):
    """Keras's and our `TimeDistributed` of `inner()`, with the same weights."""
    layers = [package.TimeDistributed(inner()) for package in (stock, fast)]
    for layer in layers:
        layer.build(x.shape)
    random_weights(*layers)
    return layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "folds"),
    [
        ("dense", True),
        ("conv", True),
        ("model", True),
        ("recurrent", True),
        ("batch_norm", False),
        ("dropout", False),
        ("model_with_both", False),
    ],
)
def test_time_distributed_equals_keras_in_training(kind, folds):
    x = np.random.default_rng(0).normal(size=(BATCH, STEPS, 6, FEATURES)).astype("float32")
    layers = distributed(lambda: wrapped(kind), x)
    close(layers[1](x, training=True), layers[0](x, training=True))
    # Moving statistics and random states have moved on alike, step after step.
    close([v.value for v in layers[1].variables], [v.value for v in layers[0].variables])
    own_loops = int(kind == "recurrent")
    assert loops_in(lambda x: layers[1](x, training=True), x) == own_loops + (not folds)


@pytest.mark.slow
def test_time_distributed_hands_every_step_its_mask():
    x = np.random.default_rng(0).normal(size=(BATCH, STEPS, 6, FEATURES)).astype("float32")
    mask = np.random.default_rng(1).random((BATCH, STEPS, 6)) < 0.7
    layers = distributed(lambda: wrapped("recurrent"), x)
    close(layers[1](x, mask=mask), layers[0](x, mask=mask))


def test_time_distributed_program_does_not_grow_with_time():
    layer = fast.TimeDistributed(wrapped("model_with_both"))
    layer.build((2, 3, 6, FEATURES))
    sizes = [
        len(jax.jit(layer, static_argnames="training").lower(x, training=True).as_text())
        for x in (jnp.ones((2, steps, 6, FEATURES)) for steps in (3, 300))
    ]
    assert sizes[1] < 1.1 * sizes[0]


def fitted(package, inner):
    """Losses of a model with `inner` at every timestep, and what is added to its loss."""
    keras.utils.set_random_seed(0)
    wrapper = package.TimeDistributed(inner())
    model = keras.Sequential([keras.Input((STEPS, FEATURES)), wrapper, stock.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(13, STEPS, FEATURES)).astype("float32")
    history = model.fit(x, np.ones((13, STEPS, 1)), batch_size=13, epochs=2, verbose=0).history
    model(x)
    added = [sum(layer.losses) for layer in model._flatten_layers()]
    return history["loss"], model.evaluate(x, np.ones((13, STEPS, 1)), verbose=0), added


class AddsLoss(stock.Layer):
    def build(self, shape):
        self.dense = stock.Dense(3)
        self.dense.build(shape)

    def call(self, x):
        self.add_loss(keras.ops.sum(x**2))
        return self.dense(x)


@pytest.mark.parametrize("kind", ["own", "regularizer"])
def test_time_distributed_keeps_losses_that_layers_add(kind):
    def inner():
        if kind == "own":
            return AddsLoss()
        return keras.Sequential([stock.Dense(3, activity_regularizer="l2"), stock.Dense(2)])

    close(fitted(fast, inner), fitted(stock, inner))


@pytest.mark.slow
def test_time_distributed_of_weights_that_mixed_precision_leaves_alone():
    def inner():
        frozen = stock.Dense(4, "relu")
        frozen.trainable = False
        return keras.Sequential([frozen, stock.BatchNormalization(), stock.Dropout(0.5, seed=7)])

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        ours, theirs = fitted(fast, inner), fitted(stock, inner)
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-2)


def mixes(kind):
    """Models and layers that compute rows from each other."""
    if kind in ("softmax", "normalization"):
        options = {"softmax": stock.Softmax(axis=0), "normalization": stock.UnitNormalization(0)}
        return keras.Sequential([options[kind]])
    if kind == "activation":
        return stock.Dense(3, activation=lambda x: x - keras.ops.mean(x, axis=0))
    inputs = keras.Input((FEATURES,))
    h = stock.Dense(3)(inputs)
    if kind == "operation":
        h = h - keras.ops.mean(h, axis=0, keepdims=True)
    elif kind == "constant":
        h = h * np.arange(1.0, BATCH + 1, dtype="float32")[:, None]
    elif kind == "broadcast":
        h = keras.ops.expand_dims(h, 1) + h
    elif kind == "training":
        h = stock.BatchNormalization()(h, training=True)
    return keras.Model(inputs, h)


@pytest.mark.parametrize(
    "kind",
    [
        *("softmax", "normalization", "activation", "operation", "constant", "broadcast"),
        "training",
    ],
)
def test_time_distributed_of_what_mixes_rows(kind):
    x = np.random.default_rng(0).normal(size=(BATCH, STEPS, FEATURES)).astype("float32")
    layers = distributed(lambda: mixes(kind), x)
    close(layers[1](x), layers[0](x))


def test_time_distributed_folds_operations_on_elements():
    inputs = keras.Input((6, FEATURES))
    h = stock.Dense(FEATURES, activation="gelu")(inputs)
    h = keras.ops.relu(h + inputs) * 2 - np.ones(FEATURES, "float32")
    layer = fast.TimeDistributed(keras.Model(inputs, stock.LayerNormalization()(h)))
    x = jnp.ones((BATCH, STEPS, 6, FEATURES))
    layer.build(x.shape)
    assert loops_in(layer, x) == 0


def nested_model():
    inputs = keras.Input((STEPS, FEATURES))
    inner = keras.Sequential(
        [keras.Input((STEPS, FEATURES)), stock.LSTM(4, return_sequences=True)], name="inner"
    )
    h = stock.Bidirectional(stock.GRU(3, return_sequences=True), name="both")(inner(inputs))
    h = stock.TimeDistributed(stock.Dense(4), name="each")(h)
    h = stock.SimpleRNN(2, dropout=0.3, name="last")(h)
    return keras.Model(inputs, stock.Dense(1)(h))


def trained(model):
    model.compile("adam", "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, STEPS, FEATURES)).astype("float32")
    y = rng.normal(size=(8, 1)).astype("float32")
    model.train_on_batch(x, y)
    return x, y


@pytest.mark.slow
def test_convert_keeps_weights_names_and_compile_state():
    model = nested_model()
    x, y = trained(model)
    clone = fast.convert(model)
    assert _ours_in(clone) == {"LSTM", "GRU", "SimpleRNN", "Bidirectional", "TimeDistributed"}
    assert not [layer for layer in clone._flatten_layers() if type(layer) is stock.LSTM]
    names = [[layer.name for layer in m._flatten_layers()] for m in (clone, model)]
    assert names[0] == names[1]
    close(clone.predict(x, verbose=0), model.predict(x, verbose=0))
    close(clone.train_on_batch(x, y), model.train_on_batch(x, y))
    close([w.value for w in clone.weights], [w.value for w in model.weights])


def test_convert_keeps_what_is_written_on_layers():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    with strategy.scope():
        layers = [
            keras.Input((STEPS, FEATURES)),
            ktd.split(stock.LSTM(4, return_sequences=True), kernel=(None, "model")),
            ktd.remat(stock.TimeDistributed(stock.Dense(4))),
            ktd.assign(stock.Bidirectional(stock.SimpleRNN(2)), 1),
            ktd.split(stock.Dense(2), output=("data", "model")),
        ]
        models = [keras.Sequential(layers)]
        models.append(fast.convert(models[0]))
        told, programs = [], []
        for model in models:
            report = strategy.explain(model)
            rows = [each.axes for each in report.rows]
            told.append([rows, [each.layout for each in report.outputs]])
            weights = model.trainable_variables, model.non_trainable_variables
            values = [[v.value for v in each] for each in weights]
            x = np.ones((8, STEPS, FEATURES), "float32")
            loss = lambda *state, m=model: m.stateless_call(*state, x)[0].sum()  # noqa: E731
            programs.append(str(jax.make_jaxpr(jax.grad(loss))(*values)))
    assert told[0] == told[1]
    assert told[0][1] == [("data", "model")]
    for name in ("remat2", "cond"):
        assert [name in program for program in programs] == [True, True], name


def _is_ours(layer):
    return type(layer).__module__.startswith("keras_tpu_dist")


def _ours_in(model):
    return {type(layer).__name__ for layer in model._flatten_layers() if _is_ours(layer)}


@keras.saving.register_keras_serializable("test")
class Subclassed(keras.Model):
    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.first = stock.LSTM(units, return_sequences=True)
        self.rest = [stock.GRU(3), stock.Dense(1)]
        self.hidden = Holder()

    def call(self, x):
        for layer in [self.first, *self.rest]:
            x = layer(x)
        return self.hidden(x)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Holder(stock.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.recurrent = stock.SimpleRNN(2)

    def build(self, shape):
        self.recurrent.build((None, 1, 1))

    def call(self, x):
        return self.recurrent(x[:, None])


@pytest.mark.slow
def test_convert_reaches_all_of_a_subclassed_model():
    model = Subclassed()
    x, y = trained(model)
    clone = fast.convert(model)
    assert _ours_in(clone) == {"LSTM", "GRU", "SimpleRNN"}
    assert not any(_is_ours(layer) for layer in model._flatten_layers())
    close(clone.predict(x, verbose=0), model.predict(x, verbose=0))
    close(clone.train_on_batch(x, y), model.train_on_batch(x, y))


def compiled_with(**arguments):
    inputs = keras.Input((STEPS, FEATURES))
    h = stock.LSTM(2)(inputs)
    model = keras.Model(inputs, {"a": stock.Dense(1)(h), "b": stock.Dense(1)(h)})
    model.compile("adam", **arguments)
    return model


def test_convert_keeps_functions_a_model_was_compiled_with():
    def scaled(factor):
        return lambda y, p: factor * keras.ops.mean((y - p) ** 2)

    metric = keras.metrics.MeanAbsoluteError()
    model = compiled_with(
        loss={"a": scaled(2.0), "b": "mse"}, metrics={"a": [scaled(3.0), metric], "b": ["mae"]}
    )
    clone = fast.convert(model)
    x, y = np.ones((2, STEPS, FEATURES)), {"a": np.ones((2, 1)), "b": np.ones((2, 1))}
    close(clone.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0))
    seen = float(metric.result())
    clone.evaluate(2 * x, y, verbose=0)
    assert float(metric.result()) == seen


def test_convert_says_what_it_cannot_copy():
    class Locked(keras.losses.Loss):
        lock = None

        def call(self, y, p):
            return keras.ops.mean(y - p, axis=-1)

    class Plain(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.built = True

    locked = Locked()
    locked.lock = threading.Lock()
    said = r"the arguments that the model is compiled with.*lock.*convert the model before"
    for model, words in (
        (compiled_with(loss=[locked, "mse"]), said),
        (Plain(3), "Give the model a get_config"),
        (keras.Sequential([stock.LSTM(2)]), "Only a built model can be converted"),
    ):
        with pytest.raises(ValueError, match=words):
            fast.convert(model)


@pytest.mark.slow
def test_saved_files_pass_both_ways(tmp_path):
    model = nested_model()
    clone = fast.convert(model)
    x = np.ones((2, STEPS, FEATURES), "float32")
    clone.save(tmp_path / "ours.keras")
    clone.save_weights(tmp_path / "ours.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "ours.keras")
    close(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    fresh = nested_model()
    fresh.load_weights(tmp_path / "ours.weights.h5")
    close(fresh.predict(x, verbose=0), model.predict(x, verbose=0))


@pytest.mark.parametrize("first", ["int32", "bool", "float16", "bfloat16"])
def test_time_distributed_of_a_variable_that_begins_with_another_dtype(first):
    class Mean(keras.layers.Layer):
        def build(self, shape):
            begins = {"initializer": lambda shape, dtype=None: jnp.ones(shape, first)}
            self.mean = self.add_weight(shape=(shape[-1],), trainable=False, **begins)

        def call(self, x, training=False):
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            return x - self.mean

    x = np.random.default_rng(0).normal(size=(BATCH, STEPS, FEATURES)).astype("float32")
    layers = [package.TimeDistributed(Mean()) for package in (stock, fast)]
    for layer in layers:
        layer.build(x.shape)
    # As a step of fit calls them.
    found = [
        layer.stateless_call([], [layer.layer.mean.value], x, training=True) for layer in layers
    ]
    close(found[1], found[0])
    assert found[1][1][0].dtype == "float32"


def test_a_bidirectional_says_which_variant_runs():
    shape = (8, 100, 64)
    layer = fast.Bidirectional(fast.LSTM(128))
    layer.build(shape)
    chosen = layer.variant(shape)
    assert str(chosen).startswith("a compiled loop, 1 step(s) an iteration")
    assert chosen == layer.forward_layer._variant(
        layer.forward_layer._arithmetic(), shape, find(), directions=2
    )
    apart = fast.Bidirectional(
        fast.LSTM(16, segment=10), backward_layer=fast.LSTM(16, segment=20, go_backwards=True)
    )
    apart.build(shape)
    assert [variant.segment for variant in apart.variant(shape)] == [10, 20]
    stocks = fast.Bidirectional(stock.LSTM(16))
    stocks.build(shape)
    with pytest.raises(ValueError, match=r"forward_lstm.* of Keras.*ktd\.layers\.LSTM, or convert"):
        stocks.variant(shape)
