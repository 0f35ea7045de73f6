"""Every family of keras.applications, recurrent models and a transformer, dry-run for v5e:2x4.

    python benchmarks/dry_run.py                     # all, about twenty minutes on two cores
    python benchmarks/dry_run.py MobileNet LSTM      # some
    python benchmarks/dry_run.py --effort exact LSTM # at full effort

Times are noisy on a shared machine; HBM, cycles and collectives are the compiler's and are not.
"""

import argparse
import resource
import time

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import jax
import keras

from keras_tpu_dist.dryrun import dry_run
from keras_tpu_dist.dryrun_report import duration, size

# One of each family, the smallest.
APPLICATIONS = (
    *("MobileNet", "MobileNetV2", "MobileNetV3Small", "EfficientNetB0", "EfficientNetV2B0"),
    *("ResNet50", "ResNet50V2", "VGG16", "Xception", "InceptionV3", "InceptionResNetV2"),
    *("DenseNet121", "NASNetMobile", "ConvNeXtTiny"),
)


def application(name: str):
    def build():
        make = getattr(keras.applications, name)
        model = make(weights=None, input_shape=(96, 96, 3), classes=10)
        model.compile("adamw", "sparse_categorical_crossentropy")
        return model

    return build, None, None, 64


def recurrent(layer: str, steps: int = 128):
    def build():
        inputs = keras.Input((steps, 128))
        x = getattr(keras.layers, layer)(256, return_sequences=True, name="first")(inputs)
        x = getattr(keras.layers, layer)(256, name="second")(x)
        model = keras.Model(inputs, keras.layers.Dense(10, name="head")(x))
        model.compile("adam", "mse")
        return model

    return build, None, None, 256


def own_recurrent(layer: str):
    def build():
        inputs = keras.Input((128, 128))
        x = getattr(ktd.layers, layer)(256, return_sequences=True, name="first")(inputs)
        x = getattr(ktd.layers, layer)(256, name="second")(x)
        model = keras.Model(inputs, keras.layers.Dense(10, name="head")(x))
        model.compile("adam", "mse")
        return model

    return build, None, None, 256


def transformer(width=768, depth=12, heads=12, length=512, vocabulary=32_000):
    """134 million parameters, as in BERT-base's size class."""

    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        tokens = keras.Input((length,), dtype="int32")
        x = keras.layers.Embedding(vocabulary, width, name="embedding")(tokens)
        for i in range(depth):
            h = keras.layers.LayerNormalization(name=f"norm_a{i}")(x)
            h = keras.layers.MultiHeadAttention(heads, width // heads, name=f"attention{i}")(
                h, h, use_causal_mask=True
            )
            x = keras.layers.Add(name=f"add_a{i}")([x, h])
            h = keras.layers.LayerNormalization(name=f"norm_b{i}")(x)
            h = keras.layers.Dense(4 * width, activation="gelu", name=f"up{i}")(h)
            h = keras.layers.Dense(width, name=f"down{i}")(h)
            x = keras.layers.Add(name=f"add_b{i}")([x, h])
        logits = keras.layers.Dense(vocabulary, dtype="float32", name="logits")(x)
        model = keras.Model(tokens, logits)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-4), loss)
        keras.config.set_dtype_policy("float32")
        return model

    shape = jax.ShapeDtypeStruct((1, length), "int32")
    return build, shape, shape, 32


def cases():
    found = {name: application(name) for name in APPLICATIONS}
    found |= {name: recurrent(name) for name in ("LSTM", "GRU", "SimpleRNN")}
    if hasattr(ktd, "layers"):
        found |= {f"ktd.{name}": own_recurrent(name) for name in ("LSTM", "GRU", "SimpleRNN")}
    return found | {"transformer": transformer()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--effort", default="quick")
    options = parser.parse_args()
    strategy = ktd.TPUStrategy({"data": 8}, topology="v5e:2x4")
    chosen = {n: c for n, c in cases().items() if not options.names or n in options.names}
    print(
        "| model | parameters | seconds | compiler CPU s | this process, GB | compiler, GB "
        "| HBM per chip | step | bound | collectives |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, (build, x, y, batch_size) in chosen.items():
        keras.utils.clear_session()
        started = time.perf_counter()
        run = dry_run(build, strategy, x=x, y=y, batch_size=batch_size, effort=options.effort)
        cells = (
            name,
            f"{run.parameters:,}",
            f"{time.perf_counter() - started:.0f}",
            f"{run.compile_cpu_seconds:.0f}",
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f}",
            f"{run.compile_peak_bytes / 1e9:.2f}",
            size(run.total_bytes),
            duration(run.estimate.step) if run.estimate else "-",
            run.estimate.bound if run.estimate else "-",
            str(sum(c.times for c in run.cost.collectives)),
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
