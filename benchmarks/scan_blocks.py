"""The savings and costs of `ktd.scan_blocks`, by the TPU compiler: no chip is needed.

    python benchmarks/scan_blocks.py                          # 2, 12 and 48 layers, four variants
    python benchmarks/scan_blocks.py --layers 12 --variants unrolled scanned
    python benchmarks/scan_blocks.py --effort exact --rows 16

One train step of a decoder of GroupQueryAttention blocks under "fsdp" on v5e:4x4, mixed_bfloat16,
Adam. Compile seconds are CPU seconds of the compiler, lowering seconds those of tracing and
lowering in Python. Memory is that of the program on one device. Collectives in loops count once per
round. Cycles are the compiler's estimates for one step. Nothing is measured on a chip.
"""

import argparse

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import keras

from keras_tpu_dist.show.text import size_text

L = keras.layers
HEADER = (
    *("layers", "blocks", "compile CPU s", "lowering s", "memory", "of unrolled"),
    *("temporaries", "collectives", "sent", "of unrolled", "cycles", "of unrolled"),
)
# Each variant: whether blocks are scanned, and the strategy's `remat`.
VARIANTS = {
    "unrolled": (False, None),
    "scanned": (True, None),
    "unrolled, full": (False, "full"),
    "scanned, full": (True, "full"),
}


class Block(L.Layer):
    """Norm, attention, norm, feed-forward, with grouped heads, as decoders have them."""

    def __init__(self, heads=8, **kwargs):
        super().__init__(**kwargs)
        self.heads = heads

    def build(self, shape):
        width = shape[-1]
        self.norm_1, self.norm_2 = L.LayerNormalization(), L.LayerNormalization()
        size = width // self.heads
        self.attention = L.GroupQueryAttention(size, self.heads, self.heads // 2, use_bias=False)
        self.up = L.Dense(4 * width, "gelu", use_bias=False)
        self.down = L.Dense(width, use_bias=False)
        self.norm_1.build(shape)
        self.norm_2.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * width))

    def call(self, x):
        h = self.norm_1(x)
        x = x + self.attention(h, h, use_causal_mask=True)
        return x + self.down(self.up(self.norm_2(x)))

    def get_config(self):
        return {**super().get_config(), "heads": self.heads}


def decoder(layers, width=1024, time=1024, vocabulary=8192):
    tokens = keras.Input((time,), dtype="int32")
    x = L.Embedding(vocabulary, width)(tokens)
    for i in range(layers):
        x = Block(name=f"block_{i}")(x)
    logits = L.Dense(vocabulary, name="head")(L.LayerNormalization()(x))
    return keras.Model(tokens, logits, name="decoder")


def compiled(layers, scan):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = decoder(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if scan:
        ktd.scan_blocks(model)
    return model


def measured(layers, variant, given):
    """The dry run of a variant."""
    scan, remat = VARIANTS[variant]
    # Only the programs are compared, with the same compiler options.
    options = {"remat": remat, "compiler_options": None}
    strategy = ktd.TPUStrategy(topology="v5e:4x4", layout="fsdp", **options)
    return ktd.dry_run(
        *(lambda: compiled(layers, scan), strategy),
        batch_size=given.rows,
        effort=given.effort,
    )


def row_of(layers, variant, run, before):
    """A line of the table; `before` is the dry run of the blocks unrolled."""
    numbers = [numbers_of(each) for each in (run, before)]
    memory, sent, cycles = (f"{a / b:.2f}" for a, b in zip(*numbers))
    times = sum(each.times for each in run.cost.collectives)
    return (
        *(str(layers), variant, f"{run.compile_cpu_seconds:.0f}", f"{run.build_seconds:.0f}"),
        *(size_text(run.total_bytes), memory, size_text(run.memory["temporaries"])),
        *(str(times), size_text(numbers[0][1]), sent, f"{run.cost.cycles:,.0f}", cycles),
    )


def numbers_of(run):
    """Bytes of memory, bytes sent, and cycles."""
    sent = sum(each.sent_bytes * each.times for each in run.cost.collectives)
    return run.total_bytes, sent, run.cost.cycles


def main():
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", nargs="*", type=int, default=[2, 12, 48])
    parser.add_argument("--variants", nargs="*", default=[*VARIANTS], choices=[*VARIANTS])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--effort", default="quick")
    given = parser.parse_args()
    ktd.simulate(8)
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}", flush=True)
    for layers in given.layers:
        unrolled = {}
        for variant in given.variants:
            run = measured(layers, variant, given)
            if run.cost is None or not run.memory:
                print(f"| {layers} | {variant} | {(run.error or 'no program')[:120]} |", flush=True)
                continue
            remat = VARIANTS[variant][1]
            before = unrolled.setdefault(remat, run)
            print(f"| {' | '.join(row_of(layers, variant, run, before))} |", flush=True)


if __name__ == "__main__":
    main()
