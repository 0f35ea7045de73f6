"""Writes the reports that guides show, as they open in a browser.

    python docs/reports.py                # all of them, some minutes; or those that are named

Tests compare each page with a new one: the drawing of a model letter by letter, the others without
their numbers, since times differ from run to run and compilers from version to version, and of a
check only what it names, since a busy machine may have problems.
"""

import html
import importlib.metadata
import os
import pathlib
import platform
import re
import sys

import keras_tpu_dist as ktd

REPORTS = pathlib.Path(__file__).with_suffix("")
MESH = {"data": 4, "model": 2}


def decoder(blocks=2, width=256, length=128, vocabulary=8192):
    """A decoder-only transformer, compiled.

    Args:
        blocks: How many blocks it has.
        width: Its features.
        length: Tokens of a row.
        vocabulary: How many words there are.
    """
    import keras

    layers = keras.layers
    x = tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width, name="words")(x)
    for n in range(blocks):
        h = layers.LayerNormalization(name=f"block{n}_norm_a")(x)
        attention = layers.MultiHeadAttention(8, width // 8, name=f"block{n}_attention")
        x = layers.Add(name=f"block{n}_add_a")([x, attention(h, h, use_causal_mask=True)])
        h = layers.LayerNormalization(name=f"block{n}_norm_b")(x)
        h = layers.Dense(4 * width, activation="gelu", name=f"block{n}_up")(h)
        down = layers.Dense(width, name=f"block{n}_down")(h)
        x = layers.Add(name=f"block{n}_add_b")([x, down])
    model = keras.Model(tokens, layers.Dense(vocabulary, name="logits")(x), name="decoder")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def larger():
    """A decoder of 105 million weights."""
    return decoder(blocks=4, width=1024, length=512, vocabulary=32768)


def model_page() -> str:
    """The drawing of a model, and the explanation of its layouts, as one page."""
    from keras_tpu_dist.show.page import document

    strategy = ktd.TPUStrategy(MESH, "tensor_parallel")
    with strategy.scope():
        model = decoder()
    parts = [strategy.show(model)._repr_html_(), strategy.explain(model)._repr_html_()]
    return document("decoder: which device holds what", parts)


def dry_run_page() -> str:
    """A dry run for a slice."""
    strategy = ktd.TPUStrategy(MESH, "tensor_parallel", topology="v5e-8")
    return made_here(ktd.dry_run(larger, strategy, batch_size=64))


def search_page() -> str:
    """A search over two slices."""
    few = {"batch_size": 512, "compilations": 2, "exact": 0, "cache": False, "budget_s": 3600.0}
    return made_here(ktd.search(decoder, ["v5e-8", "v6e-8"], **few))


def check_page() -> str:
    """A check of eight simulated devices, with a step of the small decoder."""
    strategy = ktd.TPUStrategy(MESH)
    with strategy.scope():
        model = decoder()
    return made_here(strategy.check(model, minutes=10))


PAGES = {
    "model.html": model_page,
    "dry_run.html": dry_run_page,
    "search.html": search_page,
    "check.html": check_page,
}


def made_here(result) -> str:
    """The page of a result, with a line that says where it was made.

    Args:
        result: What has a `to_html`.
    """
    names = ("jax", "keras", "libtpu")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    where = f"{platform.machine()} machine with {os.cpu_count()} processors and no TPU"
    line = f"Written by docs/reports.py on a {where}; {versions}."
    return result.to_html().replace("</main>", f'<p class="muted">{line}</p></main>')


def structure(page: str) -> set[str]:
    """All that a page says, without numbers, units and order, which vary from run to run.

    Args:
        page: The page.
    """
    text = re.sub(r"<(style|script)\b.*?</\1>|<wbr>", "", page, flags=re.DOTALL)
    pieces = (html.unescape(piece).strip() for piece in re.split(r"<[^>]*>", text))
    return {_NUMBER.sub("#", piece) for piece in pieces if piece}


def names(page: str) -> set[str]:
    """What a page's tables name: their heads, and the first cell of each row that is no number.

    Args:
        page: The page.
    """
    cells = re.findall(r"<th[^>]*>(.*?)</th>|<tr><td[^>]*>(.*?)</td>", page, re.DOTALL)
    return structure("<br>".join(head or first for head, first in cells)) - {"#"}


_NUMBER = re.compile(
    r"-?\d[\d.,]*(?:e[-+]?\d+)?(?: ?(?:%|(?:[KMGT]i?)?B(?:/s)?|[mu]?s|GFLOP/s))?\b"
)


def main() -> None:
    """Runs the script."""
    ktd.simulate(8)
    import keras  # after `ktd`, which selects its backend

    REPORTS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PAGES:
        keras.backend.clear_session()  # names of layers count from one for each page
        (REPORTS / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"docs/reports/{name}", flush=True)


if __name__ == "__main__":
    main()
