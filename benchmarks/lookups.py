"""Lookups in a table split over the data axes, by XLA and by width, without a chip.

    python benchmarks/lookups.py [--effort exact]

One train step (bfloat16, Adam) of a table and a Dense layer of 8 features, for slices and sizes of
decoders, with `tables=None` and with the table by its width, even if `"auto"` would not choose
that. Prints the TPU compiler's estimates, and what "auto" chooses. Needs libtpu (pip install
'jax[tpu]'); no TPU.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
import functools
from unittest import mock

import keras

from keras_tpu_dist.programs.tables import step, width
from keras_tpu_dist.show.text import duration_text, size_text

L = keras.layers
TIME = 2048
# Slice, rows and width of the table, rows of the batch of a chip.
ROWS = [
    ("v5e:4x4", 32_000, 2048, 2),
    ("v5e:2x4", 256_000, 2048, 2),
    ("v5e:4x4", 128_256, 4096, 2),
    ("v5e:8x8", 32_000, 4096, 2),
    ("v5e:8x8", 128_256, 4096, 2),
    ("v5e:16x16", 128_256, 4096, 2),
    ("v5p:2x2x4", 32_000, 4096, 4),
    ("v5p:2x2x4", 128_256, 4096, 4),
    ("v6e:4x4", 128_256, 4096, 4),
]
HEADER = ("slice", "table", "ids", "tables", "step", "kernels", "links", "memory", "chosen")


def model(rows, features):
    """A table, and what uses it."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    ids = keras.Input((TIME,), dtype="int32")
    built = keras.Model(ids, L.Dense(8)(L.Embedding(rows, features, name="table")(ids)))
    built.compile("adam", "mse")
    return built


def measured(topology, rows, features, batch, tables, effort):
    """A dry run of the train step."""
    strategy = ktd.TPUStrategy(None, "fsdp", topology=topology, tables=tables)
    count = batch * strategy.mesh.size
    build = functools.partial(model, rows, features)
    return count * TIME, ktd.dry_run(build, strategy, batch_size=count, effort=effort)


def main():
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--effort", default="exact", choices=["quick", "exact"])
    effort = parser.parse_args().effort
    chosen, decide = [], width.is_shorter

    def always(*arguments):
        chosen.append(decide(*arguments))
        return True

    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for topology, rows, features, batch in ROWS:
        for tables in (None, "auto"):
            with mock.patch.object(step, "is_shorter", always):
                ids, run = measured(topology, rows, features, batch, tables, effort)
            times = run.estimate
            cells = topology, f"{rows:,} x {features:,}", f"{ids:,}", tables
            cells += duration_text(times.step), duration_text(times.kernels)
            cells += duration_text(times.exposed_link), size_text(run.memory["temporaries"])
            cells += (chosen.pop() if tables else "",)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
