"""All steps backwards: the gradient of the states step by step, that of the weights afterwards."""

import functools

import jax.numpy as jnp
from jax import lax

from keras_tpu_dist.recurrence.cells import Array, State, join
from keras_tpu_dist.recurrence.loop import (
    Loop,
    Saved,
    Weights,
    alive_in,
    flip_second,
    mask_for,
    over_steps,
    project,
    ready,
    turned,
)


def _shift(loop: Loop, after: Array, first: Array) -> Array:
    """The states before every step, from those after and the one before the first.

    On TPU as a choice between a shifted view and the first state, which kernels compute while they
    read, where joining the two would be a copy; on CPU a copy is the faster of the two.
    """
    first = first[None].astype(after.dtype)
    if not loop.pin_layout:
        parts = [after[1:], first] if loop.reverse else [first, after[:-1]]
        return jnp.concatenate(parts, axis=0)
    by = (-1, 1, 0) if loop.reverse else (1, -1, 0)
    shifted = lax.pad(after, jnp.zeros((), after.dtype), (by, *[(0, 0, 0)] * (after.ndim - 1)))
    steps = lax.broadcasted_iota(jnp.int32, (after.shape[0], *[1] * (after.ndim - 1)), 0)
    start = after.shape[0] - 1 if loop.reverse else 0
    return jnp.where(steps == start, first, shifted)


def _inputs(loop: Loop, x, weights: Weights, saved: Saved, previous: State):
    """The activations' inputs, or the states after where those suffice."""
    if saved.inputs is not None:
        return saved.inputs
    if loop.cell.states_suffice:
        return saved.states[0]
    return _rebuilt(loop, x, weights, previous)


def _rebuilt(loop: Loop, x, weights: Weights, previous: State):
    """The activations' inputs again, of all steps or of one."""
    projected = project(loop, x, weights)
    return loop.cell.rebuild(
        loop.between, weights.recurrent, weights.recurrent_bias, projected, previous
    )


def run_back(
    loop: Loop, x, weights: Weights, saved: Saved, mask, d_hs, d_last: State, recurrent=None
):
    """All steps backwards, then one product for every weight.

    Args:
        loop: How to run.
        x: `(time, batch, features)`.
        weights: The weights.
        saved: What `run` saved.
        mask: As in `run`.
        d_hs: Cotangent of the states after every step, or None.
        d_last: Cotangents of the final states.
        recurrent: What `turned` makes of the weights for `loop.back`, if that has been done.

    Returns:
        The cotangents of x, of the weights (accumulated in at least float32) and of the states
        before the first step.
    """
    cell, product = loop.cell, loop.product
    own = ready(loop, weights)
    x_read = loop.pin(product.weight(x))
    previous = saved.states
    if not loop.kernel:
        previous = tuple(_shift(loop, s, first) for s, first in zip(previous, saved.first))
    rebuild = _rebuilds_by_step(loop, saved)
    at = None if rebuild else loop.pin(_inputs(loop, x_read, own, saved, previous))
    needed = tuple(
        None if only and not rebuild else s for s, only in zip(previous, cell.only_multiplied)
    )
    local = (x_read if rebuild else at, needed)
    if loop.early:
        local = loop.pin(cell.coefficients(*local))
    recurrent = turned(loop.back, weights) if recurrent is None else recurrent
    held = own if rebuild else Weights(None, None, recurrent)
    d_last = tuple(d.astype(jnp.promote_types(d.dtype, jnp.float32)) for d in d_last)
    d_first, emitted = over_steps(
        loop,
        "backwards",
        functools.partial(_step, loop, rebuild, product.dtype or x.dtype),
        held,
        d_last,
        (local, loop.pin(d_hs), mask_for(loop, mask)),
        reverse=not loop.reverse,
    )
    parts, totals, d_recurrent, d_recurrent_bias = cell.gradients(
        loop.between, loop.pin(emitted), at, previous
    )
    d_x, d_kernel, d_bias = project_back(loop, x_read, own, parts, totals)
    if weights.recurrent_bias is None:
        d_recurrent_bias = None
    return d_x, Weights(d_kernel, d_bias, d_recurrent, d_recurrent_bias), d_first


def _rebuilds_by_step(loop: Loop, saved: Saved) -> bool:
    """Only a kernel does: it has the weights at hand in every step."""
    can = loop.kernel is not None and loop.cell.rebuilds_by_step and loop.directions == 1
    return can and saved.inputs is None


def _step(loop: Loop, rebuild: bool, emit, weights: Weights, d_after: State, inputs):
    """One step backwards: `(cotangents of the states before, of the activations' inputs)`."""
    cell = loop.cell
    local, d_h, mask_now = inputs
    if loop.early:
        coefficients = local
    elif rebuild:
        x_now, before = local
        coefficients = cell.coefficients(_rebuilt(loop, x_now, weights, before), before)
    else:
        coefficients = cell.coefficients(*local)
    back = functools.partial(cell.retreat, loop.back, weights.recurrent, coefficients)
    return step_back(back, emit, d_after, d_h, mask_now)


def step_back(back, emit, d_after: State, d_h, mask_now):
    """One step backwards, where its mask lets it be one.

    Args:
        back: Maps cotangents of the states after the step to those of the states before it, and to
            what `Cell.retreat` emits.
        emit: The dtype in which products read what the step emits.
        d_after: Cotangents of the states after the step, but for `d_h`.
        d_h: Cotangent of what the step gave out, or None.
        mask_now: The step's mask, or None.

    Returns:
        What `back` does.
    """
    if d_h is not None:
        d_after = (d_after[0] + d_h, *d_after[1:])
    d_step = d_after
    if mask_now is not None:
        alive = alive_in(mask_now, d_after[0])
        d_step = tuple(jnp.where(alive, d, 0) for d in d_after)
    d_before, emitted = back(d_step)
    if mask_now is not None:
        d_before = tuple(b + jnp.where(alive, 0, d) for b, d in zip(d_before, d_after))
    # Nothing but products reads what a step emits.
    return d_before, tuple(part.astype(emit) for part in emitted)


def project_back(loop: Loop, x, weights: Weights, parts, totals):
    """The cotangents of the input, the kernel and the bias, from those of the gates' inputs.

    Args:
        loop: How to run.
        x: `(time, batch, features)`.
        weights: The weights as `ready` returns them.
        parts: Cotangents that follow one another along the gates; joining them would copy all of
            them, which only few rows are worth.
        totals: The sum over rows of each part, or None where the kernel's product is to find it.
    """
    product = loop.product
    if loop.directions == 2:
        parts = [flip_second(part) for part in parts]
    kernel = weights.kernel
    if loop.turn and len(parts) > 1 and x.shape[0] * x.shape[-2] < kernel.shape[-2]:
        # Only a CPU turns; there a weight's columns are copied to be multiplied with.
        parts, totals = [join(*parts)], [None]
    spec = "tdbg,dfg->tbf" if loop.directions == 2 else "tbg,fg->tbf"
    d_x = jnp.zeros((), jnp.promote_types(kernel.dtype, jnp.float32))
    start = 0
    d_kernel, d_bias = [], []
    for part, total in zip(parts, totals):
        columns = lax.slice_in_dim(kernel, start, start + part.shape[-1], axis=-1)
        start += part.shape[-1]
        d_x += jnp.einsum(
            spec, part.astype(kernel.dtype), columns, preferred_element_type=d_x.dtype
        )
        if total is None and weights.bias is not None:
            of_columns, total = product.outer_and_sum(x, part)
        else:
            of_columns = product.outer(x, part)
        d_kernel.append(of_columns)
        d_bias.append(total)
    return d_x, join(*d_kernel), None if weights.bias is None else join(*d_bias)
