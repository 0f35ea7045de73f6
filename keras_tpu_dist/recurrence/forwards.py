"""All steps forwards, and what they leave for the way back."""

from typing import Any

import jax.numpy as jnp

from keras_tpu_dist.recurrence.cells import State
from keras_tpu_dist.recurrence.loop import (
    Loop,
    Saved,
    Weights,
    alive_in,
    mask_for,
    over_steps,
    project,
    ready,
    turned,
)


def run(
    loop: Loop, x, weights: Weights, state: State, mask, *, save: bool, recurrent=None
) -> tuple[Any, Any, Any]:
    """All steps forwards.

    Args:
        loop: How to run.
        x: `(time, batch, features)`.
        weights: The weights.
        state: States before the first step, each `(batch, units)`.
        mask: `(time, batch, 1)` boolean, False where the state is carried over, or None.
        save: Whether the backward pass will need anything.
        recurrent: What `turned` makes of the weights for `loop.ahead`, if that has been done.

    Returns:
        The states `h` after every step or None, the final states, and `Saved` or None.
    """
    cell, product = loop.cell, loop.ahead
    recurrent = turned(product, weights) if recurrent is None else recurrent
    weights = ready(loop, weights)._replace(recurrent=recurrent)
    hoist = loop.hoist or loop.directions == 2
    mask = mask_for(loop, mask)
    read = loop.pin(project(loop, x, weights) if hoist else loop.product.weight(x))
    dtype, wide = x.dtype, jnp.promote_types(weights.recurrent.dtype, jnp.float32)
    state = tuple(s.astype(wide) for s in state)

    def step(weights, before, inputs):
        projected_now, mask_now = inputs
        if not hoist:
            projected_now = project(loop, projected_now, weights)
        after, at = cell.advance(
            product, weights.recurrent, weights.recurrent_bias, projected_now, before
        )
        if mask_now is not None:
            alive = alive_in(mask_now, after[0])
            after = tuple(jnp.where(alive, a, b) for a, b in zip(after, before))
        return after, _outputs(loop, before, after, at, dtype, save)

    held = weights._replace(kernel=None, bias=None) if hoist else weights
    last, out = over_steps(loop, "forwards", step, held, state, (read, mask), reverse=loop.reverse)
    out = loop.pin(out)
    hs = out.get("h")
    if not save:
        return hs, last, None
    if loop.kernel or not loop.sequences:
        return hs, last, Saved(out["states"], state, out["inputs"])
    return hs, last, Saved((hs, *out["states"]), state, out["inputs"])


def _outputs(loop: Loop, before: State, after: State, at, dtype, save: bool) -> dict[str, Any]:
    """What a step forwards writes to memory."""
    out = {}
    if loop.sequences:
        out["h"] = after[0].astype(dtype)
    if not save:
        return out
    out["inputs"] = at if loop.keep and not loop.cell.states_suffice else None
    if loop.kernel:
        # A kernel writes the states before a step as easily as those after it.
        out["states"] = tuple(
            s.astype(loop.product.dtype or s.dtype) if only else s
            for s, only in zip(before, loop.cell.only_multiplied)
        )
        if loop.cell.states_suffice:
            out["inputs"] = after[0]
    else:
        # The states after a step are made by the kernel that could also write them out; those
        # before it would need a kernel of their own. If h is given out it is kept already.
        out["states"] = after[1:] if loop.sequences else after
    return out
