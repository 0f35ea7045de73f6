"""The fully connected recurrence whose output is its state."""

import dataclasses

from keras_tpu_dist.recurrence.cells import TANH, Activation, OneProduct


@dataclasses.dataclass(frozen=True)
class SimpleRNN(OneProduct):
    """`h = activation(x @ kernel + bias + h_before @ recurrent_kernel)`.

    References:
        Elman, "Finding structure in time", Cognitive Science 14(2), 1990.
    """

    activation: Activation = TANH
    gates = 1
    num_states = 1
    only_multiplied = (True,)
    rebuilds_by_step = True

    @property
    def states_suffice(self) -> bool:
        """Whether the slope follows from the state after the step, so nothing is rebuilt."""
        return self.activation.slope is not None

    def advance(self, product, recurrent, bias, projected, state):
        """One step.

        See `Cell.advance` for the arguments.
        """
        del bias
        inputs = projected + product(state[0], recurrent)
        return (self.activation(inputs),), inputs

    def coefficients(self, inputs, previous):
        """The slope of the activation; `inputs` are the states after, where they suffice.

        See `Cell.coefficients` for the arguments.
        """
        del previous
        if self.activation.slope is not None:
            return (self.activation.slope(inputs),)
        return (self.activation.with_slope(inputs)[1],)

    def retreat(self, product, recurrent, coefficients, cotangent):
        """One product; emits the cotangent of the activation's input.

        See `Cell.retreat` for the arguments.
        """
        dz = cotangent[0] * coefficients[0]
        return (product.back(dz, recurrent),), (dz,)

    def gradients(self, product, emitted, inputs, previous):
        """One product for the recurrent kernel of all steps.

        See `Cell.gradients` for the arguments.
        """
        del inputs
        d_recurrent, total = product.outer_and_sum(previous[0], *emitted)
        return emitted, (total,), d_recurrent, None
