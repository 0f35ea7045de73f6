"""The most bytes on a device and on the host while saved weights are loaded onto eight devices.

    python benchmarks/loading.py [--width 4096] [--layers 32] [--kinds weights.h5 keras ...]

With these defaults a model of 2 GiB, with variables of at most 64 MiB, goes into eight simulated
devices under "fsdp", by every format in a process of its own. Presets are KerasHub's Llama with 1
GiB; "safetensors" is a folder in Hugging Face's format, whose largest kernels are transposed.

Printed are the peak on the device that held most over its shards (the model's weights before and
after included), and the peak on the host over the largest variable. The host's is what the process
holds beside files that are mapped and beside the simulated devices, whose memory is the host's too.
It is sampled every 5 ms, and when an array is made or placed; an array that is being placed
counts twice.
"""

import os
import subprocess
import sys

# Freed memory goes back to the system at once.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

ktd.simulate(8)

# isort: split
import argparse
import collections
import contextlib
import gc
import math
import pathlib
import tempfile
import threading
from unittest import mock

import jax
import keras
import numpy as np

PRESETS = ("preset.h5", "preset.json", "safetensors")
FILES = ("weights.h5", "weights.json", "keras", "ktd", "ktd of one device")
WATCHED = ("device_put", "make_array_from_single_device_arrays", "make_array_from_callback")
MIB = 2**20


def on_devices():
    now = collections.Counter()
    for array in jax.live_arrays():
        shard = array.sharding.shard_shape(array.shape)
        for device in array.sharding.addressable_devices:
            now[device] += int(np.prod(shard)) * array.dtype.itemsize
    return now


def in_process():
    """The bytes of this process's memory, without pages of files."""
    text = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most bytes of every device, and of the host beside them, while a function runs."""

    def __init__(self):
        gc.collect()
        self.before = on_devices()
        self._beside = in_process() - self.before.total()
        self.devices, self.host = collections.Counter(self.before), 0
        self._lock = threading.Lock()

    def look(self):
        with self._lock:
            now = on_devices()
            self.devices |= now
            self.host = max(self.host, in_process() - now.total() - self._beside)

    def of(self, load):
        """The result of a function that loads."""

        def counted(stock):
            def call(*args, **kwargs):
                self.look()
                made = stock(*args, **kwargs)
                self.look()
                return made

            return call

        ended = threading.Event()

        def sample():
            while not ended.wait(0.005):
                self.look()

        names = [(jax, name) for name in WATCHED] + [(jax.numpy, "asarray"), (jax.numpy, "array")]
        patches = [mock.patch.object(o, n, counted(getattr(o, n))) for o, n in names]
        for patch in patches:
            patch.start()
        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            return load()
        finally:
            ended.set()
            sampler.join()
            for patch in patches:
                patch.stop()


def dense(width, layers):
    blocks = [keras.layers.Dense(width, kernel_initializer="ones") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *blocks])
    model.compile(keras.optimizers.SGD(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def saved_file(kind, build, folder):
    path = folder / f"a.{kind.partition(' ')[0]}"
    where = ktd.TPUStrategy(devices=jax.devices()[:1]) if kind.endswith("of one device") else None
    with (where or ktd.TPUStrategy({"data": 8}, "fsdp")).scope():
        model = build()
        for variable in model.trainable_variables:
            variable.assign(np.random.default_rng(0).random(variable.shape, "float32"))
        if kind == "weights.json":
            model.save_weights(path, max_shard_size=0.25)
        elif kind == "weights.h5":
            model.save_weights(path)
        elif kind == "keras":
            model.save(path)
        else:
            ktd.LoopCheckpoint(path, model).save(1)
    return path


def load_file(kind, build, path):
    if kind == "keras":
        peak = Peak()
        return peak, peak.of(lambda: keras.saving.load_model(path))
    model = build()
    peak = Peak()
    load = ktd.restore if kind.startswith("ktd") else keras.Model.load_weights
    peak.of(lambda: load(model, path))
    return peak, model


def saved_preset(kind, folder):
    import keras_hub

    with ktd.TPUStrategy({"data": 8}, "fsdp").scope():
        # KerasHub 0.32 exports no head of its own, and saves no tied one in a preset's config.
        tied = kind == "safetensors"
        model = keras_hub.models.Llama3Backbone(
            16384, 2, 16, 2048, 16896, 8, tie_word_embeddings=tied
        )
        if kind == "safetensors":
            model.export_to_transformers(str(folder / kind))
        else:
            size = {"preset.h5": 10, "preset.json": 0.25}[kind]
            model.save_to_preset(str(folder / kind), max_shard_size=size)
    return folder / kind


def load_preset(path):
    import keras_hub

    peak = Peak()

    def is_built(_):
        # Initial values are random: what simulated devices need for them is not the host's.
        gc.collect()
        peak.host = 0

    between = ["keras_hub.src.utils.preset_utils"]
    if path.name == "safetensors":
        between.append("keras_hub.src.utils.transformers.preset_loader")
    with contextlib.ExitStack() as stack:
        for module in between:
            stack.enter_context(mock.patch(f"{module}.jax_memory_cleanup", is_built))
        load = keras_hub.models.Llama3Backbone.from_preset
        return peak, peak.of(lambda: load(str(path)))


def measured(kind, width, layers):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        if kind in PRESETS:
            path = saved_preset(kind, folder)
        else:
            path = saved_file(kind, lambda: dense(width, layers), folder)
        gc.collect()
        with ktd.TPUStrategy({"data": 8}, "fsdp").scope():
            if kind in PRESETS:
                peak, model = load_preset(path)
            else:
                peak, model = load_file(kind, lambda: dense(width, layers), path)
            assert model is not None
            values = [variable.value for variable in model.weights]
    sizes = [value.nbytes for value in values]
    shards = sum(math.prod(v.sharding.shard_shape(v.shape)) * v.dtype.itemsize for v in values)
    device = max(peak.devices.values())
    largest = max(sizes)
    numbers = [f"{sum(sizes) / MIB:.0f} MiB", f"{device / MIB:.1f} MiB", f"{device / shards:.2f}"]
    numbers += [f"{peak.host / MIB:.0f} MiB", f"{peak.host / largest:.1f}"]
    print(kind, *numbers, sep=" | ", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kinds", nargs="*", default=[*FILES, *PRESETS])
    parser.add_argument("--alone", action="store_true", help="one kind, in this process")
    options = parser.parse_args()
    if options.alone:
        measured(options.kinds[0], options.width, options.layers)
        return
    print("kind | weights | peak of a device | over its shards | of the host | over the largest")
    for kind in options.kinds:
        sizes = ["--width", str(options.width), "--layers", str(options.layers)]
        command = [sys.executable, __file__, "--alone", *sizes, "--kinds", kind]
        subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
