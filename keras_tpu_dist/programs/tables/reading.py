"""Finds a table in a traced step: where rows are looked up, and the operations that update it.

An update can run on some rows if the table's gradient only consists of looked-up rows, and if the
new values of the table and of its optimizer's slots are computed element by element. Whether the
other rows would stay the same is declared in `programs.tables.optimizers`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_tpu_dist.programs.dimensions import ELEMENTWISE
from keras_tpu_dist.programs.graph import Atom, Equation, Graph

# Operations that return each number unchanged or rounded.
_UNCHANGED = {"sharding_constraint", "copy", "copy_p", "convert_element_type"}
_MODES = {
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
}


@dataclass(eq=False)
class RowLookup:
    """One lookup of rows of a table.

    Attributes:
        mode: Whether an id beyond the table's rows gives `fill`, or the first or last row.
        fill: A number, or `None` for NaN.
        gather: The operation, or `None` if only its gradient is found.
        path: The operations on the table before it, which return its numbers unchanged or rounded.
        scatter: The operation that computes the table's gradient from those of the rows, or `None`.
    """

    indices: Atom
    mode: Any
    gather: Equation | None = None
    path: list[Equation] = field(default_factory=list)
    fill: float | None = None
    scatter: Equation | None = None
    updates: Atom | None = None


@dataclass(eq=False)
class Reading:
    """How a step uses a table.

    Attributes:
        update: The operations that compute the new values of the table and of its slots.
        state: The positions of the table and its slots in the state, the table first.
        changed: The new values, by their position in the state.
        numbers: Other inputs of the update.
        dense: Why the update cannot run on some rows alone, or `""`.
    """

    lookups: list[RowLookup]
    update: list[Equation] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    changed: dict[int, Atom] = field(default_factory=dict)
    numbers: list[Atom] = field(default_factory=list)
    dense: str = ""


class Refused(Exception):
    """The reason why an update cannot run on some rows alone."""


def read(graph: Graph, table: int, state: Sequence[int], outputs: Mapping[int, int]) -> Reading:
    """Analyses how a step uses a table.

    Args:
        graph: The step.
        table: The position of the table among the inputs.
        state: The positions of inputs with the table's shape and layout, itself included.
        outputs: From the position of an output to that of the input whose new value it is; empty if
            the step trains nothing.
    """
    operations = graph.needed({})
    lookups = _lookups(operations, graph.inputs[table])
    # Additions of rows to zeros of the table's shape: gradients of lookups.
    shape = graph.inputs[table].shape
    scatters = [
        operation
        for operation in operations
        if operation.name == "scatter-add"
        and operation.results[0].shape == shape
        and _adds_rows(operation)
    ]
    by_indices = {id(lookup.indices): lookup for lookup in lookups}
    found = Reading(lookups)
    if not outputs or not lookups:
        return found
    try:
        _Update(graph, operations, table, state, outputs).read(found, scatters)
    except Refused as why:
        found.dense = str(why)
        found.update, found.changed = [], {}
    for scatter in scatters:
        if scatter in found.update:
            lookup = by_indices.get(id(scatter.operands[1]))
            if lookup is None or lookup.scatter is not None or lookup.mode != _mode(scatter):
                lookup = RowLookup(scatter.operands[1], _mode(scatter))
                lookups.append(lookup)
            lookup.scatter, lookup.updates = scatter, scatter.operands[2]
            found.update.remove(scatter)
    if found.dense:
        # By width, the gradients of known lookups are exchanged nevertheless.
        for scatter in scatters:
            lookup = by_indices.get(id(scatter.operands[1]))
            if lookup is not None and lookup.scatter is None and lookup.mode == _mode(scatter):
                lookup.scatter, lookup.updates = scatter, scatter.operands[2]
    return found


def _mode(operation: Equation) -> Any:
    return operation.equation.params["mode"]


def _lookups(operations: list[Equation], table: Atom) -> list[RowLookup]:
    paths: dict[int, list[Equation]] = {id(table): []}
    found = []
    for operation in operations:
        path = paths.get(id(operation.operands[0])) if operation.operands else None
        if path is None:
            continue
        if operation.name in _UNCHANGED and len(operation.operands) == 1:
            if jnp.issubdtype(operation.results[0].aval.dtype, jnp.floating):
                paths[id(operation.results[0])] = [*path, operation]
        elif operation.name == "gather" and _is_of_rows(operation):
            fill = operation.equation.params["fill_value"]
            indices = operation.operands[1]
            found.append(RowLookup(indices, _mode(operation), operation, path, fill))
    return found


def _is_of_rows(gather: Equation) -> bool:
    """Whether a gather takes whole rows of a matrix, in the order of its indices."""
    numbers = gather.equation.params["dimension_numbers"]
    operand, indices = gather.operands
    rank = len(indices.shape) - 1
    fill = gather.equation.params["fill_value"]
    return (
        len(operand.shape) == 2
        and indices.shape[-1:] == (1,)
        and tuple(numbers.offset_dims) == (rank,)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(gather.equation.params["slice_sizes"]) == (1, operand.shape[1])
        and _mode(gather) in _MODES
        and (fill is None or np.ndim(fill) == 0)
        and rank > 0
        and math.prod(indices.shape) > 0
    )


def _adds_rows(scatter: Equation) -> bool:
    numbers = scatter.equation.params["dimension_numbers"]
    operand, indices, _ = scatter.operands
    rank = len(indices.shape) - 1
    return (
        is_number(operand, 0)
        and indices.shape[-1:] == (1,)
        and tuple(numbers.update_window_dims) == (rank,)
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and not numbers.operand_batching_dims
        and _mode(scatter) in _MODES
        and rank > 0
        and math.prod(indices.shape) > 0
    )


def number_of(atom: Atom) -> Atom:
    """The scalar that an array is filled with, or the array itself.

    Args:
        atom: The array.
    """
    operation = atom.operation
    if operation is None or operation.name != "broadcast_in_dim":
        return atom
    return operation.operands[0] if operation.operands[0].shape == () else atom


def is_number(atom: Atom, number: float) -> bool:
    """Whether all elements of an array are one known number.

    Args:
        atom: The array.
        number: The number.
    """
    filled = number_of(atom)
    while filled.operation is not None and filled.operation.name == "convert_element_type":
        filled = filled.operation.operands[0]
    known = filled.constant
    # An array may belong to a surrounding program; its values are unknown here.
    if known is None or isinstance(known, (jax.Array, jax.core.Tracer)) or np.ndim(known):
        return False
    return bool(np.asarray(known).item() == number)


class _Update:
    """The part of a step that computes the new values of a table and its slots."""

    def __init__(self, graph, operations, table, state, outputs):
        self._graph, self._operations = graph, operations
        self._table, self._outputs = table, outputs
        self._shape = graph.inputs[table].shape
        self._inputs = {id(graph.inputs[i]): i for i in state}
        # What is computed from the table, its slots and its gradient.
        self._values: set[int] = set()
        self._met: set[int] = {table}
        self._numbers: dict[int, Atom] = {}

    def read(self, found: Reading, scatters: list[Equation]) -> None:
        gathers = {one.gather for one in found.lookups}
        paths = {id(step) for lookup in found.lookups for step in lookup.path}
        self._values.add(id(self._graph.inputs[self._table]))
        own = self._gradients(scatters)
        update = []
        for operation in self._operations:
            if operation in own:
                self._values.add(id(operation.results[0]))
                update.append(operation)
            elif operation not in gathers and any(
                id(operand) in self._values for operand in operation.operands
            ):
                self._add(operation)
                if id(operation) not in paths or self._leads_on(operation, gathers):
                    update.append(operation)
        self._check_outputs(found)
        self._check_readers(update, gathers, paths)
        found.update, found.numbers = update, list(self._numbers.values())
        found.state = [self._table, *sorted(self._met - {self._table})]

    def _gradients(self, scatters: list[Equation]) -> set[Equation]:
        """The scatters of this table's gradient, not of another table of the same shape."""
        readers: dict[int, list[Equation]] = {}
        for operation in self._operations:
            for operand in operation.operands:
                readers.setdefault(id(operand), []).append(operation)
        table, found = id(self._graph.inputs[self._table]), set()
        for scatter in scatters:
            reached, todo = set(), [scatter]
            while todo:
                for result in todo.pop().results:
                    for reader in readers.get(id(result), ()):
                        if id(reader) not in reached:
                            reached.add(id(reader))
                            if any(id(operand) == table for operand in reader.operands):
                                found.add(scatter)
                            todo.append(reader)
        return found

    def _leads_on(self, operation: Equation, gathers: set) -> bool:
        """Whether other operations also read the results of one before a lookup."""
        results = {id(result) for result in operation.results}
        return any(
            other not in gathers and any(id(operand) in results for operand in other.operands)
            for other in self._operations
        )

    def _add(self, operation: Equation) -> None:
        if operation.name not in ELEMENTWISE or len(operation.results) != 1:
            raise Refused(f"its update reads the whole table or its gradient ({operation.name})")
        if operation.results[0].shape != self._shape:
            raise Refused(f"its update changes shapes ({operation.name})")
        for operand in operation.operands:
            if id(operand) in self._values:
                continue
            number = number_of(operand)
            if number.shape == ():
                if number.constant is None:
                    self._numbers[id(number)] = number
            elif id(operand) in self._inputs:
                self._met.add(self._inputs[id(operand)])
                self._values.add(id(operand))
            else:
                source = "an input" if operand.operation is None else operand.operation.name
                raise Refused(f"its gradient is not only that of looked-up rows ({source})")
        self._values.add(id(operation.results[0]))

    def _check_outputs(self, found: Reading) -> None:
        for place, atom in enumerate(self._graph.outputs):
            if id(atom) not in self._values:
                continue
            own = self._outputs.get(place)
            if own is not None and atom is self._graph.inputs[own]:
                continue
            if own is None or own not in self._inputs.values():
                raise Refused("the step returns it, or changes its layout")
            self._met.add(own)
            found.changed[own] = atom

    def _check_readers(self, update: list, gathers: set, paths: set) -> None:
        """Raises `Refused` if other operations read the state that the update writes."""
        known = {id(step) for step in update} | {id(gather) for gather in gathers} | paths
        own = {id(self._graph.inputs[i]) for i in self._met}
        for operation in self._operations:
            if id(operation) not in known and any(
                id(operand) in own for operand in operation.operands
            ):
                raise Refused(f"its slots are also read by {operation.name}")
        returned = {place for place, own in self._outputs.items() if own in self._met}
        for place in returned:
            atom = self._graph.outputs[place]
            if id(atom) not in self._values:
                raise Refused("its slots are replaced by new values")


def on_rows(reading: Reading, graph: Graph) -> Any:
    """The update as a function of rows.

    Args:
        reading: How the step uses the table.
        graph: The step.

    Returns:
        A function from rows of the state, the gradients of these rows for each lookup that has
        some, and scalars to the new rows of the state.
    """
    leaves = [lookup.scatter for lookup in reading.lookups if lookup.scatter is not None]

    def update(state: list, gradients: list, numbers: list) -> list:
        values = {id(graph.inputs[i]): rows for i, rows in zip(reading.state, state, strict=True)}
        values |= {id(number): n for number, n in zip(reading.numbers, numbers, strict=True)}
        for scatter, gradient in zip(leaves, gradients, strict=True):
            values[id(scatter.results[0])] = gradient

        def of(atom: Atom, like: Any) -> Any:
            if id(atom) in values:
                return values[id(atom)]
            number = number_of(atom)
            value = values.get(id(number), number.constant)
            return jnp.full(like, value, atom.aval.dtype) if atom.shape else value

        for operation in reading.update:
            like = state[0].shape
            operands = [of(operand, like) for operand in operation.operands]
            params = operation.equation.params
            result = operands[0]
            if operation.name != "sharding_constraint":
                result = operation.equation.primitive.bind(*operands, **params)
            values[id(operation.results[0])] = result
        return [
            values[id(reading.changed[i])] if i in reading.changed else rows
            for i, rows in zip(reading.state, state, strict=True)
        ]

    return update
