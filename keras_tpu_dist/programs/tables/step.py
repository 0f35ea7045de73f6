"""Train, test and predict steps whose tables are looked up and updated by rows."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_tpu_dist import _keras
from keras_tpu_dist.common.axes import axis_size, entry_names
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.programs.answers import (
    Answer,
    Level,
    PassContext,
    Rewritten,
    Why,
    WrittenProgram,
    words_of,
)
from keras_tpu_dist.programs.graph import Atom, Equation, Graph, Instead, traced_step
from keras_tpu_dist.programs.partitioner.places import padded_at_the_end
from keras_tpu_dist.programs.tables.exchange import NOBODY, Lookups, Route, TableSplit, Updates
from keras_tpu_dist.programs.tables.optimizers import why_every_row
from keras_tpu_dist.programs.tables.reading import Reading, RowLookup, number_of, on_rows, read
from keras_tpu_dist.programs.tables.width import (
    LEAST_BYTES,
    ByWidth,
    ids_of,
    is_shorter,
    trouble,
    used_otherwise,
)

# If a step has more ids per row of the table, most rows change anyway.
_MOST_IDS = 1 / 8

BY_ROWS = "by rows: ids and rows are exchanged, and only the used rows are updated"
LAZY = f"{BY_ROWS}; unused rows and their slots remain unchanged"
EVERY_ROW = "every row is updated"
LOOKED_UP = "by rows: ids and rows are exchanged"
BY_WIDTH = "by width: all ids are looked up in a part of each row, and features are exchanged"


@dataclass(frozen=True)
class RowTable:
    """A table of a step.

    Attributes:
        alike: The positions in the state of arrays with its shape and layout, itself included.
    """

    variable: Any
    place: int
    split: TableSplit
    alike: tuple[int, ...]


class TablesByRows:
    """The pass that uses tables by rows or by width, if `tables=` asks for it."""

    name = "tables"
    level = Level.STEP

    def rewritten(self, program: WrittenProgram, where: PassContext) -> Rewritten | Why:
        """The step with its tables by rows or by width, or why it updates every row."""
        strategy, model, mesh, batch = (
            _keras.active_strategy(),
            where.model,
            where.mesh,
            where.data_axes,
        )
        option = None if strategy is None else strategy.options.tables
        if option is None or mesh.size == 1:
            return Why()
        answers = [
            Answer(path, f"{EVERY_ROW}: {why}", level=logging.WARNING)
            for path, why in _troubles(model, mesh, batch, option).items()
        ]
        tables = tables_of(model, where.kind, mesh, batch, option)
        if not tables:
            return Why(answers)
        return _Step(where, option, tables, answers).rewritten(program)

    def waits(self, model: Any, strategy: Any) -> list[Answer]:
        """What is known before a step is traced."""
        option, mesh, batch = strategy.options.tables, strategy.mesh, strategy.data_axes
        if option is None or mesh.size == 1:
            return [Answer("", "tables=None" if option is None else "the mesh has one device")]
        answers = [
            Answer(table.variable.path, "may be used by rows: the first step decides")
            for table in tables_of(model, "predict", mesh, batch, option)
        ]
        troubles = _troubles(model, mesh, batch, option).items()
        answers += [Answer(path, f"{EVERY_ROW}: {why}") for path, why in troubles]
        least = f" of {LEAST_BYTES >> 20} MiB or more" if option == "auto" else ""
        return answers or [Answer("", f"no Embedding has a table{least} that is split")]


def refused(model: Any, strategy: Any) -> dict[str, str]:
    """The tables of which every row is updated although `tables=` asks for rows, with reasons.

    Args:
        model: The model.
        strategy: Its strategy.
    """
    if strategy.options.tables not in ("rows", "lazy"):
        return {}
    waits = {answer.path: answer.words for answer in TablesByRows().waits(model, strategy)}
    found = {**waits, **words_of(model, TablesByRows.name)}
    return {path: words for path, words in found.items() if EVERY_ROW in words}


def _troubles(model: Any, mesh: Mesh, batch: Sequence[str], option: str) -> dict[str, str]:
    """The tables whose layout prevents their use by rows, with reasons."""
    if option == "auto":
        return {}
    found = {}
    for variable in _embeddings(model):
        split = _split_of(variable, mesh, batch)
        why = "it is not a matrix of floats on this mesh" if split is None else split.trouble()
        if why:
            found[variable.path] = why
    return found


def _embeddings(model: Any) -> list[Any]:
    """The tables of `keras.layers.Embedding`, and of layers derived from it."""
    layers = _keras.flatten_layers(model)
    kinds = [layer for layer in layers if isinstance(layer, keras.layers.Embedding)]
    tables = [_keras.stored_weight(layer, "embeddings") for layer in kinds]
    return [table for table in tables if table is not None]


def tables_of(
    model: Any, kind: str, mesh: Mesh, batch: Sequence[str], option: str
) -> list[RowTable]:
    """The tables of a model that may be used by rows.

    Args:
        model: The model, built.
        kind: `"train"`, `"test"` or `"predict"`.
        mesh: The mesh.
        batch: Its axes that split the batch.
        option: `"auto"`, `"rows"` or `"lazy"`.
    """
    variables = [v for group in _keras.state_groups(model, kind) for v in group]
    tables = set(map(id, _embeddings(model)))
    found = []
    for place, variable in enumerate(variables):
        split = _split_of(variable, mesh, batch) if id(variable) in tables else None
        if split is None or split.trouble() or not _is_worth(variable, split, option):
            continue
        layout = _keras.variable_layout(variable)
        alike = tuple(
            i
            for i, v in enumerate(variables)
            if tuple(v.shape) == split.shape and _keras.variable_layout(v) == layout
        )
        found.append(RowTable(variable, place, split, alike))
    return found


def _split_of(variable: Any, mesh: Mesh, batch: Sequence[str]) -> TableSplit | None:
    layout, shape = _keras.variable_layout(variable), tuple(variable.shape)
    if len(shape) != 2 or not jnp.issubdtype(jnp.dtype(variable.dtype), jnp.floating):
        return None
    if not isinstance(layout, NamedSharding) or layout.mesh != mesh:
        return None
    rows, columns = (*layout.spec, None, None)[:2]
    axes = [tuple(n for n in entry_names(e) if mesh.shape[n] > 1) for e in (rows, columns, batch)]
    return TableSplit(mesh, axes[0], axes[1], axes[2], shape)


def _is_worth(variable: Any, split: TableSplit, option: str) -> bool:
    if option != "auto":
        return True
    return bool(split.exchanged or split.traded) and bytes_of(variable) >= LEAST_BYTES


class _Step:
    """A step that is analysed once and computed with its tables by rows."""

    def __init__(
        self, where: PassContext, option: str, tables: list[RowTable], answers: list[Answer]
    ):
        self._model, self._kind = where.model, where.kind
        self._option, self._tables, self._answers = option, tables, answers

    def rewritten(self, program: WrittenProgram) -> Rewritten:
        """Its results."""
        graph, inputs, shapes = traced_step(program.function, *program.args)
        state, _ = program.args
        count, outputs = len(jax.tree.leaves(state)), {}
        # A train step returns its new state last, in the order of the old one.
        if self._kind == "train" and len(jax.tree.leaves(shapes[1])) == count:
            first = len(graph.outputs) - count
            outputs = {first + i: i for i in range(count)}
        used = [use for t in self._tables if (use := self._used(graph, t, outputs)) is not None]
        instead: dict[Equation, Instead] = {}
        for use in used:
            instead |= use.replaced()

        def updated(value: Callable) -> dict[int, Any]:
            return {k: new for use in used for k, new in use.updated(value).items()}

        results = graph.evaluate(inputs, instead, after=updated)
        return Rewritten(jax.tree.unflatten(jax.tree.structure(shapes), results), self._answers)

    def _used(
        self, graph: Graph, table: RowTable, outputs: Mapping[int, int]
    ) -> "_Used | ByWidth | None":
        """How the step uses a table, or `None` if it is left to the compiler."""
        trains, lazy = bool(outputs) and table.variable.trainable, self._option == "lazy"
        reading = read(graph, table.place, table.alike, outputs if trains else {})
        path, asked = table.variable.path, self._option != "auto"
        if not reading.lookups:
            if asked:
                why = "its lookup is inside remat, a loop or an assigned layer, or there is none"
                self._note(path, f"{EVERY_ROW}: {why}", warn=True)
            return None
        why = reading.dense
        if trains and not lazy:
            why = why or why_every_row(self._model, table.variable)
        ids = ids_of(reading)
        many = ids > _MOST_IDS * table.split.shape[0] or not table.split.exchanged
        if why or (many and not asked):
            why = why or f"{ids} ids a step for {table.split.shape[0]} rows"
            return self._by_width(graph, table, reading, trains, why)
        if trains and reading.changed:
            self._note(path, LAZY if lazy else BY_ROWS)
        else:
            self._note(path, LOOKED_UP)
        return _Used(table, reading, graph)

    def _by_width(
        self, graph: Graph, table: RowTable, reading: Reading, trains: bool, why: str
    ) -> ByWidth | None:
        """The table by its width, if that takes less time than gathering it."""
        split, path, ids = table.split, table.variable.path, ids_of(reading)
        found = [lookup.gather for lookup in reading.lookups if lookup.gather is not None]
        item_bytes = found[0].results[0].aval.dtype.itemsize if found else 0
        if (
            trouble(split)
            or not is_shorter(split, ids, item_bytes, trains)
            or used_otherwise(graph, table.place, reading)  # last, as it reads the whole step
        ):
            self._note(path, f"{EVERY_ROW}: {why}", warn=self._option != "auto")
            return None
        self._note(path, BY_WIDTH)
        return ByWidth(split, path, reading)

    def _note(self, path: str, words: str, warn: bool = False) -> None:
        done = not words.startswith(EVERY_ROW)
        level = logging.WARNING if warn else logging.NOTSET
        self._answers.append(Answer(path, words, done, level))


class _Used:
    """A table in a step that is being computed."""

    def __init__(self, table: RowTable, reading: Reading, graph: Graph):
        self._table, self._reading, self._graph = table, reading, graph
        self._split = table.split
        # The ids and the route of each lookup.
        self._routes: dict[RowLookup, tuple[Any, Route]] = {}
        # How ids, rows and their gradients, and routes are split: each device has a route of its
        # own, but all have the same rounds.
        self._batch = PartitionSpec(self._split.batch or None)
        self._updates = PartitionSpec(self._split.batch or None, self._split.left or None)
        everywhere = PartitionSpec(self._split.mesh.axis_names)
        self._of_routes = Route(everywhere, everywhere, PartitionSpec(), everywhere)

    def replaced(self) -> dict[Equation, Instead]:
        """The replacements of operations."""
        reading, found = self._reading, {}
        table = self._graph.inputs[self._table.place]
        for lookup in reading.lookups:
            if lookup.gather is not None:
                found[lookup.gather] = Instead([table, lookup.indices], self._looking_up(lookup))
            if lookup.scatter is not None and lookup.updates is not None:
                found[lookup.scatter] = Instead([lookup.indices, lookup.updates], _nothing)
        for operation in reading.update:
            operands = [each for atom in operation.operands for each in _read_of(atom)]
            found[operation] = Instead(operands, _nothing)
        return found

    def _looking_up(self, lookup: RowLookup) -> Callable:
        def compute(arrays: list) -> list:
            rows = self._rows(lookup, *arrays)
            for operation in lookup.path:
                if operation.name != "sharding_constraint":
                    rows = rows.astype(operation.results[0].aval.dtype)
            return [rows]

        return compute

    def _rows(self, lookup: RowLookup, table: Any, indices: Any) -> Any:
        ids, valid = _ids(indices, lookup.mode, self._split.shape[0])
        ids, exchange = self._placed(ids)
        rows, route = self._mapped(
            exchange.look_up, (self._split.layout, self._batch), (self._updates, self._of_routes)
        )(table, ids)
        self._routes[lookup] = ids, route
        shape = indices.shape[:-1]
        rows = rows.reshape(*ids.shape, -1)[: shape[0]]
        if valid is None:
            return rows
        fill = jnp.nan if lookup.fill is None else lookup.fill
        return jnp.where(valid[..., None], rows, jnp.asarray(fill, rows.dtype))

    def _placed(self, ids: Any) -> tuple[Any, Lookups]:
        """Ids padded to equal counts on all devices, and their `Lookups`."""
        ways = axis_size(self._split.mesh, self._split.batch or None)
        ids = padded_at_the_end(ids, {0: -ids.shape[0] % ways}, NOBODY)
        return ids, Lookups(self._split, ids.size // ways)

    def _route(self, lookup: RowLookup, indices: Any) -> tuple[Any, Route]:
        if lookup not in self._routes:
            ids, _ = _ids(indices, lookup.mode, self._split.shape[0])
            ids, exchange = self._placed(ids)
            route = self._mapped(
                lambda ids: exchange.route(exchange.ids(ids)), (self._batch,), self._of_routes
            )(ids)
            self._routes[lookup] = ids, route
        return self._routes[lookup]

    @staticmethod
    def _gradients(ids: Any, updates: Any) -> Any:
        """The gradients of a lookup's rows, padded as `_placed` pads its ids."""
        updates = padded_at_the_end(updates, {0: ids.shape[0] - updates.shape[0]})
        return updates.reshape(-1, updates.shape[-1])

    def updated(self, value: Callable) -> dict[int, Any]:
        """The new values of the table and its slots, by the `id` of their atoms in the step.

        Args:
            value: A function from an atom of the step to its array.
        """
        reading, split = self._reading, self._split
        if not reading.changed:
            return {}
        trained = [lookup for lookup in reading.lookups if lookup.scatter is not None]
        routes = [self._route(lookup, value(lookup.indices)) for lookup in trained]
        updates = Updates(
            [self._placed(ids)[1] for ids, _ in routes], on_rows(reading, self._graph)
        )
        state = self._mapped(
            updates,
            (
                split.layout,
                self._batch,
                [self._of_routes] * len(routes),
                self._updates,
                PartitionSpec(),
            ),
            split.layout,
        )(
            [value(self._graph.inputs[i]) for i in reading.state],
            [ids for ids, _ in routes],
            [route for _, route in routes],
            [
                self._gradients(ids, value(lookup.updates))
                for lookup, (ids, _) in zip(trained, routes, strict=True)
            ],
            [value(number) for number in reading.numbers],
        )
        return {
            id(reading.changed[i]): new
            for i, new in zip(reading.state, state, strict=True)
            if i in reading.changed
        }

    def _mapped(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        return jax.shard_map(
            # Profiles count the table's time for its layer.
            jax.named_scope(self._table.variable.path.rpartition("/")[0] or "table")(function),
            mesh=self._split.mesh,
            in_specs=inputs,
            out_specs=outputs,
            check_vma=False,  # loops and sums do not record over which axes their results vary
        )


def _read_of(atom: Atom) -> list[Atom]:
    """What an update of rows reads instead of an operand: the scalar of a filled array."""
    number = number_of(atom)
    read = number if number.shape == () else atom
    return [] if read.constant is not None else [read]


def _nothing(arrays: list) -> list:
    return [None]


def _ids(indices: Any, mode: Any, rows: int) -> tuple[Any, Any]:
    """The ids of a lookup, with `NOBODY` for ids without a row, and a mask of the valid ones.

    The mask is `None` if ids beyond the ends mean the first and the last row.
    """
    indices = indices[..., 0]
    last = np.asarray(rows - 1, indices.dtype) if rows - 1 <= np.iinfo(indices.dtype).max else None
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        clipped = jnp.maximum(indices, 0)
        clipped = clipped if last is None else jnp.minimum(clipped, last)
        return clipped.astype("int32"), None
    valid = indices >= 0
    if last is not None:
        valid &= indices <= last
    return jnp.where(valid, indices.astype("int32"), NOBODY), valid
