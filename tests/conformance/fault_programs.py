"""Programs that XLA partitions wrongly, one for every entry of the table of faults.

docs/xla_partitioner.md describes them.
"""

from collections.abc import Callable
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

_ROWS = PartitionSpec("data")


@dataclass(frozen=True)
class Case:
    """A program that XLA may partition wrongly.

    If `expected` is given, `function` is one of the mesh that returns the program; otherwise one
    device computes `function` too. Without `result` the compiler chooses the result's layout.
    """

    function: Callable[..., Any]
    args: tuple[np.ndarray, ...]
    specs: tuple[PartitionSpec, ...]
    mesh: dict[str, int]
    expected: Callable[..., Any] | None = None
    result: PartitionSpec | None = None


@dataclass(frozen=True)
class Ready:
    """A program as XLA partitions it, and as we compile it, with its arguments and result."""

    plain: Callable[..., Any]
    repaired: Jitted
    arrays: list[jax.Array]
    mesh: Mesh
    expected: np.ndarray


def ready(name: str) -> Ready:
    """The program of a fault, on all devices."""
    case = CASES[name](jax.device_count())
    mesh = auto_mesh(np.asarray(jax.devices()).reshape(*case.mesh.values()), tuple(case.mesh))
    layouts = tuple(NamedSharding(mesh, spec) for spec in case.specs)
    function = case.function if case.expected is None else case.function(mesh)
    with jax.default_device(jax.devices()[0]), jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(case.expected or case.function)(*case.args))

    def as_tuple(*args):
        return (function(*args),)

    result = () if case.result is None else (NamedSharding(mesh, case.result),)
    options = {"out_shardings": result} if result else {}
    repaired = Jitted(as_tuple, mesh, lambda *args: layouts, outputs=result, **options)
    return Ready(jax.jit(as_tuple, **options), repaired, put(case.args, layouts), mesh, expected)


def _lookup(number: int) -> Case:
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


def _order(number: int) -> Case:
    data = number // 4
    result = PartitionSpec(("model", "data"), "fsdp")

    def product(mesh):
        def of(x, kernel):
            made = x @ kernel
            return lax.with_sharding_constraint(made, NamedSharding(mesh, result))

        return of

    x = np.arange(4.0 * data * 2, dtype=np.float32).reshape(4 * data, 2)
    kernel = np.random.default_rng(0).random((2, 4), np.float32)
    return Case(
        product,
        (x, kernel),
        (PartitionSpec(None, "fsdp"), PartitionSpec("fsdp")),
        {"data": data, "fsdp": 2, "model": 2},
        expected=lambda x, kernel: x @ kernel,
        result=result,
    )


def _sums(number: int) -> Case:
    data = number // 2

    def summed(mesh):
        def split(x, *axes):
            return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

        def of(x, y):
            one, other = split(x, "data", "model"), split(y, "data", None, "model")
            return jnp.einsum("bthd,bthr->dr", one, other)

        return of

    rng = np.random.default_rng(0)
    x, y = (rng.random((2 * data, 2, 2, 3), np.float32) for _ in range(2))
    return Case(
        summed,
        (x, y),
        (_ROWS, _ROWS),
        {"data": data, "model": 2},
        expected=lambda x, y: jnp.einsum("bthd,bthr->dr", x, y),
        result=PartitionSpec(),
    )


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
    )


CASES: dict[str, Callable[[int], Case]] = {
    "Lookup among replicas": _lookup,
    "Write at one place after a move": _write,
    "Scatter of unevenly split rows": _scatter,
    "Indices of few bits": _indices,
    "Kernel gradient of a grouped convolution": _convolution,
    "Slice at a place beyond the end": _slice,
    "Windows and steps along a split dimension": _windows,
    "Reductions by a function": _reduction,
    "Products in another order than the devices": _order,
    "Sums over dimensions that are split differently": _sums,
    "Rows exchanged in a branch": _branch,
}
