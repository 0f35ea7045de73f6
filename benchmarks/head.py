"""A head of a large vocabulary, whole and in pieces: memory and time, without a chip.

    python benchmarks/head.py [--words 256000] [--width 2304] [--tokens 2048] [--rows 8]
                              [--layers 1] [--topology v5e:4x4] [--plans 0 1 2] [--effort exact]
                              [--heads whole pieces] [--through 0.5]

A decoder in bfloat16 with some layers, a cross-entropy of logits and its gradients, with SGD, as
`head="whole"` and `head="pieces"` compute it, with `--rows` rows for each chip. `--through 0.5`
leaves half of the tokens out before the head, as if their weights were 0. Prints what the TPU
compiler says: peak memory of a device, temporaries, estimated time of a step, collectives. Needs
libtpu (pip install 'jax[tpu]').
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
import functools

import keras

from keras_tpu_dist.programs.head import pieces
from keras_tpu_dist.show.text import duration_text, size_text

L = keras.layers
PLANS = [
    ({"data": -1}, None),
    ({"data": -1}, "fsdp"),
    ({"data": -1, "model": 4}, "tensor_parallel"),
]


def model(options):
    keras.config.set_dtype_policy("mixed_bfloat16" if not options.bfloat16 else "bfloat16")
    ids = keras.Input((options.tokens,), dtype="int32")
    x = L.Embedding(options.words, options.width, name="words")(ids)
    for n in range(options.layers):
        y = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(8, options.width // 8)(y, y, use_causal_mask=True)])
        y = L.Dense(4 * options.width, activation="gelu", name=f"up_{n}")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dense(options.width, name=f"down_{n}")(y)])
    x = x[:, : round(options.through * options.tokens)]
    built = keras.Model(ids, L.Dense(options.words, use_bias=False, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.SGD(0.1), loss)
    return built


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", type=int, default=256_000)
    parser.add_argument("--width", type=int, default=2304)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--plans", type=int, nargs="*", default=range(len(PLANS)))
    parser.add_argument("--piece_mib", type=int)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--heads", nargs="*", default=["whole", "pieces"])
    parser.add_argument("--through", type=float, default=1.0, help="share of tokens in the head")
    options = parser.parse_args()
    if options.piece_mib:
        pieces.PIECE_BYTES = options.piece_mib * 2**20
    print("mesh | plan | head | peak | temporaries | step | collectives")
    for mesh, plan in [PLANS[n] for n in options.plans]:
        for head in options.heads:
            strategy = ktd.TPUStrategy(mesh, plan, topology=options.topology, head=head)
            build = functools.partial(model, options)
            batch_size = options.rows * strategy.num_replicas_in_sync
            run = ktd.dry_run(build, strategy, batch_size=batch_size, effort=options.effort)
            print(
                mesh,
                plan,
                head,
                size_text(run.memory["peak"]),
                size_text(run.memory.get("temporaries", run.memory.get("temp", 0))),
                duration_text(run.estimate.step),
                f"{sum(c.times for c in run.cost.collectives):g}",
                sep=" | ",
                flush=True,
            )
            if options.__dict__.get("verbose"):
                print(run)


if __name__ == "__main__":
    main()
