"""The cost of repairing programs that XLA partitions wrongly: repaired against unrepaired.

    python benchmarks/partitioner.py [speed] [ragged] [tracing] [--rounds 7] [--steps 20]

8 simulated devices, one process, in random order; medians over rounds. `speed`: a step of a
MobileNetV3 and of an embedding classifier with and without the repairs of
`keras_tpu_dist.programs.partitioner`, and the collectives of both programs. `ragged`: steps per
second with batches of 30 rows against 32. `tracing`: the step of a 12-layer transformer.
"""

import argparse
import contextlib
import time

import numpy as np

import keras_tpu_dist as ktd

MESHES = ({"data": 8}, {"data": 4, "model": 2})


def mobilenet(rows):
    import keras

    x = np.random.default_rng(0).normal(size=(rows, 32, 32, 3)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, rows)
    return keras.applications.MobileNetV3Small(
        input_shape=(32, 32, 3),
        alpha=0.5,
        weights=None,
        classes=10,
        include_preprocessing=False,
        minimalistic=True,
        dropout_rate=0.0,
    ), (x, y)


def embedding(rows):
    import keras

    layers = [
        keras.layers.Embedding(8192, 64),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    x = np.random.default_rng(0).integers(0, 8192, (rows, 64))
    return keras.Sequential(layers), (x, np.random.default_rng(1).integers(0, 10, rows))


def mlp(rows):
    import keras

    layers = [
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype("float32")
    return keras.Sequential(layers), (x, np.random.default_rng(1).integers(0, 10, rows))


def transformer(rows, blocks=12):
    import keras

    ids = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(1024, 64)(ids)
    for _ in range(blocks):
        normal = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 16)(normal, normal, use_causal_mask=True)
        inner = keras.layers.Dense(256, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(64)(inner)
    model = keras.Model(ids, keras.layers.Dense(1024, activation="softmax")(x))
    x = np.random.default_rng(0).integers(0, 1024, (rows, 64))
    return model, (x, x)


@contextlib.contextmanager
def as_xla_makes_it():
    """A context without the repairs."""
    from keras_tpu_dist.programs.partitioner import rewrite

    rewritten = rewrite.rewritten
    rewrite.rewritten = lambda jaxpr, *_: jaxpr
    try:
        yield
    finally:
        rewrite.rewritten = rewritten


def stepper(build, mesh, rows):
    """The jitted train step of a model with its state and a placed batch."""
    import keras

    from keras_tpu_dist import _keras
    from keras_tpu_dist.training import loop

    strategy = ktd.TPUStrategy(mesh)
    with strategy.scope():
        model, batch = build(rows)
        model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
        model.train_on_batch(*batch)
        groups = ("trainable", "non_trainable", "optimizer", "metrics")
        with strategy.runner.running(strategy, model, "train_on_batch", dict(zip("xy", batch))):
            state = model._get_jax_state(**{f"{g}_variables": True for g in groups})
            placed = strategy.placer.place((*batch, None))
            step = loop.jitted_step(model, "train", strategy.placer, donate=False)
            lowered = step.lower(state, placed)
        _keras.forget_state(model)
    compiled = lowered.compile()
    holder = [state]

    def run():
        _, holder[0] = compiled(holder[0], placed)

    def wait():
        import jax

        jax.block_until_ready(holder[0])

    return run, wait, compiled.as_text()


def alternate(runs, rounds, steps):
    """Median seconds of each, a round of `steps` in random turns."""
    rng = np.random.default_rng(0)
    seconds = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for index in rng.permutation(len(runs)):
            name = list(runs)[index]
            run, wait = runs[name][:2]
            start = time.perf_counter()
            for _ in range(steps):
                run()
                wait()  # one at a time: 8 devices on a few cores
            if turn:
                seconds[name].append((time.perf_counter() - start) / steps)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def traffic(text):
    """Collectives of a program, and the bytes of one device that they send."""
    from keras_tpu_dist.tools import hlo

    found = hlo.analyze(text).collectives
    kinds = {}
    for collective in found:
        kinds[collective.kind] = kinds.get(collective.kind, 0) + collective.times
    sent = sum(c.times * c.bytes for c in found)
    return f"{', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}; {sent:,} bytes"


def speed(rounds, steps):
    print(f"\na step on {MESHES[1]}, with repairs against without")
    for name, build, rows in (
        ("MobileNetV3", mobilenet, 32),
        ("embedding", embedding, 256),
        ("embedding, ragged", embedding, 254),
    ):
        runs = {"right": stepper(build, MESHES[1], rows)}
        with as_xla_makes_it():
            runs["wrong"] = stepper(build, MESHES[1], rows)
        found = alternate(runs, rounds, steps)
        ratio = found["wrong"] / found["right"]
        print(f"{name}: {1e3 * found['right']:.2f} ms, {ratio:.2f} times the wrong one's speed")
        for label, (_, _, text) in runs.items():
            print(f"    {label}: {traffic(text)}")


def ragged(rounds, steps):
    print("\nsteps per second, batches of 30 rows against 32")
    for mesh in MESHES:
        for name, build in (("MLP", mlp), ("embedding", embedding)):
            runs = {rows: stepper(build, mesh, rows) for rows in (30, 32)}
            found = alternate(runs, rounds, steps)
            print(f"{name} on {mesh}: {found[32] / found[30]:.2f} ({1e3 * found[30]:.2f} ms)")


def tracing(rounds):
    import jax
    import keras

    from keras_tpu_dist.training import loop

    strategy = ktd.TPUStrategy(MESHES[1])
    seconds = {"right": [], "wrong": []}
    with strategy.scope():
        model, batch = transformer(30)
        model.compile("adam", "sparse_categorical_crossentropy")
        model.optimizer.build(model.trainable_variables)
    for turn in range(rounds + 1):
        for label in np.random.default_rng(turn).permutation(list(seconds)):
            around = as_xla_makes_it() if label == "wrong" else contextlib.nullcontext()
            with around, strategy.scope():
                keras.utils.clear_session(free_memory=False)
                groups = ("trainable", "non_trainable", "optimizer", "metrics")
                state = model._get_jax_state(**{f"{g}_variables": True for g in groups})
                placed = strategy.placer.place((*batch, None))
                step = loop.jitted_step(model, "train", strategy.placer, donate=False)
                jax.clear_caches()
                start = time.perf_counter()
                step.program(state, placed).trace(state, placed)
                if turn:
                    seconds[label].append(time.perf_counter() - start)
    right, wrong = (float(np.median(seconds[label])) for label in ("right", "wrong"))
    print("\ntracing the step of a 12-layer transformer, 30 rows")
    print(f"{right:.2f} s with repairs, {wrong:.2f} s without: {right / wrong:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("speed", "ragged", "tracing")
    # argparse compares the empty list itself with the choices.
    parser.add_argument("parts", nargs="*", choices=[*parts, []])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    chosen = arguments.parts or parts
    ktd.simulate(8)
    if "speed" in chosen:
        speed(arguments.rounds, arguments.steps)
    if "ragged" in chosen:
        ragged(arguments.rounds, arguments.steps)
    if "tracing" in chosen:
        tracing(arguments.rounds)


if __name__ == "__main__":
    main()
