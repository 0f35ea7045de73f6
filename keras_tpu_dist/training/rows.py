"""One program of a step for batches of several numbers of rows, so that few are compiled."""

import logging
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.axes import named_sharding
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.input.batches import BatchPlacer, PlacedBatch, Slot
from keras_tpu_dist.input.iterator import DeviceIterator
from keras_tpu_dist.programs.partitioner import Jitted, OtherTypes, types_of
from keras_tpu_dist.programs.rows import Differs, Shared, shared

SHARED = "batches of fewer rows run in the program of longer ones, with their number as data"
ALONE = "each number of rows has a program of its own"
# From so many kinds of batches on, a step is compiled for powers of two of rows.
MANY = 8


class BatchSizes:
    """The rows to which the batches of a step are padded.

    A batch with fewer rows than the one before it, such as a remainder, is padded to the rows of
    that one. If calls have one batch each, with different rows, or if an input has a third number
    of rows, or if there are many kinds of batches, rows are padded to a power of two on each
    device. The first batch of a call with more than one has its own program, since a larger one
    would take longer at each step.

    Args:
        name: The step and its model, for messages.
    """

    def __init__(self, placer: BatchPlacer, name: str):
        self._placer, self._name = placer, name
        self._known: dict[Hashable, dict[int, int | None]] = {}
        self._compiled: list[str] = []
        # Why batches are not padded to more rows than they need.
        self._reason = ""

    def place(self, iterator: DeviceIterator | None, batch: Any) -> PlacedBatch:
        """Transfers a host batch.

        Args:
            iterator: The input that the batch comes from; `None` for `train_on_batch` and the like.
        """
        placer = self._placer
        if not placer.pads_rows:
            return placer.place(batch)
        leaves, treedef, plan = placer.planned(batch)
        if not plan.rows:
            return placer.place_planned(leaves, treedef, plan)
        before, varies = 0, True
        if iterator is not None:
            before = iterator.rows_before
            iterator.rows_before = plan.rows
            iterator.rows_seen.add(plan.rows)
            varies = iterator.num_batches == 1 or len(iterator.rows_seen) > 2
        sizes = self._known.setdefault(plan.others, {})
        if plan.rows not in sizes:
            sizes[plan.rows] = self._longer(plan.rows, sizes, before, varies)
        return placer.place_planned(leaves, treedef, plan, sizes[plan.rows])

    def follow(self, iterator: DeviceIterator, batch: Any) -> None:
        """Notes the rows of a host batch that ran in a launch of several steps."""
        if self._placer.pads_rows:
            iterator.rows_before = self._placer.planned(batch)[2].rows
            iterator.rows_seen.add(iterator.rows_before)

    def no_use(self, reason: str, rows: int) -> None:
        """Notes that the step shares no program, so that a batch was padded for nothing."""
        if rows > 1:  # one row may be traced otherwise than all other numbers
            self._reason = reason
        self._note(f"{rows} rows")

    def _longer(
        self, rows: int, sizes: dict[int, int | None], before: int, varies: bool
    ) -> int | None:
        chosen = None if self._reason else self._chosen(rows, sizes, before, varies)
        if chosen not in (None, rows):
            return chosen
        self._note(f"{rows} rows")
        return None

    def _chosen(
        self, rows: int, sizes: dict[int, int | None], before: int, varies: bool
    ) -> int | None:
        shards = self._placer.num_shards
        if rows < before:
            return sizes.get(before) or before + -before % shards
        if sizes and (varies or len(sizes) >= MANY):
            return shards * 2 ** math.ceil(math.log2(max(1, rows / shards)))
        return None

    def _note(self, batch: str) -> None:
        """Warns once if the step is compiled for many kinds of batches."""
        self._compiled.append(batch)
        if len(self._compiled) == MANY:
            several = len(self._known) > 1
            kinds = f", of {len(self._known)} kinds of other sizes" if several else ""
            reason = f" They share no program: {self._reason}." if self._reason else ""
            log_once(
                f"{self._name} is compiled for {MANY} batches: {', '.join(self._compiled)}{kinds}."
                f"{reason} Give batches of equal shapes: drop_remainder=True in tf.data, sequences "
                "padded to a few lengths",
                logging.WARNING,
                about=f"many compilations: {self._name}",
            )


class RowsAsData:
    """The programs of a step for longer batches, in which the number of rows is data.

    Args:
        exact: The step, which is compiled for each number of rows.
        make: Compiles a function of the state, a batch and numbers, as the step is compiled.
        sizes: The rows to which batches are padded.
        returns_rows: Whether the step's outputs have rows.
        keep: Keeps the answer of the pass "rows": words, and whether programs are shared.
    """

    def __init__(
        self,
        exact: Jitted,
        make: Callable[[Callable], Callable],
        sizes: BatchSizes,
        returns_rows: bool,
        keep: Callable[[str, bool], None],
    ):
        self._exact, self._make, self._sizes = exact, make, sizes
        self._returns_rows, self._keep = returns_rows, keep
        self._launches: dict[Hashable, Callable] = {}
        self._programs: dict[Hashable, Callable] = {}

    def __call__(self, state: Any, batch: PlacedBatch) -> tuple[Any, Any]:
        """Runs the step."""
        kind = batch.kind
        launch = self._launches.get(kind)
        if launch is not None:
            try:
                return launch(state, batch)
            except OtherTypes:
                self._programs.clear()
        launch = self._launches[kind] = self._shared(state, batch) or self._exact
        return launch(state, batch)

    def _shared(self, state: Any, batch: PlacedBatch) -> Callable | None:
        """The launch of a program whose number of rows is data, or `None` if there is none."""
        slots = tuple(Slot(slot.axis, time=slot.time) for slot in batch.slots)
        whole = PlacedBatch(batch.data, slots)
        few = PlacedBatch(_described(batch), slots)
        try:
            traced = self._traced(state, whole)
            structure = jax.tree.structure(traced.out_info)
            part = shared(traced.jaxpr, self._exact.trace(state, few).jaxpr)
            outputs, rest = jax.tree.unflatten(structure, list(map(_Rows, part.outputs)))
            if any(
                of.rows for of in jax.tree.leaves((rest, () if self._returns_rows else outputs))
            ):
                raise Differs("a result has rows")
        except Differs as error:
            rows = next(slot.rows for slot in batch.slots if slot.rows is not None)
            self._sizes.no_use(str(error), rows)
            self._keep(f"{ALONE}: {error}", False)
            return None
        self._keep(SHARED, True)
        # Without numbers, what the step computes of further rows is only not used.
        numbers = (part.numbers,) if part.numbers else ()
        key = whole.kind, part.signature
        program = self._programs.get(key) if numbers else self._exact
        if program is None:
            types = types_of(jax.tree.leaves((state, batch)))
            program = self._programs[key] = self._make(_program(part, structure, types))

        def launch(state: Any, batch: PlacedBatch) -> tuple[Any, Any]:
            results, state = program(state, PlacedBatch(batch.data, slots), *numbers)
            return jax.tree.map(_cut, results, outputs), state

        return launch

    def _traced(self, state: Any, batch: PlacedBatch) -> Any:
        """The step for a longer batch, which the user did not ask for."""
        try:
            return self._exact.trace(state, batch)
        except Exception as error:
            raise Differs(f"it cannot be traced for more rows: {error}") from error


class _Rows:
    """The dimension of a result's rows and their number, as a leaf of a structure."""

    def __init__(self, rows: tuple[int, int] | None):
        self.rows = rows


def _cut(result: Any, of: _Rows) -> Any:
    """A result without further rows."""
    if of.rows is None:
        return result
    dimension, rows = of.rows
    return np.asarray(result)[(slice(None),) * dimension + (slice(rows),)]


def _described(batch: PlacedBatch) -> Any:
    """The shapes of a batch's true rows."""

    def shape(leaf: Any, slot: Slot) -> Any:
        sizes = list(leaf.shape)
        if slot.axis is not None and slot.rows is not None:
            sizes[slot.axis] = slot.rows
        # As a step is traced: its operations know the mesh of the arrays.
        return jax.ShapeDtypeStruct(sizes, leaf.dtype, sharding=named_sharding(leaf.sharding.mesh))

    leaves, structure = jax.tree.flatten(batch.data)
    return jax.tree.unflatten(structure, map(shape, leaves, batch.slots))


def _program(part: Shared, structure: Any, types: list) -> Callable:
    def program(state: Any, batch: PlacedBatch, numbers: Any) -> Any:
        arrays = jax.tree.leaves((state, batch))
        if types_of(arrays) != types:
            raise OtherTypes
        results = part.run(arrays, numbers)
        return jax.tree.unflatten(structure, results)

    return program
