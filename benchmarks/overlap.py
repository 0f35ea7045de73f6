"""The effect of `compiler_options="auto"`, by the TPU compiler: no chip is needed.

    python benchmarks/overlap.py                   # all rows
    python benchmarks/overlap.py decoder --effort quick

One train step with the compiler's defaults, and with a strategy's options: the estimated step, and
the part of it in which chips wait for collectives. Nothing is measured on a chip.
"""

import argparse

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import keras
import maxtext
from remat import MODELS

from keras_tpu_dist.show.text import duration_text, size_text

HEADER = ("model", "slice", "mesh", "layout", "options", "step", "not overlapped", "memory")


def decoder():
    """Two layers of the model of 16 billion parameters."""
    model = maxtext.decoder(maxtext.SHAPES["16B"], 2)
    ktd.scan_blocks(model, False)
    return model


def small(name):
    """A function that builds a model of `benchmarks/remat.py`."""

    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        model = MODELS[name][0]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        return model

    return build


# Model, slice, mesh, layout, rows of a chip.
ROWS = {
    "decoder": [
        (decoder, "v5e:16x16", None, "fsdp", 2),
        (decoder, "v5e:8x8", None, "fsdp", 2),
        (decoder, "v5e:4x8", None, "fsdp", 2),
        (decoder, "v5e:2x4", None, "fsdp", 2),
        (decoder, "v5e:16x16", {"data": 16, "model": 16}, "tensor_parallel", 1),
        (decoder, "v5p:4x4x4", None, "fsdp", 2),
        (decoder, "v6e:16x16", None, "fsdp", 2),
        (decoder, "2*v5e:16x16", None, "fsdp", 2),
    ],
    "vit": [(small("vit"), "v5e:4x4", None, None, 32)],
    "small decoder": [(small("decoder"), "v5e:4x4", None, None, 4)],
    "conv": [(small("conv"), "v5e:4x4", None, None, 32)],
}


def measured(build, topology, mesh, layout, rows, options, effort):
    """The dry run of a train step."""
    strategy = ktd.TPUStrategy(mesh, layout, topology=topology, compiler_options=options)
    return ktd.dry_run(build, strategy, batch_size=rows * strategy.mesh.size, effort=effort)


def main():
    """Prints the table, row by row."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("models", nargs="*", default=[*ROWS])
    arguments.add_argument("--effort", default="exact")
    arguments.add_argument("--slices", nargs="+", help="rows of these slices only")
    arguments.add_argument("--auto-only", action="store_true", help="not the compiler's defaults")
    asked = arguments.parse_args()
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for name in asked.models:
        for row in ROWS[name]:
            if asked.slices and row[1] not in asked.slices:
                continue
            for options in ("auto",) if asked.auto_only else (None, "auto"):
                run = measured(*row, options, asked.effort)
                times = run.estimate
                mesh = " x ".join(f"{axis} {n}" for axis, n in run.mesh)
                cells = [name, row[1], mesh, row[3], options]
                if times is None:
                    cells += [run.error or "no program", "", size_text(run.total_bytes)]
                else:
                    part = f"{times.exposed_link / times.step:.1%}"
                    waits = f"{duration_text(times.exposed_link)}, {part}"
                    cells += [duration_text(times.step), waits, size_text(run.total_bytes)]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
