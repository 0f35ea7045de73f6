"""Weights that libtpu fetches part by part: what a step computes, and how it orders the parts.

    python tests/replay/fetched_parts.py 20

Draws stacks of residual blocks, compiles a step of gradient descent for one chip, runs what the
compiler made on a simulated device, and prints for each stack the largest difference, the weights
that are joined from parts and those whose parts are named in another order than their places'.
"""

import json
import os
import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist._keras.replicas import compiled_replicas, run_replicas
from keras_tpu_dist.hardware.libtpu import libtpu_environment
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools.hlo.operations import target
from keras_tpu_dist.tools.hlo.parse import parse
from keras_tpu_dist.tools.replay.rewrite import runnable

# (depth, width inside, width outside, rows); parts of a kernel of the first are out of order.
FIRST = (8, 768, 384, 64)


def drawn(rng):
    """A stack."""
    depth, rows = int(rng.integers(4, 20)), 8 * int(rng.integers(1, 20))
    return depth, 128 * int(rng.integers(2, 13)), 128 * int(rng.integers(2, 9)), rows


def step(weights, x):
    """What a step of gradient descent makes of the weights."""

    def loss(weights):
        y = x
        for inner, bias, outer in weights:
            y = y + jax.nn.gelu(y @ inner + bias) @ outer
        return (y * y).mean()

    gradients = jax.grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradients)


def out_of_order(program):
    """The joins of a program, and those whose parts are not named by their places."""
    joins, moved = 0, 0
    for computation in program:
        for instruction in computation:
            if target(instruction).name != "ConcatBitcast":
                continue
            parts = [computation.operands(done)[0] for done in computation.operands(instruction)]
            places = [part.integers("slice") for part in parts]
            joins, moved = joins + 1, moved + (places != sorted(places))
    return joins, moved


def compared(stack, chip, rng):
    """The largest difference relative to a weight's update, and what `out_of_order` counts."""
    depth, inside, outside, rows = stack
    array = lambda *shape: (rng.normal(size=shape) / shape[0] ** 0.5).astype("float32")  # noqa: E731
    block = lambda: (array(outside, inside), array(inside), array(inside, outside))  # noqa: E731
    given = [block() for _ in range(depth)], array(rows, outside)
    described = topologies.get_topology_desc(**Topology.parse(chip).libtpu_arguments()).devices
    there = NamedSharding(Mesh(np.array(described[:1]), "x"), PartitionSpec())
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), given)
    lowered = jax.jit(step, donate_argnums=0).lower(*shapes)
    program = parse(lowered.compile().as_text())
    devices = jax.devices()[:1]
    executable = compiled_replicas(runnable(program, range(1)), devices)
    own = NamedSharding(Mesh(np.array(devices), "replica"), PartitionSpec())
    placed = [jax.device_put(a, own) for a in jax.tree.leaves(given)]
    found = [parts[0] for parts in run_replicas(executable, placed)]
    expected = jax.tree.leaves(jax.jit(step)(*given))
    gaps = [
        float(np.abs(np.asarray(a) - b).max() / np.abs(b - before).max())
        for a, b, before in zip(
            found, map(np.asarray, expected), jax.tree.leaves(given[0]), strict=True
        )
    ]
    return max(gaps), *out_of_order(program)


def main(number, chip="v5e:1x1"):
    os.environ.update({k: v for k, v in libtpu_environment().items() if k != "JAX_PLATFORMS"})
    rng = np.random.default_rng(0)
    jax.config.update("jax_default_matmul_precision", "highest")
    for n in range(int(number)):
        stack = drawn(rng) if n else FIRST
        print(json.dumps([stack, *compared(stack, chip, rng)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
