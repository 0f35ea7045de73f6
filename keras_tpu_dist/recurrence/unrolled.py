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
from keras_tpu_dist.recurrence.loop import (
    Loop,
    Weights,
    alive_in,
    project,
    project_back,
    ready,
    step_back,
)
from keras_tpu_dist.recurrence.plan import MATRIX_ROWS


def run_unrolled(loop: Loop, x, weights: Weights, state: State, mask, *, save: bool):
    """All steps forwards, one direction; arguments and results as for `run`.

    The saved value is a list over time: the states before a step, and the activations' inputs, the
    states after the step if those suffice, or None.
    """
    cell, own = loop.cell, ready(loop, weights)
    advance = _advance_together(loop, weights) if _together(loop, weights) else _advance(loop, own)
    wide = jnp.promote_types(own.recurrent.dtype, jnp.float32)
    state = tuple(s.astype(wide) for s in state)
    hs: list[Any] = [None] * len(x)
    steps: list[Any] = [None] * len(x)
    for t in _order(loop.reverse, x):
        after, at = advance(x[t], state)
        if mask is not None:
            alive = alive_in(mask[t], after[0])
            after = tuple(jnp.where(alive, a, b) for a, b in zip(after, state))
        if cell.states_suffice:
            at = after[0]
        steps[t] = state, at if loop.keep or cell.states_suffice else None
        hs[t] = after[0].astype(x.dtype)
        state = after
    return jnp.stack(hs) if loop.sequences else None, state, steps if save else None


def _order(reverse: bool, x) -> range:
    return range(len(x))[::-1] if reverse else range(len(x))


def _together(loop: Loop, weights: Weights) -> bool:
    """Whether input and state are multiplied in one product.

    This saves kernels as long as both fit the matrix unit's rows; for larger ones it only copies
    the input.
    """
    both = weights.kernel.shape[-2] + weights.recurrent.shape[-2]
    return both <= MATRIX_ROWS


def _advance(loop: Loop, own: Weights):
    def advance(x_now, state):
        projected = project(loop, x_now, own)
        return loop.cell.advance(loop.product, own.recurrent, own.recurrent_bias, projected, state)

    return advance


def _advance_together(loop: Loop, weights: Weights):
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
    """All steps backwards; arguments and results as for `run_back`."""
    own = ready(loop, weights)
    rules = _back_together if _together(loop, weights) else _back
    retreat, of_step, finish = rules(loop, own, weights)
    advance = _advance(loop, own)
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
        d_xs[t], now = of_step(x[t], before, at, emitted)
        total = now if total is None else jax.tree.map(jnp.add, total, now)
    return jnp.stack(d_xs), finish(total), d_state


def _back_together(loop: Loop, own: Weights, weights: Weights):
    """Functions for a step backwards: the step, its summand, and the weights' gradients from the
    sum."""
    cell, product = loop.cell, loop.product
    wide = jax.tree.map(lambda w: w.astype(jnp.promote_types(w.dtype, jnp.float32)), weights)
    (weight, bias), transpose = jax.vjp(cell.joined, wide)
    of_state = product.weight(weight[-weights.recurrent.shape[-2] :])
    summed = product.sum_by_product and bias is not None

    def retreat(coefficients, cotangent):
        columns, (dh, *others) = cell.columns_back(coefficients, cotangent)
        return (dh + product.back(columns, of_state), *others), (columns,)

    def of_step(x_now, before, at, emitted):
        del at
        (columns,) = emitted
        # Eight rows of ones, as in `Product.outer_and_sum`.
        ones = [jnp.ones((len(x_now), 8), columns.dtype)] if summed else []
        now = product.outer(_rows(loop, x_now, before, *ones)[None], columns[None])
        total = None if bias is None or summed else jnp.sum(columns, axis=0, dtype=now.dtype)
        return product.back(columns[..., : own.kernel.shape[-1]], own.kernel), (now, total)

    def finish(total):
        now, of_bias = total
        return transpose((now[: len(weight)], now[len(weight)] if summed else of_bias))[0]

    return retreat, of_step, finish


def _back(loop: Loop, own: Weights, weights: Weights):
    """The same for one step, by the cell's rules for all of time."""

    def retreat(coefficients, cotangent):
        return loop.cell.retreat(loop.product, own.recurrent, coefficients, cotangent)

    def of_step(x_now, before, at, emitted):
        emitted, at, before = jax.tree.map(lambda a: a[None], (emitted, at, before))
        parts, totals, d_recurrent, d_inner = loop.cell.gradients(loop.product, emitted, at, before)
        x_now = loop.product.weight(x_now)[None]
        d_x, d_kernel, d_bias = project_back(loop, x_now, own, parts, totals)
        if weights.recurrent_bias is None:
            d_inner = None
        return d_x[0], Weights(d_kernel, d_bias, d_recurrent, d_inner)

    return retreat, of_step, lambda total: total
