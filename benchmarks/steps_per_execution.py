"""Steps per second at N steps per launch, TPUStrategy against stock Keras at the same N.

    python benchmarks/steps_per_execution.py [--rounds 5] [--steps 128]

Same model, data and mesh (8 simulated devices), one process, in random
turns; medians over rounds. Stock Keras dispatches its N steps one by one from Python.
"""

import argparse
import time

import numpy as np

import keras_tpu_dist as ktd


def mlp(layers):
    return [layers.Input((16,)), layers.Dense(32, activation="relu"), layers.Dense(10)], (16,)


def cnn(layers):
    return [
        layers.Input((8, 8, 1)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(10),
    ], (8, 8, 1)


def trainer(distribution, build, n, x, y, batch_size):
    import keras

    with distribution.scope():
        model = keras.Sequential(build(keras.layers)[0])
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=n,
        )

    def epoch():
        with distribution.scope():
            model.fit(x, y, batch_size=batch_size, verbose=0)

    return epoch, model


def measure(name, build, ns, batch_size, steps, rounds):
    import keras

    shape = build(keras.layers)[1]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * batch_size, *shape)).astype("float32")
    y = rng.integers(0, 10, len(x)).astype("int32")
    strategy, stock = ktd.TPUStrategy(), keras.distribution.DataParallel()
    runs = {}
    for n in ns:
        for label, distribution in (("TPUStrategy", strategy), ("stock", stock)):
            runs[n, label] = trainer(distribution, build, n, x, y, batch_size)[0]
    seconds = {key: [] for key in runs}
    for turn in range(rounds + 1):
        for index in rng.permutation(len(runs)):
            key = list(runs)[index]
            start = time.perf_counter()
            runs[key]()
            if turn:
                seconds[key].append(time.perf_counter() - start)
    for n in ns:
        ours, theirs = np.array(seconds[n, "TPUStrategy"]), np.array(seconds[n, "stock"])
        group = n * batch_size * (x[0].nbytes + y[0].nbytes)
        print(
            f"{name:5} {n:5} {steps / np.median(ours):12.0f} {steps / np.median(theirs):12.0f} "
            f"{np.median(theirs / ours):8.2f}x {group / 2**20:13.2f}",
            flush=True,
        )


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=128)
    arguments.add_argument("--batch-size", type=int, default=64)
    arguments = arguments.parse_args()
    ktd.simulate(8)
    print(
        f"{'model':5} {'N':>5} {'ours steps/s':>12} {'stock':>12} {'ratio':>9} {'batches MiB':>13}"
    )
    for name, build in (("MLP", mlp), ("CNN", cnn)):
        measure(
            name, build, (1, 8, 32, 128), arguments.batch_size, arguments.steps, arguments.rounds
        )


if __name__ == "__main__":
    main()
