"""Time cut into segments: to keep only the states between them, or to stay in cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_tpu_dist.recurrence.backwards import run_back
from keras_tpu_dist.recurrence.forwards import run
from keras_tpu_dist.recurrence.loop import Loop, Weights, turned
from keras_tpu_dist.recurrence.unrolled import run_unrolled, run_unrolled_back


def _cut(loop: Loop, tree):
    """Whole segments `(segments, size, batch, ...)` and the shorter one that is run last."""
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


def run_segments(loop: Loop, x, weights: Weights, state, mask, *, save: bool):
    """All steps forwards; returns the states after every step or None, the last, and the kept.

    Kept are the states before every segment if the rest is computed again, else what `run` saves.

    Args:
        loop: How to run; `loop.segment` is the number of steps in a segment.
        x: `(time, batch, features)`.
        weights: The weights.
        state: States before the first step, each `(batch, units)`.
        mask: `(time, batch, 1)` boolean or None.
        save: Whether the backward pass will need anything.
    """
    keep_all = save and not loop.recompute
    recurrent = turned(loop.ahead, weights)
    ahead = run_unrolled if loop.unrolled else run
    whole, short = _cut(loop, (x, mask))

    def segment(before, inputs):
        x_now, mask_now = inputs
        hs, after, saved = ahead(
            loop, x_now, weights, before, mask_now, save=keep_all, recurrent=recurrent
        )
        return after, (saved if keep_all else before, hs)

    wide = jnp.promote_types(x.dtype, jnp.float32)
    state = tuple(s.astype(wide) for s in state)
    state, (kept, hs) = lax.scan(segment, state, whole, reverse=loop.reverse)
    if x.shape[0] % loop.segment == 0:
        return _paste(loop, hs, None), state, (kept, None)
    last, (before, hs_short) = segment(state, short)
    return _paste(loop, hs, hs_short), last, (kept, before)


def run_segments_back(loop: Loop, x, weights: Weights, kept, mask, d_hs, d_last):
    """All steps backwards, one segment after the other; arguments and results as `run_back`.

    Args:
        loop: How to run; `loop.segment` is the number of steps in a segment.
        x: `(time, batch, features)`.
        weights: The weights.
        kept: What `run_segments` kept: of the whole segments, and of the shorter one or None.
        mask: As in `run_segments`.
        d_hs: Cotangent of the states after every step, or None.
        d_last: Cotangents of the final states.
    """
    kept_whole, kept_short = kept
    whole, short = _cut(loop, (x, mask, d_hs))
    of_ahead, of_back = turned(loop.ahead, weights), turned(loop.back, weights)
    ways: Any = (run_unrolled, run_unrolled_back) if loop.unrolled else (run, run_back)
    ahead, back = ways

    def segment(d_after, inputs):
        saved, (x_now, mask_now, d_hs_now) = inputs
        if loop.recompute:
            _, _, saved = ahead(
                loop, x_now, weights, saved, mask_now, save=True, recurrent=of_ahead
            )
        d_x, d_weights, d_before = back(
            loop, x_now, weights, saved, mask_now, d_hs_now, d_after, of_back
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
