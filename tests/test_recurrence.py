"""Recurrences against autodiff of a plain scan, one compiled program for many cases."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_tpu_dist import recurrence as rec

CELLS = {
    "lstm": rec.LSTM(),
    "gru": rec.GRU(),
    "gru_before": rec.GRUResetBefore(),
    "simple": rec.SimpleRNN(),
}
BATCH, FEATURES, UNITS = 3, 4, 5


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


def weights_for(cell, rng, *, bias=True, dtype=np.float32):
    gates = cell.gates * UNITS

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.5, dtype)

    return rec.Weights(
        draw(FEATURES, gates),
        draw(gates) if bias else None,
        draw(UNITS, gates),
        draw(gates) if bias and isinstance(cell, rec.GRU) else None,
    )


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


def loss_of(function, cotangents):
    """A scalar that depends on every output with its own random factor."""

    def loss(*args):
        outputs = function(*args)
        return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(outputs), cotangents)), outputs

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def case(cell, *, steps, mask="none", batch=BATCH, split=None, bias=True, seed=0, **loop):
    """Ours and the plain scan's outputs and gradients, jitted together."""
    rng = np.random.default_rng(seed)
    weights = weights_for(cell, rng, bias=bias)
    x = jnp.asarray(rng.normal(size=(batch, steps, FEATURES)), np.float32)
    state = tuple(
        jnp.asarray(rng.normal(size=(batch, UNITS)), np.float32) for _ in range(cell.num_states)
    )
    m = mask_for(mask, rng, batch, steps)
    full = jnp.ones((batch, steps), bool) if m is None else m
    loop = rec.Loop(cell, **loop)

    def ours(weights, x, state):
        hs, last = rec.recur(loop, split or rec.Split(), x, weights, state, m)
        return ((), last) if hs is None else (hs, last)

    def theirs(weights, x, state):
        hs, last = plain(cell, weights, x, state, full, loop.reverse)
        return (hs, last) if loop.sequences else ((), last)

    shapes = jax.tree.leaves(jax.eval_shape(ours, weights, x, state))
    cotangents = [jnp.asarray(rng.normal(size=s.shape), np.float32) for s in shapes]
    return loss_of(ours, cotangents), loss_of(theirs, cotangents), (weights, x, state)


def check(cases):
    """Compiles all cases as one program and compares them."""
    fs = [(ours, theirs) for ours, theirs, _ in cases]
    args = [a for _, _, a in cases]
    out = jax.jit(lambda args: [(o(*a), t(*a)) for (o, t), a in zip(fs, args)])(args)
    for ours, theirs in out:
        close(ours, theirs)


@pytest.mark.parametrize("name", CELLS)
def test_equals_autodiff_of_a_plain_scan(name):
    grid = []
    variants = itertools.cycle(
        [
            {},
            {"keep": True},
            {"segment": 3},
            {"unroll": 4},
            {"segment": 2, "unroll": 2},
            {"early": False},
            {"keep": True, "segment": 3, "recompute": False, "unroll": 3},
        ]
    )
    masks = itertools.cycle(["none", "padded", "arbitrary", "row"])
    for steps, reverse, sequences in itertools.product([1, 2, 7], [False, True], [False, True]):
        loop = dict(next(variants), reverse=reverse, sequences=sequences)
        if loop.get("segment", 0) > steps:
            loop["segment"] = 1
        grid.append(
            case(CELLS[name], steps=steps, mask=next(masks), bias=len(grid) % 3 > 0, **loop)
        )
    check(grid)
