"""Which rows of a batch every process provides with `input="per_process"`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from keras_tpu_dist.common.checks import NaturalInt, PositiveInt, checked_constructor, is_count
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.printed import Printed


@checked_constructor
@dataclass(frozen=True, repr=False)
class InputShard(Printed):
    """The part of the input that a process provides with `TPUStrategy(input="per_process")`.

    Attributes:
        index: The number of the part, from 0.
        count: The number of parts.
        processes: The processes that provide this part, with the same rows in the same order. There
            are several if a model axis crosses hosts.

    Raises:
        ValueError: If one of these is not a valid number.

    Example:

    >>> import numpy as np, keras_tpu_dist as ktd
    >>> shard = ktd.InputShard(index=1, count=2, processes=(1,))
    >>> print(shard)
    input shard 1 of 0..1, process 1
    >>> np.arange(7)[shard.index :: shard.count]
    array([1, 3, 5])
    """

    index: NaturalInt = 0
    count: PositiveInt = 1
    processes: tuple[int, ...] = (0,)

    def __post_init__(self):
        listed = isinstance(self.processes, (tuple, list)) and len(self.processes) > 0
        numbers = listed and all(is_count(process, 0) for process in self.processes)
        if self.index >= self.count or not numbers:
            raise value_error(
                "The index of an input shard is below their count, and processes are numbers.",
                received={"index": self.index, "count": self.count} | {"processes": self.processes},
                fix="Use strategy.input_shard, or write for example InputShard(0, 2, (0,)).",
            )

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)

    def __str__(self):
        several = "es" if len(self.processes) > 1 else ""
        numbers = ", ".join(map(str, self.processes))
        return f"input shard {self.index} of 0..{self.count - 1}, process{several} {numbers}"


@dataclass(frozen=True)
class InputShards:
    """Which processes have which parts of the batch on their devices.

    Attributes:
        blocks: For every input shard, the parts of the batch on its processes, in the order of the
            mesh's data axes.
        own: The number of this process's input shard.
    """

    blocks: tuple[tuple[int, ...], ...]
    processes: tuple[tuple[int, ...], ...]
    own: int

    @property
    def shard(self) -> InputShard:
        """This process's input shard."""
        return InputShard(self.own, len(self.blocks), self.processes[self.own])

    @property
    def num_blocks(self) -> int:
        """The number of parts into which the mesh splits a batch."""
        return sum(map(len, self.blocks))

    def of(self, batch_size: int) -> int:
        """The rows of a global batch that this process provides.

        Args:
            batch_size: The rows of all input shards together.
        """
        count = len(self.blocks)
        if batch_size < count:
            raise value_error(
                "batch_size is the global one, with at least one row for every input shard.",
                received=f"batch_size={batch_size} for {count} input shards.",
                fix=f"Choose {count} or more.",
            )
        return batch_size * (self.own + 1) // count - batch_size * self.own // count

    def rows_of_blocks(self, rows: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The rows in every part of the batch: a shard fills its parts one after another.

        Args:
            rows: The number of rows of every input shard.

        Returns:
            The length of a part including padding, and the number of true rows in every part.
        """
        longest = max(-(-n // len(blocks)) for n, blocks in zip(rows, self.blocks, strict=True))
        filled = [0] * self.num_blocks
        for n, blocks in zip(rows, self.blocks, strict=True):
            for i, block in enumerate(blocks):
                filled[block] = min(max(n - i * longest, 0), longest)
        return longest, tuple(filled)


def input_shards_of(mesh: Mesh, data_axes: Sequence[str]) -> InputShards:
    """The input shards of a mesh, seen from this process.

    Args:
        mesh: The mesh.
        data_axes: The axes that split the batch.

    Raises:
        ValueError: If the parts of two processes overlap and are not the same.
    """
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    axes = [mesh.axis_names.index(name) for name in data_axes]
    shards = input_shards_by(processes, axes, jax.process_index())
    if shards is None:
        raise value_error(
            'input="per_process" needs a mesh on which two processes hold either the same '
            "parts of a batch or no common part, and all of them hold equally many.",
            received={"mesh": dict(mesh.shape), "data_axes": tuple(data_axes)},
            fix="Put the data axes first in the mesh, with a size that divides the number of "
            'processes or is divisible by it, or leave input="global".',
        )
    return shards


def input_shards_by(
    processes: np.ndarray, axes: Sequence[int], this_process: int
) -> InputShards | None:
    """The input shards, from the process of every device.

    Args:
        processes: The process of every device, in the shape of the mesh.
        axes: The dimensions that split the batch, the first the outermost.
        this_process: The number of this process.

    Returns:
        The shards, or `None` if processes cannot provide their own rows on this mesh.

    Example:

    >>> input_shards_by(np.array([[0, 0], [0, 0], [1, 1], [1, 1]]), [0], this_process=1).blocks
    ((0, 1), (2, 3))
    """
    by_block = np.moveaxis(processes, axes, range(len(axes)))
    by_block = by_block.reshape(int(np.prod(by_block.shape[: len(axes)])), -1)
    held: dict[int, list[int]] = {}
    for block, holders in enumerate(by_block):
        for process in sorted({int(holder) for holder in holders}):
            held.setdefault(process, []).append(block)
    groups: dict[tuple[int, ...], list[int]] = {}
    for process in sorted(held):
        groups.setdefault(tuple(held[process]), []).append(process)
    blocks = sorted(groups)
    # Every part of the batch must be in exactly one shard, and all shards have equally many parts.
    if sum(map(len, blocks)) != len(by_block) or len(set(map(len, blocks))) != 1:
        return None
    members = tuple(tuple(groups[held_by]) for held_by in blocks)
    mine = next((i for i, group in enumerate(members) if this_process in group), 0)
    return InputShards(tuple(blocks), members, mine)
