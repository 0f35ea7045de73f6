"""The TPU compiler's account of attention, the flash kernel against XLA's own.

Compiles forward and gradients for a v5e slice that nobody has attached:

    python benchmarks/attention.py [--time 4096] [--heads 16] [--width 128] [--rows 4]

Needs libtpu (pip install "keras_tpu_dist[tpu]"); no TPU.
"""

import argparse
import dataclasses
import os
import re

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from keras_tpu_dist.attention import dot_product_attention
from keras_tpu_dist.hardware.libtpu import libtpu_environment

os.environ.update(libtpu_environment())
jax.config.update("jax_platforms", "cpu")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program, per device.

    `cycles` sums the compiler's own estimates; it makes none for a kernel, and what a loop does
    for each batch row (only with a mask per row) counts once. `kernels` is how many
    kernels the program holds, and `kernel_cycles` the least their matrix products take: their
    multiply-adds over those of the chip's matrix units, skipped blocks left out.
    """

    name: str
    temp_bytes: int
    cycles: int
    kernels: int
    kernel_cycles: int

    def __str__(self):
        return (
            f"{self.name:26} {self.temp_bytes / 2**20:10.1f} MiB  {self.cycles / 1e6:8.2f} M + "
            f"{self.kernel_cycles / 1e6:6.2f} M in {self.kernels} kernels"
        )


# Four 128 x 128 matrix units, one multiply-add a cycle each: 4 * 128**2 * 2 * 1.5 GHz = 197 TFLOP/s
# https://docs.cloud.google.com/tpu/docs/v5e
MACS_PER_CYCLE = 4 * 128 * 128


def compile_attention(
    name, mesh, *, rows, time, heads, width, flash_attention, mask=None, is_causal=False
):
    split, batch = NamedSharding(mesh, P("data")), rows * mesh.size
    x = jax.ShapeDtypeStruct((batch, time, heads, width), jnp.bfloat16, sharding=split)
    arguments = [x, x, x]
    if mask is not None:
        arguments.append(jax.ShapeDtypeStruct((batch, *mask), bool, sharding=split))

    def loss(query, key, value, mask=None):
        output = dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=is_causal,
            flash_attention=flash_attention,
            mesh=mesh,
            data_axes=("data",),
        )
        return jnp.sum(output.astype(jnp.float32) ** 2)

    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arguments).compile()
    text = program.as_text()
    kernels = text.count('custom_call_target="tpu_custom_call"')
    # 2 products forward, 4 for dk and dv, 3 for dq, of time x time x width; causality halves them.
    multiply_adds = 9 * rows * time**2 * heads * width * (0.5 + 256 / time if is_causal else 1)
    return Compiled(
        name=name,
        temp_bytes=program.memory_analysis().temp_size_in_bytes,
        cycles=sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text))),
        kernels=kernels,
        kernel_cycles=round(multiply_adds / MACS_PER_CYCLE) if kernels else 0,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="batch rows of each device")
    options = parser.parse_args()
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = Mesh(mesh_utils.create_device_mesh((8,), topology.devices), ("data",))
    shape = vars(options)
    print(f"{shape} on v5e:2x4, bfloat16, forward and gradients, per device: HBM for temporaries,")
    print("cycles the compiler estimates + least cycles of the kernels' matrix products")
    kinds = {
        "no mask": {},
        "causal": {"is_causal": True},
        "key mask": {"mask": (1, 1, options.time)},
        "mask per row": {"mask": (1, options.time, options.time)},
    }
    for kind, settings in kinds.items():
        for name, flash in (("kernel", True), ("XLA", False)):
            print(
                compile_attention(
                    f"{kind}, {name}", mesh, flash_attention=flash, **shape, **settings
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
