"""Weights that are split over devices: gathered before the loop, or regrouped by units.

A split weight of `gates * units` columns is in contiguous pieces: one device may have two whole
gates, or the end of one and the beginning of the next. A loop whose units are split needs the same
units of every gate on a device. Every device has and needs as many blocks of columns as there are
gates. So the blocks get to their places in that many rounds, in which every device sends one block
and gets one.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from keras_tpu_dist.common.printed import Printed

# A sixteenth of the memory of the smallest TPU core that XLA still serves (v5e: 16 GB), the same
# limit as for values kept for the backward pass.
GATHERED_BYTES = 2**30


@dataclasses.dataclass(frozen=True, repr=False)
class Gathering(Printed):
    """How a layer handles weights that are split over devices.

    Args:
        gather: Whether its weights are gathered once before the loop, which then has no collective
            in it.
        units_axes: Otherwise the mesh axes over which its units are split, every device with its
            part of every gate, so that the loop exchanges states; empty if Keras's path runs.
    """

    gather: bool
    units_axes: tuple[str, ...]
    bytes: int
    reason: str

    def __str__(self):
        return self.reason

    def to_dict(self):
        """The choice as plain data."""
        return dataclasses.asdict(self)


def gathering(
    size: int,
    *,
    units: int,
    axes: tuple[str, ...],
    mesh: Mapping[str, int],
    data_axes: tuple[str, ...],
) -> Gathering:
    """The choice for a layer with weights that are split over devices.

    If the split is kept inside the loop, every step exchanges states: hundreds of small collectives
    instead of two large ones. So weights are gathered if a device has room for all of them.

    Args:
        axes: Mesh axes over which the recurrent kernel's last dimension is split.
    """
    have = f"its weights are split and {size / 2**20:.1f} MiB whole"
    if size <= GATHERED_BYTES:
        reason = f"{have}: gathered on every device before the loop, which has no collective in it"
        return Gathering(True, (), size, reason)
    have += f", more than the {GATHERED_BYTES / 2**20:.0f} MiB to gather"
    ways = math.prod(mesh[axis] for axis in axes)
    if axes and units % ways == 0 and not set(axes) & set(data_axes):
        over = " and ".join(repr(axis) for axis in axes)
        reason = f"{have}: every gate's units are split over {over}, and steps exchange states"
        return Gathering(False, axes, size, reason)
    why = "the recurrent kernel's columns are not split over axes of their own"
    if axes and units % ways:
        why = f"{units} units are not divisible by {ways}"
    return Gathering(False, (), size, f"{have}, and {why}: the loop is Keras's")


@functools.cache
def rounds(gates: int, ways: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The sender, receiver and block of every round.

    Args:
        gates: Gates of the recurrence, and blocks of a device.
        ways: Devices over which the columns are split.

    Returns:
        For every round `(to, place, gate)`: for every device the one it sends to, the position of
        the block among its own, and the block's gate.

    References:
        König, 1916: a bipartite graph whose nodes all have the same number of edges falls apart
        into perfect matchings.
    """
    left = {(k // gates, k % ways): [] for k in range(gates * ways)}
    for k in range(gates * ways):
        left[k // gates, k % ways].append((k % gates, k // ways))
    found = []
    for _ in range(gates):
        edges = np.array([pair for pair, blocks in left.items() if blocks]).T
        graph = csr_array((np.ones(edges.shape[1]), edges), shape=(ways, ways))
        to = maximum_bipartite_matching(graph, perm_type="column").tolist()
        blocks = [left[source, target].pop() for source, target in enumerate(to)]
        found.append((tuple(to), *(tuple(n) for n in zip(*blocks))))
    return tuple(found)


def by_units(weight, gates: int, axes: tuple[str, ...]):
    """This device's units of every gate, from its contiguous columns; inside `shard_map`.

    Args:
        weight: `(..., gates * units / devices)`.

    Returns:
        The same shape.
    """
    return _exchange(weight, gates, axes, back=False)


def by_columns(weight, gates: int, axes: tuple[str, ...]):
    """Undoes `by_units`.

    See `by_units` for the arguments.
    """
    return _exchange(weight, gates, axes, back=True)


def _exchange(weight, gates: int, axes: tuple[str, ...], *, back: bool):
    here = lax.axis_index(axes)
    have = weight.reshape(*weight.shape[:-1], gates, -1)
    want = jnp.zeros_like(have)
    for to, place, gate in rounds(gates, lax.axis_size(axes)):
        came_from = tuple(np.argsort(to).tolist())
        gate_here = tuple(gate[source] for source in came_from)
        sent, target, got = (gate_here, came_from, place) if back else (place, to, gate_here)
        block = lax.dynamic_index_in_dim(have, jnp.asarray(sent)[here], -2, keepdims=False)
        block = lax.ppermute(block, axes, list(enumerate(target)))
        want = lax.dynamic_update_index_in_dim(want, block, jnp.asarray(got)[here], -2)
    return want.reshape(weight.shape)
