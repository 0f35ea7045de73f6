"""Muon beside AdamW: what its products cost on a mesh, without a chip.

    python benchmarks/muon.py [--layers 2] [--width 1024] [--topology v5e:2x4] [--rows 1]
                              [--plans data fsdp tensor] [--optimizers adamw written muon]
                              [--effort exact] [--verbose]

A decoder in mixed bfloat16: of each layer two kernels, `(width, 4 * width)` and `(4 * width,
width)`, are Muon's; the heads' kernels have three dimensions, so Keras gives them to AdamW. Prints
what the TPU compiler says of a training step: collectives, bytes that each device sends, estimated
time and its parts, memory. "written" is Muon without the pass that gives each device whole kernels.
Needs libtpu (pip install 'jax[tpu]').
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
import functools

import keras

from keras_tpu_dist.programs import passes
from keras_tpu_dist.show.text import duration_text, size_text

L, PASSES = keras.layers, passes.PASSES
PLANS = {
    "data": ({"data": -1}, None),
    "fsdp": ({"fsdp": -1}, "fsdp"),
    "tensor": ({"data": -1, "model": 2}, "tensor_parallel"),
}
OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(1e-3),
    "written": lambda: keras.optimizers.Muon(1e-3, exclude_layers=["head"]),
    "muon": lambda: keras.optimizers.Muon(1e-3, exclude_layers=["head"]),
}


def model(options, optimizer):
    keras.config.set_dtype_policy("mixed_bfloat16")
    ids = keras.Input((options.tokens,), dtype="int32")
    x = L.Embedding(options.words, options.width, name="embedding")(ids)
    for n in range(options.layers):
        y = L.LayerNormalization()(x)
        heads = L.MultiHeadAttention(8, options.width // 8, name=f"heads_{n}")
        x = L.Add()([x, heads(y, y, use_causal_mask=True)])
        y = L.Dense(4 * options.width, activation="gelu", name=f"up_{n}")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dense(options.width, name=f"down_{n}")(y)])
    built = keras.Model(ids, L.Dense(options.words, use_bias=False, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(OPTIMIZERS[optimizer](), loss)
    return built


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS))
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    print("plan | optimizer | collectives | sent | step | cycles | Muon's | its links | peak")
    for name in options.plans:
        mesh, plan = PLANS[name]
        for optimizer in options.optimizers:
            strategy = ktd.TPUStrategy(mesh, plan, topology=options.topology)
            build = functools.partial(model, options, optimizer)
            batch_size = options.rows * strategy.num_replicas_in_sync
            passes.PASSES = [p for p in PASSES if (optimizer, p.name) != ("written", "muon")]
            run = ktd.dry_run(build, strategy, batch_size=batch_size, effort=options.effort)
            found = run.cost.collectives
            update = [layer for layer in run.cost.layers if layer.layer in ("muon", "adamw")]
            print(
                name,
                optimizer,
                f"{sum(c.times for c in found):g}",
                size_text(round(sum(c.sent_bytes * c.times for c in found))),
                duration_text(run.estimate.step),
                f"{run.cost.cycles:,}",
                f"{sum(layer.cycles for layer in update):,}",
                duration_text(sum(layer.link_seconds for layer in update)),
                size_text(run.memory["peak"]),
                sep=" | ",
                flush=True,
            )
            if options.verbose:
                print(run, flush=True)


if __name__ == "__main__":
    main()
