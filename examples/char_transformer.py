"""A character-level language model of Python, trained on the standard library's own sources.

The text is read from the running interpreter, nothing is downloaded. The model is plain Keras; it
runs on a simulated 4 x 2 mesh, rows over "data", heads and hidden units over "model", and its
first epoch is repeated on one device, which must give the same losses:

    python examples/char_transformer.py [--epochs 8]
"""

import argparse
import pathlib
import sysconfig
import time

import keras_tpu_dist as ktd

ktd.simulate(8)

import keras
import numpy as np
from keras import layers

CONTEXT, WIDTH, HEADS, BLOCKS, VOCABULARY = 128, 96, 4, 2, 128
BATCH = 50  # need not be divisible by 4
STEPS = 60


def corpus(characters):
    """Sources of the standard library's top-level modules, as ASCII codes."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text, size = [], 0
    for path in sorted(folder.glob("*.py")):
        text.append(path.read_bytes())
        size += len(text[-1])
        if size >= characters:
            break
    codes = np.frombuffer(b"".join(text), np.uint8)
    return codes[codes < VOCABULARY].astype("int32")


def windows(codes, count, seed):
    """Random pieces of text, and the same pieces shifted by one character."""
    starts = np.random.default_rng(seed).integers(0, len(codes) - CONTEXT - 1, count)
    stretch = codes[starts[:, None] + np.arange(CONTEXT + 1)]
    return stretch[:, :-1], stretch[:, 1:]


@keras.saving.register_keras_serializable()
class Positions(layers.Layer):
    """Adds a learned vector for each position in the context."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="normal", name="table")

    def call(self, x):
        return x + self.table


def language_model():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((CONTEXT,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, WIDTH)(tokens))
    for block in range(BLOCKS):
        h = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(h, h, use_causal_mask=True)
        h = layers.LayerNormalization()(x)
        h = layers.Dense(4 * WIDTH, activation="gelu", name=f"widen_{block}")(h)
        x += layers.Dense(WIDTH, name=f"narrow_{block}")(h)
    logits = layers.Dense(VOCABULARY)(layers.LayerNormalization()(x))
    model = keras.Model(tokens, logits)
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# Megatron's layout: one all-reduce per attention and one per pair of Dense layers.
LAYOUT = [
    (".*/(query|key|value)/kernel", (None, "model", None)),
    (".*/(query|key|value)/bias", ("model", None)),
    (".*/attention_output/kernel", ("model", None, None)),
    ("widen_.*/kernel", (None, "model")),
    ("widen_.*/bias", ("model",)),
    ("narrow_.*/kernel", ("model", None)),
]


def train(model, codes, epochs):
    """The loss of each epoch; each epoch uses new pieces of text."""
    losses = []
    for epoch in range(epochs):
        x, y = windows(codes, BATCH * STEPS, seed=epoch)
        start = time.perf_counter()
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
        losses.append(history["loss"][0])
        print(
            f"epoch {epoch + 1:2}: loss {losses[-1]:.4f} nats, accuracy "
            f"{history['accuracy'][0]:.3f}, {time.perf_counter() - start:.1f} s",
            flush=True,
        )
    return losses


def sample(model, prompt, length):
    """Continues a prompt by the most likely character, one at a time."""
    codes = list(prompt.encode())
    for _ in range(length):
        context = np.zeros((1, CONTEXT), "int32")
        recent = codes[-CONTEXT:]
        context[0, : len(recent)] = recent
        logits = model.predict(context, verbose=0)[0, len(recent) - 1]
        codes.append(int(np.argmax(logits)))
    return bytes(codes).decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    codes = corpus(1_000_000)
    held_out, codes = codes[-50_000:], codes[:-50_000]
    print(f"{len(codes):,} characters to learn from")

    print("one device:")
    (alone,) = train(language_model(), codes, 1)

    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, LAYOUT)
    print(f"{strategy}:")
    with strategy.scope():
        model = language_model()
    losses = train(model, codes, epochs)
    print(f"first epoch: {losses[0]:.6f} on 8 devices, {alone:.6f} on one")
    x, y = windows(held_out, 200, seed=0)
    loss = model.evaluate(x, y, batch_size=BATCH, verbose=0)[0]
    print(f"held-out text: {loss:.4f} nats a character")
    print(sample(model, "def __init__(self", 60))


if __name__ == "__main__":
    main()
