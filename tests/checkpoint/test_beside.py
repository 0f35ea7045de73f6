"""What layers keep beside their variables, in every kind of file: as stock Keras on one device."""

import inspect
import logging

import jax
import keras
import numpy as np
import pytest
from helpers import compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.common import once
from keras_tpu_dist.layers.beside import layers_with_more

MESH = {"data": 4, "model": 2}
X = np.random.default_rng(0).normal(3.0, 2.0, (13, 6)).astype("float32")
IDS = np.random.default_rng(1).integers(0, 30, (13, 4))
kl = keras.layers


@keras.saving.register_keras_serializable("beside")
class Keeps(kl.Layer):
    """A user's layer: a table that is no variable, and a number that loading computes."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.table, self.total = np.zeros(3, "float32"), 0.0

    def set(self, values):
        self.table = np.asarray(values, "float32")
        self.total = float(self.table.sum())

    def call(self, x):
        return x * self.scale + self.total

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["table"] = self.table

    def load_own_variables(self, store):
        self.scale.assign(store["0"])
        self.set(store["table"])


@keras.saving.register_keras_serializable("beside")
class Words(kl.Layer):
    """A user's layer with files only."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.shift = 0.0

    def call(self, x):
        return x + self.shift

    def save_assets(self, folder):
        with open(f"{folder}/shift.txt", "w") as file:
            file.write(str(self.shift))

    def load_assets(self, folder):
        with open(f"{folder}/shift.txt") as file:
            self.shift = float(file.read())


@keras.saving.register_keras_serializable("beside")
class Finalizes(kl.Layer):
    """A user's layer that computes something of its variables when they are loaded."""

    def build(self, shape):
        self.raw = self.add_weight(shape=(shape[-1],), initializer="zeros", name="raw")
        self.finalize_state()

    def finalize_state(self):
        self.bias = np.exp(np.asarray(self.raw.value))

    def call(self, x):
        return x + self.bias

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.finalize_state()


def adapt(layer, x):
    layer.adapt(x)


def quantized(mode):
    def make():
        layer = kl.Dense(8)
        layer.build((None, 6))
        layer.quantize(mode)
        return layer

    return make


def with_lora(layer):
    def make():
        made = layer()
        made.build((None, 6))
        made.enable_lora(2)
        return made

    return make


def change_lora(layer, x):
    a, b = layer.lora_kernel_a, layer.lora_kernel_b
    for variable in (a, b):
        variable.assign(np.random.default_rng(2).normal(size=variable.shape))


def calibrated(layer, x):
    layer.is_gptq_calibrated = True
    for v in (layer.quantized_kernel, layer.kernel_scale, layer.kernel_zero):
        v.assign(np.ones(v.shape))


def gptq():
    config = keras.quantizers.GPTQConfig(dataset=["a"], tokenizer=None, group_size=2)
    layer = kl.Dense(8)
    layer.build((None, 6))
    layer.quantize("gptq", config=config)
    return layer


# By name: how the layer is made, how its state changes, and its input.
CASES = {
    "Normalization": (kl.Normalization, adapt, X),
    "Normalization given": (lambda: kl.Normalization(mean=1.0, variance=4.0), None, X),
    "Discretization": (lambda: kl.Discretization(num_bins=4), adapt, X),
    "IntegerLookup": (lambda: kl.IntegerLookup(max_tokens=40), adapt, IDS),
    "IntegerLookup multi_hot": (
        lambda: kl.IntegerLookup(max_tokens=40, output_mode="multi_hot", pad_to_max_tokens=True),
        adapt,
        IDS,
    ),
    "int8": (quantized("int8"), None, X),
    "int4": (quantized("int4"), None, X),
    "gptq": (gptq, calibrated, X),
    "LoRA": (with_lora(lambda: kl.Dense(8)), change_lora, X),
    "Keeps": (Keeps, lambda layer, x: layer.set([1.0, 2.0, 4.0]), X),
    "Words": (Words, lambda layer, x: setattr(layer, "shift", 2.5), X),
    "Finalizes": (
        Finalizes,
        lambda layer, x: (layer.raw.assign(np.full(6, 0.5)), layer.finalize_state()),
        X,
    ),
}
if hasattr(kl, "TernaryDense"):  # from Keras 3.16 on
    CASES["TernaryDense"] = (lambda: kl.TernaryDense(8), None, X)
    CASES["ternary"] = (quantized("ternary"), None, X)
SLOW = set(CASES) - {"Normalization", "IntegerLookup", "Keeps", "Words"}
EACH = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]


def made(name, changed, strategy=None):
    """A model with the layer, and its state if `changed`."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1 if changed else 2)
    build, change, x = CASES[name]
    if "Lookup" in name or "Text" in name or name == "Discretization":
        pytest.importorskip("tensorflow")

    def of_layer():
        layer = build()
        inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
        if changed and change is adapt:
            layer.adapt(x)
        elif change is adapt and not isinstance(layer, kl.Normalization):
            layer.adapt(x[:5] + 1)  # or a call is an error
        outputs = kl.Rescaling(1.0, dtype="float32")(layer(inputs))
        model = keras.Model(inputs, kl.Dense(2)(kl.Flatten()(outputs)))
        if changed and change not in (adapt, None):
            change(layer, x)
        return compiled(model, keras.optimizers.SGD(0.0), "mse")

    if strategy is None:
        return of_layer(), x
    with strategy.scope():
        return of_layer(), x


def wanted_of(name):
    """What the changed model predicts on one device, of a strategy and of stock Keras the same."""
    model, x = made(name, True)
    return model.predict(x, verbose=0)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.parametrize("door", ["restore", "fit", "loop"])
@pytest.mark.parametrize("name", EACH)
def test_our_checkpoints_hold_it(name, door, tmp_path, caplog):
    expected = wanted_of(name)
    strategy = ktd.TPUStrategy(MESH)
    model, x = made(name, True, strategy)
    y = np.zeros((len(x), 2), "float32")
    if door == "loop":
        with ktd.LoopCheckpoint(tmp_path, model) as saved:
            saved.save(1)
    else:
        model.fit(x, y, 13, 1, verbose=0, callbacks=[ktd.callbacks.Checkpoint(tmp_path)])
    other = ktd.TPUStrategy({"data": 2, "fsdp": 4})
    model, x = made(name, False, other)

    def predicted():
        return other.local_results(other.run(predict, (x,)))[0]

    def predict(x):
        return model(x)

    before = predicted() if door == "loop" else model.predict(x, verbose=0)
    assert np.abs(before - expected).max() > 1e-2
    if door == "restore":
        ktd.restore(model, tmp_path)
    elif door == "loop":
        with ktd.LoopCheckpoint(tmp_path, model) as saved:
            saved.restore()
        np.testing.assert_allclose(predicted(), expected, rtol=1e-5, atol=1e-5)
    else:
        model, x = made(name, False, other)
        model.fit(x, y, 13, 2, verbose=0, callbacks=[ktd.callbacks.Checkpoint(tmp_path)])
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-5)
    assert "beside their variables" not in caplog.text


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.parametrize("suffix", [".weights.h5", pytest.param(".keras", marks=pytest.mark.slow)])
# Stock Keras does not load what "gptq" has just quantized.
@pytest.mark.parametrize("name", [each for each in EACH if "gptq" not in str(each)])
def test_files_of_keras_load_as_stock_keras_loads_them(name, suffix, tmp_path, caplog):
    model, x = made(name, True)
    path = str(tmp_path / f"model{suffix}")
    (model.save if suffix == ".keras" else model.save_weights)(path)
    stock, _ = made(name, False)
    stock.load_weights(path)
    expected = stock.predict(x, verbose=0)
    for load in (ktd.restore, lambda model, path: model.load_weights(path)):
        model, _ = made(name, False, ktd.TPUStrategy(MESH))
        if load is ktd.restore:  # stock `load_weights` leaves programs as they are
            model.predict(x, verbose=0)
        load(model, path)
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-5)
    if suffix == ".keras":
        with ktd.TPUStrategy(MESH).scope():
            model = keras.models.load_model(path)
        np.testing.assert_allclose(
            model.predict(x, verbose=0), wanted_of(name), rtol=1e-5, atol=1e-5
        )


def test_every_layer_of_keras_with_a_door_of_its_own_is_here():
    """A new one in Keras must get a case."""
    stock = keras.Layer
    found = {
        name
        for name, kind in vars(kl).items()
        if inspect.isclass(kind)
        and issubclass(kind, stock)
        and (
            kind.save_own_variables is not stock.save_own_variables
            or kind.load_own_variables is not stock.load_own_variables
            or hasattr(kind, "save_assets")
            or hasattr(kind, "finalize_state")
        )
    }
    here = {
        *("Normalization", "Discretization", "IntegerLookup", "StringLookup", "TextVectorization"),
        # Their variables are all: merged with LoRA, or quantized.
        *("Dense", "EinsumDense", "Embedding", "ReversibleEmbedding"),
        *(f"Conv{n}D" for n in (1, 2, 3)),
        *(f"Convolution{n}D" for n in (1, 2, 3)),
        *("TernaryDense", "TorchModuleWrapper"),
    }
    assert found <= here


@pytest.mark.parametrize("kind", ["StringLookup", "TextVectorization", "tf_idf", "FeatureSpace"])
def test_text_layers_outside_of_programs(kind, tmp_path):
    """They run on the host; a loop's checkpoint and `restore` hold their vocabulary."""
    pytest.importorskip("tensorflow")
    words = np.array([["b"], ["a"], ["c"], ["a"]])

    def of_kind():
        keras.utils.clear_session(free_memory=False)
        if kind == "FeatureSpace":
            features = {"w": keras.utils.FeatureSpace.string_categorical()}
            return keras.utils.FeatureSpace(features, output_mode="dict")
        if kind == "tf_idf":
            return kl.StringLookup(output_mode="tf_idf")
        return getattr(kl, kind)()

    def output(layer):
        found = layer({"w": words})["w"] if kind == "FeatureSpace" else layer(words)
        return np.asarray(found)

    layer = of_kind()
    if kind == "FeatureSpace":
        import tensorflow as tf

        layer.adapt(tf.data.Dataset.from_tensor_slices({"w": words}))
    else:
        layer.adapt(words)
    expected = output(layer)
    variable = keras.Variable(0.0)
    with ktd.LoopCheckpoint(tmp_path, layer, variable) as saved:
        saved.save(1)
    layer = of_kind()
    with ktd.LoopCheckpoint(tmp_path, layer, keras.Variable(0.0)) as saved:
        saved.restore()
    np.testing.assert_array_equal(output(layer), expected)


def test_a_checkpoint_without_it_is_said(tmp_path, caplog, monkeypatch):
    model, _ = made("Keeps", True, ktd.TPUStrategy(MESH))
    with monkeypatch.context() as patch:
        patch.setattr(
            "keras_tpu_dist.checkpoint.snapshot.rows_beside", lambda models: [[] for _ in models]
        )
        with ktd.LoopCheckpoint(tmp_path, model) as saved:
            saved.save(1)
    with caplog.at_level(logging.WARNING):
        ktd.restore(model, tmp_path)
    assert "has nothing of what 1 layers keep beside their variables (keeps)" in caplog.text


def test_a_layer_that_does_not_take_it_is_one_error(tmp_path, monkeypatch):
    model, _ = made("Keeps", True, ktd.TPUStrategy(MESH))
    with ktd.LoopCheckpoint(tmp_path, model) as saved:
        saved.save(1)
    monkeypatch.setattr(Keeps, "set", lambda self, values: [][1])
    with pytest.raises(ValueError, match=r"Layer 'keeps' does not take.*IndexError.*load_own_var"):
        ktd.restore(model, tmp_path)


def test_layers_of_variables_alone_are_left_alone():
    layers = [kl.Dense(2), kl.Embedding(3, 2), kl.BatchNormalization(), kl.LSTM(2), kl.Conv2D(2, 1)]
    assert [each for layer in layers for each in layers_with_more(layer)] == []


@pytest.mark.parametrize(
    "value", [np.ones(3, np.longdouble), np.array(["2024"], "datetime64[s]"), jax.random.key(0)]
)
def test_what_no_checkpoint_holds_is_said_before_it_is_written(value, tmp_path, caplog):
    pytest.importorskip("orbax.checkpoint")

    class Odd(kl.Layer):
        def call(self, x):
            return x

        def save_own_variables(self, store):
            store["odd"] = value

    once.forget()
    with ktd.TPUStrategy().scope():
        model = compiled(
            keras.Sequential([keras.Input((6,)), kl.Dense(2), Odd(name="odd")]), "sgd", "mse"
        )
    saved = ktd.callbacks.Checkpoint(tmp_path)
    with caplog.at_level(logging.WARNING, "keras_tpu_dist"):
        model.fit(X, X[:, :2], verbose=0, callbacks=[saved])
    assert saved.steps == [1]
    assert "layer 'odd' saves 'odd' as" in caplog.text
