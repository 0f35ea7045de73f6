"""How near hand-written kernels come to their roofline, by the compiler's final schedule.

    python benchmarks/kernels.py

Dry runs count a kernel at its roofline: its matrix products at peak, or its bytes at the speed of
HBM. Its schedule says how many cycles the core is busy. Prints both for kernels of attention and of
recurrent layers on v5e, forward and backward. Needs libtpu; no TPU.
"""

import argparse
import os
import pathlib
import shutil
import tempfile

# Rows, heads, time, width. Without a causal mask: schedules count blocks that it skips.
ATTENTION = ((64, 12, 512, 64), (8, 16, 2048, 64), (8, 16, 2048, 128), (1, 16, 8192, 128))
# cell, batch, time steps, units
RECURRENT = (
    ("LSTM", 16, 64, 128),
    ("LSTM", 64, 128, 256),
    ("LSTM", 256, 128, 512),
    ("LSTM", 1024, 64, 1024),
    ("GRU", 64, 128, 256),
)


def of_kernels(text, dump):
    """Cycles of a program's kernels: at their roofline, and in their schedules."""
    from tpu_schedule import kernels as scheduled

    from keras_tpu_dist.hardware.topology import Topology
    from keras_tpu_dist.tools.hlo import kernels, traffic
    from keras_tpu_dist.tools.hlo.loops import executions
    from keras_tpu_dist.tools.hlo.parse import parse

    slice_, program = Topology.parse("v5e:2x2"), parse(text)
    # No shorter than HBM needs: a schedule leaves out what a kernel waits for.
    cycles = {kernel.name: kernel.bound for kernel in scheduled(text, dump)}
    roofline = schedule = 0.0
    for run in executions(program).executions:
        instruction = run.instruction
        if not kernels.is_kernel(instruction) or not cycles.get(instruction.name):
            continue
        flops = kernels.flops(instruction, run.computation.operands(instruction)) or 0
        moved = traffic.hbm_bytes(program, run.computation, instruction)
        seconds = max(flops / slice_.peak_flops(), moved / slice_.hbm_bandwidth)
        roofline += run.times * seconds * slice_.chip.clock
        schedule += run.times * cycles[instruction.name]
    return roofline, schedule


def attention(case, dump):
    import numpy as np
    from attention import gradients
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from keras_tpu_dist.hardware.topology import Topology

    rows, heads, time, width = case
    options = argparse.Namespace(heads=heads, width=width, causal=False, padding=False)
    described = topologies.get_topology_desc(**Topology.parse("v5e:2x2").libtpu_arguments())
    mesh = Mesh(np.array(described.devices[:1]), ("data",))
    text = gradients(mesh, rows, time, time, options, True).as_text()
    name = f"attention, {rows} rows of {time}, {heads} heads of {width}"
    return name, *of_kernels(text, dump)


def recurrent(case, dump):
    import keras

    import keras_tpu_dist as ktd
    from keras_tpu_dist.tools.dryrun.build import Subject, lower
    from keras_tpu_dist.tools.dryrun.compile import compile_lowered

    cell, batch, steps, units = case

    def build():
        rows = keras.Input((steps, units))
        layer = getattr(ktd.layers, cell)(units)
        model = keras.Model(rows, layer(rows))
        model.compile("sgd", "mse")
        return model

    strategy = ktd.TPUStrategy({"data": 4}, topology="v5e:2x2")
    compiled = compile_lowered(
        lower(Subject(build, strategy, 4 * batch)), effort="exact", timeout=3000
    )
    return f"{cell}, {batch} rows of {steps}, {units} units", *of_kernels(compiled.text, dump)


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    dump = pathlib.Path(tempfile.mkdtemp(prefix="schedule"))
    # Before libtpu is loaded.
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    print("| kernels, v5e | at their roofline | scheduled | of the roofline |")
    print("|---|--:|--:|--:|", flush=True)
    cases = [*((attention, case) for case in ATTENTION), *((recurrent, c) for c in RECURRENT)]
    try:
        for measure, case in cases:
            for path in dump.iterdir():
                path.unlink()
            name, roofline, schedule = measure(case, dump)
            share = f"{roofline / schedule:.2f}" if schedule else "no kernel"
            print(
                f"| {name} | {roofline / 1e3:,.0f} k | {schedule / 1e3:,.0f} k | {share} |",
                flush=True,
            )
    finally:
        shutil.rmtree(dump)


if __name__ == "__main__":
    main()
