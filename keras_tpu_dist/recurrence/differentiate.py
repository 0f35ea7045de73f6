"""The recurrence as one function with a custom gradient, split over the batch.

Time may be cut into segments, to keep only the states between them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.common.axes import axis_size
from keras_tpu_dist.recurrence.loop import Loop, Weights, run, run_back
from keras_tpu_dist.recurrence.plan import LANES
from keras_tpu_dist.recurrence.unrolled import run_unrolled, run_unrolled_back


def _cut(loop: Loop, tree):
    """Whole segments `(segments, size, batch, ...)` and the shorter one that runs last."""
    size = loop.segment or 1

    def whole(a):
        short = a.shape[0] % size
        rest = a[short:] if loop.reverse else a[: a.shape[0] - short]
        return rest.reshape(a.shape[0] // size, size, *a.shape[1:])

    def short(a):
        rest = a.shape[0] % size
        return a[:rest] if loop.reverse else a[a.shape[0] - rest :]

    return jax.tree.map(whole, tree), jax.tree.map(short, tree)


def _paste(loop: Loop, whole, short) -> Any:
    """Undoes `_cut`."""
    if whole is None:
        return None
    whole = whole.reshape(whole.shape[0] * whole.shape[1], *whole.shape[2:])
    if short is None:
        return whole
    return jnp.concatenate([short, whole] if loop.reverse else [whole, short], axis=0)


def run_segments(loop: Loop, x, weights: Weights, state, mask):
    """Runs all steps; returns the states after every step or None, the last, and the kept values.

    The states before every segment, of `loop.segment` steps, are kept; the backward pass recomputes
    the rest. Arguments as for `run`.

    Args:
        loop: How to run; `loop.segment` is the number of steps in a segment.
        x: `(time, batch, features)`.
        weights: The weights.
        state: States before the first step, each `(batch, units)`.
        mask: `(time, batch, 1)` boolean or None.
    """
    whole, short = _cut(loop, (x, mask))

    def segment(before, inputs):
        x_now, mask_now = inputs
        hs, after, _ = run(loop, x_now, weights, before, mask_now, save=False)
        return after, (before, hs)

    wide = jnp.promote_types(x.dtype, jnp.float32)
    state = tuple(s.astype(wide) for s in state)
    state, (kept, hs) = lax.scan(segment, state, whole, reverse=loop.reverse)
    if x.shape[0] % loop.segment == 0:
        return _paste(loop, hs, None), state, (kept, None)
    last, (before, hs_short) = segment(state, short)
    return _paste(loop, hs, hs_short), last, (kept, before)


def run_segments_back(loop: Loop, x, weights: Weights, kept, mask, d_hs, d_last):
    """All steps backwards, one segment after the other; arguments and results as for `run_back`.

    `kept` is what `run_segments` kept: for the whole segments, and for the shorter one or None.

    Args:
        loop: How to run; `loop.segment` is the number of steps in a segment.
        x: `(time, batch, features)`.
        weights: The weights.
        kept: The kept values of `run_segments`, for the whole segments, and for the shorter one or
            None.
        mask: See `run_segments`.
        d_hs: Cotangent of the states after every step, or None.
        d_last: Cotangents of the final states.
    """
    kept_whole, kept_short = kept
    whole, short = _cut(loop, (x, mask, d_hs))

    def segment(d_after, inputs):
        before, (x_now, mask_now, d_hs_now) = inputs
        _, _, saved = run(loop, x_now, weights, before, mask_now, save=True)
        d_x, d_weights, d_before = run_back(
            loop, x_now, weights, saved, mask_now, d_hs_now, d_after
        )
        return d_before, (d_x.astype(x.dtype), d_weights)

    def accumulate(carry, inputs):
        d_after, total = carry
        d_before, (d_x, d_weights) = segment(d_after, inputs)
        return (d_before, jax.tree.map(jnp.add, total, d_weights)), d_x

    wide = jnp.promote_types(x.dtype, jnp.float32)
    d_last = tuple(d.astype(wide) for d in d_last)
    if kept_short is None:
        total = jax.tree.map(lambda w: jnp.zeros(w.shape, wide), weights)
        d_x_short = None
    else:
        d_last, (d_x_short, total) = segment(d_last, (kept_short, short))
    (d_first, total), d_x = lax.scan(
        accumulate, (d_last, total), (kept_whole, whole), reverse=not loop.reverse
    )
    return _paste(loop, d_x, d_x_short), total, d_first


@dataclasses.dataclass(frozen=True)
class Split:
    """The mesh axes that split the batch, if any.

    Args:
        mesh: The mesh, or None on a single device.
        axes: Names of the mesh axes that split the batch.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """The number of parts of the batch."""
        return 1 if self.mesh is None else axis_size(self.mesh, self.axes)

    def apply(self, function, loop: Loop, shared, own, weights: Weights):
        """Runs `function(loop, shared, own, weights)` on every part of the batch.

        The loop is inside a `shard_map`, so that no partitioner can put a collective into it and
        layout constraints hold where they are written. Weights come in whole: a split one is
        gathered here, once.

        Args:
            function: The function to run. It returns arrays like `shared`, like `own`, and a sum
                over rows for every weight, or nothing instead. The sums are added up over devices.
            loop: How to run.
            shared: Arrays over rows and features.
            own: Arrays over rows and units.
            weights: The weights.
        """
        if self.mesh is None:
            return function(loop, shared, own, weights)
        results = jax.eval_shape(functools.partial(function, loop), shared, own, weights)

        def local(shared, own, weights):
            shared, own, summed = function(loop, shared, own, weights)
            if self.axes:
                summed = lax.psum(summed, self.axes)
            return shared, own, summed

        def specs(shared, own, weights):
            rows = functools.partial(_rows, axes=self.axes or None)
            everywhere = jax.tree.map(lambda _: PartitionSpec(), weights)
            return jax.tree.map(rows, shared), jax.tree.map(rows, own), everywhere

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=specs(shared, own, weights),
            out_specs=specs(*results),
            check_vma=False,
        )(shared, own, weights)


def _rows(array, axes) -> PartitionSpec:
    """The batch is the second to last axis of every array that has one."""
    return PartitionSpec(*[None] * (len(array.shape) - 2), axes, None)


def _forwards(save: bool, loop: Loop, shared, state, weights):
    x, mask = shared
    if loop.segment is not None:
        hs, last, saved = run_segments(loop, x, weights, state, mask)
    else:
        forwards = run_unrolled if loop.unrolled else run
        hs, last, saved = forwards(loop, x, weights, state, mask, save=save)
    last = tuple(s.astype(before.dtype) for s, before in zip(last, state, strict=True))
    return (), (hs, last, saved if save else None), ()


def _backwards(loop: Loop, shared, own, weights):
    x, mask = shared
    saved, d_hs, d_last = own
    if loop.segment is not None:
        back = run_segments_back
    else:
        back = run_unrolled_back if loop.unrolled else run_back
    d_x, d_weights, d_first = back(loop, x, weights, saved, mask, d_hs, d_last)
    d_first = tuple(d.astype(last.dtype) for d, last in zip(d_first, d_last, strict=True))
    return d_x.astype(x.dtype), d_first, d_weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def differentiable(loop: Loop, split: Split, x, weights: Weights, state, mask):
    """The recurrence; `x` is `(time, batch, features)`, the batch divisible by the split.

    See `recur` for the arguments. The mask is `(time, batch, 1)` or `(time, 2, batch, 1)`.

    Args:
        loop: How to run.
        split: Over which mesh axes the batch is split.
        x: `(time, batch, features)`.
        weights: The weights; with two directions each has a leading axis of two.
        state: Tuple of states before the first step, each `(batch, units)` or `(2, batch, units)`.
        mask: `(time, batch, 1)` or `(time, 2, batch, 1)` boolean, False where the state is carried
            over, or None.

    Returns:
        `h` after every step, `(time, batch, units)` or `(time, 2, batch, units)`, or None if
        `loop.sequences` is False; and the tuple of final states, shaped like `state`.
    """
    _, (hs, last, _), _ = split.apply(
        functools.partial(_forwards, False), loop, (x, mask), state, weights
    )
    return hs, last


def _save(loop: Loop, split: Split, x, weights: Weights, state, mask):
    _, (hs, last, saved), _ = split.apply(
        functools.partial(_forwards, True), loop, (x, mask), state, weights
    )
    return (hs, last), (x, weights, mask, saved)


def _differentiate(loop: Loop, split: Split, residuals, cotangents):
    x, weights, mask, saved = residuals
    d_x, d_first, d_weights = split.apply(
        _backwards, loop, (x, mask), (saved, *cotangents), weights
    )
    d_weights = jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights)
    return d_x, d_weights, d_first, None


differentiable.defvjp(_save, _differentiate)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def recur(loop: Loop, split: Split, x, weights: Weights, state, mask=None):
    """Runs a recurrence over `(batch, time, features)` with its own gradient.

    Args:
        loop: How to run.
        split: Over which mesh axes the batch is split. If the batch is not divisible, it is padded
            with rows that are cut off again; rows are independent, so nothing else changes.
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
        x, state, mask = jax.tree.map(lambda a: _pad(a, -2, short), rows)
    units = state[0].shape[-1]
    more = -units % LANES if loop.kernel else 0
    if more:
        weights, state = _pad_units(loop, weights, state, more)
    result: Any = differentiable(loop, split, x, weights, tuple(state), mask)
    hs, last = result
    if more:
        hs, last = jax.tree.map(lambda a: a[..., :units], (hs, last))
    if short:
        hs, last = jax.tree.map(
            lambda a: lax.slice_in_dim(a, 0, batch, axis=a.ndim - 2), (hs, last)
        )
    if hs is None:
        return None, last
    return jnp.moveaxis(hs, 0, -2), last


def _pad(a, axis: int, short: int):
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, short)
    return jnp.pad(a, widths)


def _pad_units(loop: Loop, weights: Weights, state, short: int):
    """Adds units, so that every gate starts at a tile. They do not affect the other units.

    In memory a tile is as wide anyway; inside a kernel, gates would otherwise be moved sideways.
    """

    def gates(w):
        apart = w.reshape(*w.shape[:-1], loop.cell.gates, -1)
        return _pad(apart, -1, short).reshape(*w.shape[:-1], -1)

    rows = weights._replace(recurrent=_pad(weights.recurrent, -2, short))
    return jax.tree.map(gates, rows), tuple(_pad(s, -1, short) for s in state)
