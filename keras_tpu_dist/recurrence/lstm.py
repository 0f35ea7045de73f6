"""Long short-term memory."""

import dataclasses

from keras_tpu_dist.recurrence.cells import SIGMOID, TANH, Activation, join, split


@dataclasses.dataclass(frozen=True)
class LSTM:
    """Gates in Keras's order: input, forget, candidate, output.

    References:
        Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 9(8), 1997.
    """

    activation: Activation = TANH
    recurrent_activation: Activation = SIGMOID
    gates = 4
    num_states = 2
    states_suffice = False

    @property
    def can_keep(self) -> bool:
        """Whether slopes follow from the activated gates alone."""
        return self.activation.slope is not None and self.recurrent_activation.slope is not None

    def _activate(self, z):
        i, f, g, o = split(z, 4)
        gate = self.recurrent_activation
        return gate(i), gate(f), self.activation(g), gate(o)

    def advance(self, product, recurrent, bias, projected, state):
        """One step; keeps the activated gates."""
        del bias
        h, c = state
        i, f, g, o = self._activate(projected + product(h, recurrent))
        c = f * c + i * g
        return (o * self.activation(c), c), (i, f, g, o)

    def rebuild(self, product, recurrent, bias, projected, previous):
        """The inputs of the activations, of all steps, by one product."""
        del bias
        return projected + product(previous[0], recurrent)

    def _slopes(self, gates):
        if isinstance(gates, tuple):
            i, f, g, o = gates
            gate = self.recurrent_activation.slope
            return (i, gate(i)), (f, gate(f)), (g, self.activation.slope(g)), (o, gate(o))
        i, f, g, o = split(gates, 4)
        gate = self.recurrent_activation.with_slope
        return gate(i), gate(f), self.activation.with_slope(g), gate(o)

    def coefficients(self, gates, previous):
        """How much of dc goes to i, f and g, of dh to o and dc, and of dc to the step before."""
        c_before = previous[1]
        (i, di), (f, df), (g, dg), (o, do) = self._slopes(gates)
        y, dy = self.activation.with_slope(f * c_before + i * g)
        return g * di, c_before * df, i * dg, y * do, o * dy, f

    def retreat(self, product, transposed, coefficients, cotangent):
        """One product; emits the cotangent of the activations' inputs."""
        to_i, to_f, to_g, to_o, to_c, carry = coefficients
        dh, dc = cotangent
        dc = dc + dh * to_c
        dz = join(dc * to_i, dc * to_f, dc * to_g, dh * to_o)
        return (product(dz, transposed), dc * carry), dz

    def gradients(self, product, emitted, coefficients, gates, previous):
        """One product for the recurrent kernel of all steps."""
        del coefficients, gates
        return emitted, product.outer(previous[0], emitted), None
