"""Which operations the TPU compilers write, and whether `tools/hlo/operations.py` has them all.

    python tests/versions/opcodes.py --here                 # the libraries of this environment
    python tests/versions/opcodes.py --pythons A B B --libtpu /tmp/libtpu
    python tests/versions/opcodes.py --here --chips v5e v6e --cases dropout --keep /tmp/texts
    python tests/versions/opcodes.py --pythons A B --log FILE   # hours; it may be stopped

Small programs are compiled for eight devices of every chip, as `ktd.verify` compiles them, each in
a process of its own, and their operations are counted: opcodes, and the targets of custom calls.
`--libtpu` names a folder with another libtpu, unpacked from its wheel, for the last of the pythons.
What stands in the `--log` is not compiled again.
Prints one table, and ends with 1 if an operation is in no table. Needs no chip.
"""

import argparse
import collections
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matrix

ROOT = Path(__file__).parents[2]
SECONDS = 400.0
STEPS = 4


def dropout():
    """Random numbers, pools, windows, statistics."""
    import keras

    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.GaussianNoise(0.1)(layers.Conv2D(8, 3, activation="relu", padding="same")(image))
    x = layers.DepthwiseConv2D(3)(layers.BatchNormalization()(layers.MaxPooling2D()(x)))
    x = layers.Dropout(0.3)(layers.Flatten()(x))
    model = keras.Model(image, layers.Dense(10)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def lstm():
    """A recurrence whose loop sums gradients over devices."""
    import keras

    rows = keras.Input((12, 16))
    model = keras.Model(rows, keras.layers.Dense(4)(keras.layers.LSTM(32)(rows)))
    model.compile("sgd", "mse")
    return model


def decoder():
    """Embeddings and attention, with a kernel where the chip has one."""
    return matrix.decoder()


def counts():
    """Rows that are scattered in a loop, and a table."""
    import keras

    class Counts(keras.layers.Layer):
        def build(self, shape):
            zeros = {"shape": (96,), "initializer": "zeros", "trainable": False}
            self.n = self.add_weight(**zeros, name="n")

        def call(self, ids):
            flat = keras.ops.reshape(ids, (-1,))
            ones = keras.ops.ones_like(flat, dtype="float32")
            self.n.assign(self.n + keras.ops.segment_sum(ones, flat, num_segments=96))
            return ids

    ids = keras.Input((8,), dtype="int32")
    table = keras.layers.Embedding(65536, 64)
    x = keras.layers.GlobalAveragePooling1D()(table(Counts()(ids)))
    model = keras.Model(ids, keras.layers.Dense(4)(x))
    model.compile("adagrad", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def experts():
    """KerasHub's mixture of experts, of which a step computes the chosen ones."""
    import keras
    import keras_hub

    import keras_tpu_dist as ktd

    inner = keras_hub.models.MixtralBackbone(
        vocabulary_size=128,
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=64,
        intermediate_dim=128,
        num_experts=4,
        top_k=2,
        dtype="float32",
    )
    names = ("token_ids", "padding_mask")
    inputs = {name: keras.Input((32,), dtype="int32", name=name) for name in names}
    model = ktd.convert(keras.Model(inputs, keras.layers.Dense(128)(inner(inputs))))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# Name: the model, its mesh and its layout.
MODELS = {
    "dropout": (dropout, None, None),
    "LSTM": (lstm, {"data": 4, "model": 2}, "tensor_parallel"),
    "decoder": (decoder, {"data": 4, "fsdp": 2}, "fsdp"),
    "counts": (counts, {"data": 8}, None),
    "experts": (experts, {"data": 8}, None),
}


def operations(x, y, ids, matrices):
    """Every kind of operation that jax.numpy and jax.lax have, once."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    key = jax.random.key(0)
    one = [
        jnp.sin, jnp.cos, jnp.tan, jnp.tanh, jnp.exp, jnp.expm1, jnp.log, jnp.log1p, jnp.sqrt,
        lax.rsqrt, jnp.cbrt, jnp.floor, jnp.ceil, jnp.round, lax.round, jnp.sign, jnp.abs,
        lax.logistic, lax.erf, lax.erfc, lax.erf_inv, lax.lgamma, lax.digamma, jnp.arcsin,
        jnp.arctan, jnp.sinh, jnp.arccosh, jnp.isfinite, lax.bessel_i1e, jnp.negative,
    ]  # fmt: skip
    two = [
        jnp.arctan2, jnp.power, jnp.mod, jnp.fmod, jnp.maximum, jnp.minimum, jnp.hypot, jnp.equal,
        jnp.less, lax.nextafter, jnp.divide, jnp.logaddexp,
    ]  # fmt: skip
    whole = [
        jnp.left_shift, jnp.right_shift, lax.shift_right_logical, jnp.bitwise_and, jnp.bitwise_xor,
        jnp.bitwise_or, jnp.remainder, jnp.floor_divide,
    ]  # fmt: skip
    found = [f(x) for f in one] + [f(x, y) for f in two] + [f(ids, ids.T.T + 1) for f in whole]
    found += [lax.population_count(ids), lax.clz(ids), ~ids, jnp.clip(x, -0.5, 0.5)]
    found += [jnp.sort(x, 1), jnp.argsort(y, 0), *lax.top_k(x, 3), jnp.cumsum(x, 1)]
    found += [jnp.cumprod(y, 0), lax.cummax(x, 1), jnp.argmax(x, 1), jnp.median(x), jnp.flip(x, 1)]
    found += [x[:, 1::2], jnp.pad(x, 1), jnp.roll(x, 3, 1), jnp.concatenate([x, y], 1)]
    found += [jnp.take(x, ids % 7, axis=1), x.at[ids[:, 0] % 8].add(y), jnp.where(x > y, x, y)]
    found += [x.at[ids[:, 0] % 8].max(y), lax.dynamic_slice(x, (ids[0, 0] % 3, 0), (2, 4))]
    found += [lax.dynamic_update_slice(x, y[:2, :4], (ids[0, 0] % 3, 1)), jnp.unique(ids, size=9)]
    found += [jnp.real(jnp.fft.fft(x)), jnp.fft.irfft(jnp.fft.rfft(y)), jnp.abs(x + 1j * y)]
    found += [
        lax.reduce_precision(x, 5, 7),
        x.astype("bfloat16"),
        x.astype("int8"),
        x.view("int32"),
    ]
    found += [jax.random.normal(key, (8, 16)), jax.random.randint(key, (8, 16), 0, 1000)]
    found += [jax.random.gamma(key, 2.0, (8, 4)), jax.random.permutation(key, x)]
    found += [lax.rng_bit_generator(jnp.arange(4, dtype="uint32"), (8, 16))[1]]
    windows = (1, 3), (1, 1), "SAME"
    found += [lax.reduce_window(x, -jnp.inf, lax.max, *windows), x @ y.T, (x @ y.T > 0).any()]
    found += [lax.cond(ids[0, 0] > 3, jnp.sin, jnp.cos, x), lax.fori_loop(0, ids[1, 1], _grown, x)]
    found += [lax.map(lambda row: row * 2, x), jnp.prod(x), jnp.linalg.norm(x), x.var(0)]
    found += [jnp.linalg.cholesky(matrices), jnp.linalg.solve(matrices, matrices)]
    found += [jnp.linalg.qr(matrices)[0], jnp.linalg.eigh(matrices)[0], jnp.linalg.svd(matrices)[1]]
    return found


def _grown(_, x):
    return x * 1.5 - 1


def exchanges(x):
    """Every collective."""
    import jax.numpy as jnp
    from jax import lax

    every = ("data", "model")
    found = [lax.psum(x, every), lax.pmax(x, "data"), lax.pmin(x, "model"), lax.pmean(x, "data")]
    found += [lax.all_gather(x, "data", tiled=True), lax.psum_scatter(x, "data", tiled=True)]
    found += [lax.all_to_all(x, "data", 1, 0, tiled=True), lax.axis_index("data") + x]
    found += [lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3), (3, 0)])]
    found += [lax.psum(x @ x.T, "model"), jnp.sin(lax.all_gather(x, "model", axis=1, tiled=True))]
    return [one.reshape(-1)[None] for one in found]


def to_compile_model(case, topology):
    """The launch of a model's steps, lowered."""
    import keras_tpu_dist as ktd
    from keras_tpu_dist.tools.dryrun.build import Subject, lower
    from keras_tpu_dist.tools.replay.run import ragged_products_as_products

    build, mesh, layout = MODELS[case]
    strategy = ktd.TPUStrategy(mesh, layout, topology=topology)
    step = Subject(build, strategy, 8 * strategy.mesh.size)
    with ragged_products_as_products():
        return lower(step, steps=STEPS, to_run=True)


def to_compile_function(case, topology):
    """A function of JAX, lowered."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import keras_tpu_dist as ktd
    from keras_tpu_dist.tools.dryrun.build import ToCompile, export_step, of_platform, pickled

    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, topology=topology)
    rows = NamedSharding(strategy.mesh, PartitionSpec("data"))

    def array(shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    if case == "exchanges":
        specs = PartitionSpec("data", "model"), PartitionSpec(("data", "model"))
        inside = jax.shard_map(
            exchanges, mesh=strategy.mesh, in_specs=specs[:1], out_specs=specs[1], check_vma=False
        )
        given = [array((1024, 512))]
    else:
        inside = operations
        given = [array((8, 16)), array((8, 16)), array((8, 16), "int32"), array((8, 4, 4))]
    exported = export_step(lambda _, given: inside(*given), [], given, "tpu")
    return ToCompile(
        program=pickled(exported),
        donate=False,
        axes=tuple(strategy.mesh.shape.items()),
        devices=tuple(strategy.mesh.devices.flat),
        **of_platform(strategy, "tpu"),
    )


CASES = (*MODELS, "operations", "exchanges")


def text_of(case, topology):
    """The compiled program, as `verify` asks for it."""
    from keras_tpu_dist.tools.dryrun.compile import run_compiler
    from keras_tpu_dist.tools.replay.run import job_to_run

    lowered = (to_compile_model if case in MODELS else to_compile_function)(case, topology)
    answer, _ = run_compiler(lowered, job_to_run(lowered), SECONDS, topology)
    return answer["text"]


def counted(text):
    """How often each operation stands in a program: opcodes, and targets of custom calls."""
    from keras_tpu_dist.tools.hlo.parse import parse

    found = collections.Counter()
    for computation in parse(text):
        for one in computation:
            found[one.opcode] += 1
            if target := one.attribute("custom_call_target"):
                found["custom-call " + target.strip('"')] += 1
    return found


def worker(programs, label, log, keep):
    """Adds the counts of each program of this environment to the log, a line of JSON each."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import keras_tpu_dist as ktd

    ktd.simulate(8)
    for chip, case in programs:
        row = {"label": label, "chip": chip, "case": case}
        try:
            text = text_of(case, matrix.CHIPS[chip][1])
            row["counts"] = counted(text)
            if keep:
                Path(keep).mkdir(parents=True, exist_ok=True)
                Path(keep, f"{chip}-{case}.txt").write_text(text)
        except Exception as error:  # a refused program is a line below the table
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        with open(log, "a") as file:
            file.write(json.dumps(row) + "\n")


def rows_in(log, label):
    """What the log has of an environment; an unfinished line at its end is left out."""
    if not log.exists():
        return []
    rows = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
    return [row for row in rows if row["label"] == label]


def rows_of(python, label, programs, log, keep="", libtpu=""):
    """The rows of an environment; a process that ends early is a row with its error."""
    done = [(row["chip"], row["case"]) for row in rows_in(log, label)]
    left = [program for program in programs if program not in done]
    path = os.pathsep.join(filter(None, [libtpu, str(ROOT)]))
    names = ["/".join(program) for program in left]
    asked = ["--worker", *names, "--label", label, "--log", str(log), "--keep", keep]
    run = subprocess.run(
        [str(python), __file__, *asked],
        capture_output=True,
        text=True,
        timeout=SECONDS * max(len(left), 1),
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": path},
    )
    found = [row for row in rows_in(log, label) if (row["chip"], row["case"]) in programs]
    if run.returncode:
        found.append({"chip": "?", "case": "?", "error": run.stderr.strip()[-400:]})
    return found


def libraries(python, libtpu=""):
    """The versions that decide."""
    code = (
        "import importlib.metadata as m, libtpu; n = libtpu.__version__; "
        "print('jax', m.version('jax'), 'libtpu', n)"
    )
    path = {"PYTHONPATH": libtpu} if libtpu else {}
    run = [str(python), "-c", code]
    env = {**os.environ, **path}
    return subprocess.run(run, capture_output=True, text=True, env=env).stdout.strip()


def known(name):
    """What the table has of an opcode, or of the target of a custom call."""
    from keras_tpu_dist.tools.hlo.operations import OPERATIONS, TARGETS

    table = TARGETS if name.startswith("custom-call ") else OPERATIONS
    name = name.removeprefix("custom-call ")
    # Of what is handed to another core: no name.
    return True if name.startswith("TODO(") else table.get(name)


def table(found):
    """Lines of the table: operations down, environments across; and how many are in no table."""
    columns = {label: collections.Counter() for label in found}
    for label, rows in found.items():
        for row in rows:
            columns[label].update(row.get("counts", {}))
    names = sorted(set().union(*columns.values()))
    lines = ["| operation | it | replayed | " + " | ".join(found) + " |"]
    lines.append("|---|---|---|" + "---|" * len(found))
    missing = [name for name in names if known(name) is None]
    for name in names:
        one = known(name)
        of = ("", "by what it calls") if one is True else ("NOT IN THE TABLE", "")
        if one not in (None, True):
            of = one.kind.value, one.replayed.value
        counts = (str(columns[label][name] or "-") for label in found)
        lines.append(f"| {name} | {' | '.join(of)} | {' | '.join(counts)} |")
    return lines, missing


def main():
    """Prints the table; exit code 1 if an operation is in no table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--here", action="store_true", help="this environment only")
    options.add_argument("--pythons", nargs="+", default=[], help="environments' interpreters")
    options.add_argument("--libtpu", default="", help="a folder with another libtpu for the last")
    options.add_argument("--chips", nargs="+", default=[*matrix.CHIPS], choices=[*matrix.CHIPS])
    options.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    options.add_argument("--keep", default="", help="a folder for the programs' texts")
    options.add_argument("--log", help="a file of rows: what stands in it is not compiled again")
    options.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    options.add_argument("--label", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.worker is not None:
        programs = [tuple(name.split("/")) for name in asked.worker]
        worker(programs, asked.label, asked.log, asked.keep)
        return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(asked.log or Path(folder, "rows.jsonl"))
        sys.exit(compared(asked, log))


def compared(asked, log):
    """Compiles what is asked, and prints the table; 1 if an operation is in no table."""
    started, found = time.perf_counter(), {}
    programs = [(chip, case) for chip in asked.chips for case in asked.cases]
    pythons = asked.pythons or [sys.executable]
    for place, python in enumerate(pythons):
        libtpu = asked.libtpu if place == len(pythons) - 1 else ""
        label = libraries(python, libtpu)
        keep = asked.keep and str(Path(asked.keep, label.replace(" ", "-")))
        found[label] = rows_of(python, label, programs, log, keep, libtpu)
    lines, missing = table(found)
    print("\n".join(lines))
    for label, rows in found.items():
        for row in rows:
            if "error" in row:
                print(f"{label}, {row['chip']}, {row['case']}: {row['error']}")
    count = sum(len(rows) for rows in found.values())
    print(
        f"\n{count} programs, {len(lines) - 2} operations, {len(missing)} in no table "
        f"{missing or ''}, {time.perf_counter() - started:.0f} s, {datetime.date.today()}"
    )
    return int(bool(missing))


if __name__ == "__main__":
    main()
