"""Long short-term memory."""

import dataclasses

from keras_tpu_dist.recurrence.cells import SIGMOID, TANH, Activation, OneProduct, join, split


@dataclasses.dataclass(frozen=True)
class LSTM(OneProduct):
    """Gates in Keras's order: input, forget, candidate, output.

    Args:
        activation: Of the candidate and of the carried state.
        recurrent_activation: Of the gates.
        wide: Whether the backward step multiplies all gates at once. As four multiplications the
            TPU compiler makes three kernels of it; on CPU joining them costs more than it saves.

    References:
        Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 9(8), 1997.
    """

    activation: Activation = TANH
    recurrent_activation: Activation = SIGMOID
    wide: bool = False
    gates = 4
    num_states = 2
    only_multiplied = (True, False)
    states_suffice = False
    rebuilds_by_step = True

    def after(self, inputs, state):
        """The states after a step.

        See `OneProduct.after` for the arguments.
        """
        c = state[1]
        i, f, g, o = split(inputs, 4)
        gate = self.recurrent_activation
        c = gate(f) * c + gate(i) * self.activation(g)
        return gate(o) * self.activation(c), c

    def coefficients(self, inputs, previous):
        """How much of dc goes to i, f and g and of dh to o; of dh to dc; of dc to before.

        See `Cell.coefficients` for the arguments.
        """
        c_before = previous[1]
        at_i, at_f, at_g, at_o = split(inputs, 4)
        gate = self.recurrent_activation.with_slope
        (i, di), (f, df), (o, do) = gate(at_i), gate(at_f), gate(at_o)
        g, dg = self.activation.with_slope(at_g)
        y, dy = self.activation.with_slope(f * c_before + i * g)
        to_inputs = g * di, c_before * df, i * dg, y * do
        return join(*to_inputs) if self.wide else to_inputs, o * dy, f

    def columns_back(self, coefficients, cotangent):
        """The cotangent of all gates' inputs.

        See `OneProduct.columns_back` for the arguments.
        """
        to_inputs, to_c, carry = coefficients
        dh, dc = cotangent
        dc = dc + dh * to_c
        cotangents = (dc, dc, dc, dh)
        if self.wide:
            dz = join(*cotangents) * to_inputs
        else:
            dz = join(*(d * to for d, to in zip(cotangents, to_inputs)))
        return dz, (0, dc * carry)

    def gradients(self, product, emitted, inputs, previous):
        """One product for the recurrent kernel of all steps.

        See `Cell.gradients` for the arguments.
        """
        del inputs
        d_recurrent, total = product.outer_and_sum(previous[0], *emitted)
        return emitted, (total,), d_recurrent, None
