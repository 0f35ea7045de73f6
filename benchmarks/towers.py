"""Layouts for the weights of two towers on two logical devices, by the TPU compiler.

    python benchmarks/towers.py --width 512 --hidden 1024 --rows 4096
    python benchmarks/towers.py --keras --width 5000 --hidden 10000 --rows 4096

Compiles one Adam step of `tower0(x) + tower1(x)` in plain JAX for v5e:2x2 as
`{"data": 2, "logical": 2}`; no chip is needed. Each layout of the weights has a line: the bytes of
weights and slots on a device, those of temporaries, and the bytes that a device sends.

- copies: both towers' weights on all devices. A step sums their gradients over the logical axis.
- union: one array of two slots, split over the logical axis; each device has its own tower's.
- flat union: the same, each tower one row of numbers, for towers of different shapes.
- gathered: each weight split over the logical axis, and left to the partitioner.
- sent: each weight split over the logical axis; each device sends its part to the one that
  computes, and gets its part of the gradient back.
- sent, bfloat16: the same, with parts and gradients cast before they are sent.
- exchanged: each weight split over the logical axis; before the first tower one exchange of all
  makes the two slots of "union" of them.

A collective over the logical axis between the two towers of the forward pass has one device wait
until the other has computed: then the towers run one after the other.

With `--keras`, the same towers as Keras layers, computed by all devices and assigned to one each:
what `explain` says that a device holds of weights and slots, and what a dry run counts.
"""

import argparse
import functools
import math
import pathlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TOPOLOGY, MESH = "v5e:2x2", (("data", 2), ("logical", 2))
DEVICES = 2
RATE = 1e-3


@dataclass(frozen=True)
class Form:
    """A layout of the weights of two towers.

    Args:
        weights: Their shapes, by name.
        split: The mesh axes of each.
        outputs: Gives the sum of both towers' outputs from the weights and a batch.
    """

    weights: dict[str, tuple[int, ...]]
    split: dict[str, Any]
    outputs: Callable


def tower(w, x):
    """A tower's output."""
    import jax

    return jax.nn.relu(x @ w["in"]) @ w["out"]


def on_one(mesh, device, compute, weights, x, specs):
    """`compute(weights, x)` by one logical device, zeros by the others, and their sum."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    def body(index, weights, x):
        out = jax.eval_shape(compute, weights, x[0])
        done = jax.lax.cond(
            index[0] == device, compute, lambda *_: jnp.zeros(out.shape, out.dtype), weights, x[0]
        )
        return done[None]

    stacked = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("logical"), specs, P("logical")),
        out_specs=P("logical"),
        axis_names={"logical"},
        check_vma=False,
    )(jnp.arange(DEVICES), weights, jnp.broadcast_to(x, (DEVICES, *x.shape)))
    return stacked.sum(0)


def copies(shapes, mesh):
    """As assigned layers were: all devices have both."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    def outputs(w, x):
        total = 0
        for k in range(DEVICES):
            own = {n: jnp.broadcast_to(w[f"{n}{k}"], (DEVICES, *s)) for n, s in shapes.items()}

            def compute(own, x):
                return tower(jax.tree.map(lambda a: a[0], own), x)

            total += on_one(mesh, k, compute, own, x, P("logical"))
        return total

    weights = {f"{n}{k}": s for k in range(DEVICES) for n, s in shapes.items()}
    return Form(weights, dict.fromkeys(weights, P()), outputs)


def union(shapes, mesh):
    """A slot for each device."""
    import jax
    from jax.sharding import PartitionSpec as P

    def compute(own, x):
        return tower(jax.tree.map(lambda a: a[0], own), x)

    def outputs(w, x):
        return sum(on_one(mesh, k, compute, w, x, P("logical")) for k in range(DEVICES))

    weights = {n: (DEVICES, *s) for n, s in shapes.items()}
    return Form(weights, dict.fromkeys(weights, P("logical")), outputs)


def flat_union(shapes, mesh):
    """A row of numbers for each device."""
    from jax.sharding import PartitionSpec as P

    sizes = {n: math.prod(s) for n, s in shapes.items()}

    def compute(own, x):
        parts, begin = {}, 0
        for n, s in shapes.items():
            parts[n] = own["all"][0, begin : begin + sizes[n]].reshape(s)
            begin += sizes[n]
        return tower(parts, x)

    def outputs(w, x):
        return sum(on_one(mesh, k, compute, w, x, P("logical")) for k in range(DEVICES))

    return Form({"all": (DEVICES, sum(sizes.values()))}, {"all": P("logical")}, outputs)


def gathered(shapes, mesh):
    """Split, and used like copies."""
    from jax.sharding import PartitionSpec as P

    form = copies(shapes, mesh)
    return Form(form.weights, dict.fromkeys(form.weights, P("logical")), form.outputs)


def sent(shapes, mesh, dtype=None):
    """Split, and sent to the device that computes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    def outputs(w, x):
        total = 0
        for k in range(DEVICES):
            own = {n: w[f"{n}{k}"] for n in shapes}
            total += jax.shard_map(
                functools.partial(body, k),
                mesh=mesh,
                in_specs=(P("logical"), P("logical"), P("logical")),
                out_specs=P("logical"),
                axis_names={"logical"},
                check_vma=False,
            )(jnp.arange(DEVICES), own, jnp.broadcast_to(x, (DEVICES, *x.shape))).sum(0)
        return total

    def body(k, index, own, x):
        def part_of(a, j):
            a = a if dtype is None else a.astype(dtype)
            return a if j == k else jax.lax.ppermute(a, "logical", [(j, k)])

        parts = [jax.tree.map(lambda a, j=j: part_of(a, j), own) for j in range(DEVICES)]

        def compute(parts, x):
            return tower(jax.tree.map(lambda *p: jnp.concatenate(p), *parts), x)

        out = jax.eval_shape(compute, parts, x[0])
        done = jax.lax.cond(
            index[0] == k, compute, lambda *_: jnp.zeros(out.shape, out.dtype), parts, x[0]
        )
        return done[None]

    form = copies(shapes, mesh)
    return Form(form.weights, dict.fromkeys(form.weights, P("logical")), outputs)


def exchanged(shapes, mesh):
    """Split, and made the slots of a union before any tower is computed."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    slots = NamedSharding(mesh, P("logical"))
    of_union = union(shapes, mesh)

    def outputs(w, x):
        stacked = {n: jnp.stack([w[f"{n}{k}"] for k in range(DEVICES)]) for n in shapes}
        own = {n: jax.lax.with_sharding_constraint(a, slots) for n, a in stacked.items()}
        return of_union.outputs(jax.lax.optimization_barrier(own), x)

    form = copies(shapes, mesh)
    return Form(form.weights, dict.fromkeys(form.weights, P("logical")), outputs)


def collectives_between_towers(program) -> int:
    """How many collectives stand between the first two conditionals of a program."""
    from keras_tpu_dist.tools.hlo.collectives import kind_of

    begun, found = False, 0
    for instruction in program.entry:
        if instruction.opcode == "conditional":
            if begun:
                return found
            begun = True
        elif begun and kind_of(instruction):
            found += 1
    return found


def forms() -> dict[str, Callable]:
    """All forms by name."""
    return {
        "copies": copies,
        "union": union,
        "flat union": flat_union,
        "gathered": gathered,
        "sent": sent,
        "sent, bfloat16": functools.partial(sent, dtype="bfloat16"),
        "exchanged": exchanged,
    }


def step_of(form):
    """One step of Adam."""
    import jax
    import jax.numpy as jnp

    def loss_of(w, x, y):
        return jnp.mean((form.outputs(w, x) - y) ** 2)

    def step(state, x, y):
        w, m, v = state
        loss, g = jax.value_and_grad(loss_of)(w, x, y)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
        w = jax.tree.map(lambda w, m, v: w - RATE * m / (jnp.sqrt(v) + 1e-7), w, m, v)
        return (w, m, v), loss

    return step


def compiled(form, mesh, rows, width, dtype="float32"):
    """The step, compiled for the devices of a mesh."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def described(shape, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = {n: described(s, form.split[n]) for n, s in form.weights.items()}
    batch = described((rows, width), P("data"))
    lay = [{n: NamedSharding(mesh, form.split[n]) for n in weights}] * 3
    step = jax.jit(
        step_of(form), donate_argnums=0, out_shardings=(tuple(lay), NamedSharding(mesh, P()))
    )
    state = (weights, dict(weights), dict(weights))
    return step.lower(state, batch, batch).compile()


def print_keras(width, hidden, rows, effort):
    """Prints a line for the Keras model without assignments, and one with them."""
    import keras_tpu_dist as ktd

    ktd.simulate(1)
    import keras

    from keras_tpu_dist.tools.dryrun.page import kinds_of_memory

    strategy = ktd.TPUStrategy(ktd.DeviceAssignment.build(TOPOLOGY, computation_shape=(1, 2)))

    def build(assigned):
        x = keras.Input((width,))
        outputs = []
        for k in range(DEVICES):
            inner = [
                keras.Input((width,)),
                keras.layers.Dense(hidden, "relu", use_bias=False),
                keras.layers.Dense(width, use_bias=False),
            ]
            part = keras.Sequential(inner, name=f"tower{k}")
            outputs.append((ktd.assign(part, k) if assigned else part)(x))
        model = keras.Model(x, keras.layers.Add()(outputs))
        model.compile(keras.optimizers.Adam(RATE), "mse")
        return model

    for assigned in (False, True):
        with strategy.scope():
            model = build(assigned)
            model.optimizer.build(model.trainable_variables)
        held = strategy.explain(model).bytes_per_device
        make = functools.partial(build, assigned)
        run = ktd.dry_run(make, strategy, batch_size=rows, effort=effort)
        how = "assigned" if assigned else "computed by all"
        print(
            f"{how:16s} {model.count_params():,} weights: "
            f"weights and slots {held / 2**20:,.0f} MiB a device by explain; compiled "
            f"{run.total_bytes / 2**30:.2f} GiB in all, {run.estimate.step * 1e3:.1f} ms a step",
            flush=True,
        )
        for name, size in kinds_of_memory(run):
            print(f"    {name}: {size / 2**20:,.0f} MiB")


def main():
    """Prints a line for each form."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--hidden", type=int, default=1024)
    arguments.add_argument("--rows", type=int, default=4096)
    arguments.add_argument("--only", action="append", choices=list(forms()))
    arguments.add_argument("--keras", action="store_true", help="dry runs of the Keras model")
    arguments.add_argument("--effort", default="quick", help="of the dry runs")
    arguments.add_argument("--write", help="a folder for the programs' texts")
    given = arguments.parse_args()
    if given.keras:
        print_keras(given.width, given.hidden, given.rows, given.effort)
        return

    import keras_tpu_dist as ktd  # first: it selects Keras's JAX backend

    ktd.simulate(1)
    import jax
    import numpy as np
    from jax.experimental import topologies

    from keras_tpu_dist.hardware.libtpu import start_without_tpu
    from keras_tpu_dist.tools import hlo

    start_without_tpu()
    topology = ktd.Topology.parse(TOPOLOGY).libtpu_arguments()
    devices = np.asarray(topologies.get_topology_desc(**topology).devices)
    names, sizes = zip(*MESH, strict=True)
    mesh = jax.sharding.Mesh(devices.reshape(sizes), names)
    shapes = {"in": (given.width, given.hidden), "out": (given.hidden, given.width)}
    for name, make in forms().items():
        if given.only and name not in given.only:
            continue
        program = compiled(make(shapes, mesh), mesh, given.rows, given.width)
        memory, text = program.memory_analysis(), program.as_text()
        if given.write:
            file = name.replace(", ", "_").replace(" ", "_") + ".txt"
            pathlib.Path(given.write, file).write_text(text)
        cost = hlo.analyze(text, wire=hlo.Wire(MESH))
        batch = 2 * given.rows // MESH[0][1] * given.width * 4
        kinds = Counter()
        for c in cost.collectives:
            kinds[f"{c.kind} over {'/'.join(c.axes)}"] += c.sent_bytes * c.times
        by_kind = ", ".join(f"{kind} {sent / 2**20:.2f}" for kind, sent in kinds.items())
        print(
            f"{name:14s} {collectives_between_towers(hlo.parse(text))} between the towers, "
            f"state {(memory.argument_size_in_bytes - batch) / 2**20:7.2f} MiB, "
            f"temporaries {memory.temp_size_in_bytes / 2**20:7.2f}, cycles {cost.cycles:,}, "
            f"moved {cost.hbm_bytes / 2**20:.1f} MiB, sent MiB: {by_kind}",
            flush=True,
        )


if __name__ == "__main__":
    main()
