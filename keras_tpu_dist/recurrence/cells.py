"""The arithmetic of one recurrent step and of its gradient, without loops.

Every cell says five things, all element-wise except for the products with the recurrent kernel:
how a step advances the state, how the activations' inputs of all steps are rebuilt at once from
the states, the coefficients that turn a state's cotangent into theirs, one step backwards, and
the weight gradients of all steps at once. Shapes are written `(..., batch, units)`: the leading
axes are none for one step, time for all steps, and a direction axis where two directions run
together.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
State = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Activation:
    """An element-wise activation and its derivative.

    Args:
        name: What reports call it.
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
    # On TPU tanh is one instruction, while exp and a division are a dozen; the two forms differ
    # by one unit in the last place of 1.
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


TANH = Activation("tanh", jnp.tanh, lambda y: 1 - y * y)
SIGMOID = Activation("sigmoid", _sigmoid, lambda y: y * (1 - y))
RELU = Activation("relu", jax.nn.relu, lambda y: (y > 0).astype(y.dtype))
LINEAR = Activation("linear", lambda x: x, jnp.ones_like)
BUILT_IN = {a.name: a for a in (TANH, SIGMOID, RELU, LINEAR)}


@dataclasses.dataclass(frozen=True)
class Product:
    """Matrix products as the loop does them.

    Args:
        dtype: Name of the dtype operands are rounded to ("bfloat16" under a mixed policy), or None
            to leave them. Products always accumulate in at least float32.
        sum_by_product: Whether sums over time and batch are products with ones. By the TPU
            compiler's schedule a sum of its own reads the cotangents a further time in float32,
            where products let them be kept in the precision products take.
        turned: Whether the weight is given transposed.
        weight_first: Whether products are `weight @ rows`, with rows and result transposed. XLA's
            CPU products read a large first operand up to twice as fast as a large second one.
    """

    dtype: str | None = None
    sum_by_product: bool = False
    turned: bool = False
    weight_first: bool = False

    def weight(self, weight: Array) -> Array:
        """A weight, rounded once for many products.

        Args:
            weight: The weight, of any shape, or an input that products read.
        """
        return weight if self.dtype is None else weight.astype(self.dtype)

    def __call__(self, rows: Array, weight: Array) -> Array:
        """`rows @ weight` over the last two axes, accumulated in at least float32."""
        return self._over_last(rows, weight) if self.turned else self._over_first(rows, weight)

    def back(self, rows: Array, weight: Array) -> Array:
        """`rows @ weight.T`, with no transposed copy of the weight.

        Args:
            rows: `(..., batch, out)`.
            weight: `(..., in, out)`, or `(..., out, in)` if `turned`.
        """
        return self._over_first(rows, weight) if self.turned else self._over_last(rows, weight)

    def _over_first(self, rows: Array, stored: Array) -> Array:
        """`rows @ stored`."""
        if self.weight_first:
            return self._upright(rows, jnp.swapaxes(stored, -1, -2))
        wide = jnp.promote_types(stored.dtype, jnp.float32)
        return jnp.matmul(rows.astype(stored.dtype), stored, preferred_element_type=wide)

    def _over_last(self, rows: Array, stored: Array) -> Array:
        """`rows @ stored.T`."""
        if self.weight_first:
            return self._upright(rows, stored)
        batch = tuple(range(stored.ndim - 2))
        return lax.dot_general(
            rows.astype(stored.dtype),
            stored,
            (((rows.ndim - 1,), (stored.ndim - 1,)), (batch, batch)),
            preferred_element_type=jnp.promote_types(stored.dtype, jnp.float32),
        )

    @staticmethod
    def _upright(rows: Array, stored: Array) -> Array:
        """`(stored @ rows.T).T`."""
        wide = jnp.promote_types(stored.dtype, jnp.float32)
        # Left to itself XLA would make `rows @ stored.T` of it again.
        columns = lax.optimization_barrier(jnp.swapaxes(rows.astype(stored.dtype), -1, -2))
        product = jnp.matmul(stored, columns, preferred_element_type=wide)
        return jnp.swapaxes(lax.optimization_barrier(product), -1, -2)

    def width(self, weight: Array) -> int:
        """How many columns a weight has.

        Args:
            weight: `(..., in, out)`, or `(..., out, in)` if `turned`.
        """
        return weight.shape[-2 if self.turned else -1]

    def columns(self, weight: Array, parts: slice) -> Array:
        """Some columns of a weight.

        Args:
            weight: `(..., in, out)`, or `(..., out, in)` if `turned`, and so the result.
            parts: Which of the `out` columns.
        """
        return weight[..., parts, :] if self.turned else weight[..., parts]

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

        See `outer` for the arguments.
        """
        if not self.sum_by_product:
            wide = jnp.promote_types(cotangents.dtype, jnp.float32)
            return self.outer(rows, cotangents), jnp.sum(cotangents, axis=(0, -2), dtype=wide)
        inputs = rows.shape[-1]
        # Eight rows of ones, a tile's height: a single one the compiler turns back into a sum.
        ones = jnp.ones((*rows.shape[:-1], 8), rows.dtype)
        both = self.outer(join(rows, ones), cotangents)
        return both[..., :inputs, :], both[..., inputs, :]


@dataclasses.dataclass(frozen=True)
class Exchange(Product):
    """Products with a recurrent kernel of which every device has some units' part of all gates.

    Args:
        axes: Mesh axes over which the units are split.
    """

    axes: tuple[str, ...] = ()

    def __call__(self, rows: Array, weight: Array) -> Array:
        """The product with this device's columns: every unit's state is collected first."""
        return super().__call__(self._all(rows.astype(weight.dtype)), weight)

    def back(self, rows: Array, weight: Array) -> Array:
        """This device's part of the sum over all devices' columns.

        Args:
            rows: `(..., batch, columns)`, of this device's columns.
            weight: `(..., units, columns)`, this device's columns for the units of all devices, or
                `(..., columns, units)` if `turned`.
        """
        whole = super().back(rows, weight)
        return lax.psum_scatter(whole, self.axes, scatter_dimension=whole.ndim - 1, tiled=True)

    def outer_and_sum(self, rows: Array, cotangents: Array) -> tuple[Array, Array]:
        """The gradients of this device's columns, and of its units' bias.

        Args:
            rows: `(time, batch, units)`, of this device's units; those of all are collected.
            cotangents: `(time, batch, columns)`, of this device's columns.
        """
        whole = Product(self.dtype, self.sum_by_product)
        return whole.outer_and_sum(self._all(rows), cotangents)

    def _all(self, rows: Array) -> Array:
        return lax.all_gather(rows, self.axes, axis=rows.ndim - 1, tiled=True)


class Cell(Protocol):
    """What the loop needs to know of a recurrence."""

    gates: int
    num_states: int
    states_suffice: bool
    only_multiplied: tuple[bool, ...]
    rebuilds_by_step: bool
    joins: bool

    def advance(self, product, recurrent, bias, projected, state) -> Any:
        """One step: `(new state, the activations' inputs)`.

        Args:
            product: How products with the recurrent kernel are done.
            recurrent: `(..., units, gates * units)`, the last two swapped if `product.turned`.
            bias: The recurrent product's own, `(..., 1, gates * units)`, or None if there is none.
            projected: The input's part, its bias included, `(..., batch, gates * units)`.
            state: The states before the step, each `(..., batch, units)`.
        """
        ...

    def rebuild(self, product, recurrent, bias, projected, previous) -> Any:
        """The activations' inputs of all steps, from the states before each step.

        Args:
            product: As in `advance`.
            recurrent: As in `advance`.
            bias: As in `advance`.
            projected: As in `advance`, of all steps or of one.
            previous: The states before each of these steps, each `(..., batch, units)`.
        """
        ...

    def coefficients(self, inputs, previous) -> Any:
        """What `retreat` multiplies cotangents with, for one step or for all.

        Args:
            inputs: What `rebuild` returns, or the states after the steps if `states_suffice`.
            previous: The states before the steps, each `(..., batch, units)`; of those that are
                `only_multiplied` None may stand in place.
        """
        ...

    def retreat(self, product, recurrent, coefficients, cotangent) -> Any:
        """One step backwards: `(cotangent of the state before, parts to emit)`.

        Args:
            product: As in `advance`.
            recurrent: As in `advance`.
            coefficients: What `coefficients` returns, for this step.
            cotangent: Cotangents of the states after the step, each `(..., batch, units)`.
        """
        ...

    def gradients(self, product, emitted, inputs, previous) -> Any:
        """`(projection's parts, their sums, recurrent kernel's gradient, recurrent bias's)`.

        Args:
            product: As in `advance`.
            emitted: What `retreat` emitted, of all steps, each `(time, ..., batch, columns)`.
            inputs: As in `coefficients`, of all steps; None where they were rebuilt step by step.
            previous: The states before every step, each `(time, ..., batch, units)`.
        """
        ...


def split(x: Array, parts: int) -> list[Array]:
    """Splits the last axis into equal parts.

    Args:
        x: `(..., parts * width)`.
        parts: How many.
    """
    return jnp.split(x, parts, axis=-1)


def join(*parts: Array) -> Array:
    """Joins along the last axis.

    Args:
        *parts: Arrays `(..., width)`, which may differ in width only.
    """
    return jnp.concatenate(parts, axis=-1)


class OneProduct:
    """A cell whose activations' inputs are the projected ones and one product with the state."""

    joins = True

    def advance(self, product, recurrent, bias, projected, state):
        """One step.

        See `Cell.advance` for the arguments.
        """
        inputs = self.rebuild(product, recurrent, bias, projected, state)
        return self.after(inputs, state), inputs

    def rebuild(self, product, recurrent, bias, projected, previous):
        """The inputs of the activations, of all steps, by one product.

        See `Cell.rebuild` for the arguments.
        """
        del bias
        return projected + product(previous[0], recurrent)

    def after(self, inputs, state) -> Any:
        """The states after a step.

        Args:
            inputs: The activations' inputs.
            state: The states before it.
        """
        raise NotImplementedError

    def joined(self, weights) -> Any:
        """The weight that `join(x, h)` is multiplied with in one product, and its bias.

        Args:
            weights: The `Weights` of one direction, as they are given.

        Returns:
            `(features + units, columns)`, the columns of the input's kernel first; and
            `(columns,)` or None.
        """
        return jnp.concatenate([weights.kernel, weights.recurrent]), weights.bias

    def inputs_of(self, columns) -> Any:
        """The activations' inputs, from the product with what `joined` returns.

        Args:
            columns: `(batch, columns)`, the bias included.
        """
        return columns

    def columns_back(self, coefficients, cotangent) -> Any:
        """The cotangent of those columns, and the states' that does not come through the product.

        Args:
            coefficients: What `Cell.coefficients` returns, for this step.
            cotangent: Cotangents of the states after the step.
        """
        raise NotImplementedError

    def retreat(self, product, recurrent, coefficients, cotangent):
        """One product; emits the cotangent of the activations' inputs.

        See `Cell.retreat` for the arguments.
        """
        dz, (dh, *others) = self.columns_back(coefficients, cotangent)
        return (dh + product.back(dz, recurrent), *others), (dz,)
