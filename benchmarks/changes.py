"""What a dry run says to change, counted and compiled, for ten models on v5e-8.

    python benchmarks/changes.py [name ...]

Each change is compiled by the TPU compiler (effort quick), on any machine with libtpu; all ten take
some five minutes of a processor. A row has the figure with the change over the one without it,
counted and compiled. The last line has the changes of which the count has the wrong sign, and the
median of the counts' errors.
"""

import contextlib
import statistics
import sys

import keras

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.planner import layout_named

L = keras.layers


def compiled(layers, optimizer="adam", loss="mse"):
    """A Sequential model, compiled.

    Args:
        layers: Its layers, the input first.
        optimizer: Its optimizer.
        loss: Its loss.
    """
    model = keras.Sequential(layers)
    model.compile(optimizer, loss)
    return model


def convolutions(size=32, filters=32):
    """Convolutions with batch normalization, half of them depthwise."""
    layers: list = [keras.Input((size, size, 3))]
    for n in range(3):
        layers += [L.Conv2D(filters * 2**n, 3, strides=2, padding="same", use_bias=False)]
        layers += [L.BatchNormalization(), L.ReLU(), L.DepthwiseConv2D(3, padding="same")]
    return compiled([*layers, L.GlobalAveragePooling2D(), L.Dense(10)])


def transformer(blocks=2, width=128, length=128, words=2048, causal=True):
    """A transformer of equal blocks, each of which is a model."""
    x = tokens = keras.Input((length,), dtype="int32")
    x = L.Embedding(words, width)(x)
    for n in range(blocks):
        inputs = keras.Input((length, width))
        h = L.LayerNormalization()(inputs)
        h = L.MultiHeadAttention(4, width // 4)(h, h, use_causal_mask=causal)
        a = L.Add()([inputs, h])
        h = L.Dense(4 * width, "gelu")(L.LayerNormalization()(a))
        x = keras.Model(inputs, L.Add()([a, L.Dense(width)(h)]), name=f"block_{n}")(x)
    model = keras.Model(tokens, L.Dense(words)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def in_bfloat16(build):
    """A model in mixed precision.

    Args:
        build: The function that builds it.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return build()
    finally:
        keras.config.set_dtype_policy(before)


def blocks(width=512, count=4):
    """Equal blocks of two dense layers."""
    x = inputs = keras.Input((width,))
    for n in range(count):
        x = x + keras.Sequential([L.Dense(4 * width, "gelu"), L.Dense(width)], name=f"b_{n}")(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model


def recurrent(kind, units=128, length=32):
    """Two recurrent layers of Keras.

    Args:
        kind: The layer's class.
        units: Its units.
        length: The times of a sequence.
    """
    first = kind(units, return_sequences=True)
    return compiled([keras.Input((length, units)), first, kind(units), L.Dense(8)])


def vocabulary(words=128_000, width=64, length=1024):
    """Probabilities of many words, as newcomers write them.

    Args:
        words: The number of words.
        width: The width of the model.
        length: The length of a text.
    """
    tokens = keras.Input((length,), dtype="int32")
    model = keras.Model(tokens, L.Dense(words, "softmax")(L.Embedding(words, width)(tokens)))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


# Name: the function that builds it, and the batch.
MODELS = {
    "convolutions": (convolutions, 256),
    "decoder": (transformer, 64),
    "encoder in bfloat16": (lambda: in_bfloat16(lambda: transformer(causal=False)), 64),
    "LSTM": (lambda: recurrent(L.LSTM), 64),
    "vocabulary": (vocabulary, 256),
    "dense, small": (lambda: compiled([keras.Input((64,)), L.Dense(256, "relu"), L.Dense(8)]), 64),
    "blocks": (blocks, 8192),
    "blocks that do not fit": (lambda: blocks(1024, 8), 2**21),
    "dense that does not fit": (lambda: compiled([keras.Input((1024,)), L.Dense(2**21)]), 8),
    "table that does not fit": (
        lambda: compiled([keras.Input((1,), dtype="int32"), L.Embedding(2**23, 128), L.Dense(8)]),
        1024,
    ),
}


def in_launches(build, steps):
    """A model whose launches have several steps.

    Args:
        build: The function that builds it.
        steps: The number of steps.
    """
    model = build()
    model.steps_per_execution = steps
    return model


def with_change(build, strategy, rows, change):
    """The dry run with a change.

    Args:
        build: The function that builds the model.
        strategy: Its strategy.
        rows: The global batch.
        change: The change, of a report.
    """
    kind, value = change.kind, change.value
    of_build = {
        "bfloat16": lambda: in_bfloat16(build),
        "convert": lambda: ktd.convert(build()),
        "steps": lambda: in_launches(build, value),
    }
    if kind in of_build:
        return ktd.dry_run(of_build[kind], strategy, batch_size=rows)
    if kind == "batch":
        return ktd.dry_run(build, strategy, batch_size=value)
    topology = change.line.split('"')[-2] if kind == "slice" else strategy.topology
    options = {kind: value} if kind in ("head", "remat") else {}
    layout = layout_named(value) if kind in ("layout", "slice") and value else None
    other = ktd.TPUStrategy({"data": -1}, layout, topology=topology, **options)
    return ktd.dry_run(build, other, batch_size=rows)


def main():
    """Prints a row for each change."""
    wrong, errors = [], []
    print(f"{'model':26} {'change':10} {'figure':16} {'counted':>8} {'compiled':>9}  step")
    for name in sys.argv[1:] or MODELS:
        build, rows = MODELS[name]
        strategy = ktd.TPUStrategy({"data": 8}, topology="v5e-8")
        run = ktd.dry_run(build, strategy, batch_size=rows)
        for change in run.changes:
            changed = with_change(build, strategy, rows, change)
            before, after = change.of(run), change.of(changed)
            found = after / before if before and after is not None else None
            step = ""
            with contextlib.suppress(AttributeError):  # one of them may not fit
                step = f"{changed.estimate.step / run.estimate.step:.2f}"
            compiled_ = "-" if found is None else f"{found:.2f}"
            print(
                f"{name:26} {change.kind:10} {change.figure:16} {change.factor:8.2f} "
                f"{compiled_:>9}  {step}",
                flush=True,
            )
            if found is not None:
                wrong += [name] * ((found - 1) * (change.factor - 1) <= 0)
                errors.append(abs(found / change.factor - 1))
        if not run.changes:
            print(f"{name:26} nothing to change")
    print(f"{len(errors)} changes, {len(wrong)} wrong by sign {wrong or ''}", end="")
    print(f", median error {statistics.median(errors):.0%}" if errors else "")


if __name__ == "__main__":
    main()
