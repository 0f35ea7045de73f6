"""What is frozen does not change, what is not trains, on any mesh and in any kind of model."""

import keras
import numpy as np
import pytest
from helpers import assert_close

import keras_tpu_dist as ktd

X = np.random.default_rng(0).normal(size=(13, 6)).astype("float32")
Y = X[:, :3]


def encoder():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu", name="inner"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.2),
        ],
        name="encoder",
    )


def nested():
    return keras.Sequential(
        [keras.Input((6,)), encoder(), keras.layers.Dense(3, name="head")], name="nested"
    )


def functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(encoder()(inputs)))


def shared():
    inputs = keras.Input((6,))
    layer = keras.layers.Dense(6, name="encoder")
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(layer(layer(inputs))))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.head = keras.layers.Dense(3, name="head")

    def call(self, x, training=None):
        return self.head(self.encoder(x, training=training))


def subclassed():
    model = Subclassed()
    model(X)
    return model


def values(model, part):
    return [np.asarray(w) for w in model.weights if part in w.path]


def trained(model):
    return [weight.path for weight in model.trainable_weights]


def fit(model):
    model.fit(X, Y, batch_size=5, epochs=2, verbose=0)


MESHES = {
    "stock": None,
    "data and model": ({"data": 4, "model": 2}, "tensor_parallel"),
    "three axes": ({"data": 2, "fsdp": 2, "model": 2}, "fsdp"),
}
slow = pytest.mark.slow


def made(build, mesh):
    if MESHES[mesh] is None:
        return build()
    with ktd.TPUStrategy(*MESHES[mesh]).scope():
        return build()


@slow
@pytest.mark.parametrize(
    ("build", "mesh"),
    [
        (nested, "data and model"),
        (functional, "stock"),
        (shared, "three axes"),
        (subclassed, "data and model"),
        (subclassed, "stock"),
    ],
)
def test_what_is_frozen_stays_and_the_rest_trains(build, mesh):
    model = made(build, mesh)
    frozen = ktd.freeze(model, "encoder/*")
    model.compile("adam", "mse")
    assert {path.split("head")[-1] for path in trained(model)} == {"/kernel", "/bias"}
    assert frozen
    assert all("encoder" in path for path in frozen)
    before = values(model, "encoder"), values(model, "head")
    fit(model)
    # The averages of BatchNormalization too.
    assert all((a == b).all() for a, b in zip(before[0], values(model, "encoder"), strict=True))
    assert all((a != b).any() for a, b in zip(before[1], values(model, "head"), strict=True))
    ktd.freeze(model, [])
    model.compile("adam", "mse")
    fit(model)
    assert all((a != b).any() for a, b in zip(before[0], values(model, "encoder"), strict=True))


@slow
def test_it_equals_trainable_of_keras():
    keras.utils.set_random_seed(0)
    keras_way = nested()
    keras.utils.set_random_seed(0)
    ours = nested()
    keras_way.get_layer("encoder").trainable = False
    ktd.freeze(ours, ["encoder"])
    for model in (keras_way, ours):
        keras.utils.set_random_seed(3)
        model.compile("adam", "mse")
        fit(model)
    assert_close(ours.get_weights(), keras_way.get_weights())


def test_single_weights_by_path():
    model = nested()
    assert len(ktd.freeze(model, "*/bias")) == 2
    assert model.get_layer("head").trainable is True
    assert len(ktd.freeze(model, "*", exclude="*/bias")) == 4
    # What the call before named trains again.
    assert [path.rpartition("/")[2] for path in trained(model)] == ["bias", "bias"]
    assert model.get_layer("encoder").get_layer("norm").trainable is False
    assert ktd.freeze(model, []) == []
    assert len(model.trainable_weights) == 6


def test_a_layer_frozen_by_its_user_stays_frozen():
    model = nested()
    model.get_layer("encoder").get_layer("inner").trainable = False
    assert len(ktd.freeze(model, "encoder/*")) == 2
    assert ktd.freeze(model, []) == []
    assert not [path for path in trained(model) if "inner" in path]
    assert len(model.non_trainable_weights) == 4


def test_a_layer_that_its_user_froze_after_some_of_its_weights_stays_frozen():
    model = nested()
    ktd.freeze(model, "*/inner/bias")
    model.get_layer("encoder").get_layer("inner").trainable = False
    ktd.freeze(model, [])
    assert not [path for path in trained(model) if "inner" in path]


def test_a_layer_alone_is_frozen():
    norm = keras.layers.BatchNormalization(name="norm")
    norm.build((None, 4))
    assert ktd.freeze(norm, "norm/gamma") == ["norm/gamma"]
    assert trained(norm) == ["norm/beta"]
    assert len(ktd.freeze(norm, "*")) == 2
    assert norm.trainable is False
    assert ktd.freeze(norm, []) == []
    assert len(trained(norm)) == 2


def test_lora_trains_and_its_kernel_does_not():
    model = nested()
    dense = model.get_layer("encoder").get_layer("inner")
    ktd.freeze(model, "encoder")
    dense.enable_lora(2)
    # Keras freezes what is added to a frozen layer.
    assert [weight.path for weight in model.trainable_weights] == [
        "nested/head/kernel",
        "nested/head/bias",
    ]
    ktd.freeze(model, [])
    assert len([path for path in trained(model) if "inner" in path]) == 3
    assert dense._kernel.trainable is False
    frozen = ktd.freeze(model, "*", exclude="*lora*")
    assert not [path for path in frozen if path.endswith("inner/kernel")]
    assert [path.rpartition("/")[2] for path in trained(model)] == [
        "lora_kernel_a",
        "lora_kernel_b",
    ]


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_a_quantized_model():
    model = nested()
    model.quantize("int8")
    frozen = ktd.freeze(model, "*", exclude="*norm*")
    assert sorted(path.rpartition("/")[2] for path in trained(model)) == ["beta", "gamma"]
    assert not [path for path in frozen if path.endswith("kernel")]


def test_a_pattern_that_matches_nothing():
    model = nested()
    with pytest.raises(ValueError, match=r"'encodr/\*', which.*nothing.* Did you mean 'encoder'"):
        ktd.freeze(model, ["encodr/*", "head"])
    with pytest.raises(ValueError, match="'xyz', which matches nothing"):
        ktd.freeze(model, "*", exclude=["xyz"])
    assert len(model.trainable_weights) == 6
    unbuilt = keras.Sequential([keras.layers.Dense(1)], name="unbuilt")
    with pytest.raises(
        ValueError, match=r"must exist before you freeze them\. Received: 'unbuilt'"
    ):
        ktd.freeze(unbuilt, "*")


@pytest.mark.parametrize("mesh", ["stock", pytest.param("data and model", marks=slow)])
def test_a_model_that_has_trained_is_compiled_again(mesh, caplog):
    caplog.set_level("INFO", "keras_tpu_dist")
    model = made(nested, mesh)
    model.compile("adam", "mse")
    fit(model)
    ktd.freeze(model, "encoder")
    assert "compile it again, with a new optimizer" in caplog.text
    with pytest.raises(ValueError, match=r"You must call `compile\(\)`"):
        fit(model)
    model.compile("adam", "mse")
    before = values(model, "encoder")
    fit(model)
    assert all((a == b).all() for a, b in zip(before, values(model, "encoder"), strict=True))
    ktd.freeze(model, "encoder")
    fit(model)


@pytest.mark.parametrize("mesh", ["stock", "data and model"])
@pytest.mark.parametrize("moment", ["on_train_begin", "on_train_batch_end", "on_epoch_end"])
def test_within_a_fit_it_is_an_error_and_no_weight_is_lost(mesh, moment):
    model = made(nested, mesh)
    model.compile("adam", "mse")
    fit(model)
    kept = []

    def act(*args, **logs):
        if not kept:
            ktd.freeze(model, "encoder")
            kept[:] = model.get_weights()

    callback = keras.callbacks.Callback()
    setattr(callback, moment, act)
    with pytest.raises(RuntimeError, match="Freeze weights between two fits"):
        model.fit(X, Y, batch_size=5, epochs=3, verbose=0, callbacks=[callback])
    assert all((a == b).all() for a, b in zip(kept, model.get_weights(), strict=True))
    model.compile("adam", "mse")
    fit(model)
