"""Tests the programs that XLA partitions wrongly, as this package compiles them.

There is one program for every entry of `programs.partitioner.table`; docs/xla_partitioner.md
describes them. On CPU, those that neither abort nor hang also run without the repair.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist.hardware.mesh import auto_mesh
from keras_tpu_dist.processes.arrays import put
from keras_tpu_dist.programs.partitioner import Jitted
from keras_tpu_dist.programs.partitioner.table import FAULTS, Fault
from keras_tpu_dist.tools.checkup.bench import Bench, Job
from keras_tpu_dist.tools.checkup.report import RIGHT, CheckPart, Problem, numbered

_ROWS = PartitionSpec("data")


@dataclass(frozen=True)
class Case:
    """A program that XLA may partition wrongly.

    Args:
        function: The program; a function of the mesh that returns it if `expected` is given.
        args: Its arguments, on the host.
        specs: The layouts of the arguments.
        mesh: The sizes of the axes.
        expected: The program for one device, or `None` to use `function`.
        result: The layout of the result, or `None` to leave it to the compiler.
        runs: Whether it can run without the repair on CPU, without aborting or hanging. On other
            platforms this was not tried, and an abort would end the user's program.
    """

    function: Callable[..., Any]
    args: tuple[np.ndarray, ...]
    specs: tuple[PartitionSpec, ...]
    mesh: dict[str, int]
    expected: Callable[..., Any] | None = None
    result: PartitionSpec | None = None
    runs: bool = True


def partitioner(bench: Bench) -> CheckPart:
    """Compares every repaired program with one device, and lists those XLA still gets wrong.

    Args:
        bench: The check's shared state.
    """
    number = len(bench.devices)
    if number < 4 or number % 4:
        why = f"its programs need 4, 8, 12, ... devices, and you have {number}"
        return CheckPart("partitioner", RIGHT, left_out=why)
    problems: list[Problem] = []
    ran, unrepaired = 0, {}
    for fault in FAULTS:
        case = _CASES[fault.name](number)
        if case is None:
            continue
        ran += 1
        ready = _placed(bench, case)
        wrong = bench.some(fault.name, _repaired(bench, fault, ready))
        problems += [_problem(fault, wrong)] if wrong else []
        if case.runs and bench.platform == "cpu":
            unrepaired[fault.name] = bool(bench.some(f"{fault.name}, unrepaired", _plain(ready)))
    still = [name for name, wrong in unrepaired.items() if wrong]
    words = f"{ran - len(problems)} of {ran} known faults of XLA repaired"
    if unrepaired:
        words += f"; without the repairs, this XLA gets {len(still)} of {len(unrepaired)} wrong"
    return CheckPart("partitioner", RIGHT, words, tuple(problems), {"still wrong in XLA": still})


@dataclass(frozen=True)
class _Ready:
    """A program with its arguments on the mesh, and its expected result.

    Args:
        function: The program; its result is a tuple of one array.
        arrays: Its arguments.
        mesh: The mesh.
        layouts: The layouts of the arguments.
        result: The layout of the result, or `()` to leave it to the compiler.
        expected: The result on one device.
    """

    function: Callable[..., Any]
    arrays: list[jax.Array]
    mesh: Mesh
    layouts: tuple[NamedSharding, ...]
    result: tuple[NamedSharding, ...]
    expected: np.ndarray

    @property
    def options(self) -> dict[str, Any]:
        """Options for `jax.jit`."""
        return {"out_shardings": self.result} if self.result else {}


def _placed(bench: Bench, case: Case) -> _Ready:
    names, sizes = tuple(case.mesh), tuple(case.mesh.values())
    grid = np.asarray(bench.devices, dtype=object).reshape(sizes)
    mesh = auto_mesh(grid, names)
    layouts = tuple(NamedSharding(mesh, spec) for spec in case.specs)
    function = case.function if case.expected is None else case.function(mesh)
    with jax.default_device(bench.local[0]), jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(case.expected or case.function)(*case.args))

    def as_tuple(*args):
        return (function(*args),)

    result = () if case.result is None else (NamedSharding(mesh, case.result),)
    return _Ready(as_tuple, put(case.args, layouts), mesh, layouts, result, expected)


def _repaired(bench: Bench, fault: Fault, ready: _Ready) -> list[int]:
    """The devices of this process with a wrong result if this package compiles the program."""
    job = Job(f"partitioner, {fault.name.lower()}")
    with jax.default_matmul_precision("highest"):
        program = Jitted(
            ready.function,
            ready.mesh,
            lambda *args: ready.layouts,
            outputs=ready.result,
            **ready.options,
        )
        (found,) = bench.launches.run(job, program, *ready.arrays)
    return _wrong(found, ready.expected)


def _plain(ready: _Ready) -> list[int]:
    """The devices of this process with a wrong result if XLA partitions the program alone."""
    with jax.default_matmul_precision("highest"):
        (found,) = jax.jit(ready.function, **ready.options)(*ready.arrays)
        return _wrong(found, ready.expected)


def _wrong(array: jax.Array, expected: np.ndarray) -> list[int]:
    return [
        part.device.id
        for part in array.addressable_shards
        if not np.allclose(np.asarray(part.data), expected[part.index], rtol=1e-4, atol=1e-4)
    ]


def _problem(fault: Fault, devices: list[int]) -> Problem:
    return Problem(
        f"{fault.name}: wrong on {numbered(devices)} in spite of the repair ({fault.instead})",
        f"XLA: {fault.wrong}. The repair does not work with this compiler.",
        "Train on a mesh of one axis, or with the versions in docs/versions.md, and report it "
        "with the output of `ktd --version`.",
        tuple(devices),
    )


# --- the programs --------------------------------------------------------------------------------


def _lookup(number: int) -> Case | None:
    if number < 8:
        return None

    def picked(x):
        return jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1)

    def of_replicas(mesh):
        return jax.shard_map(
            lambda w, x: picked(w * x),
            mesh=mesh,
            in_specs=(PartitionSpec(), _ROWS),
            out_specs=_ROWS,
            axis_names={"data"},
            check_vma=False,
        )

    data = number // 4
    rng = np.random.default_rng(0)
    w = rng.uniform(1.0, 2.0, (3, 8)).astype(np.float32)
    x = rng.uniform(1.0, 2.0, (3 * data, 8)).astype(np.float32)
    return Case(
        of_replicas,
        (w, x),
        (PartitionSpec(None, "model"), _ROWS),
        {"data": data, "sequence": 2, "model": 2},
        expected=lambda w, x: picked(jnp.tile(w, (data, 1)) * x),
        runs=False,
    )


def _write(number: int) -> Case:
    def shifted(x):
        return x.at[:-1].set(x[1:]).at[-1].set(99)

    return Case(shifted, (np.arange(2 * number, dtype=np.int32),), (_ROWS,), {"data": number})


def _scatter(number: int) -> Case:
    data = number // 2
    ids = np.arange(2 * data, dtype=np.int32)

    def of_some(mesh):
        rows = NamedSharding(mesh, _ROWS)
        return lambda ids: _histogram(lax.with_sharding_constraint(ids[: data + 1], rows))

    def _histogram(ids):
        return jnp.zeros(2 * data, jnp.int32).at[ids].add(1)

    return Case(
        of_some,
        (ids,),
        (_ROWS,),
        {"data": data, "model": 2},
        expected=lambda ids: _histogram(ids[: data + 1]),
    )


def _indices(number: int) -> Case:
    data = number // 2
    table, ids = np.zeros(300 * data, np.float32), np.array([100, 1, 2], np.uint8)

    def of_table(table, ids):
        return jax.grad(lambda table: jnp.take(table, ids).sum())(table)

    places = (_ROWS, PartitionSpec())
    return Case(of_table, (table, ids), places, {"data": data, "model": 2}, result=_ROWS)


def _convolution(number: int) -> Case:
    data = number // 2
    numbers = ("NHWC", "HWIO", "NHWC")

    def of_kernel(kernel, x):
        def loss(kernel):
            return lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=3
            ).sum()

        return jax.grad(loss)(kernel)

    kernel = np.ones((1, 1, 1, 3), np.float32)
    x = np.ones((4 * data, 4, 4, 3), np.float32)
    return Case(of_kernel, (kernel, x), (PartitionSpec(), _ROWS), {"data": data, "model": 2})


def _slice(number: int) -> Case:
    data = number // 2

    def write(x, start):
        return lax.dynamic_update_slice(x, jnp.full(1, 9, x.dtype), [start])

    args = (np.arange(2 * data, dtype=np.int32), np.array(2 * data + 1, np.int32))
    return Case(write, args, (_ROWS, PartitionSpec()), {"data": data, "model": 2}, result=_ROWS)


def _windows(number: int) -> Case:
    data = number // 2

    def of_pooled(x):
        def pooled(x):
            return lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME")

        return jax.grad(lambda x: (pooled(x) ** 2).sum())(x)

    x = np.arange(2 * data, dtype=np.float32)
    return Case(of_pooled, (x,), (_ROWS,), {"data": data, "model": 2})


def _reduction(number: int) -> Case:
    def of_rows(x):
        return lax.reduce((x, x), (np.float32(1), np.float32(3)), _both, (0,))[1]

    def _both(a, b):
        return a[0] + b[0], a[1] + b[1]

    return Case(of_rows, (np.arange(2 * number, dtype=np.float32),), (_ROWS,), {"data": number})


def _branch(number: int) -> Case:
    data = number // 2
    ragged = 3 * data - 2

    def assigned(mesh):
        rows = NamedSharding(mesh, _ROWS)

        def of(x, w):
            x = lax.with_sharding_constraint(x[:ragged], rows)

            def branch(index, x, w):
                def there():
                    return x[0] @ w[0]

                def skip():
                    return jnp.zeros((ragged, 3), x.dtype)

                return lax.cond(index[0] == 0, there, skip)[None]

            both = [jnp.broadcast_to(a, (2, *a.shape)) for a in (x, w)]
            parts = jax.shard_map(
                branch,
                mesh=mesh,
                in_specs=PartitionSpec("model"),
                out_specs=PartitionSpec("model"),
                axis_names={"model"},
                check_vma=False,
            )(jnp.arange(2), *both)
            return (parts.sum(0) ** 2).sum()

        return of

    args = (np.ones((3 * data, 4), np.float32), np.ones((4, 3), np.float32))
    return Case(
        assigned,
        args,
        (_ROWS, PartitionSpec()),
        {"data": data, "model": 2},
        expected=lambda x, w: ((x[:ragged] @ w) ** 2).sum(),
        runs=False,
    )


_CASES: dict[str, Callable[[int], Case | None]] = {
    "Lookup among replicas": _lookup,
    "Write at one place after a move": _write,
    "Scatter of unevenly split rows": _scatter,
    "Indices of few bits": _indices,
    "Kernel gradient of a grouped convolution": _convolution,
    "Slice at a place beyond the end": _slice,
    "Windows and steps along a split dimension": _windows,
    "Reductions by a function": _reduction,
    "Rows exchanged in a branch": _branch,
}


def programs() -> Iterator[str]:
    """The names of the faults that have a program."""
    yield from _CASES
