"""Steps per second at N steps per launch, TPUStrategy against stock Keras at the same N.

    python benchmarks/steps_per_execution.py [--rounds 5] [--steps 512]

Both train the same model with the same data and mesh (8 simulated devices) in one process, in
random order; medians over rounds of an epoch of `steps` steps. Stock Keras dispatches its N steps
one by one from Python. Memory is that of one device: the program of a launch, and its N batches,
while the next N are being prepared.
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
    runs, models = {}, {}
    for n in ns:
        for label, distribution in (("TPUStrategy", strategy), ("stock", stock)):
            runs[n, label], model = trainer(distribution, build, n, x, y, batch_size)
            if distribution is strategy:
                models[n] = model
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
        program, batches = launch_bytes(strategy, models[n], n, x, y, batch_size)
        print(
            f"{name:5} {batch_size:5} {n:4} {steps / np.median(ours):12.0f} "
            f"{steps / np.median(theirs):8.0f} {np.median(theirs / ours):6.2f}x "
            f"{program / 2**10:12.1f} {batches / 2**10:12.1f}",
            flush=True,
        )


def launch_bytes(strategy, model, n, x, y, batch_size):
    """Bytes of a device for a launch of N train steps by the compiler, and for its batches."""
    from keras_tpu_dist import _keras
    from keras_tpu_dist.training import loop
    from keras_tpu_dist.training.guard import states_to_keep

    rows = [slice(i * batch_size, (i + 1) * batch_size) for i in range(n)]
    batches = [(x[part], y[part]) for part in rows]
    variables = _keras.state_variables(model)
    with strategy.scope():
        placer = strategy.placer
        batch = placer.place_many(batches) if n > 1 else placer.place(batches[0])
        donate = states_to_keep("auto", variables) == 0
        step = loop.jitted_step(model, "train", placer, donate, scanned=n > 1)
        state = tuple([v.value for v in group] for group in _keras.state_groups(model))
        memory = step.lower(state, batch).compile().memory_analysis()
    whole = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return whole, sum(leaf.nbytes for leaf in batch.data) / placer.num_shards


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=512)
    arguments = arguments.parse_args()
    ktd.simulate(8)
    print(
        f"{'model':5} {'batch':>5} {'N':>4} {'ours steps/s':>12} {'stock':>8} {'ratio':>7} "
        f"{'launch KiB':>12} {'batches KiB':>12}"
    )
    for name, build, batch_size in (("MLP", mlp, 32), ("MLP", mlp, 64), ("CNN", cnn, 64)):
        measure(name, build, (1, 8, 32, 128), batch_size, arguments.steps, arguments.rounds)


if __name__ == "__main__":
    main()
