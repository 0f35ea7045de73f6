"""Time without a loop: every step has separate arrays, and nothing is stacked over time.

A cell with few units is computed sooner than a kernel of the compiler starts, so the number of
kernels in a step matters. Here a step has one product for input and state together, forwards and
for the gradient of the weights; Keras's cells have two of each and a sum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from keras_tpu_dist.recurrence.cells import State, join
from keras_tpu_dist.recurrence.loop import Loop, Weights, alive_in, step_back


def run_unrolled(loop: Loop, x, weights: Weights, state: State, mask, *, save: bool):
    """All steps forwards, one direction; arguments and results as for `run`.

    The saved value is a list over time: the states before a step, and the activations' inputs, the
    states after the step if those suffice, or None.

    Args:
        loop: How to run.
        x: `(time, batch, features)`.
        weights: The weights.
        state: States before the first step, each `(batch, units)`.
        mask: `(time, batch, 1)` boolean, False where the state is carried over, or None.
        save: Whether the backward pass will need the saved values.
    """
    cell, advance = loop.cell, _advance(loop, weights)
    wide = jnp.promote_types(loop.product.weight(weights.recurrent).dtype, jnp.float32)
    state = tuple(s.astype(wide) for s in state)
    hs: list[Any] = [None] * len(x)
    steps: list[Any] = [None] * len(x)
    for t in _order(loop.reverse, x):
        after, at = advance(x[t], state)
        if mask is not None:
            alive = alive_in(mask[t], after[0])
            after = tuple(jnp.where(alive, a, b) for a, b in zip(after, state, strict=True))
        if cell.states_suffice:
            at = after[0]
        steps[t] = state, at if loop.keep or cell.states_suffice else None
        hs[t] = after[0].astype(x.dtype)
        state = after
    return jnp.stack(hs) if loop.sequences else None, state, steps if save else None


def _order(reverse: bool, x) -> range:
    return range(len(x))[::-1] if reverse else range(len(x))


def _advance(loop: Loop, weights: Weights):
    weight, bias = loop.cell.joined(weights)
    weight = loop.product.weight(weight)

    def advance(x_now, state):
        columns = loop.product(_rows(loop, x_now, state), weight)
        at = loop.cell.inputs_of(columns if bias is None else columns + bias)
        return loop.cell.after(at, state), at

    return advance


def _rows(loop: Loop, x_now, state: State, *more):
    """The rows of a step's product: the input and the previous state."""
    x_now = loop.product.weight(x_now)
    return join(x_now, state[0].astype(x_now.dtype), *more)


def run_unrolled_back(loop: Loop, x, weights: Weights, steps, mask, d_hs, d_last: State):
    """All steps backwards; arguments and results as for `run_back`.

    Args:
        loop: How to run.
        x: `(time, batch, features)`.
        weights: The weights.
        steps: The saved values of `run_unrolled`.
        mask: See `run_unrolled`.
        d_hs: Cotangent of the states after every step, or None.
        d_last: Cotangents of the final states.
    """
    retreat, of_step, finish = _back(loop, weights)
    advance = _advance(loop, weights)
    d_state = tuple(d.astype(jnp.promote_types(d.dtype, jnp.float32)) for d in d_last)
    emit = loop.product.dtype or x.dtype
    d_xs: list[Any] = [None] * len(x)
    total: Any = None
    for t in _order(not loop.reverse, x):
        before, at = steps[t]
        if at is None:
            _, at = advance(x[t], before)
        d_h, alive = (None if a is None else a[t] for a in (d_hs, mask))
        back = functools.partial(retreat, loop.cell.coefficients(at, before))
        d_state, emitted = step_back(back, emit, d_state, d_h, alive)
        d_xs[t], now = of_step(x[t], before, emitted)
        total = now if total is None else total + now
    return jnp.stack(d_xs), finish(total), d_state


def _back(loop: Loop, weights: Weights):
    """Functions for a step backwards: the step, its summand, and the weights' gradients from the
    sum."""
    cell, product = loop.cell, loop.product
    wide = jax.tree.map(lambda w: w.astype(jnp.promote_types(w.dtype, jnp.float32)), weights)
    (weight, bias), transpose = jax.vjp(cell.joined, wide)
    of_state = product.weight(weight[-weights.recurrent.shape[-2] :])
    kernel = product.weight(weights.kernel)

    def retreat(coefficients, cotangent):
        columns, (dh, *others) = cell.columns_back(coefficients, cotangent)
        return (dh + product.back(columns, of_state), *others), (columns,)

    def of_step(x_now, before, emitted):
        (columns,) = emitted
        # Eight rows of ones, as in `Product.outer_and_sum`.
        ones = [] if bias is None else [jnp.ones((len(x_now), 8), columns.dtype)]
        now = product.outer(_rows(loop, x_now, before, *ones)[None], columns[None])
        return product.back(columns[..., : kernel.shape[-1]], kernel), now

    def finish(total):
        return transpose((total[: len(weight)], None if bias is None else total[len(weight)]))[0]

    return retreat, of_step, finish
