"""Two towers on the two logical devices of a replica, by the TPU compiler: no chip is needed.

Prints the compiler's cycles of the busiest device without collectives, and the bytes of the
collectives, for towers that every device computes and for towers assigned to one device each.
Assignment pays with many rows per weight (first command), and not with few (second command).

    python benchmarks/assign.py --width 2048 --rows 32768
    python benchmarks/assign.py --width 4096 --rows 4096
"""

import argparse

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import keras

from keras_tpu_dist.tools.dryrun.build import Subject, lower
from keras_tpu_dist.tools.dryrun.compile import compile_lowered
from keras_tpu_dist.tools.hlo.parse import parse

DEVICES = 2


def build(width, assigned):
    """A model of two towers."""
    layers = keras.layers
    x = keras.Input((width,))
    parts = []
    for k in range(DEVICES):
        inner = [keras.Input((width,)), layers.Dense(width, "relu"), layers.Dense(width)]
        tower = keras.Sequential(inner, name=f"tower{k}")
        parts.append((ktd.assign(tower, k) if assigned else tower)(x))
    model = keras.Model(x, layers.Dense(1)(layers.Concatenate()(parts)))
    model.compile("sgd", "mse")
    return model


def cycles_of(program, name, device):
    """Estimated cycles of a computation on one logical device."""
    total = 0
    for instruction in program.computations[name]:
        total += instruction.number("estimated_cycles") or 0
        if instruction.opcode == "conditional":
            skipped, computed = instruction.called
            mine = f"tower{device})" in instruction.op_name
            total += cycles_of(program, computed if mine else skipped, device)
    return total


def main():
    """Compiles both and prints a table."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--width", type=int, default=2048)
    arguments.add_argument("--rows", type=int, default=32768)
    given = arguments.parse_args()
    ktd.simulate(8)
    strategy = ktd.TPUStrategy(ktd.DeviceAssignment.build("v5e:2x4", computation_shape=(1, 2)))
    for assigned in (False, True):
        step = Subject(lambda assigned=assigned: build(given.width, assigned), strategy, given.rows)
        lowered = lower(step)
        compiled = compile_lowered(lowered, effort="exact", timeout=600)
        if compiled.error:
            raise SystemExit(compiled.error)
        program = parse(compiled.text)
        cycles = max(cycles_of(program, program.entry.name, k) for k in range(DEVICES))
        reduced = sum(
            shape.bytes
            for computation in program
            for instruction in computation
            if instruction.opcode.startswith("all-reduce")
            for shape in instruction.shapes
        )
        what = "assigned to one device each" if assigned else "computed by every device"
        print(f"{what:30s} {cycles:>12,} cycles, all-reduces of {reduced / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
