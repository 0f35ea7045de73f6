"""Weights are loaded straight into shards: no device holds a whole one, the host no second one."""

import collections
import contextlib
import gc
import tracemalloc
import weakref

import jax
import keras
import numpy as np
import pytest
from keras.src.saving import saving_api

import keras_tpu_dist as ktd

KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
WIDTH, DEPTH = 512, 6
TOTAL = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)


def bytes_now():
    """The bytes of all arrays on each device."""
    now = collections.Counter()
    for array in jax.live_arrays():
        # Reading its shards would keep them alive.
        shard = array.sharding.shard_shape(array.shape)
        for device in array.sharding.addressable_devices:
            now[device] += int(np.prod(shard)) * array.dtype.itemsize
    return now


def is_shared(host, array):
    """Simulated devices use whole rows of the host itself where the address is a multiple of 64."""
    rows = array.sharding.shard_shape(array.shape)[1:] == array.shape[1:]
    return rows and host.ctypes.data % 64 == 0


class Peak:
    """The most bytes on each device, counted whenever an array is made or placed."""

    def __init__(self, monkeypatch):
        gc.collect()
        self.before = bytes_now()
        self.bytes = collections.Counter()
        self.shared_bytes = 0
        for owner, name in ((jax, "device_put"), (jax.numpy, "asarray"), (jax.numpy, "array")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, stock):
        def call(*args, **kwargs):
            made = stock(*args, **kwargs)
            self.bytes |= bytes_now()
            if isinstance(args[0], np.ndarray) and isinstance(made, jax.Array):
                self.shared_bytes += args[0].nbytes * is_shared(args[0], made)
            return made

        return call


def on_eight():
    return ktd.TPUStrategy({"data": 8}, "fsdp").scope()


def written_by_orbax(model, folder):
    callback = keras.callbacks.OrbaxCheckpoint(folder, save_on_background=False)
    callback.set_model(model)
    callback.on_epoch_end(0)


# 288 MiB, in variables of 36 MiB: Keras makes one of these in shards, and groups are of 64 MiB.
def large():
    layers = [keras.layers.Dense(3072, kernel_initializer="ones") for _ in range(8)]
    model = keras.Sequential([keras.Input((3072,)), *layers])
    model.compile("sgd", "mse")
    for number, layer in enumerate(layers):
        layer.kernel.assign(np.full((3072, 3072), number, "float32"))
    return model


def saved(kind, model, path):
    if kind == "ktd":
        ktd.LoopCheckpoint(path, model).save(1)
    else:
        model.save(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a.keras", "ktd"])
def test_a_large_state_is_there_once(kind, tmp_path, monkeypatch):
    with on_eight():
        saved(kind, large(), tmp_path / kind)
        makes_the_model = kind == "a.keras"
        model = None if makes_the_model else large()
        gc.collect()
        tracemalloc.start()
        with monkeypatch.context() as patch:
            peak = Peak(patch)
            if makes_the_model:
                model = keras.saving.load_model(tmp_path / kind)
            else:
                ktd.restore(model, tmp_path / kind)
        _, on_host = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    largest, total = 4 * 3072**2, 4 * 8 * 3072**2
    own = 0 if makes_the_model else total / 8
    added = [peak.bytes[device] - peak.before[device] for device in peak.bytes]
    assert max(added) + own < 1.3 * total / 8
    # Simulated devices use the arrays that Orbax reads, without a copy.
    if kind == "a.keras":
        # With some MiB of Python's objects.
        assert on_host - peak.shared_bytes < 2 * largest + 2**22
    for number, layer in enumerate(model.layers):
        np.testing.assert_array_equal(layer.kernel[::1000, ::1000], number)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["one file", "several files", "safetensors"])
def test_a_preset_of_keras_hub_is_there_once(kind, tmp_path, monkeypatch):
    hub = pytest.importorskip("keras_hub", reason="there is no KerasHub here")
    # KerasHub 0.32 exports no head of its own, and saves no tied one in a preset's config.
    tied = kind == "safetensors"
    with on_eight():
        model = hub.models.Llama3Backbone(4096, 1, 16, 2304, 4608, 16, tie_word_embeddings=tied)
        if kind == "safetensors":
            pytest.importorskip("safetensors")
            model.export_to_transformers(str(tmp_path))
        else:
            size = 10 if kind == "one file" else 0.1
            model.save_to_preset(str(tmp_path), max_shard_size=size)
        expected = [np.array(variable) for variable in model.weights]
        del model
        gc.collect()
        tracemalloc.start()
        with monkeypatch.context() as patch:
            peak = Peak(patch)
            loaded = hub.models.Llama3Backbone.from_preset(str(tmp_path))
        _, on_host = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    sizes = [value.nbytes for value in expected]
    added = [peak.bytes[device] - peak.before[device] for device in peak.bytes]
    assert max(added) < 1.3 * sum(sizes) / 8
    # An array and, by KerasHub's conversion, its transpose, with some MiB of Python's objects.
    assert on_host - peak.shared_bytes < 2 * max(sizes) + 2**22
    for weight, value in zip(loaded.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight, value)


@pytest.mark.filterwarnings("ignore")  # Orbax warns of its own interfaces as Keras uses them.
def test_a_directory_is_loaded_though_its_names_cannot_be_read(tmp_path, monkeypatch, caplog):
    """What is only logged about a load does not end it."""

    def another_orbax(path):
        raise AttributeError("no attribute 'metadata'")

    with on_eight():
        model = build()
        model.compile("adam", "mse")
        written_by_orbax(model, tmp_path)
        monkeypatch.setattr(saving_api.ocp, "checkpointables_metadata", another_orbax)
        expected = np.asarray(model.layers[0].kernel)
        model.layers[0].kernel.assign(model.layers[0].kernel * 0)
        model.load_weights(tmp_path)
    np.testing.assert_array_equal(np.asarray(model.layers[0].kernel), expected)
    assert "not counted, because of AttributeError: no attribute 'metadata'" in caplog.text


@pytest.mark.filterwarnings("ignore")  # Orbax warns of its own interfaces as Keras uses them.
@pytest.mark.parametrize("where", [on_eight, contextlib.nullcontext], ids=["scope", "stock"])
@pytest.mark.parametrize("loads", ["load_model", "load_weights"])
def test_weights_of_a_directory_that_keras_skips_are_said(loads, where, tmp_path, caplog):
    ktd.TPUStrategy()  # from then on
    with where():
        model = build()
        model.compile("adam", "mse")
        written_by_orbax(model, tmp_path)
        if loads == "load_model":
            other = keras.saving.load_model(tmp_path)
        else:
            other = build()
            other.compile("adam", "mse")
            other.load_weights(tmp_path)
        text = "weights of model 'sequential"
        # Keras 3.16 gives a model that it loads the paths of the saved one.
        is_loaded = other.layers[0].kernel.path == model.layers[0].kernel.path
        assert is_loaded == (loads == "load_model" and KERAS >= (3, 16))
        kernels = [np.asarray(one.layers[0].kernel) for one in (model, other)]
        assert np.array_equal(*kernels) or not is_loaded
        assert caplog.text.count(text) == (0 if is_loaded else 1)
        assert is_loaded or "were not loaded from" in caplog.text
        assert is_loaded or "and call load_weights" in caplog.text
        caplog.clear()
        # The model of the same names: all of it is loaded, and there is nothing to say.
        model.layers[0].kernel.assign(model.layers[0].kernel * 0)
        model.load_weights(tmp_path)
        assert np.asarray(model.layers[0].kernel).any()
        assert text not in caplog.text


@pytest.mark.parametrize("step", ["", "0"])
def test_restore_says_how_to_load_a_directory_of_keras(step, tmp_path):
    with on_eight():
        model = build()
        model.compile("adam", "mse")
    written_by_orbax(model, tmp_path)
    with pytest.raises(
        ktd.CheckpointError, match=r"keras\.callbacks\.OrbaxCheckpoint wrote\. Compile the model"
    ):
        ktd.restore(model, tmp_path / step)


def build():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH) for _ in range(DEPTH)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.weights.h5", {}), ("a.weights.json", {"max_shard_size": 0.002})],
    ids=["one file", "several files"],
)
def test_each_device_gets_its_shards_alone(name, options, tmp_path, monkeypatch):
    saved = build()
    saved.save_weights(tmp_path / name, **options)
    expected = saved.get_weights()
    with on_eight():
        model = build()
    model.set_weights([np.zeros(weight.shape, weight.dtype) for weight in expected])
    with monkeypatch.context() as patch:
        peak = Peak(patch)
        model.load_weights(tmp_path / name)
    assert len(peak.bytes) == 8
    # The model's own weights were there before.
    added = [peak.bytes[device] - peak.before[device] for device in peak.bytes]
    assert max(added) < 0.3 * TOTAL / 8
    for weight, value in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_an_array_is_released_before_the_next_one_is_read():
    with on_eight():
        weight = keras.Variable(np.zeros((256, 2048), "float32"))
    value = np.ones(weight.shape, "float32")
    released = weakref.ref(value)
    weight.assign(value)
    del value
    assert released() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_arrays_of_the_host_are_rounded_as_keras_rounds_them(dtype):
    value = np.random.default_rng(0).normal(size=(8, 3))
    expected = keras.Variable(np.zeros((8, 3)), dtype=dtype)
    expected.assign(value)
    with ktd.TPUStrategy().scope():
        variable = keras.Variable(np.zeros((8, 3)), dtype=dtype)
        variable.assign(value)
    np.testing.assert_array_equal(
        np.asarray(variable.value, "float32"), np.asarray(expected.value, "float32")
    )
    with pytest.raises(ValueError, match="must match"):
        variable.assign(value[:4])
