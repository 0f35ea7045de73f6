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
from keras_tpu_dist.programs.partitioner import Jitted
from keras_tpu_dist.programs.rows import Differs, Shared, shared

# From so many kinds of batches on, a step is compiled for powers of two of rows.
MANY = 8


class BatchSizes:
    """The rows to which the batches of a step are padded.

    A remainder runs in the program of the batches before it. Of calls with one batch, each with
    other rows, and of many kinds of batches, the rows are padded to powers of two. The first batch
    of a call with more than one has its own program, since a larger one would take longer at each
    step.

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
            iterator: The input that it is of; `None` for `train_on_batch` and the like.
        """
        placer = self._placer
        if not placer.pads_rows:
            return placer.place(batch)
        leaves, treedef, plan = placer.planned(batch)
        if not plan.rows:
            return placer.place_planned(leaves, treedef, plan)
        before = 0 if iterator is None else iterator.rows_before
        if iterator is not None:
            iterator.rows_before = plan.rows
        known = self._known.setdefault(plan.others, {})
        if plan.rows not in known:
            alone = iterator is None or iterator.num_batches == 1
            known[plan.rows] = self._longer(plan.rows, known, before, alone)
        return placer.place_planned(leaves, treedef, plan, known[plan.rows])

    def follow(self, iterator: DeviceIterator, batch: Any) -> None:
        """Notes the rows of a host batch that ran in a launch of several steps."""
        if self._placer.pads_rows:
            iterator.rows_before = self._placer.planned(batch)[2].rows

    def no_use(self, reason: str, rows: int) -> None:
        """Notes that the step shares no program, so that a batch was padded for nothing."""
        if rows > 1:  # one row may be traced otherwise than all other numbers
            self._reason = reason
        self._note(f"{rows} rows")

    def _longer(
        self, rows: int, known: dict[int, int | None], before: int, alone: bool
    ) -> int | None:
        chosen = None if self._reason else self._chosen(rows, known, before, alone)
        if chosen not in (None, rows):
            return chosen
        self._note(f"{rows} rows")
        return None

    def _chosen(
        self, rows: int, known: dict[int, int | None], before: int, alone: bool
    ) -> int | None:
        shards = self._placer.num_shards
        if rows < before:
            return known.get(before) or before + -before % shards
        if known and (alone or len(known) >= MANY):
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
        own: The step, which is compiled for each number of rows.
        make: Compiles a function of the state, a batch and numbers, as the step is compiled.
        sizes: The rows to which batches are padded.
        returns_rows: Whether the step's outputs have rows.
    """

    def __init__(
        self,
        own: Jitted,
        make: Callable[[Callable], Callable],
        sizes: BatchSizes,
        returns_rows: bool,
    ):
        self._own, self._make, self._sizes = own, make, sizes
        self._returns_rows = returns_rows
        self._launches: dict[Hashable, Callable] = {}
        self._programs: dict[Hashable, Callable] = {}

    def __call__(self, state: Any, batch: PlacedBatch) -> tuple[Any, Any]:
        """Runs the step."""
        kind = batch.kind
        launch = self._launches.get(kind)
        if launch is None:
            launch = self._launches[kind] = self._shared(state, batch) or self._own
        return launch(state, batch)

    def _shared(self, state: Any, batch: PlacedBatch) -> Callable | None:
        """The launch of a program whose number of rows is data, or `None` if there is none."""
        slots = tuple(Slot(slot.axis, time=slot.time) for slot in batch.slots)
        whole = PlacedBatch(batch.data, slots)
        few = PlacedBatch(_described(batch), slots)
        try:
            traced = self._traced(state, whole)
            structure = jax.tree.structure(traced.out_info)
            found = shared(traced.jaxpr, self._own.trace(state, few).jaxpr)
            outputs, rest = jax.tree.unflatten(structure, list(map(_Rows, found.outputs)))
            if any(
                of.rows for of in jax.tree.leaves((rest, () if self._returns_rows else outputs))
            ):
                raise Differs("a result has rows")
        except Differs as error:
            rows = next(slot.rows for slot in batch.slots if slot.rows is not None)
            self._sizes.no_use(str(error), rows)
            return None
        # Without numbers, what the step computes of further rows is only not used.
        numbers = (found.numbers,) if found.numbers else ()
        key = whole.kind, found.signature
        program = self._programs.get(key) if numbers else self._own
        if program is None:
            program = self._programs[key] = self._make(_program(found, structure))

        def launch(state: Any, batch: PlacedBatch) -> tuple[Any, Any]:
            results, state = program(state, PlacedBatch(batch.data, slots), *numbers)
            return jax.tree.map(_cut, results, outputs), state

        return launch

    def _traced(self, state: Any, batch: PlacedBatch) -> Any:
        """The step for a longer batch, which the user did not ask for."""
        try:
            return self._own.trace(state, batch)
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


def _program(found: Shared, structure: Any) -> Callable:
    def program(state: Any, batch: PlacedBatch, numbers: Any) -> Any:
        results = found.run(jax.tree.leaves((state, batch)), numbers)
        return jax.tree.unflatten(structure, results)

    return program
