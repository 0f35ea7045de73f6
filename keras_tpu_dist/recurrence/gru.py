"""Gated recurrent unit, in both of its forms."""

import dataclasses

import jax.numpy as jnp

from keras_tpu_dist.recurrence.cells import SIGMOID, TANH, Activation, OneProduct, join, split


@dataclasses.dataclass(frozen=True)
class _Gated:
    """What both forms have in common."""

    activation: Activation = TANH
    recurrent_activation: Activation = SIGMOID
    gates = 3
    num_states = 1
    only_multiplied = (False,)
    states_suffice = False


@dataclasses.dataclass(frozen=True)
class GRU(_Gated, OneProduct):
    """The reset gate acts after the product with the recurrent kernel (`reset_after=True`).

    Gates in Keras's order: update, reset, candidate. The product has a bias of its own.

    References:
        Cho et al., https://arxiv.org/abs/1406.1078v1.
    """

    rebuilds_by_step = True

    def after(self, inputs, state):
        """The state after a step.

        See `OneProduct.after` for the arguments.
        """
        z, _, n, _ = self._gates(inputs, lambda activation, x: activation(x))
        return (z * state[0] + (1 - z) * n,)

    def joined(self, weights):
        """Both parts of n's input have columns of their own, with zeros for what is not theirs.

        See `OneProduct.joined` for the arguments.
        """
        kernel, bias, recurrent, inner = weights
        gates = recurrent.shape[-2] * 2
        weight = jnp.concatenate([_apart(kernel, gates, 0), _apart(recurrent, gates, 1)])
        if bias is None:
            return weight, None
        return weight, _apart(bias, gates, 0) + _apart(inner, gates, 1)

    def inputs_of(self, columns):
        """Both parts of n's input added, and the recurrent one.

        See `OneProduct.inputs_of` for the arguments.
        """
        at_z, at_r, x_n, h_n = split(columns, 4)
        return join(at_z, at_r, x_n + h_n), h_n

    def columns_back(self, coefficients, cotangent):
        """The cotangents of n's parts side by side.

        See `OneProduct.columns_back` for the arguments.
        """
        to_inner, to_n, carry = coefficients
        (dh,) = cotangent
        to_z, to_r, to_recurrent = split(to_inner, 3)
        return join(dh * to_z, dh * to_r, dh * to_n, dh * to_recurrent), (dh * carry,)

    def rebuild(self, product, recurrent, bias, projected, previous):
        """Both parts of all gates' inputs together, and the recurrent part of n's, of all steps.

        That part is found as a difference, which rounds no more than the sum does, so that the
        sum can be taken where the product is.

        See `Cell.rebuild` for the arguments.
        """
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
        # x_n + r * h_n, where x_n + h_n is at hand.
        n = apply(self.activation, at_n + (reset - 1) * h_n)
        return apply(self.recurrent_activation, at_z), r, n, h_n

    def coefficients(self, inputs, previous):
        """How much of dh goes to each gate's input, to the recurrent candidate, and through.

        See `Cell.coefficients` for the arguments.
        """
        (z, dz), (r, dr), (n, dn), h_n = self._gates(inputs, lambda f, x: f.with_slope(x))
        to_n = (1 - z) * dn
        return join((previous[0] - n) * dz, to_n * h_n * dr, to_n * r), to_n, z

    def retreat(self, product, recurrent, coefficients, cotangent):
        """One product; emits the cotangents of the inputs of z, r and n's recurrent part; of n.

        See `Cell.retreat` for the arguments.
        """
        to_inner, to_n, carry = coefficients
        (dh,) = cotangent
        inner = join(dh, dh, dh) * to_inner
        return (dh * carry + product.back(inner, recurrent),), (inner, dh * to_n)

    def gradients(self, product, emitted, inputs, previous):
        """One product for the recurrent kernel of all steps.

        See `Cell.gradients` for the arguments.
        """
        del inputs
        inner, dn = emitted
        (h,) = previous
        d_recurrent, total = product.outer_and_sum(h, inner)
        gates = 2 * h.shape[-1]
        totals = total[..., :gates], None
        return (inner[..., :gates], dn), totals, d_recurrent, total


@dataclasses.dataclass(frozen=True)
class GRUResetBefore(_Gated):
    """The reset gate acts before the product with the recurrent kernel (`reset_after=False`).

    References:
        Cho et al., https://arxiv.org/abs/1406.1078v3.
    """

    rebuilds_by_step = False  # the weights' gradient reads what would be rebuilt
    joins = False  # a part of the product waits for the reset gate

    @staticmethod
    def _kernels(product, recurrent):
        gates = product.width(recurrent) // 3 * 2
        of_gates, of_candidate = slice(gates), slice(gates, None)
        return product.columns(recurrent, of_gates), product.columns(recurrent, of_candidate)

    def advance(self, product, recurrent, bias, projected, state):
        """One step of two products.

        See `Cell.advance` for the arguments.
        """
        inputs = self.rebuild(product, recurrent, bias, projected, state)
        at_z, _, at_n = split(inputs, 3)
        z = self.recurrent_activation(at_z)
        return (z * state[0] + (1 - z) * self.activation(at_n),), inputs

    def rebuild(self, product, recurrent, bias, projected, previous):
        """The activations' inputs of all steps, by two products.

        See `Cell.rebuild` for the arguments.
        """
        del bias
        (h,) = previous
        gate_kernel, candidate_kernel = self._kernels(product, recurrent)
        x_z, x_r, x_n = split(projected, 3)
        h_z, h_r = split(product(h, gate_kernel), 2)
        r = self.recurrent_activation(x_r + h_r)
        return join(x_z + h_z, x_r + h_r, x_n + product(r * h, candidate_kernel))

    def coefficients(self, inputs, previous):
        """How much of dh goes to z, n and through; of the reset state's cotangent to r and h.

        See `Cell.coefficients` for the arguments.
        """
        at_z, at_r, at_n = split(inputs, 3)
        z, dz = self.recurrent_activation.with_slope(at_z)
        r, dr = self.recurrent_activation.with_slope(at_r)
        n, dn = self.activation.with_slope(at_n)
        (h,) = previous
        return (h - n) * dz, h * dr, (1 - z) * dn, z, r

    def retreat(self, product, recurrent, coefficients, cotangent):
        """Two products; emits the cotangent of the activations' inputs.

        See `Cell.retreat` for the arguments.
        """
        to_z, to_r, to_n, carry, r = coefficients
        (dh,) = cotangent
        gate_kernel, candidate_kernel = self._kernels(product, recurrent)
        dn = dh * to_n
        d_reset = product.back(dn, candidate_kernel)
        dz, dr = dh * to_z, d_reset * to_r
        before = dh * carry + d_reset * r + product.back(join(dz, dr), gate_kernel)
        return (before,), (join(dz, dr), dn)

    def gradients(self, product, emitted, inputs, previous):
        """Two products for the recurrent kernel of all steps.

        See `Cell.gradients` for the arguments.
        """
        (h,) = previous
        r = self.recurrent_activation(split(inputs, 3)[1])
        gates, dn = emitted
        of_gates, gates_total = product.outer_and_sum(h, gates)
        of_candidate, dn_total = product.outer_and_sum((r * h).astype(h.dtype), dn)
        return emitted, (gates_total, dn_total), join(of_gates, of_candidate), None


def _apart(weight, gates: int, second: int):
    """Columns of z, r, and n, where n's are the first or the second of two parts."""
    other = jnp.zeros((*weight.shape[:-1], weight.shape[-1] - gates), weight.dtype)
    of_n = weight[..., gates:]
    return join(weight[..., :gates], *((other, of_n) if second else (of_n, other)))
