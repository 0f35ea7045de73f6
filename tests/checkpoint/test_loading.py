"""Weights are loaded straight into shards: no device holds a whole one."""

import collections
import gc

import jax
import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd

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


class Peak:
    """The most bytes on each device, counted whenever an array is made or placed."""

    def __init__(self, monkeypatch):
        gc.collect()
        self.before = bytes_now()
        self.bytes = collections.Counter()
        for owner, name in ((jax, "device_put"), (jax.numpy, "asarray"), (jax.numpy, "array")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, stock):
        def call(*args, **kwargs):
            made = stock(*args, **kwargs)
            self.bytes |= bytes_now()
            return made

        return call


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
    with ktd.TPUStrategy({"data": 8}, "fsdp").scope():
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
