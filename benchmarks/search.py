"""The closed-form forecast against the TPU compiler: ranks of step time and memory.

    python benchmarks/search.py [--topology v5e:2x4] [--candidates 10] [--model NAME ...]

For each model some candidates of `ktd.search`, the first by forecast and others drawn at random,
are compiled; prints Spearman's correlation of forecast and compiled step time and memory, where the
compiler's best stood in the forecast, and the time that forecasting and compiling took.
"""

import argparse
import random
import time

import keras

import keras_tpu_dist as ktd
from keras_tpu_dist.dryrun.cache import Cache
from keras_tpu_dist.planning.candidates import candidates
from keras_tpu_dist.planning.search import _compiled, _forecasts

L = keras.layers


def compiled(model, loss="mse"):
    model.compile("adam", loss)
    return model


def tokens_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def block(x, width, heads, causal=True):
    y = L.LayerNormalization()(x)
    x = x + L.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal)
    y = L.LayerNormalization()(x)
    return x + L.Dense(width)(L.Dense(4 * width, activation="gelu")(y))


def decoder(width=1024, layers=4, time=512, vocabulary=16_000):
    tokens = keras.Input((time,), dtype="int32")
    x = L.Embedding(vocabulary, width)(tokens)
    for _ in range(layers):
        x = block(x, width, width // 64)
    return compiled(keras.Model(tokens, L.Dense(vocabulary)(x)), tokens_loss())


def vit(width=512, layers=4):
    image = keras.Input((128, 128, 3))
    x = L.Reshape((64, width))(L.Conv2D(width, 16, 16)(image))
    for _ in range(layers):
        x = block(x, width, 8, causal=False)
    x = L.Dense(1000)(L.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(image, x), tokens_loss())


def cnn(layers=4):
    image = keras.Input((64, 64, 3))
    x = image
    for i in range(layers):
        x = L.Conv2D(64 * 2**i, 3, padding="same", activation="relu")(x)
        x = L.Conv2D(64 * 2**i, 3, 2, padding="same", activation="relu")(x)
    x = L.Dense(1000)(L.GlobalAveragePooling2D()(x))
    return compiled(keras.Model(image, x), tokens_loss())


def lstm():
    tokens = keras.Input((64,), dtype="int32")
    x = L.Embedding(10_000, 512)(tokens)
    x = ktd.layers.LSTM(1024, return_sequences=True)(x)
    x = ktd.layers.LSTM(1024)(x)
    return compiled(keras.Model(tokens, L.Dense(10_000)(x)), tokens_loss())


def ranking():
    ids = keras.Input((16,), dtype="int32")
    numbers = keras.Input((64,))
    x = L.Flatten()(L.Embedding(500_000, 64)(ids))
    x = L.Concatenate()([x, numbers])
    for width in (1024, 512, 256):
        x = L.Dense(width, activation="relu")(x)
    return compiled(keras.Model([ids, numbers], L.Dense(1)(x)))


# Rows a device.
MODELS = {"decoder": (decoder, 4), "ViT": (vit, 16), "CNN": (cnn, 16), "LSTM": (lstm, 32)}
MODELS["ranking"] = (ranking, 512)


def ranks(values):
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def spearman(a, b):
    a, b = ranks(a), ranks(b)
    mean = (len(a) - 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(a, b))
    return both / max(sum((x - mean) ** 2 for x in a), 1e-9)


def measure(name, topology, number, policy):
    build, rows = MODELS[name]
    keras.config.set_dtype_policy(policy)
    topology = ktd.Topology.parse(topology)
    batch = rows * topology.num_devices
    given = {"x": None, "y": None, "sample_weight": None}
    start = time.perf_counter()
    _, found = _forecasts(build, topology, batch, given, list(candidates(topology.num_devices)))
    forecast_s = time.perf_counter() - start
    first = found[: number // 2]
    drawn = first + random.Random(0).sample(found[len(first) :], number - len(first))
    start = time.perf_counter()
    runs = [_compiled(build, topology, tried, given, None, Cache.of(True)) for tried in drawn]
    compile_s = time.perf_counter() - start
    runs = [tried for tried in runs if tried.run is not None and tried.run.estimate is not None]
    steps = [tried.run.estimate.step for tried in runs]
    for tried in runs:
        run, f = tried.run, tried.forecast
        e = run.estimate
        ours = (f.step_s, f.compute_s + f.traffic_s, f.exposed_s)
        theirs = (e.step, e.kernels, e.exposed_link)
        print(f"  {tried.candidate}\n    step, kernels, exposed links, MiB", end="")
        for numbers, size in ((ours, f.memory_bytes), (theirs, run.total_bytes)):
            print("  |", *(f"{1e3 * s:8.2f}" for s in numbers), f"{size / 2**20:8.0f}", end="")
        print(flush=True)
    right = spearman([tried.forecast.step_s for tried in runs], steps)
    memory = [tried.run.total_bytes for tried in runs]
    room = spearman([tried.forecast.memory_bytes for tried in runs], memory)
    print(
        f"{name:8} {len(found)} candidates in {forecast_s:.1f} s, {len(runs)} compiled in "
        f"{compile_s:.0f} s: step {right:.2f}, memory {room:.2f}; the compiler's best was number "
        f"{steps.index(min(steps)) + 1} of the forecast",
        flush=True,
    )


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--topology", default="v5e:2x4")
    arguments.add_argument("--candidates", type=int, default=10)
    arguments.add_argument("--policy", default="mixed_bfloat16")
    arguments.add_argument("--model", choices=list(MODELS), action="append")
    arguments = arguments.parse_args()
    print("forecast | compiler, of step time and memory a device")
    for name in arguments.model or MODELS:
        measure(name, arguments.topology, arguments.candidates, arguments.policy)


if __name__ == "__main__":
    main()
