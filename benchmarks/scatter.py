"""Gradients of "fsdp" summed by all-reduces, against reduce-scatters made by hand.

    python benchmarks/scatter.py

On a torus of 16 by 16 chips the compiler sums each large gradient whole, and computes meanwhile.
`jax.shard_map` makes it scatter instead: along one side of the torus and then along the other, or
half of the gradient in each order, so that all links are used. What the TPU compiler estimates of
a step of three wide residual blocks; nothing is measured on a chip.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import jax
import keras
from jax.sharding import PartitionSpec

from keras_tpu_dist.common.text import duration_text, size_text

L = keras.layers
TIME, WIDTH, HIDDEN, BLOCKS, ROWS = 2048, 4096, 28_672, 3, 512
AXES = ("data", "fsdp")
WAYS = ("all-reduces, as compiled", "scattered, side by side", "halves, both orders")


def gathered(weight, order):
    """A weight of parts that lie along both axes, whole; its gradient is scattered."""
    for axis in reversed(order):
        weight = jax.lax.all_gather(weight, axis, axis=0, tiled=True)
    return weight


class Scattered(L.Layer):
    """A dense layer whose weight is gathered, and whose gradient is scattered, by hand."""

    def __init__(self, strategy, units, activation=None, halves=False):
        super().__init__()
        self.strategy, self.units, self.halves = strategy, units, halves
        self.activation = keras.activations.get(activation)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:-1], self.units), self.compute_dtype)

    def call(self, x):
        def product(x, kernel):
            if not self.halves:
                return x @ gathered(kernel, AXES)
            parts = jax.numpy.split(kernel, 2, axis=1)
            orders = (AXES, AXES[::-1])
            return x @ jax.numpy.concatenate([gathered(*each) for each in zip(parts, orders)], 1)

        rows, parts = PartitionSpec(AXES), PartitionSpec(AXES, None)
        mapped = jax.shard_map(
            product,
            mesh=self.strategy.mesh,
            in_specs=(rows, parts),
            out_specs=rows,
            check_vma=False,
        )
        return self.activation(mapped(x, jax.numpy.asarray(self.kernel)))


def model(strategy, way):
    """Wide residual blocks, without attention."""
    keras.config.set_dtype_policy("mixed_bfloat16")

    def dense(units, activation=None):
        if way == WAYS[0]:
            return L.Dense(units, activation, use_bias=False)
        return Scattered(strategy, units, activation, halves=way == WAYS[2])

    inputs = x = keras.Input((TIME, WIDTH))
    for _ in range(BLOCKS):
        x = x + dense(WIDTH)(dense(HIDDEN, "silu")(L.RMSNormalization()(x)))
    made = keras.Model(inputs, x)
    made.compile("adam", "mse")
    return made


def main():
    """Prints the table, row by row."""
    print("| gradients | step | not overlapped | memory |\n| --- | --- | --- | --- |")
    for way in WAYS:
        strategy = ktd.TPUStrategy({"data": 16, "fsdp": 16}, "fsdp", topology="v5e:16x16")
        run = ktd.dry_run(
            lambda way=way, strategy=strategy: model(strategy, way),
            strategy,
            batch_size=ROWS,
            effort="exact",
        )
        times = run.estimate
        seconds = duration_text(times.step), duration_text(times.exposed_link)
        print(f"| {way} | {' | '.join(seconds)} | {size_text(run.peak_bytes)} |", flush=True)


if __name__ == "__main__":
    main()
