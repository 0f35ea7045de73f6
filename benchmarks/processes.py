"""Steps per second of fit over processes, against a hand-written loop over jax.distributed.

    python -m keras_tpu_dist launch --processes 2 --devices 4 benchmarks/processes.py

Both train the same model on the same data in the same processes, in turns. The hand-written loop
exchanges no messages between processes: it is `jax.jit` of Keras's stateless step on batches that
each process puts on its devices. Also counts the bytes of a batch that this process transfers.
"""

import argparse
import statistics
import time

import keras_tpu_dist as ktd

ktd.initialize()

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

BATCH, STEPS = 256, 20


def mlp():
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(10)])


def cnn():
    return keras.Sequential(
        [
            keras.Input((16, 16, 8)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )


def compiled(make):
    keras.utils.set_random_seed(0)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def data(model):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, *model.input_shape[1:])).astype("float32")
    return x, rng.integers(0, 10, len(x)).astype("int32")


def ours(make):
    """A function that trains `STEPS` steps by fit."""
    with ktd.TPUStrategy().scope():
        model = compiled(make)
    x, y = data(model)
    return lambda: model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def by_hand(make):
    """The same steps by a hand-written loop."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    rows, everywhere = (
        NamedSharding(mesh, PartitionSpec("data")),
        NamedSharding(mesh, PartitionSpec()),
    )
    model = compiled(make)
    x, y = data(model)
    model.optimizer.build(model.trainable_variables)

    def put(array, sharding):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def loss(weights, others, x, y):
        predicted, others = model.stateless_call(weights, others, x, training=True)
        return model.loss(y, predicted), others

    @jax.jit
    def step(state, x, y):
        weights, others, slots = state
        (value, others), gradients = jax.value_and_grad(loss, has_aux=True)(weights, others, x, y)
        weights, slots = model.optimizer.stateless_apply(slots, gradients, weights)
        return value, (weights, others, slots)

    groups = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
    state = [tuple([put(v.numpy(), everywhere) for v in group] for group in groups)]

    def run():
        for start in range(0, len(x), BATCH):
            batch = (put(a[start : start + BATCH], rows) for a in (x, y))
            value, state[0] = step(state[0], *batch)
        jax.block_until_ready(value)

    return run


def transferred(run):
    """The bytes of batches that this process puts on its devices for each step."""
    stock, counted = jax.make_array_from_callback, []

    def counting(shape, sharding, callback, *args, **kwargs):
        def counted_callback(index):
            part = callback(index)
            counted.append(part.nbytes)
            return part

        return stock(shape, sharding, counted_callback, *args, **kwargs)

    jax.make_array_from_callback = counting
    try:
        run()
    finally:
        jax.make_array_from_callback = stock
    return sum(counted) / STEPS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    for make in (mlp, cnn):
        runs = {"fit": ours(make), "by hand": by_hand(make)}
        times = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                if number:
                    times[name].append(time.perf_counter() - began)
        ms = {name: 1e3 * statistics.median(found) / STEPS for name, found in times.items()}
        moved = transferred(runs["fit"])
        x, y = data(compiled(make))
        whole = (x.nbytes + y.nbytes) / STEPS
        if jax.process_index() == 0:
            print(
                f"{make.__name__}: fit {ms['fit']:.1f} ms a step, by hand {ms['by hand']:.1f}: "
                f"{ms['by hand'] / ms['fit']:.2f}x its steps per second; each process transfers "
                f"{moved / whole:.3f} of a batch's bytes ({jax.process_count()} processes)"
            )


if __name__ == "__main__":
    main()
