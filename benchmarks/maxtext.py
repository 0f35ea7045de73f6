"""MaxText's models for v5e-256 as plain Keras models, by the TPU compiler: no chip is needed.

    python benchmarks/maxtext.py                       # 16B, 32B, 64B and 128B
    python benchmarks/maxtext.py 16B --effort quick
    python benchmarks/maxtext.py 16B --rows 4 --remat dots
    python benchmarks/maxtext.py 16B --search          # with the choice of `ktd.search`

The whole train step, all layers, mixed_bfloat16, Adam, 2048 tokens a row, on v5e:16x16. Shapes and
recomputation are those of MaxText's scripts, whose `global_parameter_scale` doubles heads and MLP,
width, and layers in turn. So are rows per chip, except 3 instead of 4 for 32B, to save memory.
There are no rotary embeddings. Model FLOPs utilisation is defined as in MaxText, with an estimated
step: nothing is measured on a chip. MaxText measured the published figures.

References:
    https://github.com/AI-Hypercomputer/maxtext/tree/main/MaxText/configs/v5e
    https://github.com/AI-Hypercomputer/maxtext#tpu-v5e
"""

import argparse
import functools
import sys
from dataclasses import dataclass

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import keras

from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.text import size_text
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.tools.searches.ranking import Tried

L = keras.layers
TOPOLOGY, CHIPS, TIME, VOCABULARY, HEAD = "v5e:16x16", 256, 2048, 32_000, 128


@dataclass(frozen=True)
class Shape:
    """One of MaxText's models, and how its script trains it on 256 chips."""

    width: int
    heads: int
    mlp: int
    layers: int
    rows: int
    published: float


SHAPES = {
    "16B": Shape(4096, 64, 28_672, 32, rows=6, published=0.611),
    "32B": Shape(8192, 64, 28_672, 32, rows=3, published=0.669),
    "64B": Shape(8192, 64, 28_672, 64, rows=2, published=0.599),
    "128B": Shape(8192, 128, 57_344, 64, rows=1, published=0.561),
}
HEADER = (
    *(
        "model",
        "parameters",
        "rows a chip",
        "strategy",
        "fits",
        "memory at one time",
        "step",
        "MFU",
    ),
    *("published", "not overlapped", "compile", "compile CPU", "compiler's memory"),
)


class Block(L.Layer):
    """Norm, causal attention, norm, gated feed-forward."""

    def __init__(self, heads, mlp, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.mlp = heads, mlp

    def build(self, shape):
        self.norm_1, self.norm_2 = L.RMSNormalization(), L.RMSNormalization()
        self.attention = L.GroupQueryAttention(HEAD, self.heads, self.heads, use_bias=False)
        self.gate = L.Dense(self.mlp, "silu", use_bias=False)
        self.up = L.Dense(self.mlp, use_bias=False)
        self.down = L.Dense(shape[-1], use_bias=False)
        for layer in (self.norm_1, self.norm_2, self.gate, self.up):
            layer.build(shape)
        self.attention.build(shape, shape)
        self.down.build((*shape[:-1], self.mlp))

    def call(self, x):
        h = self.norm_1(x)
        x = x + self.attention(h, h, use_causal_mask=True)
        h = self.norm_2(x)
        return x + self.down(self.gate(h) * self.up(h))

    def get_config(self):
        return {**super().get_config(), "heads": self.heads, "mlp": self.mlp}


def decoder(shape: Shape, layers: int):
    """The model, compiled, its blocks as one loop."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((TIME,), dtype="int32")
    x = L.Embedding(VOCABULARY, shape.width)(tokens)
    for i in range(layers):
        x = Block(shape.heads, shape.mlp, name=f"block_{i}")(x)
    logits = L.Dense(VOCABULARY, use_bias=False, name="head")(L.RMSNormalization()(x))
    model = keras.Model(tokens, logits, name="decoder")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ktd.scan_blocks(model)
    return model


def chosen(shape: Shape, layers: int, rows: int, compilations: int) -> Tried:
    """The choice of `ktd.search` among all meshes, plans and policies; prints what it tried.

    The fastest two are compiled as for training, which decides.
    """
    found = ktd.search(
        lambda: decoder(shape, layers),
        TOPOLOGY,
        batch_size=rows * CHIPS,
        compilations=compilations,
        budget_s=3600.0,
    )
    print(found, file=sys.stderr, flush=True)
    return found.best


def main():
    """Prints the table, row by row."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("models", nargs="*", default=[*SHAPES])
    arguments.add_argument("--effort", default="exact")
    arguments.add_argument("--rows", type=int, help="rows a chip; default: as in the script")
    arguments.add_argument("--remat", default="full", help="'' for none")
    arguments.add_argument("--layers", type=int, help="default: all")
    arguments.add_argument("--search", action="store_true", help="instead of fsdp and --remat")
    arguments.add_argument("--compilations", type=int, default=8, help="of a search")
    arguments.add_argument("--full", action="store_true", help="print the dry runs as well")
    asked = arguments.parse_args()
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for name in asked.models:
        shape = SHAPES[name]
        rows = asked.rows or shape.rows
        layers = asked.layers or shape.layers
        if asked.search:
            best = chosen(shape, layers, rows, asked.compilations)
            candidate, run = best.candidate, best.run
        else:
            candidate = Candidate((("fsdp", CHIPS),), "fsdp", False, asked.remat or None)
            run = ktd.dry_run(
                functools.partial(decoder, shape, layers),
                candidate.strategy(Topology.parse(TOPOLOGY)),
                batch_size=rows * CHIPS,
                effort=asked.effort,
            )
        if asked.full or run.estimate is None:
            print(run)
        times = run.estimate
        cells = [
            *(name, f"{run.parameters / 1e9:.1f} G", rows, candidate, run.fits),
            *(size_text(run.peak_bytes), f"{times.step:.2f} s" if times else ""),
            *(f"{run.mfu:.1%}" if run.mfu else "", f"{shape.published:.1%}"),
            f"{times.exposed_link / times.step:.1%}" if times else "",
            *(f"{run.compile_seconds:.0f} s", f"{run.compile_cpu_seconds:.0f} s"),
            size_text(run.compile_peak_bytes),
        ]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
