"""Gated recurrent unit, in both of its forms."""

import dataclasses

import jax.numpy as jnp

from keras_tpu_dist.recurrence.cells import SIGMOID, TANH, Activation, join, split, sum_rows


def _with_bias(x, bias):
    return x if bias is None else x + bias


@dataclasses.dataclass(frozen=True)
class GRU:
    """The reset gate acts after the product with the recurrent kernel (`reset_after=True`).

    Gates in Keras's order: update, reset, candidate. The product has a bias of its own.

    References:
        Cho et al., https://arxiv.org/abs/1406.1078v1.
    """

    activation: Activation = TANH
    recurrent_activation: Activation = SIGMOID
    gates = 3
    num_states = 1
    states_suffice = False

    @property
    def can_keep(self) -> bool:
        """Whether slopes follow from the activated gates alone."""
        return self.activation.slope is not None and self.recurrent_activation.slope is not None

    def advance(self, product, recurrent, bias, projected, state):
        """One step; keeps the activated gates and the candidate's recurrent part."""
        (h,) = state
        x_z, x_r, x_n = split(projected, 3)
        h_z, h_r, h_n = split(_with_bias(product(h, recurrent), bias), 3)
        z = self.recurrent_activation(x_z + h_z)
        r = self.recurrent_activation(x_r + h_r)
        n = self.activation(x_n + r * h_n)
        return (z * h + (1 - z) * n,), (z, r, n, h_n)

    def rebuild(self, product, recurrent, bias, projected, previous):
        """Both parts of the activations' inputs of all steps, by one product."""
        return {
            "inputs": projected,
            "recurrent": _with_bias(product(previous[0], recurrent), bias),
        }

    def _slopes(self, gates):
        if isinstance(gates, tuple):
            z, r, n, h_n = gates
            gate = self.recurrent_activation.slope
            return (z, gate(z)), (r, gate(r)), (n, self.activation.slope(n)), h_n
        x_z, x_r, x_n = split(gates["inputs"], 3)
        h_z, h_r, h_n = split(gates["recurrent"], 3)
        z = self.recurrent_activation.with_slope(x_z + h_z)
        r = self.recurrent_activation.with_slope(x_r + h_r)
        return z, r, self.activation.with_slope(x_n + r[0] * h_n), h_n

    def coefficients(self, gates, previous):
        """How much of dh goes to each gate's input, to the recurrent candidate, and through."""
        (z, dz), (r, dr), (n, dn), h_n = self._slopes(gates)
        to_n = (1 - z) * dn
        return (previous[0] - n) * dz, to_n * h_n * dr, to_n * r, z, to_n

    def retreat(self, product, transposed, coefficients, cotangent):
        """One product; emits the state's cotangent, of which all others are multiples."""
        to_z, to_r, to_h, carry, _ = coefficients
        (dh,) = cotangent
        du = join(dh * to_z, dh * to_r, dh * to_h)
        return (dh * carry + product(du, transposed),), dh

    def gradients(self, product, emitted, coefficients, gates, previous):
        """One product for the recurrent kernel of all steps."""
        del gates
        to_z, to_r, to_h, _, to_n = coefficients
        dz, dr = emitted * to_z, emitted * to_r
        du = join(dz, dr, emitted * to_h)
        return join(dz, dr, emitted * to_n), product.outer(previous[0], du), sum_rows(du)


@dataclasses.dataclass(frozen=True)
class GRUResetBefore:
    """The reset gate acts before the product with the recurrent kernel (`reset_after=False`).

    References:
        Cho et al., https://arxiv.org/abs/1406.1078v3.
    """

    activation: Activation = TANH
    recurrent_activation: Activation = SIGMOID
    gates = 3
    num_states = 1
    states_suffice = False

    @property
    def can_keep(self) -> bool:
        """Whether slopes follow from the activated gates alone."""
        return self.activation.slope is not None and self.recurrent_activation.slope is not None

    @staticmethod
    def _kernels(recurrent):
        units = recurrent.shape[-2]
        return recurrent[..., : 2 * units], recurrent[..., 2 * units :]

    def advance(self, product, recurrent, bias, projected, state):
        """One step of two products; keeps the activated gates."""
        del bias
        (h,) = state
        gate_kernel, candidate_kernel = self._kernels(recurrent)
        x_z, x_r, x_n = split(projected, 3)
        h_z, h_r = split(product(h, gate_kernel), 2)
        z = self.recurrent_activation(x_z + h_z)
        r = self.recurrent_activation(x_r + h_r)
        n = self.activation(x_n + product(r * h, candidate_kernel))
        return (z * h + (1 - z) * n,), (z, r, n)

    def rebuild(self, product, recurrent, bias, projected, previous):
        """The activations' inputs of all steps, by two products."""
        del bias
        (h,) = previous
        gate_kernel, candidate_kernel = self._kernels(recurrent)
        x_z, x_r, x_n = split(projected, 3)
        h_z, h_r = split(product(h, gate_kernel), 2)
        r = self.recurrent_activation(x_r + h_r)
        return {"z": x_z + h_z, "r": x_r + h_r, "n": x_n + product(r * h, candidate_kernel)}

    def _slopes(self, gates):
        if isinstance(gates, tuple):
            z, r, n = gates
            gate = self.recurrent_activation.slope
            return (z, gate(z)), (r, gate(r)), (n, self.activation.slope(n))
        gate = self.recurrent_activation.with_slope
        return gate(gates["z"]), gate(gates["r"]), self.activation.with_slope(gates["n"])

    def coefficients(self, gates, previous):
        """How much of dh goes to z, n and through; of the reset state's cotangent to r and h."""
        (z, dz), (r, dr), (n, dn) = self._slopes(gates)
        (h,) = previous
        return (h - n) * dz, h * dr, (1 - z) * dn, z, r

    def retreat(self, product, transposed, coefficients, cotangent):
        """Two products; emits the cotangent of the activations' inputs."""
        to_z, to_r, to_n, carry, r = coefficients
        (dh,) = cotangent
        units = dh.shape[-1]
        gate_kernel, candidate_kernel = (
            transposed[..., : 2 * units, :],
            transposed[..., 2 * units :, :],
        )
        dn = dh * to_n
        d_reset = product(dn, candidate_kernel)
        dz, dr = dh * to_z, d_reset * to_r
        before = dh * carry + d_reset * r + product(join(dz, dr), gate_kernel)
        return (before,), join(dz, dr, dn)

    def gradients(self, product, emitted, coefficients, gates, previous):
        """Two products for the recurrent kernel of all steps."""
        del gates
        (h,) = previous
        r = coefficients[4]
        units = h.shape[-1]
        of_gates = product.outer(h, emitted[..., : 2 * units])
        of_candidate = product.outer((r * h).astype(h.dtype), emitted[..., 2 * units :])
        return emitted, jnp.concatenate([of_gates, of_candidate], axis=-1), None
