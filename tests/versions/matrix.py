"""Every chip generation and version of JAX: does the TPU compiler take our programs? Needs no chip.

    python tests/versions/matrix.py --here                  # the libraries of this environment
    python tests/versions/matrix.py                         # all supported ends, in environments
    python tests/versions/matrix.py --here --chips v6e v5p --cases MLP --markdown

A cell is one program compiled at the defaults of a strategy, for one chip and for a slice of eight
devices, in a process of its own with a timeout. Its collectives are compared with those of v5e, or
of v2 where no kernel of ours is in it.
Environments are made by pip below --environments and used again.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of each generation one chip, where there is such a slice, and eight devices.
CHIPS = {
    "v5e": ("v5e:1x1", "v5e:2x4"),  # first: the others are compared with it
    "v2": (None, "v2:2x2"),
    "v3": (None, "v3:2x2"),
    "v4": (None, "v4:2x2x2"),
    "v5p": (None, "v5p:2x2x2"),
    "v6e": ("v6e:1x1", "v6e:2x4"),
    "tpu7x": (None, "tpu7x:2x2x1"),
}
CASES = ("MLP", "LSTM", "attention", "FSDP decoder", "strategy.run")
# Python, and what pip installs into its environment: the ends of what we say we support.
VERSIONS = {
    "3.11, oldest": ("3.11", ["jax[tpu]==0.10.0"]),
    "3.11, newest": ("3.11", ["jax[tpu]>=0.10,!=0.10.2"]),
    "newest Python": ("3.13", ["jax[tpu]"]),
    "newest Python and libtpu": ("3.13", ["jax", "libtpu"]),
}
SECONDS = 240.0
_MOST_WORDS = 400


def mlp():
    import keras

    layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(16)]
    model = keras.Sequential([keras.Input((128,)), *layers])
    model.compile("adam", "mse")
    return model


def lstm():
    import keras

    import keras_tpu_dist as ktd

    model = keras.Sequential([keras.Input((16, 128)), ktd.layers.LSTM(128), keras.layers.Dense(16)])
    model.compile("adam", "mse")
    return model


def attention():
    import keras

    inputs = keras.Input((256, 128))
    attended = keras.layers.MultiHeadAttention(2, 64)(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, keras.layers.Dense(16)(attended))
    model.compile("adam", "mse")
    return model


def decoder():
    import keras

    tokens = keras.Input((128,), dtype="int32")
    x = keras.layers.Embedding(512, 128)(tokens)
    for _ in range(2):
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(2, 64)(normed, normed, use_causal_mask=True)
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(128)(keras.layers.Dense(512, activation="gelu")(normed))
    model = keras.Model(tokens, keras.layers.Dense(512)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


BUILDERS = {"MLP": mlp, "LSTM": lstm, "attention": attention, "FSDP decoder": decoder}


def of_model(case, topology):
    """The collectives of a train step, and whether a kernel of ours is in it."""
    import keras_tpu_dist as ktd

    strategy = ktd.TPUStrategy(layout="fsdp" if "FSDP" in case else None, topology=topology)
    rows = {"batch_size": 8 * strategy.mesh.size}
    run = ktd.dry_run(BUILDERS[case], strategy, **rows, timeout=SECONDS)
    assert run.fits, run.error
    return collectives(run.cost.collectives), run.cost.kernel_flops > 0


def of_replica_code(topology):
    """The collectives of a step under `strategy.run`, made on simulated devices."""
    import compile_only
    import jax
    import keras
    import numpy as np
    from helpers import stepped

    import keras_tpu_dist as ktd
    from keras_tpu_dist.tools import hlo

    devices = ktd.Topology.parse(topology).num_devices
    strategy = ktd.TPUStrategy({"data": devices}, devices=jax.devices()[:devices])
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.Adam()

    def step(x, y):
        value, _ = stepped(model, optimizer, x, lambda outputs: ((outputs - y) ** 2).mean())
        return ktd.get_replica_context().all_reduce("mean", value)

    batch = (np.ones((8 * devices, 128), "float32"), np.ones((8 * devices, 16), "float32"))
    (placed,) = strategy.distribute_dataset([batch])
    strategy.run(step, placed)
    compiled = compile_only.compiled_for_tpu(strategy, step, placed, topology)
    assert compiled.error is None, compiled.error
    found = hlo.analyze(compiled.text, wire=hlo.Wire.of({"data": devices})).collectives
    return collectives(found), False


def collectives(found):
    """Bytes by kind and axes.

    How many collectives carry them is the compiler's choice, and so is whether a sum of which each
    device keeps a part is a reduce-scatter: that depends on the shape of the slice.
    """
    total = {}
    for one in found:
        kind = "sum" if one.kind in ("all-reduce", "reduce-scatter") else one.kind
        key = f"{kind} over {'/'.join(one.axes)}"
        total[key] = total.get(key, 0) + one.bytes * one.times
    return dict(sorted(total.items()))


def cell(case, topology):
    """One program compiled in this process, as plain data."""
    started = time.perf_counter()
    try:
        found, kernel = of_replica_code(topology) if "run" in case else of_model(case, topology)
        answer = {"collectives": found, "kernel": kernel}
    except Exception as error:  # a refused cell is a row of the table
        answer = {"error": f"{type(error).__name__}: {error}"[:_MOST_WORDS]}
    return {**answer, "seconds": time.perf_counter() - started}


def worker(chips, cases):
    """Prints each cell of this environment as a line of JSON."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import keras_tpu_dist as ktd

    ktd.simulate(8)
    for chip in chips:
        for where, topology in zip(("one chip", "slice"), CHIPS[chip]):
            for case in cases if topology else ():
                found = {"chip": chip, "where": where, "case": case, **cell(case, topology)}
                print("CELL " + json.dumps(found), flush=True)


def cells(python, chips, cases):
    """The cells of an environment; one that ends early has an error for what is missing."""
    command = [str(python), __file__, "--worker", "--chips", *chips, "--cases", *cases]
    names = [(c, w, k) for c in chips for w in ("one chip", "slice") for k in cases]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS * len(names),
        env=environment,
    )
    found = [json.loads(line[5:]) for line in run.stdout.splitlines() if line.startswith("CELL ")]
    if run.returncode:
        last = run.stderr.strip().splitlines()[-3:]
        found.append({"chip": "?", "where": "?", "case": "?", "error": " ".join(last)})
    return found


def alike(found, expected):
    """Whether collectives are of the same kinds and axes, and carry the same bytes but for 5 %.

    A small weight that is read twice is gathered once or twice, as the compiler likes.
    """
    return found.keys() == expected.keys() and all(
        abs(found[kind] - expected[kind]) <= 0.05 * expected[kind] for kind in found
    )


def judged(found):
    """Each cell with a word, and in words what is wrong with it."""
    first: dict[tuple, dict] = {}
    for one in found:
        # v2 and v3 have no kernels, and so other programs: v3 is compared with v2
        key = one["where"], one["case"], one.get("kernel")
        same = first.setdefault(key, one.get("collectives"))
        if "error" in one:
            one["word"] = "REFUSED"
        elif not alike(one["collectives"], same):
            one["word"] = "other collectives"
            one["error"] = f"{one['collectives']}, first {same}"
        else:
            one["word"] = "ok"
    return found


def table(label, versions, found, chips, cases):
    """Lines of one environment's table: chips down, cases across."""
    yield f"\n{label}: {versions}\n"
    yield "| chip | " + " | ".join(cases) + " |"
    yield "|---|" + "---|" * len(cases)
    for chip in chips:
        row = []
        for case in cases:
            mine = [c for c in found if (c["chip"], c["case"]) == (chip, case)]
            words = dict.fromkeys(c["word"] for c in mine)
            kernel = ", kernel" if mine and all(c.get("kernel") for c in mine) else ""
            row.append(" / ".join(words) + kernel if mine else "-")
        yield f"| {chip} | " + " | ".join(row) + " |"
    for one in found:
        if one.get("word") != "ok":
            yield f"{one['chip']}, {one['where']}, {one['case']}: {one['error']}"


def environment(python, packages, folder):
    """A virtual environment with the packages, made once."""
    made = folder / ("-".join([python, *packages]).replace(" ", "").replace("/", ""))
    if not (made / "ready").exists():
        found = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
        subprocess.run(
            [str(found[-1] if found else f"python{python}"), "-m", "venv", made], check=True
        )
        pip = [str(made / "bin" / "pip"), "install", "-q", "--upgrade"]
        subprocess.run([*pip, *packages, "keras>=3.15,<3.17", "rich"], check=True)
        (made / "ready").touch()
    return made / "bin" / "python"


def installed(python):
    """Versions of what decides, as an environment has them."""
    code = (
        "import platform, importlib.metadata as m; print('Python', platform.python_version(), "
        "*[f'{n} {m.version(n)}' for n in ('keras', 'jax', 'libtpu')])"
    )
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip()


def main():
    """Prints the table; exit code 1 if a cell is refused or has other collectives."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--here", action="store_true", help="this environment only")
    options.add_argument("--pythons", nargs="+", help="these environments' interpreters only")
    options.add_argument("--chips", nargs="+", default=[*CHIPS], choices=[*CHIPS])
    options.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    options.add_argument("--versions", nargs="+", default=[*VERSIONS], choices=[*VERSIONS])
    options.add_argument("--environments", type=Path, default=Path("/tmp/ktd_versions"))
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.worker:
        worker(asked.chips, asked.cases)
        return
    started, bad, count = time.perf_counter(), 0, 0
    pythons = {path: path for path in asked.pythons or [sys.executable]}
    if not (asked.here or asked.pythons):
        pythons = {n: environment(*VERSIONS[n], asked.environments) for n in asked.versions}
    for label, python in pythons.items():
        found = judged(cells(python, asked.chips, asked.cases))
        bad += sum(c["word"] != "ok" for c in found)
        count += len(found)
        print(
            *table(label, installed(python), found, asked.chips, asked.cases), sep="\n", flush=True
        )
    seconds = time.perf_counter() - started
    print(f"\n{count} cells, {bad} not as they should be, {seconds:.0f} s, {datetime.date.today()}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
