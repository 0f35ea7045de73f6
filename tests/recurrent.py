"""What tests of recurrences share: a textbook one, masks, meshes, comparison."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from keras_tpu_dist import recurrence as rec
from keras_tpu_dist.layers.recurrent import FastRecurrence

MESHES = {
    "data8": ({"data": 8}, None),
    "data2_model4": (
        {"data": 2, "model": 4},
        [(".*/recurrent_kernel", (None, "model")), (".*_cell/kernel", (None, "model"))],
    ),
}


def without_loops(monkeypatch):
    """From here on layers run as they do on TPU where `variant` says "no loop"."""
    usual = FastRecurrence._variant

    def variant(self, arithmetic, shape, place, directions=1):
        chosen = usual(self, arithmetic, shape, place, directions)
        if directions == 2:
            return chosen
        return dataclasses.replace(chosen, unrolled=True, keep=True, segment=None)

    monkeypatch.setattr(FastRecurrence, "_variant", variant)


def plain(cell, weights, x, state, mask, reverse):
    """Textbook recurrence, one step after the other, differentiated by JAX."""

    def step(before, inputs):
        x_t, m_t = inputs
        projected = x_t @ weights.kernel
        if weights.bias is not None:
            projected = projected + weights.bias
        after, _ = cell.advance(
            rec.Product(), weights.recurrent, weights.recurrent_bias, projected, before
        )
        after = tuple(jnp.where(m_t[:, None], a, b) for a, b in zip(after, before))
        return after, after[0]

    last, hs = jax.lax.scan(
        step, state, (jnp.swapaxes(x, 0, 1), jnp.swapaxes(mask, 0, 1)), reverse=reverse
    )
    return jnp.swapaxes(hs, 0, 1), last


def mask_for(kind, rng, batch, steps):
    if kind == "none":
        return None
    if kind == "padded":
        lengths = rng.integers(1, steps + 1, size=batch)
        return jnp.asarray(np.arange(steps)[None] < lengths[:, None])
    mask = rng.random((batch, steps)) < 0.6
    if kind == "row":
        mask[0] = False
    return jnp.asarray(mask)


def close(ours, theirs, tolerance=1e-5):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
