"""The time loop forwards and backwards, with as little as possible in a step.

All arrays are time-major, `(time, batch, ...)`, or `(time, 2, batch, ...)` if both directions of a
bidirectional layer run in one loop; the batch is always the second to last axis.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from keras_tpu_dist.recurrence.cells import Array, Cell, Product, State, join
from keras_tpu_dist.recurrence.kernel import Kernel, over_time


class Weights(NamedTuple):
    """The weights of one recurrence; with two directions each has a leading axis of two.

    Args:
        kernel: `(features, gates * units)`.
        bias: `(gates * units,)` or None.
        recurrent: `(units, gates * units)`.
        recurrent_bias: `(gates * units,)` or None; only the GRU whose reset gate acts after its
            product has one.
    """

    kernel: Any
    bias: Array | None
    recurrent: Array
    recurrent_bias: Array | None = None


@dataclasses.dataclass(frozen=True)
class Loop:
    """How a recurrence runs: everything that is known before the arrays.

    Args:
        cell: The arithmetic of one step.
        product: How matrix products are computed.
        sequences: Whether to return the states after all steps, or only the last.
        reverse: Whether time runs backwards.
        directions: 2 to run a forward and a backward recurrence in the same loop.
        keep: Whether the backward pass gets the activations' inputs from the forward pass (more
            memory) or rebuilds them (one more product).
        hoist: Whether the input is projected before the loop, for all steps at once (more memory),
            or step by step inside. Two directions need it before.
        segment: Number of steps that are projected, run and differentiated together, or None for
            all. Only the states between segments are kept; the backward pass recomputes the rest.
        unroll: Steps per iteration of the compiled loop.
        pin_layout: Whether to force the loop's inputs to be time-major in memory; for TPU only,
            because the CPU compiler gets it wrong for arrays that leave the compiled program.
        kernel: The kernel for the loop on TPU, or None for a compiled loop.
        unrolled: Whether there is no loop, and every step has separate arrays, which no segment
            has. In this case `hoist`, `unroll`, `kernel` and `pin_layout` have no effect.
    """

    cell: Cell
    product: Product = dataclasses.field(default_factory=Product)
    sequences: bool = True
    reverse: bool = False
    directions: int = 1
    keep: bool = False
    hoist: bool = True
    segment: int | None = None
    unroll: int = 1
    pin_layout: bool = False
    kernel: Kernel | None = None
    unrolled: bool = False

    @property
    def early(self) -> bool:
        """Whether the backward pass computes its coefficients before its loop, for all steps.

        Otherwise it computes them step by step inside, which takes less memory. Within a segment
        they need little.
        """
        return self.kernel is None and self.segment is not None

    def pin(self, tree: Any) -> Any:
        """Keeps arrays time-major in memory.

        By default, the TPU compiler puts `(time, batch, gates)` batch-major into memory, because
        that suits the projection's product. Then every step reads eight times its bytes.

        Args:
            tree: Arrays whose first axis is time, or None.
        """
        if not self.pin_layout:
            return tree
        return jax.tree.map(lambda a: with_layout_constraint(a, Layout(tuple(range(a.ndim)))), tree)


class SavedStates(NamedTuple):
    """The values saved for the backward pass; `inputs` of the activations only if they are kept.

    Args:
        states: The states after every step; from a kernel, the states before every step if only
            products read them, in the products' precision.
        first: The states before the first step.
        inputs: The activations' inputs of all steps, or None; from a kernel whose cell only needs
            the states after every step, those.
    """

    states: State
    first: State
    inputs: Any


def ready(loop: Loop, weights: Weights) -> Weights:
    """Weights rounded once for all products, and biases which broadcast against a step.

    Args:
        loop: How to run; its `product` defines the rounding.
        weights: The weights in their own precision.
    """
    kernel, bias, recurrent, recurrent_bias = weights
    return Weights(
        loop.product.weight(kernel),
        None if bias is None else bias[..., None, :],
        loop.product.weight(recurrent),
        None if recurrent_bias is None else recurrent_bias[..., None, :],
    )


def flip_second(x):
    """Reverses time for the second direction of `(time, 2, batch, ...)`.

    Args:
        x: `(time, 2, batch, ...)`.
    """
    return jnp.stack([x[:, 0], jnp.flip(x[:, 1], axis=0)], axis=1)


def project(loop: Loop, x: Array, weights: Weights) -> Array:
    """The input's part of all steps, in one product: `(time, batch, gates * units)`.

    Args:
        loop: How to run.
        x: `(time, batch, features)`, or `(batch, features)` for one step of one direction.
        weights: The weights as `ready` returns them.

    Returns:
        The projection with its bias. With two directions it is `(time, 2, batch, gates * units)`,
        the second from the last step to the first.
    """
    kernel = weights.kernel
    if loop.directions == 2:
        projected = jnp.einsum(
            "tbf,dfg->tdbg",
            x.astype(kernel.dtype),
            kernel,
            preferred_element_type=jnp.promote_types(kernel.dtype, jnp.float32),
        )
        projected = flip_second(projected)
    else:
        projected = loop.product(x, kernel)
    return projected if weights.bias is None else projected + weights.bias


def mask_for(loop: Loop, mask):
    """A mask for the loop: kernels cannot hold booleans in memory.

    Args:
        loop: How to run.
        mask: `(time, batch, 1)` or `(time, 2, batch, 1)` boolean, or None.
    """
    return mask if mask is None or loop.kernel is None else mask.astype(jnp.int32)


def alive_in(mask_now, like):
    """A step's mask for every unit; in kernels it is numeric, so that they can repeat it.

    Args:
        mask_now: `(batch, 1)` or `(2, batch, 1)`, boolean or numeric, from `mask_for`.
        like: A state, `(batch, units)` or `(2, batch, units)`; only its shape is read.
    """
    return jnp.broadcast_to(mask_now, like.shape) != 0


def over_steps(loop: Loop, name, step, held, carry, inputs, *, reverse: bool) -> tuple[Any, Any]:
    """`lax.scan` of `step`, on TPU in one kernel, or at least without filling memory twice.

    Args:
        loop: How to run.
        name: The loop's name, for its kernel.
        step: `(held, carry, inputs of one step) -> (carry, outputs of one step)`, in a kernel of
            one direction. There it must not use other arrays.
        held: Arrays that every step reads, such as weights.
        carry: Arrays before the first step, each `(batch, units)` or `(2, batch, units)`.
        inputs: Arrays over time, `(time, batch, ...)` or `(time, 2, batch, ...)`.
        reverse: Whether the last step comes first.

    Returns:
        The carry after the step that is run last, and the outputs of all steps, stacked over time.
    """
    if loop.kernel:
        name = f"{type(loop.cell).__name__.lower()}_{name}"
        return over_time(
            loop.kernel,
            name,
            step,
            held,
            carry,
            inputs,
            reverse=reverse,
            unroll=loop.unroll,
            directions=loop.directions,
        )
    step = functools.partial(step, held)
    if loop.pin_layout:
        return _into_empty(loop, step, carry, inputs, reverse)
    length = jax.tree.leaves(inputs)[0].shape[0]
    return lax.scan(step, carry, inputs, reverse=reverse, unroll=min(loop.unroll, length))


def _into_empty(loop: Loop, step, carry, inputs, reverse: bool) -> tuple[Any, Any]:
    """`lax.scan` of `step` that writes into uninitialized memory.

    A scan clears the memory for its outputs, unless the compiler sees that all of it is written,
    which it does not for backward loops. Clearing touches as much memory as the loop itself.
    """
    length = jax.tree.leaves(inputs)[0].shape[0]
    unroll = min(loop.unroll, length)

    def at(t):
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, t, 0, keepdims=False), inputs)

    def body(number, both):
        carry, written = both
        t = length - 1 - number if reverse else number
        carry, out = step(carry, at(t))
        written = jax.tree.map(
            lambda whole, now: lax.dynamic_update_index_in_dim(whole, now, t, 0), written, out
        )
        return carry, written

    shapes = jax.eval_shape(lambda c: step(c, at(0))[1], carry)
    empty = jax.tree.map(lambda s: lax.empty((length, *s.shape), s.dtype), shapes)
    # If a carry starts as a constant, the compiler adds a selection to every iteration.
    return lax.fori_loop(0, length, body, (lax.optimization_barrier(carry), empty), unroll=unroll)


def run(loop: Loop, x, weights: Weights, state: State, mask, *, save: bool) -> tuple[Any, Any, Any]:
    """All steps forwards.

    Args:
        loop: How to run.
        x: `(time, batch, features)`.
        weights: The weights.
        state: States before the first step, each `(batch, units)`.
        mask: `(time, batch, 1)` boolean, False where the state is carried over, or None.
        save: Whether the backward pass will need the saved values.

    Returns:
        The states `h` after every step or None, the final states, and `SavedStates` or None.
    """
    cell, product = loop.cell, loop.product
    weights = ready(loop, weights)
    mask = mask_for(loop, mask)
    read = loop.pin(project(loop, x, weights) if loop.hoist else loop.product.weight(x))
    dtype, wide = x.dtype, jnp.promote_types(weights.recurrent.dtype, jnp.float32)
    state = tuple(s.astype(wide) for s in state)

    def step(weights, before, inputs):
        projected_now, mask_now = inputs
        if not loop.hoist:
            projected_now = project(loop, projected_now, weights)
        after, at = cell.advance(
            product, weights.recurrent, weights.recurrent_bias, projected_now, before
        )
        if mask_now is not None:
            alive = alive_in(mask_now, after[0])
            after = tuple(jnp.where(alive, a, b) for a, b in zip(after, before, strict=True))
        return after, _outputs(loop, before, after, at, dtype, save)

    held = weights._replace(kernel=None, bias=None) if loop.hoist else weights
    last, out = over_steps(loop, "forwards", step, held, state, (read, mask), reverse=loop.reverse)
    out = loop.pin(out)
    hs = out.get("h")
    if not save:
        return hs, last, None
    if loop.kernel or not loop.sequences:
        return hs, last, SavedStates(out["states"], state, out["inputs"])
    return hs, last, SavedStates((hs, *out["states"]), state, out["inputs"])


def _outputs(loop: Loop, before: State, after: State, at, dtype, save: bool) -> dict[str, Any]:
    """The values that a forward step writes to memory."""
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
            for s, only in zip(before, loop.cell.only_multiplied, strict=True)
        )
        if loop.cell.states_suffice:
            out["inputs"] = after[0]
    else:
        # The kernel that computes the states after a step can also write them; the states before it
        # would need a separate kernel. If h is an output, it is kept already.
        out["states"] = after[1:] if loop.sequences else after
    return out


def _shift(loop: Loop, after: Array, first: Array) -> Array:
    """The states before every step, from those after every step and the first one.

    It is a selection between a shifted view and the first state, which kernels compute while they
    read; on TPU, joining the two would be a copy.
    """
    first = first[None].astype(after.dtype)
    by = (-1, 1, 0) if loop.reverse else (1, -1, 0)
    shifted = lax.pad(after, jnp.zeros((), after.dtype), (by, *[(0, 0, 0)] * (after.ndim - 1)))
    steps = lax.broadcasted_iota(jnp.int32, (after.shape[0], *[1] * (after.ndim - 1)), 0)
    start = after.shape[0] - 1 if loop.reverse else 0
    return jnp.where(steps == start, first, shifted)


def _inputs(loop: Loop, x, weights: Weights, saved: SavedStates, previous: State):
    """The activations' inputs, or the states after the steps if those suffice."""
    if saved.inputs is not None:
        return saved.inputs
    if loop.cell.states_suffice:
        return saved.states[0]
    return _rebuilt(loop, x, weights, previous)


def _rebuilt(loop: Loop, x, weights: Weights, previous: State):
    """Rebuilds the activations' inputs, of all steps or of one."""
    projected = project(loop, x, weights)
    return loop.cell.rebuild(
        loop.product, weights.recurrent, weights.recurrent_bias, projected, previous
    )


def run_back(loop: Loop, x, weights: Weights, saved: SavedStates, mask, d_hs, d_last: State):
    """All steps backwards, then one product for every weight.

    Args:
        loop: How to run.
        x: `(time, batch, features)`.
        weights: The weights.
        saved: The saved values of `run`.
        mask: See `run`.
        d_hs: Cotangent of the states after every step, or None.
        d_last: Cotangents of the final states.

    Returns:
        The cotangents of x, of the weights (accumulated in at least float32) and of the states
        before the first step.
    """
    cell, product = loop.cell, loop.product
    own = ready(loop, weights)
    x_read = loop.pin(product.weight(x))
    previous = saved.states
    if not loop.kernel:
        previous = tuple(
            _shift(loop, s, first) for s, first in zip(previous, saved.first, strict=True)
        )
    # Step by step only in a kernel, which has the weights available in every step.
    can = loop.kernel is not None and loop.directions == 1
    rebuild = can and saved.inputs is None
    at = None if rebuild else loop.pin(_inputs(loop, x_read, own, saved, previous))
    needed = tuple(
        None if only and not rebuild else s
        for s, only in zip(previous, cell.only_multiplied, strict=True)
    )
    local = (x_read if rebuild else at, needed)
    if loop.early:
        local = loop.pin(cell.coefficients(*local))
    held = own if rebuild else Weights(None, None, own.recurrent)
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
        loop.product, loop.pin(emitted), at, previous
    )
    d_x, d_kernel, d_bias = project_back(loop, x_read, own, parts, totals)
    if weights.recurrent_bias is None:
        d_recurrent_bias = None
    return d_x, Weights(d_kernel, d_bias, d_recurrent, d_recurrent_bias), d_first


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
    back = functools.partial(cell.retreat, loop.product, weights.recurrent, coefficients)
    return step_back(back, emit, d_after, d_h, mask_now)


def step_back(back, emit, d_after: State, d_h, mask_now):
    """One step backwards, if its mask allows it.

    Args:
        back: Maps cotangents of the states after the step to those of the states before it, and to
            the emitted values of `Cell.retreat`.
        emit: The dtype in which products read the emitted values.
        d_after: Cotangents of the states after the step, without `d_h`.
        d_h: Cotangent of the step's output, or None.
        mask_now: The step's mask, or None.
    """
    if d_h is not None:
        d_after = (d_after[0] + d_h, *d_after[1:])
    d_step = d_after
    if mask_now is not None:
        alive = alive_in(mask_now, d_after[0])
        d_step = tuple(jnp.where(alive, d, 0) for d in d_after)
    d_before, emitted = back(d_step)
    if mask_now is not None:
        d_before = tuple(b + jnp.where(alive, 0, d) for b, d in zip(d_before, d_after, strict=True))
    # Only products read the emitted values of a step.
    return d_before, tuple(part.astype(emit) for part in emitted)


def project_back(loop: Loop, x, weights: Weights, parts, totals):
    """The cotangents of the input, the kernel and the bias, from those of the gates' inputs.

    Args:
        loop: How to run.
        x: `(time, batch, features)`.
        weights: The weights as `ready` returns them.
        parts: Cotangents that follow one another along the gates; joining them would copy all of
            them, which only pays for few rows.
        totals: The sum over rows of every part, or None if the kernel's product computes it.
    """
    product = loop.product
    if loop.directions == 2:
        parts = [flip_second(part) for part in parts]
    kernel = weights.kernel
    spec = "tdbg,dfg->tbf" if loop.directions == 2 else "tbg,fg->tbf"
    d_x = jnp.zeros((), jnp.promote_types(kernel.dtype, jnp.float32))
    start = 0
    d_kernel, d_bias = [], []
    for part, total in zip(parts, totals, strict=True):
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
