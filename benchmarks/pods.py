"""The time of a strategy, a plan, explain, lint, a dry run and a search for thousands of chips.

    python benchmarks/pods.py [--topology v5p:4x4x4 v5p:8x8x8 v5p:16x16x24 tpu7x:16x16x36]

Each topology runs in its own process. Prints wall and CPU seconds of each part, and the peak memory
so far, for a decoder of four blocks without values, "tensor_parallel" on "data" x 4, with sixteen
rows per device. The search compiles two candidates. The exponent is that of CPU seconds over chips,
from the first topology to the last.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time

TOPOLOGIES = ("v5p:4x4x4", "v5p:8x8x8", "v5p:16x16x24", "tpu7x:16x16x36")
PARTS = ("strategy", "plan", "explain", "lint", "show", "dry run", "search")


def decoder(compiled=True):
    import keras

    tokens = keras.Input((128,), dtype="int32")
    x = keras.layers.Embedding(32_000, 1024)(tokens)
    for _ in range(4):
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(16, 64)(h, h, use_causal_mask=True)
        h = keras.layers.LayerNormalization()(x)
        h = keras.layers.Dense(4096, activation="gelu")(h)
        x = x + keras.layers.Dense(1024)(h)
    model = keras.Model(tokens, keras.layers.Dense(32_000)(x))
    if compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss)
    return model


def seconds():
    """Wall and CPU seconds, including those of ended child processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time() + children.ru_utime + children.ru_stime


def most_memory():
    of = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in of) * 1024


def measure(name, parts):
    """Prints one line of JSON for each part."""
    import keras

    import keras_tpu_dist as ktd

    chips = ktd.Topology.parse(name)
    rows = 16 * chips.num_devices
    strategy = ktd.TPUStrategy({"data": -1, "model": 4}, "tensor_parallel", topology=chips)
    with keras.StatelessScope(initialize_variables=False):
        model = decoder(compiled=False)
    steps = {
        "strategy": lambda: ktd.TPUStrategy(
            {"data": -1, "model": 4}, "tensor_parallel", topology=chips
        ),
        "plan": lambda: strategy.placement(model),
        "explain": lambda: str(strategy.explain(model)),
        "lint": lambda: str(strategy.lint(model)),
        "show": lambda: strategy.show(model)._repr_html_(),
        "dry run": lambda: str(ktd.dry_run(decoder, strategy, batch_size=rows)),
        "search": lambda: str(
            ktd.search(
                decoder, chips, batch_size=rows, compilations=2, exact=0, budget_s=300, cache=False
            )
        ),
    }
    for part in parts:
        wall, cpu = seconds()
        steps[part]()
        then = seconds()
        found = [part, then[0] - wall, then[1] - cpu, most_memory()]
        print(json.dumps(found), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return measure(options.topology[0], options.parts)
    import keras_tpu_dist as ktd

    of_parts = {}
    print(f"{'topology':16} {'chips':>6} {'part':10} {'wall s':>8} {'CPU s':>8} {'GiB':>6}")
    for name in options.topology:
        chips = ktd.Topology.parse(name).num_chips
        command = [sys.executable, __file__, "--one", "--topology", name, "--parts"]
        with subprocess.Popen(
            [*command, *options.parts], stdout=subprocess.PIPE, text=True
        ) as child:
            for line in child.stdout:
                if not line.startswith("["):
                    continue
                part, wall, cpu, memory = json.loads(line)
                of_parts.setdefault(part, []).append((chips, cpu, memory))
                size = f"{memory / 2**30:6.2f}"
                print(f"{name:16} {chips:6} {part:10} {wall:8.2f} {cpu:8.2f} {size}", flush=True)
        if child.returncode:
            sys.exit(f"{name}: exit code {child.returncode}")
    for part, rows in of_parts.items():
        (fewer, before, less), (more, after, most) = rows[0], rows[-1]
        if more > fewer:
            grown = math.log(more / fewer)
            cpu, memory = math.log(after / before) / grown, math.log(most / less) / grown
            print(f"{part:10} exponent of CPU seconds {cpu:5.2f}, of memory {memory:5.2f}")
    return None


if __name__ == "__main__":
    main()
