"""The TPU compiler's estimates for attention: the flash kernel against XLA's own.

Compiles the forward and backward pass for a v5e slice; you need no TPU:

    python benchmarks/attention.py [--time 4096] [--heads 16] [--width 128] [--rows 4]
    python benchmarks/attention.py --short [--chips v4 v6e] [--lengths 196 4096x77] [--causal]
        [--padding] [--heads 12] [--width 64] [--rows 64]

`--short` prints the table behind the lengths that `attention.dispatch` leaves to XLA. For each chip
it has the cycles of all kernels in the compiler's final schedule, loops included, or the cycles in
which HBM can move their bytes, whichever is more. Beside them is the compiler's estimate for XLA,
which it makes before arrays are placed in on-chip memory.

Needs libtpu (pip install 'jax[tpu]'); no TPU.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import tempfile

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
    """The compiler's numbers for one program, per device.

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


FOR_LONG = {"heads": 16, "width": 128, "rows": 4}
SLICES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
# Queries and keys.
SHORT = ("64", "128", "196", "256", "384", "512", "768", "4096x77", "4096x200", "200x4096")


def scheduled(text, dump, chip):
    """Cycles of a program by its schedule, and by the compiler's estimate if it has one."""
    from tpu_schedule import scheduled_kernels

    from keras_tpu_dist.tools.hlo import cost, traffic
    from keras_tpu_dist.tools.hlo.loops import executions
    from keras_tpu_dist.tools.hlo.parse import parse

    program = parse(text)
    runs = executions(program).executions
    schedules = scheduled_kernels(runs, dump)
    bytes_per_cycle = chip.hbm_bandwidth / chip.devices / chip.clock
    by_schedule = by_estimate = 0
    for run in runs:
        if kernel := schedules.get(run.instruction.name):
            moved = traffic.hbm_bytes(program, run.computation, run.instruction)
            bound = max(kernel.cycles, moved / bytes_per_cycle)
            by_schedule += run.times * bound
            by_estimate += run.times * (cost.estimated_cycles(run.instruction) or bound)
    return by_schedule, by_estimate


def short(options):
    """Prints the table of short sequences for each chip."""
    dump = pathlib.Path(tempfile.mkdtemp(prefix="schedule"))
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    kind = f"{', causal' * options.causal}{', a padding mask' * options.padding}"
    print(f"{options.rows} rows, {options.heads} heads of {options.width}{kind}, bfloat16")
    print(
        "| chip | queries | keys | kernel | XLA | of it | XLA, estimated | memory, kernel | XLA |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    try:
        for chip in options.chips:
            for length in options.lengths:
                print(short_row(chip, length, options, dump), flush=True)
    finally:
        shutil.rmtree(dump)


def short_row(chip, length, options, dump):
    from keras_tpu_dist.hardware.topology import Topology

    slice_ = Topology.parse(SLICES[chip])
    device = topologies.get_topology_desc(**slice_.libtpu_arguments()).devices[0]
    mesh = Mesh([device], ("data",))
    time, _, source = length.partition("x")
    time, source = int(time), int(source or time)
    rows = options.rows if time == source else max(1, options.rows // 8)
    found = []
    for flash in (True, False):
        for path in dump.iterdir():
            path.unlink()
        program = gradients(mesh, rows, time, source, options, flash)
        cycles = scheduled(program.as_text(), dump, slice_.chip)
        found.append((*cycles, program.memory_analysis().temp_size_in_bytes / 2**20))
    (kernel, _, kernel_mib), (xla, estimated, xla_mib) = found
    return (
        f"| {chip} | {time} | {source} | {kernel / 1e3:,.0f} k | {xla / 1e3:,.0f} k "
        f"| {xla / kernel:.2f} | {estimated / 1e3:,.0f} k | {kernel_mib:.0f} MiB "
        f"| {xla_mib:.0f} MiB |"
    )


def gradients(mesh, rows, time, source, options, flash_attention):
    split = NamedSharding(mesh, P("data"))
    arguments = [
        jax.ShapeDtypeStruct(
            (rows, length, options.heads, options.width), jnp.bfloat16, sharding=split
        )
        for length in (time, source, source)
    ]
    if options.padding:
        arguments.append(jax.ShapeDtypeStruct((rows, 1, 1, source), bool, sharding=split))

    def loss(query, key, value, mask=None):
        output = dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=options.causal,
            flash_attention=flash_attention,
            mesh=mesh,
            data_axes=("data",),
        )
        return jnp.sum(output.astype(jnp.float32) ** 2)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arguments).compile()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", type=int, default=4096)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--rows", type=int, help="batch rows of each device")
    parser.add_argument("--short", action="store_true", help="short sequences, of one device")
    parser.add_argument("--chips", nargs="+", choices=SLICES, default=["v5e"])
    parser.add_argument("--lengths", nargs="+", default=SHORT, metavar="QUERIES[xKEYS]")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--padding", action="store_true", help="a mask of keys for each row")
    options = parser.parse_args()
    defaults = {"heads": 12, "width": 64, "rows": 64} if options.short else FOR_LONG
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)
    if options.short:
        short(options)
        return
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = Mesh(mesh_utils.create_device_mesh((8,), topology.devices), ("data",))
    shape = {name: getattr(options, name) for name in ("time", *FOR_LONG)}
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
