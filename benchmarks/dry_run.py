"""Every family of keras.applications, recurrent models and a transformer, dry-run for v5e:2x4.

    python benchmarks/dry_run.py                          # all, about an hour on two cores
    python benchmarks/dry_run.py MobileNet ktd.LSTM       # some
    python benchmarks/dry_run.py --effort exact ktd.LSTM  # at full effort
    python benchmarks/dry_run.py --json rows.jsonl        # also append each row to a file
    python benchmarks/dry_run.py --table rows.jsonl       # print the tables of such a file
    python benchmarks/dry_run.py --fit rows.jsonl         # is exact within quick's range?

Each model runs in its own process, and its row is printed as soon as it is known. Seconds vary on a
shared machine; HBM, cycles and collectives come from the compiler and do not.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import jax
import keras

from keras_tpu_dist.show.text import duration_text, size_text, span_text
from keras_tpu_dist.tools.dryrun import compile as dryrun_compile
from keras_tpu_dist.tools.dryrun.run import dry_run

# One of each family, the smallest.
APPLICATIONS = (
    *("MobileNet", "MobileNetV2", "MobileNetV3Small", "EfficientNetB0", "EfficientNetV2B0"),
    *("ResNet50", "ResNet50V2", "VGG16", "Xception", "InceptionV3", "InceptionResNetV2"),
    *("DenseNet121", "NASNetMobile", "ConvNeXtTiny"),
)
HEADER = (
    *("model", "parameters", "effort", "seconds", "compiler CPU s", "this process, GB"),
    *("compiler, GB", "HBM per chip", "step", "bound", "collectives"),
)


def application(name: str):
    def build():
        make = getattr(keras.applications, name)
        model = make(weights=None, input_shape=(96, 96, 3), classes=10)
        model.compile("adamw", "sparse_categorical_crossentropy")
        return model

    return build, None, None, 64


def two_layers(first, second, steps: int = 128):
    def build():
        inputs = keras.Input((steps, 128))
        x = second()(first()(inputs))
        model = keras.Model(inputs, keras.layers.Dense(10, name="head")(x))
        model.compile("adam", "mse")
        return model

    return build, None, None, 256


def recurrent(layers, name: str, steps: int = 128):
    layer = getattr(layers, name)
    return two_layers(
        lambda: layer(256, return_sequences=True, name="first"),
        lambda: layer(256, name="second"),
        steps,
    )


def bidirectional():
    both = ktd.layers.Bidirectional
    return two_layers(
        lambda: both(ktd.layers.LSTM(256, return_sequences=True)),
        lambda: both(ktd.layers.GRU(256)),
    )


def video():
    """A CNN on every frame, an LSTM over the frames."""

    def build():
        frame = keras.Sequential(
            [
                keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
                keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
                keras.layers.GlobalAveragePooling2D(),
            ]
        )
        inputs = keras.Input((16, 64, 64, 3))
        x = ktd.layers.TimeDistributed(frame, name="frames")(inputs)
        x = ktd.layers.LSTM(128, name="lstm")(x)
        model = keras.Model(inputs, keras.layers.Dense(10, name="head")(x))
        model.compile("adam", "mse")
        return model

    return build, None, None, 64


def language_model(blocks, width: int, length: int, vocabulary: int):
    """A model of tokens with `blocks` between embedding and logits, in bfloat16."""

    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        tokens = keras.Input((length,), dtype="int32")
        x = blocks(keras.layers.Embedding(vocabulary, width, name="embedding")(tokens))
        logits = keras.layers.Dense(vocabulary, dtype="float32", name="logits")(x)
        model = keras.Model(tokens, logits)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-4), loss)
        keras.config.set_dtype_policy("float32")
        return model

    shape = jax.ShapeDtypeStruct((1, length), "int32")
    return build, shape, shape, 32


def transformer_block(x, width: int, heads: int, number: int | str):
    h = keras.layers.LayerNormalization(name=f"norm_a{number}")(x)
    h = keras.layers.MultiHeadAttention(heads, width // heads, name=f"attention{number}")(
        h, h, use_causal_mask=True
    )
    x = keras.layers.Add(name=f"add_a{number}")([x, h])
    h = keras.layers.LayerNormalization(name=f"norm_b{number}")(x)
    h = keras.layers.Dense(4 * width, activation="gelu", name=f"up{number}")(h)
    h = keras.layers.Dense(width, name=f"down{number}")(h)
    return keras.layers.Add(name=f"add_b{number}")([x, h])


def transformer(width=768, depth=12, heads=12, length=512, vocabulary=32_000):
    """134 million parameters, as in BERT-base's size class; attention is the flash kernel."""

    def blocks(x):
        for i in range(depth):
            x = transformer_block(x, width, heads, i)
        return x

    return language_model(blocks, width, length, vocabulary)


class Blocks(keras.layers.Layer):
    """The blocks of `transformer` as one program: a scan over stacked weights."""

    def __init__(self, block, depth):
        super().__init__(name="blocks")
        self.run = block.stateless_call  # not the block: its own weights are no part of the model
        self.stacked = [
            self.add_weight(shape=(depth, *v.shape), name=v.path.replace("/", "_"))
            for v in block.trainable_variables
        ]

    def call(self, x):
        def one(x, weights):
            return self.run(weights, [], x)[0], None

        weights = [jax.numpy.asarray(w) for w in self.stacked]
        return jax.lax.scan(one, x, weights)[0]


def scanned(width=768, depth=12, heads=12, length=512, vocabulary=32_000):
    def blocks(x):
        one = keras.Input((length, width), dtype="bfloat16")
        block = keras.Model(one, transformer_block(one, width, heads, ""))
        return Blocks(block, depth)(x)

    return language_model(blocks, width, length, vocabulary)


def cases():
    found = {name: application(name) for name in APPLICATIONS}
    for name in ("LSTM", "GRU", "SimpleRNN"):
        found[name] = recurrent(keras.layers, name)
        found[f"ktd.{name}"] = recurrent(ktd.layers, name)
    found |= {"ktd.Bidirectional": bidirectional(), "ktd.TimeDistributed": video()}
    return found | {"transformer": transformer(), "transformer scanned": scanned()}


def measure(name: str, effort: str, timeout: float) -> dict:
    """Dry-runs one model, and returns the row as plain data."""
    build, x, y, batch_size = cases()[name]
    strategy = ktd.TPUStrategy({"data": 8}, topology="v5e:2x4", compiler_options=None)
    started = time.perf_counter()
    run = dry_run(build, strategy, x=x, y=y, batch_size=batch_size, effort=effort, timeout=timeout)
    return {
        "model": name,
        "effort": run.effort,
        "parameters": run.parameters,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": run.compile_cpu_seconds,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "compiler_bytes": run.compile_peak_bytes,
        "hbm_bytes": run.total_bytes,
        "temporary_bytes": run.memory["temporaries"],
        "cycles": run.cost.cycles,
        "flops": run.cost.flops,
        "step": run.estimate.step,
        "step_range": run.step_range,
        "kernels": run.estimate.kernels,
        "bound": run.estimate.bound,
        "collectives": sum(c.times for c in run.cost.collectives),
    }


def apart(name: str, options: argparse.Namespace) -> dict:
    """The same in a new process, so that the peak memory is only that of this model."""
    command = [sys.executable, __file__, "--one", name, "--effort", options.effort]
    command += ["--timeout", str(options.timeout)]
    command += [f"--option={option}" for option in options.option]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [text for text in done.stderr.splitlines() if "Error: " in text] or ["died"]
        seconds = time.perf_counter() - started
        return {"model": name, "effort": options.effort, "seconds": seconds, "error": errors[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def cells(row: dict) -> tuple[str, ...]:
    if "error" in row:
        cells = (row["model"], "", row["effort"], f"{row['seconds']:.0f}", row["error"][:120])
        return cells + ("",) * (len(HEADER) - len(cells))
    return (
        row["model"],
        f"{row['parameters']:,}",
        row["effort"],
        f"{row['seconds']:.0f}",
        f"{row['cpu_seconds']:.0f}",
        f"{row['process_bytes'] / 1e9:.2f}",
        f"{row['compiler_bytes'] / 1e9:.2f}",
        size_text(row["hbm_bytes"]),
        duration_text(row["step"]),
        row["bound"],
        str(row["collectives"]),
    )


def line(texts) -> None:
    print(f"| {' | '.join(texts)} |", flush=True)


def header(texts) -> None:
    line(texts)
    line("---" for _ in texts)


def print_tables(path: pathlib.Path) -> None:
    """Prints the last row of each model and effort, and quick against exact if there are both."""
    rows = {}
    for text in path.read_text().splitlines():
        row = json.loads(text)
        rows[row["model"], row["effort"]] = row
    header(HEADER)
    for row in rows.values():
        line(cells(row))
    both = [
        m for m, effort in rows if effort == "quick" and "hbm_bytes" in rows.get((m, "exact"), {})
    ]
    if both:
        print("\nquick against exact:\n")
        header(("model", "CPU s quick", "CPU s exact", "HBM quick / exact", "cycles quick / exact"))
    for model in both:
        quick, exact = rows[model, "quick"], rows[model, "exact"]
        ratios = [f"{quick[k] / exact[k]:.2f}" for k in ("hbm_bytes", "cycles")]
        line((model, f"{quick['cpu_seconds']:.0f}", f"{exact['cpu_seconds']:.0f}", *ratios))


def print_fit(path: pathlib.Path) -> bool:
    """Prints whether the step of effort "exact" is within the range of "quick"."""
    rows = {}
    for text in path.read_text().splitlines():
        row = json.loads(text)
        rows[row["model"], row["effort"]] = row
    header(("model", "bound", "quick sums to", "quick says", "exact", "within", "cycles"))
    right = True
    for (model, effort), quick in rows.items():
        exact = rows.get((model, "exact"), {})
        if effort != "quick" or "step" not in exact or "step_range" not in quick:
            continue
        low, high = quick["step_range"]
        within = low <= exact["step"] <= high
        right &= within
        words = (model, quick["bound"], duration_text(quick["step"]))
        words += (span_text(low, high, duration_text), duration_text(exact["step"]))
        line((*words, "yes" if within else "NO", f"{quick['cycles'] / exact['cycles']:.2f}"))
    return right


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--effort", default="quick", choices=("quick", "exact"))
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one model")
    parser.add_argument("--json", type=pathlib.Path, help="append each row to this file")
    parser.add_argument("--table", type=pathlib.Path, help="only print the tables of this file")
    parser.add_argument("--fit", type=pathlib.Path, help="only compare both efforts of this file")
    parser.add_argument("--option", action="append", default=[], help="compiler option, NAME=VALUE")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print_tables(options.table)
        return
    if options.fit:
        sys.exit(0 if print_fit(options.fit) else 1)
    if options.one:
        chosen = dryrun_compile.EFFORTS[options.effort] or {}
        more = dict(option.split("=", 1) for option in options.option)
        dryrun_compile.EFFORTS[options.effort] = chosen | more
        print(json.dumps(measure(options.one, options.effort, options.timeout)))
        return
    unknown = set(options.names) - set(cases())
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(cases())}")
    header(HEADER)
    for name in options.names or cases():
        row = apart(name, options)
        line(cells(row))
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
