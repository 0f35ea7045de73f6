"""Layout constraints within a program that leave some dimensions to the compiler."""

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def in_compiled_code() -> bool:
    """Whether operations here become part of a program.

    You cannot see it from an existing value: under differentiation it is a tracer even if nothing
    is compiled. So a new one is created.
    """
    return isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def mesh_here(mesh: Mesh) -> Any:
    """The mesh for a layout: within a `shard_map` its own, in which some axes are manual.

    Args:
        mesh: The mesh to name outside of any `shard_map`.
    """
    around = jax.sharding.get_abstract_mesh()
    return around if around.manual_axes else mesh


def constrained(array: Any, mesh: Mesh, dimensions: Mapping[int, tuple[str, ...]]) -> Any:
    """An array with a layout for some of its dimensions.

    Args:
        array: The array.
        mesh: The mesh.
        dimensions: From a dimension to the axes that split it, `()` for none. The compiler may
            choose for the others.
    """
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(
        *((dimensions[d] or None) if d in dimensions else free for d in range(array.ndim))
    )
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh_here(mesh), spec))


def padded_at_the_end(array: Any, rows: Mapping[int, int], value: Any = 0) -> Any:
    """An array with rows of one value added at the end of some dimensions.

    Args:
        array: The array.
        rows: From a dimension to the number of rows added to it; others get none.
        value: The value of the rows.
    """
    if not any(rows.values()):
        return array
    widths = [(0, rows.get(d, 0), 0) for d in range(array.ndim)]
    return lax.pad(array, lax.full((), value, array.dtype), widths)
