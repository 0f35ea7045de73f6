"""Steps per second of `fit` under TPUStrategy, stock DataParallel and a hand-written loop.

    python benchmarks/fit_overhead.py [--builds 5] [--rounds 4] [--steps 100]
    python benchmarks/fit_overhead.py --call predict --model wide   # or evaluate; without the loop

All three train the same model with the same data and mesh (8 simulated devices) in one process, in
random order. The table has the median over rounds of steps per second, and of the ratio of
TPUStrategy to the others within a round. The addresses of a program's buffers make it some percent
faster or slower while it exists, so everything is built and compiled several times.
"""

import argparse
import time

import numpy as np

import keras_tpu_dist as ktd


def mlp():
    from keras import Sequential, layers

    return Sequential(
        [
            layers.Input((784,)),
            layers.Dense(512, activation="relu"),
            layers.Dense(512, activation="relu"),
            layers.Dense(10),
        ]
    ), (784,)


def cnn():
    from keras import Sequential, layers

    return Sequential(
        [
            layers.Input((16, 16, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    ), (16, 16, 3)


def residual(blocks):
    """Four weights a block: 162 with 40 blocks, 402 with 100."""

    def build():
        from keras import Input, Model, layers

        inputs = Input((32,))
        x = layers.Dense(32)(inputs)
        for _ in range(blocks):
            x = x + layers.Dense(32)(layers.Dense(32, activation="relu")(x))
        return Model(inputs, x), (32,)

    return build


def wide():
    """25 MB of weights, for few rows."""
    from keras import Sequential, layers

    hidden = [layers.Dense(1024, use_bias=False) for _ in range(6)]
    return Sequential([layers.Input((64,)), *hidden, layers.Dense(10)]), (64,)


MODELS = {"MLP": mlp, "CNN": cnn, "162 weights": residual(40), "402 weights": residual(100)}
MODELS["wide"] = wide


def compiled(build):
    import keras

    model, _ = build()
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def run_under(strategy, call, build, x, y, batch_size):
    with strategy.scope():
        model = compiled(build)
    arguments = (x,) if call == "predict" else (x, y)

    def epoch():
        with strategy.scope():
            getattr(model, call)(*arguments, batch_size=batch_size, verbose=0)

    return epoch


def by_hand(build, mesh, x, y, batch_size):
    """Keras's stateless API in a plain `jax.jit` loop, as in its guide to JAX training."""
    import jax
    import keras
    from jax.sharding import NamedSharding, PartitionSpec

    model = compiled(build)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    accuracy.update_state(y[:1], np.zeros((1, 10)))
    accuracy.reset_state()
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))

    def forward(trainable, non_trainable, x, y):
        logits, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return loss_fn(y, logits), (logits, non_trainable)

    def step(state, x, y):
        trainable, non_trainable, slots, means, accuracies = state
        (loss, (logits, non_trainable)), grads = jax.value_and_grad(forward, has_aux=True)(
            trainable, non_trainable, x, y
        )
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        means = mean.stateless_update_state(means, loss, sample_weight=x.shape[0])
        accuracies = accuracy.stateless_update_state(accuracies, y, logits)
        return trainable, non_trainable, slots, means, accuracies

    step = jax.jit(step, donate_argnums=0)
    state = jax.device_put(
        tuple(
            [v.value for v in group]
            for group in (
                *(model.trainable_variables, model.non_trainable_variables),
                *(optimizer.variables, mean.variables, accuracy.variables),
            )
        ),
        whole,
    )
    rng = np.random.default_rng(0)

    def epoch():
        nonlocal state
        order = rng.permutation(len(x))
        for start in range(0, len(x), batch_size):
            index = order[start : start + batch_size]
            state = step(state, *jax.device_put((x[index], y[index]), (rows, rows)))
        jax.block_until_ready(state)

    return epoch


def measure(build, call, batch_size, steps, rounds, builds):
    import keras

    _, shape = build()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * batch_size, *shape)).astype("float32")
    y = rng.integers(0, 10, len(x)).astype("int32")
    strategy = ktd.TPUStrategy()
    contenders = {
        "TPUStrategy": lambda: run_under(strategy, call, build, x, y, batch_size),
        "DataParallel": lambda: run_under(
            keras.distribution.DataParallel(), call, build, x, y, batch_size
        ),
    }
    if call == "fit":
        contenders["by hand"] = lambda: by_hand(build, strategy.mesh, x, y, batch_size)
    seconds = {name: [] for name in contenders}
    for _ in range(builds):
        runs = {name: contenders[name]() for name in rng.permutation(list(contenders))}
        for turn in range(rounds + 1):
            for name in rng.permutation(list(runs)):
                start = time.perf_counter()
                runs[name]()
                if turn:  # the first compiles
                    seconds[name].append(time.perf_counter() - start)
    ours = np.array(seconds["TPUStrategy"])
    return {
        name: (steps / np.median(taken), np.median(np.array(taken) / ours))
        for name, taken in seconds.items()
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--builds", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--model", choices=list(MODELS), action="append")
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--call", choices=("fit", "evaluate", "predict"), default="fit")
    arguments.add_argument("--batch-size", type=int, default=256)
    arguments = arguments.parse_args()
    ktd.simulate(8)
    print(f"{'model':11} {'loop':14} {'steps/s':>9} {'TPUStrategy is':>16}")
    for name in arguments.model or MODELS:
        sizes = (arguments.batch_size, arguments.steps, arguments.rounds, arguments.builds)
        table = measure(MODELS[name], arguments.call, *sizes)
        for loop, (rate, ratio) in table.items():
            print(f"{name:11} {loop:14} {rate:9.1f} {ratio:15.3f}x", flush=True)


if __name__ == "__main__":
    main()
