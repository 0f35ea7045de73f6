"""A large embedding table over 16 chips: updating every row, only used rows, and the latter by
hand.

    python benchmarks/tables.py [--rows 100000000] [--effort exact]

Compiles the train step of a ranking model (16,384 rows of 16 ids, 32 features, Adagrad) for
v5e:4x4, with tables=None and with tables="rows", and one of plain JAX by hand: each device sends
its ids to the devices that own their rows, gets the rows, sends their gradients back, and the
owners update only the used rows. Prints estimates of cycles; nothing runs on a chip. Rounds for ids
that do not fit the buffer are not counted, since random ids need none.

The version by hand does not handle more ids of one device than the buffer holds; a real program has
to. Sorted indices are not marked as sorted: the compiler would stream the whole table through the
chip.

Needs libtpu (pip install 'jax[tpu]'); no TPU.
"""

import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

# isort: split
import argparse
import os

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist.hardware.libtpu import libtpu_environment
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.tools.hlo import cost, silent
from keras_tpu_dist.tools.hlo.loops import executions
from keras_tpu_dist.tools.hlo.parse import parse

L = keras.layers
TOPOLOGY, WAYS = "v5e:4x4", 16
BATCH, IDS, WIDTH, HIDDEN = 16384, 16, 32, 256
RATE, EPSILON = 0.01, 1e-7
NOBODY = np.iinfo("int32").max


def model(rows):
    """A ranking model: a table, and two Dense layers."""
    ids = keras.Input((IDS,), dtype="int32")
    x = L.Flatten()(L.Embedding(rows, WIDTH, name="table")(ids))
    x = L.Dense(1)(L.Dense(HIDDEN, activation="relu")(x))
    built = keras.Model(ids, x)
    built.compile("adagrad", "mse")
    return built


def sorted_by_owner(ids, rows_each, capacity):
    """Distinct ids for each owner, and the place of each id among them."""
    ordered, order = jax.lax.sort((ids, jnp.arange(ids.size, dtype="int32")), num_keys=1)
    first = jnp.append(True, ordered[1:] != ordered[:-1])
    owner, number = ordered // rows_each, jnp.cumsum(first.astype("int32")) - 1
    before = [(first & (owner < d)).sum(dtype="int32") for d in range(WAYS + 1)]
    starts = jnp.stack(before)
    unique = jax.lax.sort(jnp.where(first, ordered, NOBODY))
    unique = jnp.append(unique, jnp.full(capacity, NOBODY, "int32"))
    parts = [jax.lax.dynamic_slice(unique, (start,), (capacity,)) for start in before[:-1]]
    counts = (starts[1:] - starts[:-1])[:, None]
    sent = jnp.where(jnp.arange(capacity) < counts, jnp.stack(parts), NOBODY)
    place = owner * capacity + number - starts[owner]
    return sent, jax.lax.sort((order, place), num_keys=1)[1]


def exchanged(array):
    """Sends each device its part of an array, and receives a part from each."""
    return jax.lax.all_to_all(array, "data", 0, 0, tiled=True)


def summed(ids, gradients):
    """The sum of the gradients of all places with the same id, at each place."""
    places = jnp.arange(ids.size, dtype="int32")
    ordered, order = jax.lax.sort((ids, places), num_keys=1)
    first = jnp.append(True, ordered[1:] != ordered[:-1])
    group = jnp.cumsum(first.astype("int32")) - 1
    group = jax.lax.sort((order, group), num_keys=1)[1]
    return jax.ops.segment_sum(gradients, group, ids.size)[group]


def step(table, sums, dense, ids, y):
    """A train step of one device."""
    rows_each = table.shape[0]
    # Ids of a step that one device has and another owns: their mean, and five deviations of it.
    mean = ids.size / WAYS
    capacity = int(mean + 5 * mean**0.5) // 32 * 32 + 32
    sent, place = sorted_by_owner(ids.ravel(), rows_each, capacity)
    asked = exchanged(sent).ravel()
    own = jnp.where(asked < NOBODY, asked - jax.lax.axis_index("data") * rows_each, rows_each)
    rows = table.at[own].get(mode="fill", fill_value=0)
    got = exchanged(rows.reshape(WAYS, capacity, WIDTH)).reshape(-1, WIDTH)

    def loss(got, dense):
        x = got[place].reshape(len(ids), -1)
        x = jax.nn.relu(x @ dense[0] + dense[1]) @ dense[2] + dense[3]
        return ((x - y) ** 2).sum() / (WAYS * len(ids))

    by_rows, by_dense = jax.grad(loss, (0, 1))(got, dense)
    by_rows = exchanged(by_rows.reshape(WAYS, capacity, WIDTH)).reshape(-1, WIDTH)
    by_rows, by_dense = summed(own, by_rows), jax.lax.psum(by_dense, "data")
    # Places with one id write one value.
    new = sums.at[own].get(mode="fill", fill_value=1) + by_rows**2
    sums = sums.at[own].set(new, mode="drop")
    table = table.at[own].set(rows - RATE * by_rows / jnp.sqrt(new + EPSILON), mode="drop")
    return table, sums, [w - RATE * g for w, g in zip(dense, by_dense, strict=True)]


def by_hand(rows, effort):
    """The program of the step by hand."""
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    os.environ.update(libtpu_environment())
    topology = Topology.parse(TOPOLOGY)
    devices = topologies.get_topology_desc(**topology.libtpu_arguments()).devices
    mesh = Mesh(np.array(devices), ("data",))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def spec(shape, layout, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout))

    dense = [(IDS * WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
    function = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(split, split, whole, split, split),
        out_specs=(split, split, whole),
        check_vma=False,
    )
    lowered = jax.jit(function, donate_argnums=(0, 1)).lower(
        spec((rows, WIDTH), split),
        spec((rows, WIDTH), split),
        [spec(shape, whole) for shape in dense],
        spec((BATCH, IDS), split, "int32"),
        spec((BATCH, 1), split),
    )
    options = {"xla_optimization_level": "EFFORT_O1"} if effort == "quick" else {}
    return parse(lowered.compile(compiler_options=options).as_text())


def cycles(program, chip):
    """Cycles of all kernels, and those of them that the compiler does not state."""
    runs = executions(program).executions
    stated = sum(run.times * cost.estimated_cycles(run.instruction) for run in runs)
    ours = sum(
        run.times * silent.cycles(program, run.computation, run.instruction, chip) for run in runs
    )
    return stated + ours, ours


def main():
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--effort", default="exact", choices=["quick", "exact"])
    options = parser.parse_args()
    chip = Topology.parse(TOPOLOGY).chip
    found = {}
    for name, tables in (("every row", None), ("by rows", "rows")):
        strategy = ktd.TPUStrategy({"data": WAYS}, "fsdp", topology=TOPOLOGY, tables=tables)
        run = ktd.dry_run(
            lambda: model(options.rows), strategy, batch_size=BATCH, effort=options.effort
        )
        found[name] = (
            round(run.estimate.kernels * chip.clock),
            run.cost.silent_cycles,
            run.memory["peak"],
        )
    program = by_hand(options.rows, options.effort)
    found["by rows, by hand"] = *cycles(program, chip), None
    first = found["every row"][0]
    for name, (count, ours, peak) in found.items():
        memory = "" if peak is None else f", {peak / 2**20:,.0f} MiB at peak"
        print(
            f"{name}: {count:,} cycles, of them {ours:,} by our formula for scatters and gathers, "
            f"{first / count:.2f}x fewer{memory}"
        )


if __name__ == "__main__":
    main()
