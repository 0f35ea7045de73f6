"""Steps per second of a custom loop, strategy.loop, against fit at the same steps per launch.

    python benchmarks/custom_loop.py [--rounds 15] [--steps 256] [--devices 8]

Both train the same model with the same data, optimizer, metric and mesh (8 simulated devices) in
one process, in random order: an epoch of `steps` steps each. The ratio is the median over rounds of
the ratio in a round, since the machine's speed varies between rounds. `run` launches each step. The
last columns are the largest change of a weight by training, and the largest difference between
both.
"""

import argparse
import time

import numpy as np

import keras_tpu_dist as ktd


def mlp(layers):
    return [layers.Input((16,)), layers.Dense(32, activation="relu"), layers.Dense(10)]


def cnn(layers):
    return [
        layers.Input((8, 8, 1)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(10),
    ]


def parts(strategy, build):
    import keras

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(build(keras.layers))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return model, keras.optimizers.Adam(1e-4), loss, keras.metrics.SparseCategoricalAccuracy()


def fitted(strategy, build, x, y, batch_size, n):
    """An epoch of fit."""
    model, optimizer, loss, accuracy = parts(strategy, build)
    model.compile(optimizer, loss, metrics=[accuracy], steps_per_execution=n)
    return model, lambda: model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)


def looped(strategy, build, x, y, batch_size, n):
    """An epoch of replica code."""
    import jax

    model, optimizer, loss, accuracy = parts(strategy, build)
    mean = None

    def step(batch):
        x, y = batch

        def compute(weights):
            logits, _ = model.stateless_call(weights, [], x, training=True)
            return loss(y, logits), logits

        weights = [v.value for v in model.trainable_variables]
        (value, logits), gradients = jax.value_and_grad(compute, has_aux=True)(weights)
        gradients = ktd.get_replica_context().all_reduce("mean", gradients)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(y, logits)
        mean.update_state(value, sample_weight=y.shape[0])

    with strategy.scope():
        import keras

        mean = keras.metrics.Mean()
    dataset = strategy.distribute_dataset((x, y), batch_size=batch_size)

    def epoch():
        accuracy.reset_state()
        mean.reset_state()
        if n:
            for _ in strategy.loop(step, dataset, n):
                pass
        else:
            for batch in dataset:
                strategy.run(step, (batch,))
        return float(accuracy.result()), float(mean.result())

    return model, epoch


def measure(name, build, ns, batch_size, steps, rounds, strategy):
    import keras

    shape = build(keras.layers)[0].shape[1:]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * batch_size, *shape)).astype("float32")
    y = rng.integers(0, 10, len(x)).astype("int32")
    made = {("run", 1): looped(strategy, build, x, y, batch_size, 0)}
    for n in ns:
        made["fit", n] = fitted(strategy, build, x, y, batch_size, n)
        made["loop", n] = looped(strategy, build, x, y, batch_size, n)
    seconds = {key: [] for key in made}
    for turn in range(rounds + 1):
        for index in rng.permutation(len(made)):
            key = list(made)[index]
            start = time.perf_counter()
            made[key][1]()
            if turn:
                seconds[key].append(time.perf_counter() - start)
    speed = {key: steps / np.median(taken) for key, taken in seconds.items()}
    for n in ns:
        ratio = np.median(np.array(seconds["fit", n]) / seconds["loop", n])
        begin = parts(strategy, build)[0].get_weights()
        of_fit, of_loop = (made[kind, n][0].get_weights() for kind in ("fit", "loop"))
        moved, apart = (
            max(np.abs(a - b).max() for a, b in zip(of_fit, other)) for other in (begin, of_loop)
        )
        print(
            f"{name:5} {batch_size:5} {n:4} {speed['loop', n]:12.0f} {speed['fit', n]:8.0f} "
            f"{ratio:7.3f}x {speed['run', 1]:10.0f} {moved:8.2f} {apart:8.1e}",
            flush=True,
        )


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--steps", type=int, default=256)
    arguments.add_argument("--devices", type=int, default=8)
    arguments = arguments.parse_args()
    ktd.simulate(arguments.devices)
    strategy = ktd.TPUStrategy()
    print(
        f"{'model':5} {'batch':>5} {'N':>4} {'loop steps/s':>12} {'fit':>8} {'ratio':>8} "
        f"{'run (N=1)':>10} {'moved':>8} {'apart':>8}"
    )
    for name, build, batch_size in (("MLP", mlp, 64), ("CNN", cnn, 64)):
        measure(name, build, (4, 32), batch_size, arguments.steps, arguments.rounds, strategy)


if __name__ == "__main__":
    main()
