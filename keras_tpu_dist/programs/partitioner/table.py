"""Faults of XLA's partitioner, and their repairs.

`docs/xla_partitioner.md` has a program in pure JAX for every fault, and
`tests/conformance/test_reports.py` runs them. The test of a fault fails as soon as an XLA is right,
so that its repair can be removed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jaxlib
from jax.sharding import Mesh

from keras_tpu_dist.programs.partitioner import (
    branches,
    convolution,
    indices,
    lookups,
    orders,
    products,
    reductions,
    scatter,
    slices,
    windows,
    writes,
)

_SEEN = ("jax 0.10.2, libtpu 0.0.42.1", "jax 0.12.0.1, libtpu 0.0.50.1")


@dataclass(frozen=True)
class Fault:
    """A kind of program that XLA partitions wrongly.

    Attributes:
        name: Its subject, and the heading of its report.
        instead: The program that is compiled instead.
        candidate: A quick check whether an equation may be partitioned wrongly on a mesh.
        repaired: From an equation and the `Spread` of its program to the replacement equations, or
            `None` if it is partitioned correctly.
        right_since: The first jaxlib without the fault, as `(0, 12)`, or `None`. From there on
            nothing is replaced.
    """

    name: str
    operations: tuple[str, ...]
    wrong: str
    instead: str
    candidate: Callable[[Any, Mesh], bool]
    repaired: Callable[[Any, Any], list | None]
    seen: tuple[str, ...] = _SEEN
    upstream: str | None = None
    right_since: tuple[int, int] | None = None

    @property
    def present(self) -> bool:
        """Whether the installed XLA has it."""
        return self.right_since is None or _installed() < self.right_since

    def __str__(self):
        where = f" ({self.upstream})" if self.upstream else ""
        return f"{self.name}: {self.wrong}{where}. Instead: {self.instead}."


def _installed() -> tuple[int, ...]:
    return tuple(map(int, jaxlib.__version__.split(".")[:2]))


# In this order; every repair gets the operation as the earlier ones left it.
FAULTS = (
    Fault(
        "Lookup among replicas",
        lookups.PRIMITIVES,
        "the compiler aborts where a shard_map leaves two axes to it, one of them splits a "
        "dimension that the indices of a gather or scatter name, and an axis splits the indices "
        "or another dimension",
        "the dimension is not split there",
        lookups.candidate,
        lookups.repaired,
    ),
    Fault(
        "Write at one place after a move",
        writes.PRIMITIVES,
        "what a write at one place of a split dimension leaves as it is is read at a place outside "
        "of each device's part, and this slice is merged with the one that cut the part from a "
        "whole array without moving it back inside: each device but one writes another's row",
        "each device chooses by position between what is written and what was there",
        writes.candidate,
        writes.repaired,
        seen=("jax 0.10.0 to 0.11.2",),
        upstream="openxla/xla#49121, jax-ml/jax#40849, jax-ml/jax#18434",
        right_since=(0, 12),
    ),
    Fault(
        "Scatter of unevenly split rows",
        scatter.PRIMITIVES,
        "where parts are also on several devices, of a second axis or of one axis of which a "
        "reshape left a factor, the rows that are missing in the last parts get index 0 instead of "
        "one beyond the end, so that padding is added to row 0; with unsigned "
        "indices the compiler aborts on every mesh",
        "rows are added with an index beyond the end, which XLA drops",
        scatter.candidate,
        scatter.repaired,
    ),
    Fault(
        "Indices of few bits",
        indices.PRIMITIVES,
        "the place where a device's part begins does not fit into indices of 8 or 16 bits, so that "
        "rows of other devices are taken and written, or the compiler aborts",
        "gathers, scatters and slices get indices of 32 bits",
        indices.candidate,
        indices.repaired,
    ),
    Fault(
        "Kernel gradient of a grouped convolution",
        convolution.PRIMITIVES,
        "a convolution with batch_group_count, or with a window that is split itself, is summed "
        "over all devices, also over those that have the same part, so that it is too large by "
        "the size of the other axes, or of the factor of one axis that splits channels; split "
        "channels cut groups apart, and the compiler refuses its own program or aborts",
        "each device convolves its rows and groups in a shard_map over the axes that split them, "
        "and the parts are summed outside; a split image is gathered",
        convolution.candidate,
        convolution.repaired,
    ),
    Fault(
        "Slice at a place beyond the end",
        slices.PRIMITIVES,
        "a start beyond the end, which means the last place where the slice fits, is moved back "
        "within each device's part, or the update is dropped",
        "the start is moved back before",
        slices.candidate,
        slices.repaired,
        upstream="openxla/xla#49118, openxla/xla#49122",
    ),
    Fault(
        "Windows and steps along a split dimension",
        windows.PRIMITIVES,
        "pooling and its gradient, slices with a step, sums that go on, and padding in front lose "
        "rows along a split dimension, or the compiler gives up or aborts",
        "the dimension is not split there",
        windows.candidate,
        windows.repaired,
    ),
    Fault(
        "Reductions by a function",
        reductions.PRIMITIVES,
        "the value that a reduction with a function of its own starts with is counted on every "
        "device; on CPU one function is not compiled, nor are and, or and xor of whole numbers",
        "the dimension is not split there",
        reductions.candidate,
        reductions.repaired,
    ),
    Fault(
        "Products in another order than the devices",
        orders.PRIMITIVES,
        "where a product sums over one axis, and its result has one dimension split over that axis "
        "and another one over two others, in another order than the devices are numbered, the "
        "parts along this dimension are exchanged with one another",
        "the sum is whole on every device before it is split",
        orders.candidate,
        orders.repaired,
    ),
    Fault(
        "Sums over dimensions that are split differently",
        products.PRIMITIVES,
        "a product that sums over several dimensions, of which one is split in one operand and "
        "another one in the other operand, is not summed over all axes",
        "these dimensions are split alike in both operands",
        products.candidate,
        products.repaired,
        seen=("jax 0.10.1, libtpu 0.0.41", "jax 0.12.0.1, libtpu 0.0.50.1"),
    ),
    Fault(
        "Rows exchanged in a branch",
        branches.PRIMITIVES,
        "a branch that only some devices take gets a collective permute over all of them where "
        "rows are split unevenly or move, and the program hangs",
        "rows are not split in such a branch",
        branches.candidate,
        branches.repaired,
    ),
)


def by_operation(faults: tuple[Fault, ...]) -> dict[str, tuple[Fault, ...]]:
    """The faults of every operation.

    Args:
        faults: The faults.
    """
    return {
        operation: tuple(fault for fault in faults if operation in fault.operations)
        for one in faults
        for operation in one.operations
    }


BY_OPERATION = by_operation(tuple(fault for fault in FAULTS if fault.present))
