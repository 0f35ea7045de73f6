"""The arithmetic of one recurrent step and of its gradient, without loops: LSTM, GRU, SimpleRNN.

A loop calls five functions of a `Cell`, element-wise except for products with the recurrent kernel:
how a step advances the state, how the activations' inputs of all steps are rebuilt at once from the
states, the coefficients that convert a state's cotangent to theirs, one step backwards, and the
weight gradients of all steps at once. Shapes are written `(..., batch, units)`: the leading axes
are none for one step, time for all steps, and a direction axis if two directions run together.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
State = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Activation:
    """An element-wise activation and its derivative.

    Args:
        name: Its name in reports.
        function: Maps `(..., units)` to the same shape, element by element.
        slope: The derivative written in terms of the activation's output, or None if it needs the
            input; then it is obtained with one `jax.jvp`.
    """

    name: str
    function: Callable[[Array], Array]
    slope: Callable[[Array], Array] | None = None

    def __call__(self, x: Array) -> Array:
        """The activation of `x`."""
        return self.function(x)

    def with_slope(self, x: Array) -> tuple[Array, Array]:
        """The activation of `x` and its derivative there.

        Args:
            x: The activation's input, `(..., units)`.
        """
        if self.slope is not None:
            y = self.function(x)
            return y, self.slope(y)
        # The activation is element-wise, so its Jacobian times ones is the Jacobian's diagonal.
        return jax.jvp(self.function, (x,), (jnp.ones_like(x),))


def _sigmoid(x: Array) -> Array:
    # On TPU, tanh is one instruction, while exp and a division are a dozen. The two forms differ by
    # one unit in the last place of 1.
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


TANH = Activation("tanh", jnp.tanh, lambda y: 1 - y * y)
SIGMOID = Activation("sigmoid", _sigmoid, lambda y: y * (1 - y))
RELU = Activation("relu", jax.nn.relu, lambda y: (y > 0).astype(y.dtype))
LINEAR = Activation("linear", lambda x: x, jnp.ones_like)
BUILT_IN = {a.name: a for a in (TANH, SIGMOID, RELU, LINEAR)}


@dataclasses.dataclass(frozen=True)
class Product:
    """Matrix products, as the loop computes them.

    Args:
        dtype: Name of the dtype to which operands are rounded ("bfloat16" with a mixed policy), or
            None for no rounding. Products always accumulate in at least float32.
    """

    dtype: str | None = None

    def weight(self, weight: Array) -> Array:
        """A weight, rounded once for many products.

        Args:
            weight: The weight, of any shape, or an input that products read.
        """
        return weight if self.dtype is None else weight.astype(self.dtype)

    def __call__(self, rows: Array, weight: Array) -> Array:
        """`rows @ weight` over the last two axes, accumulated in at least float32."""
        wide = jnp.promote_types(weight.dtype, jnp.float32)
        return jnp.matmul(rows.astype(weight.dtype), weight, preferred_element_type=wide)

    def back(self, rows: Array, weight: Array) -> Array:
        """`rows @ weight.T`, with no transposed copy of the weight.

        Args:
            rows: `(..., batch, out)`.
            weight: `(..., in, out)`.
        """
        batch = tuple(range(weight.ndim - 2))
        return lax.dot_general(
            rows.astype(weight.dtype),
            weight,
            (((rows.ndim - 1,), (weight.ndim - 1,)), (batch, batch)),
            preferred_element_type=jnp.promote_types(weight.dtype, jnp.float32),
        )

    def outer(self, rows: Array, cotangents: Array) -> Array:
        """The gradient of a weight: rows times cotangents, summed over time and batch.

        Args:
            rows: `(time, batch, in)` or `(time, directions, batch, in)`.
            cotangents: `(time, batch, out)` or `(time, directions, batch, out)`.

        Returns:
            `(in, out)`, or `(directions, in, out)` if the cotangents have a direction axis.
        """
        if cotangents.ndim == 4 and rows.ndim == 3:
            spec = "tbi,tdbo->dio"
        else:
            spec = "tdbi,tdbo->dio" if cotangents.ndim == 4 else "tbi,tbo->io"
        dtype = self.dtype or rows.dtype
        return jnp.einsum(
            spec,
            rows.astype(dtype),
            cotangents.astype(dtype),
            preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        )

    def outer_and_sum(self, rows: Array, cotangents: Array) -> tuple[Array, Array]:
        """`outer`, and the sum of the same cotangents over time and batch: a bias's gradient.

        The sum is a product with ones: in the TPU compiler's schedule, a separate sum reads the
        cotangents once more in float32. On CPU both take as long.
        """
        inputs = rows.shape[-1]
        # Eight rows of ones, the height of a tile: the compiler would turn a single row back into a
        # sum.
        ones = jnp.ones((*rows.shape[:-1], 8), rows.dtype)
        both = self.outer(join(rows, ones), cotangents)
        return both[..., :inputs, :], both[..., inputs, :]


def split(x: Array, parts: int) -> list[Array]:
    """Splits the last axis into equal parts.

    Args:
        x: `(..., parts * width)`.
        parts: The number of parts.
    """
    return jnp.split(x, parts, axis=-1)


def join(*parts: Array) -> Array:
    """Joins along the last axis.

    Args:
        parts: Arrays `(..., width)`, which may differ in width only.
    """
    return jnp.concatenate(parts, axis=-1)


class Cell:
    """A recurrence whose activations read the projected input plus one product with a state.

    States are those before a step, each `(..., batch, units)`, unless a function says otherwise.

    Attributes:
        gates: The number of gates, each with `units` columns.
        num_states: The number of states; the first one is the output.
        only_multiplied: For each state, whether only products read it in the backward pass.
        states_suffice: Whether the slopes follow from the states after a step.
    """

    activation: Activation
    gates: int
    num_states: int
    only_multiplied: tuple[bool, ...]
    states_suffice = False

    def advance(self, product, recurrent, bias, projected, state) -> Any:
        """One step: `(new state, the activations' inputs)`.

        Args:
            product: How products with the recurrent kernel are computed.
            recurrent: `(..., units, gates * units)`.
            bias: The bias of the recurrent product, `(..., 1, gates * units)`, or None.
            projected: The projected input including its bias, `(..., batch, gates * units)`.
            state: The states before the step, each `(..., batch, units)`.
        """
        inputs = self.rebuild(product, recurrent, bias, projected, state)
        return self.after(inputs, state), inputs

    def rebuild(self, product, recurrent, bias, projected, previous) -> Any:
        """The activations' inputs of all steps, from the states before each step.

        Args:
            product: See `advance`.
            recurrent: See `advance`.
            bias: See `advance`.
            projected: See `advance`, for all steps or for one.
            previous: The states before these steps, each `(..., batch, units)`.
        """
        del bias
        return projected + product(previous[0], recurrent)

    def after(self, inputs, state) -> Any:
        """The states after a step, from the activations' inputs."""
        raise NotImplementedError

    def joined(self, weights) -> Any:
        """The weight for a single product with `join(x, h)`, and its bias.

        Returns:
            `(features + units, columns)`, the columns of the input's kernel first; and `(columns,)`
            or None.
        """
        return jnp.concatenate([weights.kernel, weights.recurrent]), weights.bias

    def inputs_of(self, columns) -> Any:
        """The activations' inputs, from the product with the weight of `joined`."""
        return columns

    def coefficients(self, inputs, previous) -> Any:
        """The factors by which `retreat` multiplies cotangents, for one step or for all.

        Args:
            inputs: The result of `rebuild`, or the states after the steps if `states_suffice`.
            previous: None is allowed for those that are `only_multiplied`.
        """
        raise NotImplementedError

    def columns_back(self, coefficients, cotangent) -> Any:
        """The cotangent of the columns of `joined`, and of the states apart from the product."""
        raise NotImplementedError

    def retreat(self, product, recurrent, coefficients, cotangent) -> Any:
        """One step backwards, with one product: `(cotangent of the state before, parts to emit)`.

        Args:
            product: See `advance`.
            recurrent: See `advance`.
            coefficients: The result of `coefficients` for this step.
            cotangent: Cotangents of the states after the step.
        """
        dz, (dh, *others) = self.columns_back(coefficients, cotangent)
        return (dh + product.back(dz, recurrent), *others), (dz,)

    def gradients(self, product, emitted, inputs, previous) -> Any:
        """`(projection's parts, their sums, recurrent kernel's gradient, recurrent bias's)`.

        Args:
            product: See `advance`.
            emitted: The values that `retreat` emitted in all steps, each
                `(time, ..., batch, columns)`; by default the cotangent of the activations' inputs.
            inputs: See `coefficients`, for all steps; None if they were rebuilt step by step.
            previous: The states before every step, each `(time, ..., batch, units)`.
        """
        d_recurrent, total = product.outer_and_sum(previous[0], *emitted)
        return emitted, (total,), d_recurrent, None


@dataclasses.dataclass(frozen=True)
class LSTM(Cell):
    """Gates in Keras's order: input, forget, candidate, output.

    Args:
        activation: The activation of the candidate and of the carried state.
        recurrent_activation: The activation of the gates.

    References:
        Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 9(8), 1997.
    """

    activation: Activation = TANH
    recurrent_activation: Activation = SIGMOID
    gates = 4
    num_states = 2
    only_multiplied = (True, False)

    def after(self, inputs, state):
        """The states after a step."""
        c = state[1]
        i, f, g, o = split(inputs, 4)
        gate = self.recurrent_activation
        c = gate(f) * c + gate(i) * self.activation(g)
        return gate(o) * self.activation(c), c

    def coefficients(self, inputs, previous):
        """How much of dc goes to i, f and g and of dh to o; of dh to dc; of dc to before."""
        c_before = previous[1]
        at_i, at_f, at_g, at_o = split(inputs, 4)
        gate = self.recurrent_activation.with_slope
        (i, di), (f, df), (o, do) = gate(at_i), gate(at_f), gate(at_o)
        g, dg = self.activation.with_slope(at_g)
        y, dy = self.activation.with_slope(f * c_before + i * g)
        to_inputs = g * di, c_before * df, i * dg, y * do
        return join(*to_inputs), o * dy, f

    def columns_back(self, coefficients, cotangent):
        """The cotangent of all gates' inputs."""
        to_inputs, to_c, carry = coefficients
        dh, dc = cotangent
        dc = dc + dh * to_c
        # All gates at once: the TPU compiler turns four separate products into three kernels.
        return join(dc, dc, dc, dh) * to_inputs, (0, dc * carry)


@dataclasses.dataclass(frozen=True)
class GRU(Cell):
    """The reset gate acts after the product with the recurrent kernel (`reset_after=True`).

    Gates in Keras's order: update, reset, candidate. The product has a bias of its own.

    References:
        Cho et al., https://arxiv.org/abs/1406.1078v1.
    """

    activation: Activation = TANH
    recurrent_activation: Activation = SIGMOID
    gates = 3
    num_states = 1
    only_multiplied = (False,)

    def after(self, inputs, state):
        """The state after a step."""
        z, _, n, _ = self._gates(inputs, lambda activation, x: activation(x))
        return (z * state[0] + (1 - z) * n,)

    def joined(self, weights):
        """Separate columns for both parts of n's input, with zeros for the other part."""
        kernel, bias, recurrent, inner = weights
        gates = recurrent.shape[-2] * 2
        weight = jnp.concatenate([_apart(kernel, gates, 0), _apart(recurrent, gates, 1)])
        if bias is None:
            return weight, None
        return weight, _apart(bias, gates, 0) + _apart(inner, gates, 1)

    def inputs_of(self, columns):
        """Both parts of n's input added, and the recurrent one."""
        at_z, at_r, x_n, h_n = split(columns, 4)
        return join(at_z, at_r, x_n + h_n), h_n

    def columns_back(self, coefficients, cotangent):
        """The cotangents of n's parts side by side."""
        to_inner, to_n, carry = coefficients
        (dh,) = cotangent
        to_z, to_r, to_recurrent = split(to_inner, 3)
        return join(dh * to_z, dh * to_r, dh * to_n, dh * to_recurrent), (dh * carry,)

    def rebuild(self, product, recurrent, bias, projected, previous):
        """Both parts of all gates' inputs together, and the recurrent part of n's, of all steps.

        That part is computed as a difference, which rounds no more than the sum does, so that the
        sum can be fused with the product."""
        total = projected + product(previous[0], recurrent)
        total = total if bias is None else total + bias
        units = previous[0].shape[-1]
        return total, total[..., 2 * units :] - projected[..., 2 * units :]

    def _gates(self, inputs, apply):
        """`apply` of the activations at their inputs: z, r, n; and the recurrent part of n's."""
        total, h_n = inputs
        at_z, at_r, at_n = split(total, 3)
        r = apply(self.recurrent_activation, at_r)
        reset = r[0] if isinstance(r, tuple) else r
        # x_n + r * h_n, computed from x_n + h_n.
        n = apply(self.activation, at_n + (reset - 1) * h_n)
        return apply(self.recurrent_activation, at_z), r, n, h_n

    def coefficients(self, inputs, previous):
        """How much of dh goes to each gate's input, to the recurrent candidate, and through."""
        (z, dz), (r, dr), (n, dn), h_n = self._gates(inputs, lambda f, x: f.with_slope(x))
        to_n = (1 - z) * dn
        return join((previous[0] - n) * dz, to_n * h_n * dr, to_n * r), to_n, z

    def retreat(self, product, recurrent, coefficients, cotangent):
        """One product; emits the cotangents of the inputs of z, r and n's recurrent part; of n."""
        to_inner, to_n, carry = coefficients
        (dh,) = cotangent
        inner = join(dh, dh, dh) * to_inner
        return (dh * carry + product.back(inner, recurrent),), (inner, dh * to_n)

    def gradients(self, product, emitted, inputs, previous):
        """One product for the recurrent kernel of all steps."""
        del inputs
        inner, dn = emitted
        (h,) = previous
        d_recurrent, total = product.outer_and_sum(h, inner)
        gates = 2 * h.shape[-1]
        totals = total[..., :gates], None
        return (inner[..., :gates], dn), totals, d_recurrent, total


def _apart(weight, gates: int, second: int):
    """Columns of z, r and n; those of n are the first or the second of two parts."""
    other = jnp.zeros((*weight.shape[:-1], weight.shape[-1] - gates), weight.dtype)
    of_n = weight[..., gates:]
    return join(weight[..., :gates], *((other, of_n) if second else (of_n, other)))


@dataclasses.dataclass(frozen=True)
class SimpleRNN(Cell):
    """`h = activation(x @ kernel + bias + h_before @ recurrent_kernel)`.

    References:
        Elman, "Finding structure in time", Cognitive Science 14(2), 1990.
    """

    activation: Activation = TANH
    gates = 1
    num_states = 1
    only_multiplied = (True,)

    @property
    def states_suffice(self) -> bool:
        """Whether the slope follows from the state after the step, so nothing is rebuilt."""
        return self.activation.slope is not None

    def after(self, inputs, state):
        """The state after a step."""
        del state
        return (self.activation(inputs),)

    def coefficients(self, inputs, previous):
        """The slope of the activation; `inputs` are the states after, where they suffice."""
        del previous
        if self.activation.slope is not None:
            return (self.activation.slope(inputs),)
        return (self.activation.with_slope(inputs)[1],)

    def columns_back(self, coefficients, cotangent):
        """The cotangent of the activation's input."""
        return cotangent[0] * coefficients[0], (0,)
