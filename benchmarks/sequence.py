"""Long sequences split along time, by the TPU compiler: no chip is needed.

    python benchmarks/sequence.py                    # all rows
    python benchmarks/sequence.py --effort exact     # minutes each

One train step of a decoder of four layers (width 2048, 16 heads of 128, 8 for keys and values,
vocabulary 32,000), mixed_bfloat16, Adam, "fsdp", remat="full": memory and estimated step for a row
on more and more devices of a "sequence" axis. Nothing is measured on a chip.
"""

import argparse

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import keras

from keras_tpu_dist.show.text import duration_text, size_text

L = keras.layers
WIDTH, HEADS, KV_HEADS, VOCABULARY, LAYERS = 2048, 16, 8, 32_000, 4
HEADER = ("tokens a row", "slice", "mesh", "activations", "all", "step", "not overlapped", "MFU")
HEADER += ("causal by half",)
# Tokens of a row, slice, mesh.
ROWS = (
    (16_384, "v5e:4x4", {"data": 16}),
    (16_384, "v5e:4x4", {"data": 8, "sequence": 2}),
    (16_384, "v5e:4x4", {"data": 4, "sequence": 4}),
    (16_384, "v5e:4x4", {"sequence": 16}),
    (131_072, "v5e:4x4", {"data": 16}),
    (131_072, "v5e:4x4", {"sequence": 16}),
)


def decoder(time):
    """A function that builds the model for rows of so many tokens."""

    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        tokens = keras.Input((time,), dtype="int32")
        x = L.Embedding(VOCABULARY, WIDTH)(tokens)
        for _ in range(LAYERS):
            y = L.LayerNormalization()(x)
            x = x + L.GroupQueryAttention(WIDTH // HEADS, HEADS, KV_HEADS)(
                y, y, use_causal_mask=True
            )
            y = L.LayerNormalization()(x)
            x = x + L.Dense(WIDTH)(L.Dense(4 * WIDTH, activation="gelu")(y))
        model = keras.Model(tokens, L.Dense(VOCABULARY)(x))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build


def main():
    """Prints the table, row by row."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--effort", default="quick")
    arguments.add_argument("--tokens", type=int, help="only rows of so many")
    asked = arguments.parse_args()
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for time, topology, mesh in ROWS:
        if asked.tokens not in (None, time):
            continue
        strategy = ktd.TPUStrategy(mesh, "fsdp", topology=topology, remat="full")
        rows = strategy.num_replicas_in_sync
        run = ktd.dry_run(decoder(time), strategy, batch_size=rows, effort=asked.effort)
        where = " x ".join(f"{axis} {n}" for axis, n in run.mesh)
        cells = [f"{time:,}", topology, where]
        times = run.estimate
        if times is None:
            cells += ["", size_text(run.total_bytes), "does not fit", "", "", ""]
        else:
            part = f"{times.exposed_link / times.step:.1%}"
            cells += [size_text(run.memory["temporaries"]), size_text(run.total_bytes)]
            cells += [duration_text(times.step), part, f"{run.mfu:.1%}", f"{run.mfu_causal:.1%}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
