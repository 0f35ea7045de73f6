"""The most bytes on a device while saved weights are loaded onto eight devices under "fsdp".

    python benchmarks/loading.py [--width 1024] [--layers 6] [--kinds weights.h5 keras orbax]

For each kind of file: the peak on the device that held most, over what its shards take. The model
is there before, with other values, but for `.keras`. Runs on eight simulated devices.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

ktd.simulate(8)

# isort: split
import argparse
import collections
import gc
import pathlib
import tempfile
from unittest import mock

import jax
import keras
import numpy as np

WATCHED = ("device_put", "make_array_from_single_device_arrays", "make_array_from_callback")


def bytes_now():
    now = collections.Counter()
    for array in jax.live_arrays():
        shard = array.sharding.shard_shape(array.shape)
        for device in array.sharding.addressable_devices:
            now[device] += int(np.prod(shard)) * array.dtype.itemsize
    return now


def peak_of(load):
    """What a device held more than before, at most, while a function ran, and its result.

    Counted when an array is made or placed.
    """
    gc.collect()
    before, peak = bytes_now(), bytes_now()

    def counted(stock):
        def call(*args, **kwargs):
            made = stock(*args, **kwargs)
            peak.update(bytes_now() - peak)
            return made

        return call

    names = [(jax, name) for name in WATCHED] + [(jax.numpy, "asarray"), (jax.numpy, "array")]
    patches = [mock.patch.object(o, n, counted(getattr(o, n))) for o, n in names]
    for patch in patches:
        patch.start()
    loaded = load()
    for patch in patches:
        patch.stop()
    return max(peak[device] - before[device] for device in peak), loaded


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    kinds = ["weights.h5", "weights.json", "keras", "orbax", "ktd"]
    parser.add_argument("--kinds", nargs="*", default=kinds)
    options = parser.parse_args()
    width = options.width

    def build():
        layers = [keras.layers.Dense(width) for _ in range(options.layers)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile(keras.optimizers.SGD(), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    folder = pathlib.Path(tempfile.mkdtemp())
    strategy = ktd.TPUStrategy({"data": 8}, "fsdp")
    rows = np.zeros((8, width), "float32")
    shards = options.layers * (width + 1) * width * 4 / 8
    print("kind | peak of a device | over its shards")
    for kind in options.kinds:
        path = folder / f"a.{kind}"
        with strategy.scope():
            model = build()
            if kind == "weights.json":
                model.save_weights(path, max_shard_size=width**2 * 6 / 2**30)
            elif kind == "weights.h5":
                model.save_weights(path)
            elif kind == "keras":
                model.save(path)
            elif kind == "orbax":
                model.fit(rows, rows, verbose=0, callbacks=[keras.callbacks.OrbaxCheckpoint(path)])
            else:
                model.fit(rows, rows, verbose=0, callbacks=[ktd.callbacks.Checkpoint(path, 1)])
            if kind == "keras":
                del model
                peak, model = peak_of(lambda path=path: keras.saving.load_model(path))
            elif kind == "ktd":
                peak, _ = peak_of(lambda path=path, model=model: ktd.restore(model, path))
            else:
                peak, _ = peak_of(lambda path=path, model=model: model.load_weights(path))
            del model
            # Its own weights were there before.
            peak += 0 if kind == "keras" else shards
        print(kind, f"{peak / 2**20:.1f} MiB", f"{peak / shards:.2f}", sep=" | ", flush=True)


if __name__ == "__main__":
    main()
