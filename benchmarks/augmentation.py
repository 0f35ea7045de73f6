"""CPU time of a step with augmentation in the model, compiled and not; no chip is used.

    python benchmarks/augmentation.py                 # 64 x 64 images, batch 128
    python benchmarks/augmentation.py --size 224      # takes long where the step is not compiled

What a Kaggle notebook has: MobileNetV2 behind RandomFlip, RandomRotation and RandomZoom, batches of
`tf.data`. Stock Keras does not compile such a model. Each way runs in a process of its own, with
the same weights and seeds: stock Keras on one device, then eight simulated devices as they run
without this package's change of `supports_jit`, and with it. Printed are the CPU seconds of a
further step, those before the first step ends, and how far the first loss is from stock's. Fifty
normalizations amplify the rounding of float32; `tests/training` compares each layer alone.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time

WAYS = {
    "stock Keras, one device, not compiled": "stock",
    "eight devices, not compiled": "uncompiled",
    "eight devices, compiled": "compiled",
}


def build(asked: argparse.Namespace, keras):
    """The model, with `supports_jit` as its layers have it."""
    layers = keras.layers
    images = keras.Input((asked.size, asked.size, 3))
    x = layers.RandomFlip("horizontal", seed=1)(images)
    x = layers.RandomRotation(0.1, seed=2)(x)
    x = layers.RandomZoom(0.1, seed=3)(x)
    base = keras.applications.MobileNetV2(
        (asked.size, asked.size, 3), alpha=0.35, include_top=False, weights=None, pooling="avg"
    )
    model = keras.Model(images, layers.Dense(10)(base(x)))
    model.compile(
        keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def measured(asked: argparse.Namespace) -> dict[str, float]:
    """The first loss and CPU seconds of a fit of a few steps, in this process."""
    import contextlib

    os.environ["KERAS_BACKEND"] = "jax"
    scope = contextlib.nullcontext()
    if asked.way != "stock":
        import keras_tpu_dist as ktd
        from keras_tpu_dist._keras import compiling

        ktd.simulate(8)
        if asked.way == "uncompiled":
            compiling._COMPILED_BY_JAX = ()
        scope = ktd.TPUStrategy().scope()
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    rows = asked.rows * asked.steps
    x = rng.random((rows, asked.size, asked.size, 3), np.float32)
    y = rng.integers(10, size=rows)
    with scope:
        model = build(asked, keras)
    ends, losses = [], []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(float(logs["loss"]))
            ends.append(time.process_time())

    begun = time.process_time()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(asked.rows)
    model.fit(batches, callbacks=[Clock()], verbose=0)
    steps = [b - a for a, b in itertools.pairwise(ends)]
    return {"first": ends[0] - begun, "step": sorted(steps)[len(steps) // 2], "loss": losses[0]}


def of_process(asked: argparse.Namespace, way: str) -> dict[str, float]:
    """What a way takes, in a process of its own."""
    sizes = [f"--{name}={getattr(asked, name)}" for name in ("size", "rows", "steps")]
    command = [sys.executable, __file__, *sizes, "--way", way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=asked.timeout)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout", type=int, default=1200, help="seconds for each way")
    parser.add_argument("--way", choices=WAYS.values(), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        print(json.dumps(measured(asked)))
        return
    stock = None
    print(f"{'':40} first step  further step  first loss beside stock")
    for words, way in WAYS.items():
        found = of_process(asked, way)
        stock = stock or found["loss"]
        gap = abs(found["loss"] - stock) / stock
        print(f"{words:40} {found['first']:8.1f} s  {found['step']:10.2f} s  {gap:.0e}", flush=True)


if __name__ == "__main__":
    main()
