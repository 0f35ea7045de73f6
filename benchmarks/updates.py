"""The cost of slices and updates in place, by a dry run and by the compiler's schedule.

    python benchmarks/updates.py [--chip v5e --chip v6e --chip tpu7x] [--only scatter] [--kernels]

Compiles a small program for each kind of slice and update; you need no chip. Reads the compiler's
final schedule: the bytes of all transfers between HBM and on-chip memory, and the instructions,
both times the trip counts of their loops. Beside them are the bytes that `tools.hlo.traffic`
computes from the program, and the cycles that `tools.hlo.silent` estimates for kernels without the
compiler's own estimate. A loop whose trip count depends on the indices has neither ("data").

Needs libtpu (pip install 'jax[tpu]'); no TPU. A chip whose two cores act as one is left
out: the schedule is of one core, which does all of some kernels and half of others.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
ROWS, WIDTH, TOUCHED = 2**20, 128, 4096
MOST_APART = 1.3


@dataclasses.dataclass(frozen=True)
class Case:
    """A program.

    Args:
        function: What it computes.
        shapes: Its arguments, as shapes and, unless they are float32, dtypes.
        donated: Which of them it may overwrite.
    """

    function: Callable
    shapes: tuple
    donated: tuple[int, ...] = (0,)


def cases() -> dict[str, Case]:
    """The programs by name."""
    import jax
    import jax.numpy as jnp

    table, picked, rows = (ROWS, WIDTH), ((TOUCHED,), "int32"), (TOUCHED, WIDTH)
    stack, part, start = (256, 1024, WIDTH), (16, 1024, WIDTH), ((), "int32")
    cache, token = ((64, 8192, 8, WIDTH), "bfloat16"), ((64, 128, 8, WIDTH), "bfloat16")
    update = jax.lax.dynamic_update_slice

    def adagrad(x, sums, i, g):
        sums = sums.at[i].add(g * g)
        return x.at[i].add(-g * jax.lax.rsqrt(sums[i] + 1e-7)), sums

    def in_loop(x, i, u):
        return jax.lax.fori_loop(0, 4, lambda k, x: x.at[i[k]].add(u[k]), x)

    def stacked(x, u):
        return jax.lax.fori_loop(0, 8, lambda k, x: update(x, u[k][None] * 2, (k, 0, 0)), x)

    def pooled(x, g):
        def pool(x):
            window = (1, 2, 2, 1)
            return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")

        return jax.vjp(pool, x)[1](g)[0]

    def add(x, i, u):
        return x.at[i].add(u)

    def taken(x, i):
        return x[i]

    return {
        "scatter: rows added": Case(add, (table, picked, rows)),
        "scatter: rows replaced": Case(lambda x, i, u: x.at[i].set(u * 2), (table, picked, rows)),
        "scatter: bfloat16": Case(add, ((table, "bfloat16"), picked, (rows, "bfloat16"))),
        "scatter: 32 wide": Case(add, ((ROWS, 32), picked, (TOUCHED, 32))),
        "scatter: 1024 wide": Case(add, ((2**17, 1024), picked, (TOUCHED, 1024))),
        "scatter: blocks": Case(add, ((2**17, 8, 128), picked, (TOUCHED, 8, 128))),
        "scatter: a small table": Case(add, ((1024, WIDTH), ((65536,), "int32"), (65536, WIDTH))),
        "scatter: in order": Case(
            lambda x, i, u: x.at[i].add(u, indices_are_sorted=True, unique_indices=True),
            (table, picked, rows),
        ),
        "scatter: two tables": Case(
            lambda x, y, i, u: (x.at[i].add(u * 2), y.at[i].add(u * 3)),
            (table, table, picked, rows),
            (0, 1),
        ),
        "scatter: Adagrad's rows": Case(adagrad, (table, table, picked, rows), (0, 1)),
        "scatter: in a loop": Case(in_loop, (table, ((4, TOUCHED), "int32"), (4, *rows))),
        "scatter: in a branch": Case(
            lambda x, i, u, p: jax.lax.cond(p, lambda x: x.at[i].add(u), lambda x: x, x),
            (table, picked, rows, ((), "bool")),
        ),
        "scatter: into a copy": Case(add, (table, picked, rows), ()),
        "slice replaced": Case(lambda x, u, k: update(x, u * 2, (k, 0, 0)), (stack, part, start)),
        "slice replaced, any row": Case(
            lambda x, u, k: update(x, u * 2, (k, 0)), (table, (2**16, WIDTH), start)
        ),
        "slice replaced, some columns": Case(
            lambda x, u, k: update(x, u * 2, (0, k)), ((2**16, 1024), (2**16, 128), start)
        ),
        "slice replaced, one row of many": Case(
            lambda x, u, k: update(x, u * 2, (0, k, 0)),
            ((256, 64, 1024), (256, 1, 1024), start),
        ),
        "slice replaced, a few rows": Case(
            lambda x, u, k: update(x, u * 2, (0, k, 0)),
            ((256, 256, 1024), (256, 16, 1024), start),
        ),
        "slice added to": Case(
            lambda x, u, k: update(x, jax.lax.dynamic_slice(x, (k, 0, 0), part) + u, (k, 0, 0)),
            (stack, part, start),
        ),
        "slice replaced by the mean": Case(
            lambda x, u, k: update(x, u + x.mean(), (k, 0, 0)), (stack, part, start)
        ),
        "two slices": Case(
            lambda x, u, k: update(update(x, u * 2, (k, 0, 0)), u * 3, (k + 32, 0, 0)),
            (stack, part, start),
        ),
        "two caches": Case(
            lambda a, b, u, v, k: (update(a, u * 2, (0, k, 0, 0)), update(b, v * 3, (0, k, 0, 0))),
            (cache, cache, token, token, start),
            (0, 1),
        ),
        "slices in a loop": Case(stacked, (stack, (8, 1024, WIDTH))),
        "slice into a copy": Case(
            lambda x, u, k: update(x, u * 2, (k, 0, 0)), (stack, part, start), ()
        ),
        "slice of a changed array": Case(
            lambda x, u, k: update(x * 0.9, u, (k, 0, 0)), (stack, part, start)
        ),
        "hand-written, one block": Case(block_by_hand, (table, (512, WIDTH), ((1,), "int32"))),
        "gather: rows": Case(taken, (table, picked), ()),
        "gather: 2048 wide": Case(taken, ((2**16, 2048), picked), ()),
        "gather: 32 wide": Case(taken, ((2**22, 32), picked), ()),
        "slice read": Case(
            lambda x, u, k: jax.lax.dynamic_slice(x, (k, 0, 0), part) * u, (stack, part, start), ()
        ),
        "columns read": Case(lambda x: x[:, :8] * 2, ((2**17, 1024),), ()),
        "select-and-scatter": Case(pooled, ((64, 64, 64, WIDTH), (64, 32, 32, WIDTH)), ()),
        "all of it": Case(lambda x, u: x + u, (table, table), ()),
    }


def block_by_hand(x, u, k):
    """Adds to one block of an array, in place, with a Pallas kernel that states no cost."""
    import jax
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    def kernel(k, u, x, out):
        out[...] = x[...] + u[...]

    first = pallas.BlockSpec((512, WIDTH), lambda i, k: (0, 0))
    chosen = pallas.BlockSpec((512, WIDTH), lambda i, k: (k[0], 0))
    return pallas.pallas_call(
        kernel,
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(1,), in_specs=[first, chosen], out_specs=chosen
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={2: 0},
    )(k, u, x)


def measured(chip: str, only: str, kernels: bool) -> list[dict]:
    """Compiles the programs for a chip; a process can do so for one, and for nothing else.

    Returns:
        Of each program its name, and of its kernels, times their runs: `bytes` as read and
        `transferred`; of those for which the compiler states no cycles `cycles` as estimated and
        `scheduled`. With `kernels` one row of each kernel.
    """
    dump = pathlib.Path(tempfile.mkdtemp(prefix="schedule"))
    import jax

    from keras_tpu_dist.hardware.libtpu import libtpu_environment

    jax.config.update("jax_platforms", "cpu")
    os.environ.update(
        libtpu_environment(),
        LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles",
    )
    from jax.experimental import topologies

    from keras_tpu_dist.hardware.topology import Topology

    slice_ = Topology.parse(CHIPS[chip])
    device = topologies.get_topology_desc(**slice_.libtpu_arguments()).devices[0]
    placed = jax.sharding.SingleDeviceSharding(device)

    def spec(shape):
        dims, dtype = shape if shape and isinstance(shape[-1], str) else (shape, "float32")
        return jax.ShapeDtypeStruct(dims, dtype, sharding=placed)

    found = []
    try:
        for name, case in cases().items():
            if only not in name:
                continue
            for path in dump.iterdir():
                path.unlink()
            jitted = jax.jit(case.function, donate_argnums=case.donated)
            compiled = jitted.lower(*map(spec, case.shapes)).compile()
            rows = kernel_rows(compiled.as_text(), dump, slice_.chip)
            found += [{"case": name, **row} for row in (rows if kernels else [total(rows)])]
    finally:
        shutil.rmtree(dump)
    return found


def kernel_rows(text: str, dump: pathlib.Path, chip) -> list[dict]:
    """What is read and what is scheduled of each kernel that has a schedule."""
    from tpu_schedule import scheduled_kernels

    from keras_tpu_dist.tools.hlo import cost, silent, traffic
    from keras_tpu_dist.tools.hlo.loops import executions
    from keras_tpu_dist.tools.hlo.parse import parse

    program = parse(text)
    runs = executions(program).executions
    schedules = scheduled_kernels(runs, dump)
    bytes_per_cycle = chip.hbm_bandwidth / chip.devices / chip.clock
    rows = []
    for run in runs:
        schedule = schedules.get(run.instruction.name)
        if schedule is None:
            continue
        moved = traffic.hbm_bytes(program, run.computation, run.instruction)
        cycles = silent.cycles(program, run.computation, run.instruction, chip)
        bound = max(schedule.cycles, schedule.bytes / bytes_per_cycle)
        rows.append(
            {
                "kernel": run.instruction.name,
                "bytes": run.times * moved,
                "transferred": run.times * schedule.bytes,
                "stated": run.times * cost.estimated_cycles(run.instruction),
                "cycles": run.times * cycles,
                "scheduled": round(run.times * bound) if cycles else 0,
                "data": schedule.depends_on_data,
            }
        )
    return rows


# Where a slice starts between tiles, every element is shifted: that may take longer than HBM.
SHIFTED = ("slice replaced, one row", "slice replaced, a few rows", "slice replaced, some columns")


def pairs(row: dict) -> list[tuple[int, int]]:
    """What is read and what is scheduled of a kernel, as far as both should agree.

    Kernels that move a megabyte at least, as often as the program says.
    """
    if row["transferred"] < 1e6 or row["data"] or row["case"] == SHIFTED[-1]:
        return []
    moved = (row["bytes"], row["transferred"])
    return (
        [moved] if row["case"].startswith(SHIFTED) else [moved, (row["cycles"], row["scheduled"])]
    )


def total(rows: list[dict]) -> dict:
    """All kernels of a program together."""
    numbers = ("bytes", "transferred", "stated", "cycles", "scheduled")
    return {n: sum(row[n] for row in rows) for n in numbers} | {
        "data": any(row["data"] for row in rows)
    }


def in_processes(chips: list[str], only: str = "", kernels: bool = False) -> dict[str, list[dict]]:
    """The rows of each chip, each in a process of its own, one after the other."""
    found = {}
    for chip in chips:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "rows.json")
            command = [sys.executable, __file__, "--chip", chip, "--json", str(path)]
            command += ["--only", only, *(["--kernels"] if kernels else [])]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[chip] = json.loads(path.read_text())
    return found


def lines(rows: list[dict]) -> list[str]:
    """The rows as a Markdown table."""
    made = [
        "| | MB read here | scheduled | of it | cycles here | scheduled | of it |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        of_bytes, of_cycles = (
            "data" if row["data"] else f"{row[a] / row[b]:.2f}" if row[b] else "-"
            for a, b in (("bytes", "transferred"), ("cycles", "scheduled"))
        )
        name = " ".join(filter(None, (row["case"], row.get("kernel"))))
        made.append(
            f"| {name} | {row['bytes'] / 1e6:,.1f} | {row['transferred'] / 1e6:,.1f} | {of_bytes} "
            f"| {row['cycles']:,} | {row['scheduled']:,} | {of_cycles} |"
        )
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", action="append", choices=CHIPS)
    parser.add_argument("--only", default="", help="part of the names of the cases")
    parser.add_argument("--kernels", action="store_true", help="a row for each kernel")
    parser.add_argument("--json", type=pathlib.Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.json:
        rows = measured(asked.chip[0], asked.only, asked.kernels)
        asked.json.write_text(json.dumps(rows))
        return
    for chip in asked.chip or CHIPS:
        print(f"\n{chip}\n", flush=True)
        print("\n".join(lines(in_processes([chip], asked.only, asked.kernels)[chip])), flush=True)


if __name__ == "__main__":
    main()
