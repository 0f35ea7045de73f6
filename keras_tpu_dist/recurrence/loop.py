"""The time loop forwards and backwards: what every step must do, and nothing else.

All arrays are time-major, `(time, batch, ...)`, or `(time, 2, batch, ...)` where both directions
of a bidirectional layer run in one loop; the batch is always the second to last axis.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.recurrence.cells import Array, Cell, Exchange, Product, State
from keras_tpu_dist.recurrence.kernel import Kernel, over_time


class Weights(NamedTuple):
    """The weights of one recurrence; with two directions each has a leading axis of two.

    Args:
        kernel: `(features, gates * units)`.
        bias: `(gates * units,)` or None.
        recurrent: `(units, gates * units)`.
        recurrent_bias: `(gates * units,)` or None; only the GRU whose reset acts after its product
            has one.
    """

    kernel: Any
    bias: Array | None
    recurrent: Array
    recurrent_bias: Array | None = None


@dataclasses.dataclass(frozen=True)
class Loop:
    """How a recurrence is run; everything about it that is known before the arrays.

    Args:
        cell: The arithmetic of one step.
        product: How matrix products are done.
        sequences: Whether the states after all steps are wanted, not only the last.
        reverse: Whether time runs backwards.
        directions: 2 to run a forward and a backward recurrence in the same loop.
        keep: Whether the backward pass gets the activations' inputs from the forward pass (more
            memory) or rebuilds them (one more product).
        early: Whether the backward pass works out its coefficients before its loop, for all steps
            at once (more memory), or step by step inside.
        hoist: Whether the input is projected before the loop, for all steps at once (more memory),
            or step by step inside. Two directions need it before.
        segment: Number of steps that are projected, run and differentiated together, or None for
            all. A short segment stays in a CPU's cache.
        recompute: With segments, whether only the states between them are kept, and everything
            inside is computed again in the backward pass.
        unroll: Steps per iteration of the compiled loop.
        kernel: The kernel that the loop is on TPU, or None for a loop of the compiler's. One works
            out its coefficients inside (not `early`).
        units_axes: Mesh axes over which the units are split, so that every step exchanges states.
        turn: Whether the loop whose product reads the recurrent kernel across its order, the
            backward one, multiplies with a transposed copy; if the weight comes first, it is the
            forward one.
        weight_first: Whether the loops' products take the weight first.
        unrolled: Whether there is no loop: every step has arrays of its own. Then `early`, `hoist`,
            `unroll`, `kernel`, `turn`, `weight_first` and `pin_layout` say nothing.
        pin_layout: Whether to force what the loop reads to be time-major in memory; for TPU, as the
            CPU compiler gets it wrong for arrays that leave the compiled program.
    """

    cell: Cell
    product: Product = dataclasses.field(default_factory=Product)
    sequences: bool = True
    reverse: bool = False
    directions: int = 1
    keep: bool = False
    early: bool = True
    hoist: bool = True
    segment: int | None = None
    recompute: bool = True
    unroll: int = 1
    pin_layout: bool = False
    kernel: Kernel | None = None
    units_axes: tuple[str, ...] = ()
    turn: bool = False
    weight_first: bool = False
    unrolled: bool = False

    def __post_init__(self):
        if self.directions == 2 and self.segment is not None:
            raise ValueError(
                message(
                    "Two directions in one loop cannot be cut into segments, because they meet "
                    "the segments in opposite order.",
                    received={"directions": self.directions, "segment": self.segment},
                    fix="Run the directions one after the other.",
                )
            )
        if self.directions == 2 and self.unrolled:
            raise ValueError(
                message(
                    "Two directions run together in a loop only.",
                    received={"directions": self.directions, "unrolled": True},
                    fix="Run the directions one after the other.",
                )
            )

    @property
    def between(self) -> Product:
        """Products with the recurrent kernel; those with the input's kernel are `product`."""
        if not self.units_axes:
            return self.product
        return Exchange(self.product.dtype, self.product.sum_by_product, axes=self.units_axes)

    @property
    def ahead(self) -> Product:
        """Products of the forward loop with what `turned` makes of the recurrent kernel."""
        turned = self.turn and self.weight_first
        return dataclasses.replace(self.between, turned=turned, weight_first=self.weight_first)

    @property
    def back(self) -> Product:
        """Products of the backward loop with what `turned` makes of the recurrent kernel."""
        turned = self.turn and not self.weight_first
        return dataclasses.replace(self.between, turned=turned, weight_first=self.weight_first)

    def pin(self, tree: Any) -> Any:
        """Keeps arrays time-major in memory.

        Left alone, the TPU compiler lays `(time, batch, gates)` out batch-major, because that is
        how the projection's product likes it, and then every step reads eight times its bytes.

        Args:
            tree: Arrays whose first axis is time, or None.

        Returns:
            The same arrays, constrained if `pin_layout`.
        """
        if not self.pin_layout:
            return tree
        return jax.tree.map(lambda a: with_layout_constraint(a, Layout(tuple(range(a.ndim)))), tree)


class Saved(NamedTuple):
    """What the backward pass is given; `inputs` of the activations only if they are kept.

    Args:
        states: The states after every step; from a kernel those before every step, where only
            products read them in the precision that products take.
        first: The states before the first step.
        inputs: The activations' inputs of all steps, or None; from a kernel whose cell needs no
            more than the states after every step, those.
    """

    states: State
    first: State
    inputs: Any


def ready(loop: Loop, weights: Weights) -> Weights:
    """Weights rounded once for all products, biases so that they broadcast against a step.

    Args:
        loop: How to run; its `product` says how weights are rounded.
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


def turned(product: Product, weights: Weights) -> Array:
    """The recurrent kernel for the products of a loop; made once, also where segments run.

    Args:
        product: The products that the loop does, `Loop.ahead` or `Loop.back`.
        weights: The weights, of which only the recurrent kernel is read.

    Returns:
        `(units, gates * units)`, or `(gates * units, units)` if `product.turned`.
    """
    recurrent = product.weight(weights.recurrent)
    if product.turned:
        # Left to itself XLA would fold the transposition into every step's product again.
        recurrent = lax.optimization_barrier(jnp.swapaxes(recurrent, -1, -2))
    return recurrent


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
    """A mask as the loop takes it: kernels cannot hold booleans in memory.

    Args:
        loop: How to run.
        mask: `(time, batch, 1)` or `(time, 2, batch, 1)` boolean, or None.
    """
    return mask if mask is None or loop.kernel is None else mask.astype(jnp.int32)


def alive_in(mask_now, like):
    """A step's mask for every unit; kernels have it as numbers, which they can repeat.

    Args:
        mask_now: `(batch, 1)` or `(2, batch, 1)`, boolean or of numbers, as `mask_for` made it.
        like: A state, `(batch, units)` or `(2, batch, units)`; only its shape is read.
    """
    return jnp.broadcast_to(mask_now, like.shape) != 0


def over_steps(loop: Loop, name, step, held, carry, inputs, *, reverse: bool) -> tuple[Any, Any]:
    """`lax.scan` of `step`, on TPU in one kernel or at least without filling memory twice.

    Args:
        loop: How to run.
        name: Which loop it is, for the name of its kernel.
        step: `(held, carry, inputs of one step) -> (carry, outputs of one step)`, in a kernel of
            one direction. There no array may come in any other way.
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
    """`lax.scan` of `step` that writes into memory that nothing has filled before.

    A scan clears what it will write, unless the compiler sees that all of it is written; of loops
    that run backwards it does not. That is a pass over as much memory as the loop itself touches.
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
    # Of a carry that starts as a constant the compiler makes a choice in every iteration.
    return lax.fori_loop(0, length, body, (lax.optimization_barrier(carry), empty), unroll=unroll)
