"""LoRA on a mesh: what a step sends and takes, without a chip.

    python benchmarks/lora.py [--effort exact] [--width 2048] [--rank 4] [--topology v5e:2x4]

One train step (Adam) of two layers of which each has LoRA, as this package computes it and as Keras
does, where the gradient of the whole kernel is summed before it is multiplied by the factors.
Prints the TPU compiler's estimates. Needs libtpu (pip install 'jax[tpu]'); no TPU.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
import functools
from unittest import mock

import keras

from keras_tpu_dist.programs import low_rank
from keras_tpu_dist.show.text import duration_text, size_text

L = keras.layers
PLANS = [({"data": 8}, None), ({"data": 4, "model": 2}, "tensor_parallel"), ({"fsdp": 8}, "fsdp")]


def model(kind, width, rank):
    layers = {
        "Dense": [L.Dense(width, name="one"), L.Dense(width, name="two")],
        "EinsumDense": [
            L.EinsumDense("btd,dnh->btnh", output_shape=(None, 16, width // 16), name="one"),
            L.EinsumDense("btnh,nhd->btd", output_shape=(None, width), name="two"),
        ],
    }[kind]
    built = keras.Sequential([keras.Input((128, width)), *layers])
    for layer in layers:
        layer.enable_lora(rank)
    built.compile("adam", "mse")
    return built


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--topology", default="v5e:2x4")
    options = parser.parse_args()
    print("layers | mesh | plan | factors | sent, Keras | sent | step, Keras | step")
    for kind in ("Dense", "EinsumDense"):
        build = functools.partial(model, kind, options.width, options.rank)
        factors = sum(4 * weight.value.size for weight in build().trainable_weights)
        for mesh, plan in PLANS:
            runs = []
            for found in (lambda graph: [], low_rank.sums_in):
                strategy = ktd.TPUStrategy(mesh, plan, topology=options.topology)
                with mock.patch.object(low_rank, "sums_in", found):
                    runs.append(ktd.dry_run(build, strategy, batch_size=64, effort=options.effort))
            sent = [sum(c.bytes * c.times for c in run.cost.collectives) for run in runs]
            steps = [run.estimate.step for run in runs]
            cells = [kind, mesh, plan, size_text(factors), *map(size_text, map(round, sent))]
            print(*cells, *map(duration_text, steps), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
