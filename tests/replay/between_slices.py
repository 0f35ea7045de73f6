"""Collectives between slices: libtpu's program on simulated devices, beside the CPU compiler's.

    python tests/replay/between_slices.py 2*v5e:2x2 2x1x4 [NAME ...]

With 2x2x2:1,0,2 the axes of the mesh are in another order, so that it mixes slices. Prints the
largest difference of each as JSON. It needs eight simulated devices.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist._keras.replicas import compiled_replicas, run_replicas
from keras_tpu_dist.hardware.libtpu import libtpu_environment
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools.hlo.parse import parse
from keras_tpu_dist.tools.replay.rewrite import runnable

AXES = ("slice", "part", "chip")
WHOLE = PartitionSpec(AXES)

# Name: what a device computes of its rows, how its results lie, and the dtype.
COLLECTIVES = {
    "sum": (lambda x: lax.psum(x, AXES), PartitionSpec(), "float32"),
    "sum of bfloat16": (lambda x: lax.psum(x, AXES), PartitionSpec(), "bfloat16"),
    "sum of integers": (lambda x: lax.psum(x, AXES), PartitionSpec(), "int32"),
    "largest": (lambda x: lax.pmax(x, AXES), PartitionSpec(), "float32"),
    "smallest over slices": (
        lambda x: lax.pmin(x, "slice"),
        PartitionSpec(("part", "chip")),
        "float32",
    ),
    "sum over slices and chips": (
        lambda x: lax.psum(x, ("slice", "chip")),
        PartitionSpec("part"),
        "float32",
    ),
    "rows of all": (lambda x: lax.all_gather(x, AXES, tiled=True), PartitionSpec(), "float32"),
    "columns of slices": (
        lambda x: lax.all_gather(x, "slice", axis=1, tiled=True),
        PartitionSpec(("part", "chip")),
        "float32",
    ),
    "parts of sums": (
        lambda x: lax.psum_scatter(x, "slice", scatter_dimension=1, tiled=True),
        WHOLE,
        "float32",
    ),
    "parts of all sums": (lambda x: lax.psum_scatter(x, AXES, tiled=True), WHOLE, "float32"),
    "rows for columns": (lambda x: lax.all_to_all(x, "slice", 0, 1, tiled=True), WHOLE, "float32"),
    "columns for rows": (lambda x: lax.all_to_all(x, AXES, 1, 0, tiled=True), WHOLE, "float32"),
    "rows of the next": (
        lambda x: lax.ppermute(
            x, AXES, [(n, (n + 1) % lax.psum(1, AXES)) for n in range(lax.psum(1, AXES))]
        ),
        WHOLE,
        "float32",
    ),
    "numbers": (
        lambda x: x + 10 * lax.axis_index("slice") + lax.axis_index(("part", "chip")),
        WHOLE,
        "float32",
    ),
}


def compared(name, topology, parts):
    """The largest difference of what two slices compute and what simulated devices do."""
    function, out, dtype = COLLECTIVES[name]
    of_slices = topologies.get_topology_desc(**Topology.parse(topology).libtpu_arguments())
    sides, _, order = parts.partition(":")
    described = np.array(of_slices.devices).reshape([int(side) for side in sides.split("x")])
    described = described.transpose(
        [int(axis) for axis in order.split(",")] if order else (0, 1, 2)
    )
    devices = jax.devices()[: described.size]
    there, here = Mesh(described, AXES), Mesh(np.array(devices).reshape(described.shape), AXES)
    x = np.arange(64 * 128).reshape(64, 128) % 61
    x = jnp.asarray(x, dtype)

    def program(mesh):
        sharded = jax.shard_map(function, mesh=mesh, in_specs=WHOLE, out_specs=out, check_vma=False)
        rows = NamedSharding(mesh, WHOLE)
        return jax.jit(sharded, in_shardings=rows), rows

    on_slices, rows = program(there)
    given = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
    text = on_slices.lower(given).compile().as_text()
    expected = program(here)[0](x)

    replayed = runnable(parse(text), [device.id for device in described.flat])
    executable = compiled_replicas(replayed, devices)
    replicas = Mesh(np.array(devices), ("replica",))
    own = NamedSharding(replicas, PartitionSpec())
    cut = list(map(jax.device_put, np.split(np.asarray(x), len(devices)), devices))
    array = jax.make_array_from_single_device_arrays(cut[0].shape, own, cut)
    (parts_found,) = run_replicas(executable, [array])
    shards = {shard.device: shard.data for shard in expected.addressable_shards}
    return max(
        float(np.abs(np.asarray(found, "float64") - np.asarray(shards[device], "float64")).max())
        for found, device in zip(parts_found, devices, strict=True)
    )


def main(topology, parts, *names):
    os.environ.update({k: v for k, v in libtpu_environment().items() if k != "JAX_PLATFORMS"})
    print(json.dumps({name: compared(name, topology, parts) for name in names or COLLECTIVES}))


if __name__ == "__main__":
    main(*sys.argv[1:])
