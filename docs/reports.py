"""Writes the pages that guides show as a notebook does.

    python docs/reports.py                # all of them, or those that are named

A test compares each page with a new one.
"""

import pathlib
import sys

import keras_tpu_dist as ktd

REPORTS = pathlib.Path(__file__).with_suffix("")
MESH = {"data": 4, "model": 2}


def decoder():
    """A small decoder-only transformer, compiled."""
    import keras

    layers = keras.layers
    x = tokens = keras.Input((128,), dtype="int32")
    x = layers.Embedding(8192, 256, name="words")(x)
    for n in range(2):
        h = layers.LayerNormalization(name=f"block{n}_norm_a")(x)
        attention = layers.MultiHeadAttention(8, 32, name=f"block{n}_attention")
        x = layers.Add()([x, attention(h, h, use_causal_mask=True)])
        h = layers.LayerNormalization(name=f"block{n}_norm_b")(x)
        h = layers.Dense(1024, activation="gelu", name=f"block{n}_up")(h)
        x = layers.Add()([x, layers.Dense(256, name=f"block{n}_down")(h)])
    model = keras.Model(tokens, layers.Dense(8192, name="logits")(x), name="decoder")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def model_page() -> str:
    """The drawing of a model, and the explanation of its layouts, as one page."""
    from keras_tpu_dist.show.page import document

    strategy = ktd.TPUStrategy(MESH, "tensor_parallel")
    model = decoder()
    parts = [strategy.show(model)._repr_html_(), strategy.explain(model)._repr_html_()]
    return document("decoder: which device holds what", parts)


PAGES = {"model.html": model_page}


def main() -> None:
    """Runs the script."""
    ktd.simulate(8)
    REPORTS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PAGES:
        (REPORTS / name).write_text(PAGES[name]())
        print(f"docs/reports/{name}", flush=True)


if __name__ == "__main__":
    main()
