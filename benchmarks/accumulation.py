"""Accumulated gradients on a mesh: sums over the devices, time and memory, without a chip.

    python benchmarks/accumulation.py [--effort exact] [--width 1024] [--batches 4] [--plans 0 2]

One launch of as many small batches as an update has (Adam, a decoder block with an embedding), as
this package computes it and as Keras does, where the gradient of each small batch is summed over
the devices. Prints what the TPU compiler says of v5e:2x4: bytes of gradients that are summed for a
small batch, estimated time of a small batch, peak memory. Needs libtpu (pip install 'jax[tpu]').
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
import functools
from unittest import mock

import keras

from keras_tpu_dist.programs.answers import Why
from keras_tpu_dist.programs.sums.launch import Accumulation
from keras_tpu_dist.show.text import duration_text, size_text

L = keras.layers
PLANS = [
    ({"data": 8}, None, False),
    ({"data": 8}, "fsdp", False),
    ({"data": 8}, None, True),
    ({"data": 4, "model": 2}, "tensor_parallel", False),
]


def model(width, batches):
    ids = keras.Input((64,), dtype="int32")
    x = L.Embedding(2048, width, name="words")(ids)
    y = L.LayerNormalization()(x)
    x = L.Add()([x, L.MultiHeadAttention(8, width // 8)(y, y, use_causal_mask=True)])
    y = L.Dense(4 * width, activation="gelu", name="up")(L.LayerNormalization()(x))
    x = L.Add()([x, L.Dense(width, name="down")(y)])
    built = keras.Model(ids, L.Dense(2048, name="head")(x))
    built.compile(
        keras.optimizers.Adam(gradient_accumulation_steps=batches),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=batches,
    )
    return built


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--plans", type=int, nargs="*", default=range(len(PLANS)))
    options = parser.parse_args()
    build = functools.partial(model, options.width, options.batches)
    print("mesh | plan | sums | collectives | summed a batch | batch | peak")
    for mesh, plan, shard_optimizer in [PLANS[n] for n in options.plans]:
        for once in (False, True):
            strategy = ktd.TPUStrategy(
                mesh, plan, topology="v5e:2x4", shard_optimizer=shard_optimizer
            )
            as_keras = mock.patch.object(Accumulation, "launch", return_value=Why())
            with mock.MagicMock() if once else as_keras:
                run = ktd.dry_run(build, strategy, batch_size=32, effort=options.effort)
            summed = [
                c
                for c in run.cost.collectives
                if c.kind in ("all-reduce", "reduce-scatter") and "data" in c.axes
            ]
            sent = sum(c.bytes * c.times for c in summed)
            print(
                mesh,
                "shard_optimizer" if shard_optimizer else plan,
                f"once in {options.batches}" if once else "every batch",
                f"{sum(c.times for c in summed):g}",
                size_text(round(sent)),
                duration_text(run.estimate.step),
                size_text(run.memory["peak"]),
                sep=" | ",
                flush=True,
            )


if __name__ == "__main__":
    main()
