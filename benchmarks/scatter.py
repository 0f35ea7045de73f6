"""Gradients under "fsdp": all-reduces by the compiler against reduce-scatters by hand.

    python benchmarks/scatter.py [--way 0 --way 3]

On a torus of 16 by 16 chips the compiler all-reduces each large gradient and computes meanwhile.
With `jax.shard_map` it scatters instead: along one side of the torus and then along the other; or
half of the gradient in each order, so that all links are used; or in rings of permutations, which
the compiler can overlap. Prints the TPU compiler's estimates for a step of three wide residual
blocks; nothing is measured on a chip.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
import functools

import jax
import keras
from jax.sharding import PartitionSpec

from keras_tpu_dist.show.text import duration_text, size_text

L = keras.layers
TIME, WIDTH, HIDDEN, BLOCKS, ROWS = 2048, 4096, 28_672, 3, 512
AXES = ("data", "fsdp")
WAYS = (
    *("all-reduces, as compiled", "scattered, side by side", "halves, both orders"),
    "rings of permutations",
)


def gathered(weight, order):
    """Gathers a weight that is split over both axes; its gradient is scattered."""
    for axis in reversed(order):
        weight = jax.lax.all_gather(weight, axis, axis=0, tiled=True)
    return weight


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered_for_rings(weight, order):
    """The same, with the gradient of each side in two rings, one per direction."""
    return gathered(weight, order)


def _in_rings(order, _, gradient):
    for axis in order:
        columns = gradient.shape[1] // 2
        ways = ring(gradient[:, :columns], axis, 1), ring(gradient[:, columns:], axis, -1)
        gradient = jax.numpy.concatenate(ways, 1)
    return (gradient,)


gathered_for_rings.defvjp(lambda weight, order: (gathered(weight, order), None), _in_rings)


def ring(partial, axis, way):
    """Reduce-scatters over an axis: sums travel from device to device in steps of `way`."""
    size, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    rows = partial.shape[0] // size

    def part(of):
        return jax.lax.dynamic_slice_in_dim(partial, of % size * rows, rows, 0)

    total = part(here - way)
    for step in range(2, size + 1):
        total = jax.lax.ppermute(total, axis, [(d, (d + way) % size) for d in range(size)])
        total += part(here - step * way)
    return total


class Scattered(L.Layer):
    """A dense layer whose weight is gathered, and whose gradient is scattered, by hand."""

    def __init__(self, strategy, units, activation, way):
        super().__init__()
        self.strategy, self.units, self.way = strategy, units, way
        self.activation = keras.activations.get(activation)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:-1], self.units), self.compute_dtype)

    def call(self, x):
        def product(x, kernel):
            if self.way != WAYS[2]:
                whole = gathered_for_rings if self.way == WAYS[3] else gathered
                return x @ whole(kernel, AXES)
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
        return Scattered(strategy, units, activation, way)

    inputs = x = keras.Input((TIME, WIDTH))
    for _ in range(BLOCKS):
        x = x + dense(WIDTH)(dense(HIDDEN, "silu")(L.RMSNormalization()(x)))
    made = keras.Model(inputs, x)
    made.compile("adam", "mse")
    return made


def main():
    """Prints the table, row by row."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--way", type=int, choices=range(len(WAYS)), action="append")
    asked = arguments.parse_args().way or range(len(WAYS))
    print("| gradients | step | not overlapped | memory |\n| --- | --- | --- | --- |")
    for way in (WAYS[i] for i in asked):
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
