"""Our recurrent layers against Keras's, unrolled Keras's and a hand-written scan.

    python benchmarks/recurrent.py tpu              # TPU v5e:2x4, by its compiler; no chip needed
    python benchmarks/recurrent.py tpu --only LSTM --size 0 --json rows.json  # in parts
    python benchmarks/recurrent.py tpu --unrolled   # few units and steps, with unroll=True and not
    python benchmarks/recurrent.py tpu --unrolled --topology v6e:2x4 --units 10 --steps 10 20
    python benchmarks/recurrent.py wall --devices 8 # wall time on simulated devices
    python benchmarks/recurrent.py wall --devices 1
    python benchmarks/recurrent.py segments         # memory and time at T = 8192
    python benchmarks/recurrent.py time-distributed # compile time and program size against T

Every program is one train step of one layer of U units on (B, T, U) inputs, as in the middle of a
network: loss, gradients of all weights and of the input, gradient descent. With `--unrolled` it is
the step of `fit` for a model with one layer, and 1024 rows on all chips. Programs that are compared
by wall time run in one process, in turn. "Products alone" is the time of the step's matrix products
at the rate of one large product on the same CPU: no layer can be faster. A program that needs more
memory than the machine has is left out, with a note.
"""

import argparse
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

TPU_SIZES = [(1024, 128, 256), (256, 1024, 512), (64, 64, 1024)]
WALL_SIZES = {
    8: [(64, 64, 1024), (256, 128, 512), (1024, 128, 256)],
    1: [(8, 64, 1024), (32, 256, 512), (128, 128, 256)],
}
CELLS = ["LSTM", "GRU", "SimpleRNN"]
KINDS = ["stock", "ours", "stock unrolled", "scan"]
UNROLLED_KINDS = ["stock", "stock unrolled", "ours", "ours unrolled"]
PRODUCT = 2048
UNROLLED_STEPS = 64  # longer ones take minutes to compile
WHATS = ["tpu", "wall", "segments", "time-distributed"]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*WHATS, "one"])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=CELLS, choices=CELLS, help="which layers")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--size", nargs="*", type=int, default=[0, 1, 2], help="which, by number")
    parser.add_argument("--unrolled", action="store_true", help="of `tpu`: one layer, few units")
    parser.add_argument("--topology", default="v5e:2x4", help="the slice, of `--unrolled`")
    parser.add_argument("--units", nargs="*", type=int, default=[10, 128, 512])
    parser.add_argument("--steps", nargs="*", type=int, default=[10, 20, 100])
    parser.add_argument("--seconds", type=float, default=6.0, help="per program, wall times")
    parser.add_argument(
        "--json", type=pathlib.Path, help="rows of `tpu`; those in it are not redone"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


class OnMesh:
    """The part of a distribution that layers use, for devices that are not attached."""

    def __init__(self, mesh, data_axes):
        self.mesh, self.data_axes = mesh, data_axes

    def get_tensor_layout(self, path):
        return None

    def get_variable_layout(self, variable):
        import jax

        # What this answers only says whether a weight is in parts; these benchmarks' fit anywhere.
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())


def plain_scan(cell, weights, x):
    """A scan as written by hand: input projected once, differentiated by JAX."""
    import jax.numpy as jnp
    from jax import lax

    from keras_tpu_dist.recurrence import Product

    projected = jnp.swapaxes(x, 0, 1) @ weights.kernel + weights.bias

    def step(state, now):
        after, _ = cell.advance(Product(), weights.recurrent, weights.recurrent_bias, now, state)
        return after, None

    zeros = jnp.zeros((x.shape[0], weights.recurrent.shape[0]))
    last, _ = lax.scan(step, (zeros,) * cell.num_states, projected)
    return last[0]


def make_step(kind, cell, size):
    """`step(weights, x) -> (loss, weights, gradient of x)` and the shapes of the weights."""
    import jax
    import jax.numpy as jnp
    import keras

    from keras_tpu_dist import layers, recurrence

    _, steps, units = size
    package = layers if kind == "ours" else keras.layers
    config = {"unroll": True} if kind == "stock unrolled" else {}
    layer = getattr(package, cell)(units, **config)
    layer.build((None, steps, units))
    frozen = [v.value for v in layer.non_trainable_variables]
    values = [v.value for v in layer.trainable_variables]

    def forward(weights, x):
        if kind != "scan":
            return layer.stateless_call(weights, frozen, x)[0]
        bias = tuple(weights[2]) if weights[2].ndim == 2 else (weights[2], None)
        named = recurrence.Weights(weights[0], bias[0], weights[1], bias[1])
        return plain_scan(getattr(recurrence, cell)(), named, x)

    def step(weights, x):
        def loss(weights, x):
            return jnp.mean(forward(weights, x) ** 2)

        value, (gradients, d_x) = jax.value_and_grad(loss, argnums=(0, 1))(weights, x)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), d_x

    return step, values


def shapes_on(mesh, values, size):
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    columns = "model" if "model" in mesh.axis_names else None
    weights = [
        jax.ShapeDtypeStruct(
            v.shape,
            v.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*[None] * (v.ndim - 1), columns)),
        )
        for v in values
    ]
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return weights, jax.ShapeDtypeStruct(size, jnp.float32, sharding=rows)


def tpu_cases(cases):
    """Compiles steps for v5e:2x4 and reads their schedules, in a process that does only this."""
    dump = pathlib.Path(tempfile.mkdtemp(prefix="schedule"))
    import jax

    from keras_tpu_dist.hardware.libtpu import libtpu_environment

    jax.config.update("jax_platforms", "cpu")
    os.environ.update(
        libtpu_environment(),
        LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        # Only the last of some eighty passes is read; writing out all doubles the time.
        "--xla_jf_dump_llo_pass_label_regex=final_bundles",
    )
    try:
        return [(fit_case if "topology" in case else tpu_case)(case, dump) for case in cases]
    finally:
        shutil.rmtree(dump)


def tpu_case(case, dump):
    import jax
    import keras
    from jax.experimental import mesh_utils, topologies
    from tpu_schedule import read

    import keras_tpu_dist  # noqa: F401  selects Keras's backend

    slice_ = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    axes = case.get("mesh", {"data": 8})
    chips = mesh_utils.create_device_mesh(
        tuple(axes.values()), slice_.devices, allow_split_physical_axes=True
    )
    mesh = jax.sharding.Mesh(chips, tuple(axes))
    size = tuple(case["size"])
    step, values = make_step(case["kind"], case["cell"], size)
    if case["kind"] == "ours":
        keras.distribution.set_distribution(OnMesh(mesh, ("data",)))
    lowered = jax.jit(step, donate_argnums=0).lower(*shapes_on(mesh, values, size))
    started = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - started
    schedule = read(compiled.as_text(), dump)
    for path in dump.iterdir():
        path.unlink()
    keras.distribution.set_distribution(None)
    return {
        **case,
        **schedule.to_dict(),
        "peak_temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "compile_cpu_seconds": round(seconds, 1),
    }


def fit_case(case, dump):
    """The step of `fit` of a model with one layer, at full effort."""
    import keras
    from tpu_schedule import read

    import keras_tpu_dist as ktd
    from keras_tpu_dist.tools.dryrun.build import Subject, lower
    from keras_tpu_dist.tools.dryrun.compile import compile_lowered

    package = keras.layers if case["kind"].startswith("stock") else ktd.layers
    batch, steps, units = case["size"]
    chip = case["topology"].split(":")[0]

    def build():
        layer = getattr(package, case["cell"])(units, unroll=case["kind"].endswith("unrolled"))
        model = keras.Sequential([keras.Input((steps, units)), layer])
        model.compile("sgd", "mse")
        return model

    options = "auto" if chip == "v5e" else None  # the same for all that are compared
    strategy = ktd.TPUStrategy(topology=case["topology"], compiler_options=options)
    lowered = lower(Subject(build, strategy, batch))
    compiled = compile_lowered(lowered, effort="exact", timeout=3000)
    schedule = read(compiled.text, dump, chip)
    return {
        **case,
        **schedule.to_dict(),
        "total_bytes": compiled.total_bytes,
        "temporary_bytes": compiled.memory["temporaries"],
        "code_bytes": compiled.memory["code"],
        "compile_cpu_seconds": round(compiled.cpu_seconds, 1),
    }


def unrolled(args):
    """Few units over few steps: stock, looped and unrolled, against ours."""
    done = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    for cell, units, steps in itertools.product(args.only, args.units, args.steps):
        size, rows = (1024, steps, units), {}
        for kind in UNROLLED_KINDS:
            case = {"cell": cell, "size": size, "kind": kind, "topology": args.topology}
            if find(done, cell, size, kind) is None:
                done.append(compiled_apart(case))
                if args.json:
                    args.json.write_text(json.dumps(done, indent=1))
            rows[kind] = find(done, cell, size, kind)
        report_unrolled(cell, units, steps, rows)


def report_unrolled(cell, units, steps, rows):
    """Cycles against the fewest that a stock layer takes; memory against that layer's."""
    print(f"{cell} of {units} units over {steps} steps, 1024 rows:")
    stocks = rows["stock"], rows["stock unrolled"]
    for kind, row in rows.items():
        line = f"  {kind:15}"
        for name in ("scheduled", "with HBM", "estimated"):
            key = COLUMNS[name]
            line += f"{name} {row[key]:8} ({row[key] / min(s[key] for s in stocks):.2f}x)  "
        fastest = min(stocks, key=lambda s: s["estimated_cycles"])
        memory = row["total_bytes"] / fastest["total_bytes"]
        line += f"memory {row['total_bytes'] / 1024:6.0f} KiB ({memory:.2f}x), "
        line += f"program {row['code_bytes'] / 1024:.0f} KiB of it, {row['compile_cpu_seconds']} s"
        print(line, flush=True)


def tpu(args):
    if args.unrolled:
        unrolled(args)
        return
    done = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    for cell in args.only:
        for number in args.size:
            size = TPU_SIZES[number]
            for kind in kinds_for(args, size):
                if find(done, cell, size, kind) is None:
                    done.append(compiled_apart({"cell": cell, "size": size, "kind": kind}))
                    if args.json:
                        args.json.write_text(json.dumps(done, indent=1))
            report_tpu(cell, size, {k: find(done, cell, size, k) for k in kinds_for(args, size)})


def kinds_for(args, size):
    return [k for k in args.kinds if k != "stock unrolled" or size[1] <= UNROLLED_STEPS]


def find(rows, cell, size, kind):
    wanted = cell, list(size), kind
    return next((r for r in rows if (r["cell"], list(r["size"]), r["kind"]) == wanted), None)


def compiled_apart(case):
    """A row; in a process of its own, as the compiler's flags are read once."""
    done = subprocess.run(
        [sys.executable, __file__, "one", "--case", json.dumps([case])],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])[0]


COLUMNS = {
    "scheduled": "scheduled_cycles",
    "with HBM": "bound_cycles",
    "bundles": "bundles",
    "estimated": "estimated_cycles",
}


def report_tpu(cell, size, rows):
    print(f"{cell}, (B, T, U) = {size}, one core of v5e:2x4, million cycles (times stock)")
    heads = "".join(f"{name:>17}" for name in COLUMNS)
    print(f"  {'':15}{heads}{'HBM MB':>9}{'temp. MB':>9}{'collectives':>12}{'CPU s':>7}")
    for kind, row in rows.items():
        stock = rows.get("stock", row)
        cells = "".join(
            f"{row[key] / 1e6:9.3f} ({row[key] / stock[key]:.2f}x)" for key in COLUMNS.values()
        )
        calls = f"{row['collectives']} ({row['collectives_in_loops']})"
        print(
            f"  {kind:15}{cells}{row['hbm_bytes'] / 1e6:9.0f}"
            f"{row['peak_temporary_bytes'] / 1e6:9.1f}{calls:>12}{row['compile_cpu_seconds']:7.1f}",
            flush=True,
        )


def race(programs, seconds):
    """Median seconds of each program; they run in turn, so that load affects all of them."""
    import jax
    import numpy as np

    times = {name: [] for name in programs}
    for run, arguments in programs.values():
        jax.block_until_ready(run(*arguments))
    stop = time.perf_counter() + seconds * len(programs)
    while time.perf_counter() < stop or min(map(len, times.values())) < 5:
        for name, (run, arguments) in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times[name].append(time.perf_counter() - started)
    return {name: float(np.median(values)) for name, values in times.items()}


def wall(args):
    import keras_tpu_dist as ktd

    ktd.simulate(args.devices)
    import jax
    import numpy as np

    for cell in args.only:
        for number in args.size:
            size = WALL_SIZES[args.devices][number]
            programs = {
                kind: program_on_devices(kind, cell, size, args.devices)
                for kind in kinds_for(args, size)
            }
            left_out = leave_out(programs, args.devices)
            programs["product"] = one_product()
            times = race(programs, args.seconds)
            alone = products(cell, size) * times.pop("product") / PRODUCT**3
            del programs
            line = ", ".join(
                f"{kind} {1e3 * t:.0f} ms ({times.get('stock', t) / t:.2f}x)"
                for kind, t in times.items()
            )
            line += f", products alone {1e3 * alone:.0f} ms{left_out}"
            print(f"{cell}, (B, T, U) = {size}, {args.devices} CPU device(s): {line}", flush=True)
            jax.clear_caches()
    assert np.isfinite(list(times.values())).all()


def leave_out(programs, devices):
    """Removes programs that need more memory than the machine has. Returns a note about them."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    note = ""
    for kind, (run, _) in list(programs.items()):
        needed = devices * run.memory_analysis().temp_size_in_bytes
        if needed > installed:
            del programs[kind]
            note += f", {kind} needs {needed / 1e9:.0f} GB (left out)"
    return note


def one_product():
    """A large matrix product, compiled."""
    import jax
    import jax.numpy as jnp

    a = jnp.ones((PRODUCT, PRODUCT))
    return jax.jit(lambda a: a @ a).lower(a).compile(), (a,)


def products(cell, size):
    """Multiplications of a step: the products of input and states, two gradients of each."""
    from keras_tpu_dist import recurrence

    batch, steps, units = size
    return 6 * batch * steps * units * units * getattr(recurrence, cell).gates


def program_on_devices(kind, cell, size, devices):
    import jax
    import keras
    import numpy as np

    import keras_tpu_dist as ktd

    rng = np.random.default_rng(0)
    x = rng.normal(size=size).astype("float32")
    step, values = make_step(kind, cell, size)
    if devices == 1:
        return jax.jit(step).lower(values, x).compile(), (values, x)
    strategy = ktd.TPUStrategy()
    weights, rows = shapes_on(strategy.mesh, values, size)
    arguments = (
        [jax.device_put(v, w.sharding) for v, w in zip(values, weights)],
        jax.device_put(x, rows.sharding),
    )
    keras.distribution.set_distribution(strategy if kind == "ours" else None)
    compiled = jax.jit(step).lower(*arguments).compile()
    keras.distribution.set_distribution(None)
    return compiled, arguments


def segments(args):
    import keras_tpu_dist as ktd

    ktd.simulate(1)
    import jax
    import keras

    from keras_tpu_dist import layers

    size = (8, 8192, 64)
    rows = {}
    for name, package, config in (
        ("stock", keras.layers, {}),
        ("ours", layers, {}),
        ("ours, segment='auto'", layers, {"segment": "auto"}),
    ):
        compiled, arguments = whole_sequence(package.LSTM(size[2], **config), size)
        rows[name] = compiled, arguments, compiled.memory_analysis().temp_size_in_bytes
    times = race({name: row[:2] for name, row in rows.items()}, args.seconds)
    for name, (_, _, temporary) in rows.items():
        print(
            f"LSTM, (B, T, U) = {size}, one CPU device, {name}: {temporary / 1e6:.1f} MB of "
            f"temporaries ({temporary / rows['stock'][2]:.3f}x), {1e3 * times[name]:.0f} ms"
        )
    jax.clear_caches()
    _segments_on_tpu(size)


def _segments_on_tpu(size):
    import keras

    import keras_tpu_dist as ktd

    batch, steps, units = 16 * size[0], *size[1:]
    strategy = ktd.TPUStrategy(topology="v5e:2x2")
    for name, package, config in (
        ("stock", keras.layers, {}),
        ("ours", ktd.layers, {}),
        ("ours, segment='auto'", ktd.layers, {"segment": "auto"}),
    ):

        def build(package=package, config=config):
            recurrent = package.LSTM(units, **config)
            model = keras.Sequential(
                [keras.Input((steps, units)), recurrent, keras.layers.Dense(1)]
            )
            model.compile("adam", "mse")
            return model

        run = ktd.dry_run(build, strategy, batch_size=batch, effort="exact")
        print(
            f"LSTM, (B, T, U) = {(batch, steps, units)}, v5e:2x2, {name}: "
            f"{run.total_bytes / 1e6:.0f} MB a chip"
        )


def whole_sequence(layer, size):
    import jax
    import jax.numpy as jnp
    import numpy as np

    layer.build((None, *size[1:]))
    values = [v.value for v in layer.trainable_variables]
    frozen = [v.value for v in layer.non_trainable_variables]
    x = np.random.default_rng(0).normal(size=size).astype("float32")

    def step(weights, x):
        return jax.value_and_grad(lambda w: jnp.mean(layer.stateless_call(w, frozen, x)[0] ** 2))(
            weights
        )

    return jax.jit(step).lower(values, x).compile(), (values, x)


def time_distributed(args):
    import keras_tpu_dist as ktd

    ktd.simulate(1)
    import jax
    import keras
    import numpy as np

    from keras_tpu_dist import layers

    inner = {
        "GlobalMaxPooling2D": keras.layers.GlobalMaxPooling2D,
        "Conv2D": lambda: keras.layers.Conv2D(4, 3),
        "Dense": lambda: keras.layers.Dense(4),
    }
    for name, make in inner.items():
        for steps in (10, 100, 1000):
            layer = layers.TimeDistributed(make())
            x = np.ones((2, steps, 8, 8, 3), "float32")
            layer.build(x.shape)
            started = time.perf_counter()
            lowered = jax.jit(lambda x, layer=layer: layer(x, training=True)).lower(x)
            compiled = lowered.compile()
            seconds = time.perf_counter() - started
            if (name, steps) == ("GlobalMaxPooling2D", 10):  # the very first also warms JAX up
                started = time.perf_counter()
                jax.clear_caches()
                compiled = (
                    jax.jit(lambda x, layer=layer: layer(x, training=True)).lower(x).compile()
                )
                seconds = time.perf_counter() - started
            print(
                f"TimeDistributed({name}), T = {steps}: {seconds:.2f} s to compile, "
                f"{len(lowered.as_text())} bytes of program, {len(compiled.as_text())} compiled",
                flush=True,
            )


def main():
    args = parse()
    sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
    if args.what == "one":
        print(json.dumps(tpu_cases(json.loads(args.case))))
        return
    run = dict(zip(WHATS, (tpu, wall, segments, time_distributed)))
    run[args.what](args)


if __name__ == "__main__":
    main()
