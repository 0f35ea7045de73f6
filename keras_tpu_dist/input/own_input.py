"""Separate input in every process, for steps that all processes run together.

Before a step is launched, every process knows how many rows all others have for it. They exchange
the numbers over the host channel, some steps ahead. A process that runs out takes part with no rows
until all are done.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse

from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.input.batch_axis import element_names, flatten
from keras_tpu_dist.input.host_arrays import as_array, check_same_rows, checked_rows
from keras_tpu_dist.input.shards import InputShards
from keras_tpu_dist.processes.arrays import checksum, joined_rows
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.encoding import MALFORMED, check_array, malformed

# Batches that are read ahead to agree on several steps at once: agreeing takes some milliseconds,
# as long as a small step.
_MOST_AHEAD, _MOST_BYTES_AHEAD = 16, 64 * 2**20
_FIX = (
    'With input="per_process" every process provides its part of every batch: the same structure, '
    "shapes and dtypes in all of them, any number of rows."
)


@dataclass(frozen=True)
class ShardBatch:
    """One process's batch for a step, and the numbers of rows of all.

    Attributes:
        batch: The structure of host arrays; they may have no rows.
    """

    batch: Any
    rows: tuple[int, ...]


class OwnInput:
    """Combines the batches of the processes into steps.

    Args:
        shards: Which rows of a batch every process provides.
        axes: Returns the batch dimension of every array of a batch, in the order of `flatten`.
        alike: Whether arrays without a batch dimension are the same in all processes.
    """

    def __init__(
        self, shards: InputShards, axes: Callable[[Any], list[int | None]], *, alike: bool = True
    ):
        self.shards = shards
        self._axes = axes
        self._alike = alike

    def of_call(self, batch: Any) -> ShardBatch:
        """This process's part of a single batch, as for `train_on_batch`.

        Args:
            batch: This process's rows.
        """
        leaves, treedef = flatten(batch)
        batch = jax.tree.unflatten(treedef, [as_array(leaf) for leaf in leaves])
        described = agree("the rows of a batch", _FIX, self._described(batch))
        return ShardBatch(batch, self._rows(described))

    def joined(self, structure: Any) -> Any:
        """Arrays with the rows of all processes, in the order of the input shards.

        Args:
            structure: A structure (tuple, list, dict, `None`) of this process's host arrays.
        """
        return jax.tree.map(lambda rows: joined_rows(rows, self.shards.processes), structure)

    def length(self, num_batches: int | None, ragged: bool) -> tuple[int | None, bool]:
        """The number of steps that all processes run, and whether one of them may be ragged.

        Args:
            num_batches: How many batches this process has, or `None` if it does not know.
            ragged: Whether its last one is smaller.
        """
        answers = agree("the number of batches", _FIX, [num_batches, ragged])
        numbers = [number for number, _ in answers]
        uneven = any(answer != answers[0] for answer in answers)
        are_known = None not in numbers
        return (max(numbers) if are_known else None), uneven or any(last for _, last in answers)

    def agreed(
        self, batches: Iterable, steps_per_epoch: int | None, *, may_be_empty: bool = False
    ) -> Iterator[ShardBatch]:
        """The batches of this process, step by step, until the input of all processes has ended.

        Args:
            batches: This process's host batches.
            steps_per_epoch: Batches beyond which nothing is read before they were used.
            may_be_empty: Whether it is allowed that no process has a batch.
        """
        ahead = _Ahead(iter(batches))
        made, most = 0, 1
        while True:
            left = steps_per_epoch - made % steps_per_epoch if steps_per_epoch else most
            ahead.read(min(most, left))
            answers = self._exchanged(ahead, first=not made)
            steps = _steps(answers)
            if not steps:
                self._check_any(made or may_be_empty)
                return
            for step in range(steps):
                yield self._batch_of_step(ahead, answers, step)
            # One batch at first, so that the first step need not wait for sixteen.
            made, most = made + steps, min(2 * most, _MOST_AHEAD)

    def _exchanged(self, ahead: "_Ahead", first: bool) -> list[dict]:
        ahead.raise_error()
        described = [self._described(batch) for batch in ahead.batches]
        batches = list(ahead.batches)[:1] if first else []
        checksums = [[checksum(leaf) for leaf in flatten(batch)[0]] for batch in batches]
        mine = {"ended": ahead.ended, "batches": described, "checksums": checksums}
        answers = agree("the rows of the next batches", _FIX, mine)
        if first:
            self._check_group([answer["checksums"] for answer in answers])
        return answers

    def _batch_of_step(self, ahead: "_Ahead", answers: list[dict], step: int) -> ShardBatch:
        here = [a["batches"][step] if step < len(a["batches"]) else None for a in answers]
        rows = self._rows(here)
        if ahead.batches:
            return ShardBatch(ahead.batches.popleft(), rows)
        return ShardBatch(_empty(next(batch for batch in here if batch is not None)), rows)

    def _rows(self, described: list[dict | None]) -> tuple[int, ...]:
        """The rows of every input shard, from the processes' descriptions of their batches."""
        for i, batch in enumerate(described):
            if batch is not None:
                _check_arrays(batch, i)
        first, first_batch = next((i, d) for i, d in enumerate(described) if d is not None)
        for i, batch in enumerate(described):
            if batch is not None and batch["leaves"] != first_batch["leaves"]:
                _raise_unlike(first, first_batch["leaves"], i, batch["leaves"])
        number = [0 if batch is None else batch["rows"] for batch in described]
        for group in self.shards.processes:
            if len({number[i] for i in group}) > 1:
                raise value_error(
                    "Processes of one input shard must provide the same rows.",
                    received=", ".join(f"{number[i]} rows in process {i}" for i in group) + ".",
                    fix="Divide the data by strategy.input_shard, not by jax.process_index().",
                )
        rows = tuple(number[group[0]] for group in self.shards.processes)
        if not any(rows):
            raise value_error(
                "A batch needs at least one row.",
                received="a batch that is empty in all processes.",
                fix="Leave empty batches out of the input.",
            )
        return rows

    def _described(self, batch: Any) -> dict[str, Any]:
        leaves, _ = flatten(batch)
        shapes, first = [], None
        for name, axis, leaf in zip(element_names(batch), self._axes(batch), leaves, strict=True):
            if isinstance(leaf, JAXSparse):
                raise ValueError(_sparse(name))
            shape, same = list(leaf.shape), None
            if axis is None or not leaf.ndim:
                same = checksum(leaf) if self._alike else None
            else:
                rows = checked_rows(name, axis, leaf, empty=True)
                first = first or (name, rows)
                check_same_rows(first, name, rows, leaf)
                shape[axis] = -1
            dtype = str(jax.dtypes.canonicalize_dtype(leaf.dtype))
            shapes.append([name, shape, dtype, same])
        rows = first[1] if first else 0
        return {"rows": rows, "leaves": shapes, "structure": described_structure(batch)}

    def _check_group(self, checksums: list[list]) -> None:
        """Checks the first batch of an epoch in processes that must provide the same."""
        for group in self.shards.processes:
            for i in group:
                if checksums[i] != checksums[group[0]]:
                    raise value_error(
                        "Processes of one input shard must provide the same rows.",
                        received=f"processes {group[0]} and {i}, whose first batches of an "
                        "epoch differ.",
                        fix="Divide and shuffle the data by strategy.input_shard.index.",
                    )

    def _check_any(self, made: int) -> None:
        if not made:
            raise value_error(
                "fit, evaluate and predict need data with at least one row.",
                received="no batch in any process.",
                fix="Give at least one of them a batch.",
            )


class _Ahead:
    """Batches of this process that were read and not used yet."""

    def __init__(self, batches: Iterator):
        self._source = batches
        self._error: Exception | None = None
        self.batches: deque = deque()
        self.ended = False

    def read(self, number: float) -> None:
        """Reads up to a number of batches ahead, fewer if they are large."""
        while not self.ended and self._error is None and len(self.batches) < number:
            if self.batches and _nbytes(self.batches) > _MOST_BYTES_AHEAD:
                return
            try:
                leaves, treedef = flatten(next(self._source))
                self.batches.append(jax.tree.unflatten(treedef, list(map(as_array, leaves))))
            except StopIteration:
                self.ended = True
            except Exception as error:
                # `raise_error` raises it, after the steps of the batches before it.
                self._error = error

    def raise_error(self) -> None:
        """Raises the error of reading, once all batches before it are used."""
        if self._error is not None and not self.batches:
            raise self._error


def _steps(answers: list[dict]) -> int:
    """The number of steps whose rows are known: those of the process that read the fewest ahead.

    A process whose input has ended does not count, because it takes part with no rows.
    """
    going_on = [len(answer["batches"]) for answer in answers if not answer["ended"]]
    return min(going_on) if going_on else max(len(answer["batches"]) for answer in answers)


def _empty(described: dict) -> Any:
    """A batch without rows, with the structure that another process has."""
    leaves = described["leaves"]
    if any(same is not None for *_, same in leaves):
        raise value_error(
            "Arrays without a batch axis must come with every batch, in all processes.",
            received=f"process {jax.process_index()}, whose input ended, without "
            f"{[name for name, *_, same in leaves if same is not None]}.",
            fix="Give all processes the same number of batches.",
        )
    arrays = (np.zeros([max(size, 0) for size in shape], dtype) for _, shape, dtype, _ in leaves)
    return structure_of(described["structure"], arrays)


def described_structure(node: Any) -> Any:
    """The structure of a batch as plain data.

    Args:
        node: The batch, or a part of it: a tuple, list, dict, `None`, or an array.
    """
    if node is None:
        return None
    if type(node) in (tuple, list):
        return [type(node).__name__, *map(described_structure, node)]
    if type(node) in (dict, OrderedDict) and all(type(key) in (str, int) for key in node):
        # JAX flattens a dict in sorted order of its keys, and an ordered dict in its own order.
        keys = list(node) if isinstance(node, OrderedDict) else sorted(node)
        items = [[key, described_structure(node[key])] for key in keys]
        return [type(node).__name__, *items]
    if not jax.tree.structure(node) == jax.tree.structure(0):
        raise value_error(
            'Batches with input="per_process" are arrays in tuples, lists and dicts whose keys are '
            "strings or integers.",
            received=f"{type(node).__name__}: {str(node)[:80]}.",
            fix="Convert it to a dict or a tuple.",
        )
    return 0


def structure_of(described: Any, arrays: Iterator) -> Any:
    """Rebuilds a batch from its structure and its arrays.

    Args:
        described: The result of `described_structure`, maybe from another process.
        arrays: The arrays, in order.

    Raises:
        PeerError: If it is not a structure, or one with another number of arrays.
    """
    left = [*arrays]
    number = len(left)
    try:
        batch = _built(described, left)
        # A dict may name a key twice, or have keys that JAX cannot sort.
        built = len(jax.tree.leaves(batch))
    except MALFORMED as error:
        raise malformed("a batch of another process", f"{error!r:.80}") from error
    if built < number:
        raise malformed("a batch of another process", "a structure of fewer arrays")
    return batch


def _built(described: Any, left: list) -> Any:
    if described is None:
        return None
    if described == 0:
        return left.pop(0)
    kind, *items = described
    if kind in ("tuple", "list"):
        nodes = [_built(item, left) for item in items]
        return tuple(nodes) if kind == "tuple" else nodes
    kinds = {"dict": dict, "OrderedDict": OrderedDict}
    return kinds[kind]((key, _built(item, left)) for key, item in items)


def _check_arrays(described: dict, process: int) -> None:
    for name, shape, dtype, _ in described["leaves"]:
        sizes = [described["rows"] if size == -1 else size for size in shape]
        check_array(sizes, dtype, where=f"{name[:80]} of process {process}")


def _raise_unlike(one: int, ours: list, other: int, theirs: list) -> None:
    words = [f"{len(ours)} arrays", f"{len(theirs)} arrays"]
    different = next(((a, b) for a, b in zip(ours, theirs, strict=False) if a != b), None)
    if different is not None:
        words = [
            f"{name} of shape ({', '.join('rows' if n < 0 else str(n) for n in shape)}) and {dtype}"
            for name, shape, dtype, _ in different
        ]
    if words[0] == words[1]:
        words[1] += " with other values"
    raise value_error(
        "The batches of all processes must fit together.",
        received=f"{words[0]} in process {one}, {words[1]} in process {other}.",
        fix=_FIX,
    )


def _sparse(name: str) -> str:
    return message(
        'input="per_process" takes dense arrays.',
        received=f"{name}, a sparse one.",
        fix='Make it dense, or give all processes the same data with input="global".',
    )


def _nbytes(batches: Iterable) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for b in batches for a in flatten(b)[0])
