"""Recurrences against autodiff of a plain scan, one compiled program for many cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent import close, mask_for, plain

from keras_tpu_dist import recurrence as rec

CELLS = {
    "lstm": rec.LSTM(),
    "gru": rec.GRU(),
    "simple": rec.SimpleRNN(),
}
BATCH, FEATURES, UNITS = 3, 4, 5


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


def loss_of(function, cotangents):
    """A scalar that depends on every output with its own random factor."""

    def loss(*args):
        outputs = function(*args)
        return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(outputs), cotangents)), outputs

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def case(
    cell,
    *,
    steps,
    mask="none",
    batch=BATCH,
    split=None,
    bias=True,
    seed=0,
    **loop,
):
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

    def everything(args):
        return [(ours(*a), theirs(*a)) for (ours, theirs), a in zip(fs, args)]

    # Compile time is most of what these tests cost.
    out = jax.jit(everything, compiler_options={"xla_backend_optimization_level": 0})(args)
    for ours, theirs in out:
        close(ours, theirs)


VARIANTS = [
    {},
    {"keep": True},
    {"segment": 3},
    {"unroll": 4},
    {"segment": 2, "unroll": 2},
    {"keep": True, "segment": 3, "unroll": 3},
    # What TPU gets; off it the memory is cleared after all.
    {"keep": True, "pin_layout": True},
    {"keep": True, "pin_layout": True, "unroll": 3, "hoist": False},
    # No loop.
    {"keep": True, "unrolled": True},
    {"unrolled": True},
]
MASKS = ["none", "padded", "arbitrary", "row"]


def cases_of(name, variants, steps):
    """Every cell meets every variant; time, masks, direction and outputs turn from cell to cell."""
    for number, variant in enumerate(variants):
        turn = number + list(CELLS).index(name)
        yield case(
            CELLS[name],
            steps=7 if "segment" in variant else steps[turn % len(steps)],
            mask=MASKS[turn % 4],
            reverse=turn % 2 == 0,
            sequences=turn % 3 > 0,
            bias=turn % 4 > 0,
            **variant,
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_equals_autodiff_of_a_plain_scan(name):
    cases = cases_of(name, VARIANTS, steps=(7, 7, 3))
    check([*cases, case(CELLS[name], steps=1, mask="row", keep=True)])


def test_long_sequences_and_segments_found_by_themselves():
    assert [rec.check_segment("auto", steps) for steps in (1, 7, 64, 100, 8192)] == [
        *(1, 3, 8, 10, 64)
    ]
    check([case(rec.LSTM(), steps=64, mask="padded", segment=rec.check_segment("auto", 64))])


@pytest.mark.slow
@pytest.mark.parametrize("pin_layout", [False, True])
def test_gradients_are_differentiable(pin_layout):
    def squared(scale):
        gradient = run_with(scale)
        return jnp.vdot(gradient, gradient)

    rng = np.random.default_rng(0)
    weights = weights_for(rec.LSTM(), rng)
    x = jnp.asarray(rng.normal(size=(2, 3, FEATURES)), np.float32)
    state = (jnp.zeros((2, UNITS)),) * 2

    # Compiled: XLA's CPU compiler, which layers never ask for a layout, mistakes the layout of an
    # array that it was asked for and that leaves the program.
    @jax.jit
    def run_with(scale):
        def loss(x):
            return jnp.sum(rec.recur(loop, rec.Split(), scale * x, weights, state)[1][0])

        return jax.grad(loss)(x)

    loop = rec.Loop(rec.LSTM(), sequences=False, pin_layout=pin_layout)
    step = 1e-2
    slope = (squared(1 + step) - squared(1 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(squared)(1.0), slope, rtol=1e-2)


def test_the_rule_says_what_it_chose_and_why():
    def chosen(**changes):
        return rec.choose(
            **{"cell": rec.LSTM(), "platform": "tpu", "batch": 128, "steps": 128, "units": 256}
            | changes
        )

    assert (chosen().keep, chosen().segment) == (True, None)
    # A full matrix unit projects inside the loop; one that is mostly idle there, before it.
    assert not chosen(features=256).hoist
    assert chosen(batch=8, features=1024).hoist
    assert chosen(batch=32, features=512).hoist
    assert not chosen(batch=32, features=128, steps=1024).hoist
    assert chosen(batch=32, features=128, steps=64).hoist  # small enough to stay on the chip
    assert chosen(platform="gpu", features=256).hoist
    assert "input projected inside the loop" in str(chosen(features=256))
    # Coefficients of all steps take little memory within a segment.
    assert rec.Loop(rec.LSTM(), segment=4).early
    assert not rec.Loop(rec.LSTM()).early
    large = chosen(batch=1024, units=1024, steps=1024)
    assert not large.keep
    assert "20.0 GiB would have to be kept" in str(large)
    cpu = chosen(platform="cpu")
    assert (cpu.segment, cpu.hoist, cpu.unroll) == (None, True, 1)
    assert chosen(segment="auto", steps=8192).segment == 64
    assert chosen(unroll=True).unroll == 128
