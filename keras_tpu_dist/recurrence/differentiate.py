"""The recurrence as JAX sees it: one function with its own gradient, split over the batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.recurrence.backwards import run_back
from keras_tpu_dist.recurrence.forwards import run
from keras_tpu_dist.recurrence.loop import Loop, Weights
from keras_tpu_dist.recurrence.on_chip import LANES
from keras_tpu_dist.recurrence.segments import run_segments, run_segments_back


@dataclasses.dataclass(frozen=True)
class Split:
    """Over which axes of a mesh the batch is split, or nothing.

    Args:
        mesh: The mesh, or None on a single device.
        axes: Names of the mesh axes that split the batch.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """Into how many parts the batch is cut."""
        if self.mesh is None:
            return 1
        parts = 1
        for axis in self.axes:
            parts *= self.mesh.shape[axis]
        return parts

    def by_batch(self, tree):
        """The batch is the second to last axis of every array that has one."""
        return jax.tree.map(
            lambda a: PartitionSpec(*[None] * (len(a.shape) - 2), self.axes or None, None), tree
        )

    def apply(self, function, rows, weights):
        """Runs `function(rows, weights) -> (rows, summed)` on every part of the batch.

        The loop lies inside `shard_map`, so that no partitioner can put a collective into it and
        layout constraints hold where they are written. Weights come in whole: a split weight is
        gathered here, once. What is summed over rows is summed over devices after the loop.
        """
        if self.mesh is None:
            return function(rows, weights)
        rows_out, summed_out = jax.eval_shape(function, rows, weights)

        def local(rows, weights):
            rows, summed = function(rows, weights)
            if self.axes:
                summed = lax.psum(summed, self.axes)
            return rows, summed

        whole = jax.tree.map(lambda _: PartitionSpec(), (weights, summed_out))
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(self.by_batch(rows), whole[0]),
            out_specs=(self.by_batch(rows_out), whole[1]),
            check_vma=False,
        )(rows, weights)


def _forwards(loop: Loop, save: bool, rows, weights):
    x, state, mask = rows
    if loop.segment is not None:
        hs, last, saved = run_segments(loop, x, weights, state, mask, save=save)
    else:
        hs, last, saved = run(loop, x, weights, state, mask, save=save)
    last = tuple(s.astype(before.dtype) for s, before in zip(last, state))
    return (hs, last, saved if save else None), ()


def _backwards(loop: Loop, rows, weights):
    x, mask, saved, d_hs, d_last = rows
    back = run_back if loop.segment is None else run_segments_back
    d_x, d_weights, d_first = back(loop, x, weights, saved, mask, d_hs, d_last)
    d_first = tuple(d.astype(last.dtype) for d, last in zip(d_first, d_last))
    return (d_x.astype(x.dtype), d_first), d_weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def differentiable(loop: Loop, split: Split, x, weights: Weights, state, mask):
    """The recurrence; `x` is `(time, batch, features)`, the batch divisible by the split."""
    (hs, last, _), _ = split.apply(
        functools.partial(_forwards, loop, False), (x, state, mask), weights
    )
    return hs, last


def _save(loop: Loop, split: Split, x, weights: Weights, state, mask):
    (hs, last, saved), _ = split.apply(
        functools.partial(_forwards, loop, True), (x, state, mask), weights
    )
    return (hs, last), (x, weights, mask, saved)


def _differentiate(loop: Loop, split: Split, residuals, cotangents):
    x, weights, mask, saved = residuals
    d_hs, d_last = cotangents
    (d_x, d_first), d_weights = split.apply(
        functools.partial(_backwards, loop), (x, mask, saved, d_hs, d_last), weights
    )
    d_weights = jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights)
    return d_x, d_weights, d_first, None


differentiable.defvjp(_save, _differentiate)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def recur(loop: Loop, split: Split, x, weights: Weights, state, mask=None):
    """Runs a recurrence over `(batch, time, features)` with its own gradient.

    Args:
        loop: How to run.
        split: Over which mesh axes the batch is split. A batch that does not divide is padded with
            rows that are cut off again; rows do not see each other, so nothing else changes.
        x: `(batch, time, features)`.
        weights: The weights; with two directions each has a leading axis of two.
        state: Tuple of states before the first step, each `(batch, units)` or
            `(2, batch, units)`.
        mask: `(batch, time)` boolean, False where the state is carried over, or None.

    Returns:
        `h` after every step as `(batch, time, units)`, in the time order of `x`, or None if
        `loop.sequences` is False; with two directions `(2, batch, time, units)`, the second in the
        order in which it ran. And the tuple of final states, shaped like `state`.
    """
    batch = x.shape[0]
    x = jnp.swapaxes(x, 0, 1)
    if mask is not None:
        mask = jnp.swapaxes(mask, 0, 1)[..., None]
        if loop.directions == 2:
            mask = jnp.stack([mask, jnp.flip(mask, axis=0)], axis=1)
    short = -batch % split.parts
    if short:
        rows: Any = (x, state, mask)
        x, state, mask = jax.tree.map(lambda a: _pad_rows(a, short), rows)
    units = state[0].shape[-1]
    if loop.kernel:
        weights, state = _pad_units(loop, weights, state, -units % LANES)
    result: Any = differentiable(loop, split, x, weights, tuple(state), mask)
    hs, last = jax.tree.map(lambda a: a[..., :units], result)
    if short:
        hs, last = jax.tree.map(
            lambda a: lax.slice_in_dim(a, 0, batch, axis=a.ndim - 2), (hs, last)
        )
    if hs is None:
        return None, last
    return jnp.moveaxis(hs, 0, -2), last


def _pad_rows(a, short: int):
    return _pad(a, -2, short)


def _pad(a, axis: int, short: int):
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, short)
    return jnp.pad(a, widths)


def _pad_units(loop: Loop, weights: Weights, state, short: int):
    """More units, so that every gate starts at a tile. Nothing leads from them to the others.

    In memory a tile is as wide anyway; inside a kernel gates would have to be moved sideways.
    """
    if not short:
        return weights, state

    def gates(w):
        apart = w.reshape(*w.shape[:-1], loop.cell.gates, -1)
        return _pad(apart, -1, short).reshape(*w.shape[:-1], -1)

    rows = weights._replace(recurrent=_pad(weights.recurrent, -2, short))
    return jax.tree.map(gates, rows), tuple(_pad(s, -1, short) for s in state)
