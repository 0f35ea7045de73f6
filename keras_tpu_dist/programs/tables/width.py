"""Uses tables by their width: each device looks up all ids in a part of each row.

A plan splits a table over the data axes. To look up rows, the compiler gathers the whole table on
each device and sums its whole gradient, even if a step uses few rows. Here the table is used by its
width instead: each device looks up the ids of all devices in its columns, and sends every device
the columns of that device's ids. Gradients return by the same route, and the device that has their
columns adds them up. This works with any optimizer, because the gradient is complete.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from keras_tpu_dist.common.axes import axis_size, named_sharding
from keras_tpu_dist.programs.graph import Equation, Graph, Instead
from keras_tpu_dist.programs.partitioner import constrained
from keras_tpu_dist.programs.tables.exchange import TableSplit
from keras_tpu_dist.programs.tables.reading import Reading

# Smaller tables are updated as fast as they are read, and left to the compiler.
LEAST_BYTES = 64 * 2**20
# The bytes that links gather while a device looks up one row or adds to it, and how much longer
# they take to exchange a byte than to gather one. With these values, the clear gains in the TPU
# compiler's estimates for v5e, v5p and v6e are used: `python benchmarks/lookups.py`.
BYTES_PER_ROW = 1250
_EXCHANGE_FACTOR = 3


def is_shorter(split: TableSplit, ids: int, item_bytes: int, trains: bool) -> bool:
    """Whether an exchange of features takes less time than the compiler's own program.

    For many ids the compiler gathers the table and sums its whole gradient. For few ids it looks up
    each id on all devices and sums the results.

    Args:
        split: The table's layout.
        ids: The number of ids of a step, on all devices.
        item_bytes: Bytes of one number in the dtype of the lookup.
        trains: Whether the table gets a gradient.

    Example:

    >>> import jax
    >>> from keras_tpu_dist.programs.tables.exchange import TableSplit
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> split = TableSplit(mesh, ("data",), (), ("data",), (128_256, 4096))
    >>> [is_shorter(split, ids, 2, trains=True) for ids in (8192, 131_072, 4_194_304)]
    [False, True, False]
    """
    return is_shorter_for(
        split.shape,
        axis_size(split.mesh, _axes(split)),
        bool(split.exchanged),
        StepLookups(ids, item_bytes, trains),
    )


class StepLookups(NamedTuple):
    """The lookups of a step in a table.

    Attributes:
        ids: The number of ids of a step, on all devices.
        item_bytes: Bytes of one number in the dtype of the lookup.
    """

    ids: float
    item_bytes: float
    trains: bool


def is_shorter_for(shape: tuple[int, ...], ways: int, by_rows: bool, lookups: StepLookups) -> bool:
    """Whether an exchange of features takes less time, for a table on any mesh.

    Args:
        shape: The table's rows and width.
        ways: The number of parts of the table.
        by_rows: Whether its rows are split.
        lookups: The lookups of a step in it.
    """
    (rows, width), (ids, item_bytes, trains) = shape, lookups
    exchanged = (ids * width + (rows * width if by_rows else 0)) * item_bytes / ways
    by_width = (1 + trains) * (BYTES_PER_ROW * ids + _EXCHANGE_FACTOR * exchanged)
    # An all-reduce sends its operand twice.
    gathered, looked_up = (1 + 2 * trains) * rows, (2 + trains) * ids
    return by_width < min(gathered, looked_up) * width * item_bytes


def trouble(split: TableSplit) -> str:
    """Why a table cannot be used by its width, or `""`.

    Args:
        split: The table's layout.
    """
    others = [name for name in (*split.rows, *split.columns) if name not in split.batch]
    if others:
        return f"it is split over {others}, which do not split the batch"
    ways = axis_size(split.mesh, _axes(split))
    if ways == 1:
        return "it is replicated"
    if split.shape[1] % ways:
        return f"its width of {split.shape[1]} is not divisible by {ways}"
    return ""


def used_otherwise(graph: Graph, table: int, reading: Reading) -> str:
    """The operation that reads a table besides lookups and the optimizer's update, or `""`.

    Args:
        graph: The step.
        table: The position of the table among its inputs.
        reading: How the step uses it.
    """
    values, gathers = {id(graph.inputs[table])}, {lookup.gather for lookup in reading.lookups}
    shape = graph.inputs[table].shape
    for operation in graph.needed({}):
        if operation in gathers or not any(id(operand) in values for operand in operation.operands):
            continue
        alike = [result for result in operation.results if result.shape == shape]
        # Scalars such as an optimizer's norms are computed from the parts.
        if not alike and not operation.name.startswith("reduce_"):
            return operation.name
        if len(operation.operands) == 1:
            values.update(map(id, alike))
    return ""


class ByWidth:
    """A table that a step uses by its width.

    Args:
        split: The table's layout.
        path: The table's path, for profiles.
        reading: How the step uses it.
    """

    def __init__(self, split: TableSplit, path: str, reading: Reading):
        self._split, self._reading = split, reading
        self._scope = path.rpartition("/")[0] or "table"
        self._width = _axes(split)
        self._rows = tuple(name for name in split.batch if name not in self._width)

    def replaced(self) -> dict[Equation, Instead]:
        """The replacements of operations."""
        found = {}
        for lookup in self._reading.lookups:
            if (gather := lookup.gather) is not None:
                found[gather] = Instead(gather.operands, self._looking_up(gather))
            if (scatter := lookup.scatter) is not None and lookup.updates is not None:
                operands = [lookup.indices, lookup.updates]
                found[scatter] = Instead(operands, self._adding_up(scatter))
        return found

    def updated(self, value: Callable) -> dict[int, Any]:
        """Nothing: the step's own update gets a complete gradient.

        Args:
            value: Not used.
        """
        return {}

    def _stored(self, table: Any) -> Any:
        """The table, or its gradient, in the stored layout."""
        layout = named_sharding(self._split.mesh, tuple(self._split.layout))
        return lax.with_sharding_constraint(table, layout)

    def _used(self, table: Any) -> Any:
        """The table, or its gradient, split by width."""
        return constrained(table, self._split.mesh, {0: (), 1: self._width})

    def _features(self, array: Any) -> Any:
        """Features of all rows of the batch, split by columns."""
        return constrained(array, self._split.mesh, {0: self._rows, array.ndim - 1: self._width})

    def _by_rows(self, array: Any) -> Any:
        """An array split by rows of the batch."""
        return constrained(array, self._split.mesh, {0: self._split.batch, array.ndim - 1: ()})

    def _ids(self, indices: Any) -> Any:
        return constrained(indices, self._split.mesh, {0: self._rows})

    def _looking_up(self, gather: Equation) -> Callable:
        def compute(arrays: list) -> list:
            table, indices = arrays
            with jax.named_scope(self._scope):
                # In the stored layout first, so that the layer's rounded numbers are exchanged.
                table = self._used(self._stored(table))
                found = gather.equation.primitive.bind(
                    table, self._ids(indices), **gather.equation.params
                )
                return [self._by_rows(self._features(found))]

        return compute

    def _adding_up(self, scatter: Equation) -> Callable:
        params = scatter.equation.params

        def compute(arrays: list) -> list:
            indices, gradients = arrays
            with jax.named_scope(self._scope):
                updates = self._features(self._by_rows(gradients))
                # One device adds up the gradients of all. In bfloat16, the sum of a frequent row
                # would stop growing.
                sums = jnp.promote_types(updates.dtype, "float32")
                total = lax.scatter_add(
                    jnp.zeros(self._split.shape, sums),
                    self._ids(indices),
                    updates.astype(sums),
                    params["dimension_numbers"],
                    indices_are_sorted=params["indices_are_sorted"],
                    unique_indices=params["unique_indices"],
                    mode=params["mode"],
                ).astype(updates.dtype)
                return [self._stored(self._used(total))]

        return compute


def ids_of(reading: Reading) -> int:
    """The number of ids that a step looks up in a table.

    Args:
        reading: How the step uses it.
    """
    return sum(math.prod(lookup.indices.shape) for lookup in reading.lookups if lookup.gather)


def _axes(split: TableSplit) -> tuple[str, ...]:
    return (*split.rows, *split.columns)
