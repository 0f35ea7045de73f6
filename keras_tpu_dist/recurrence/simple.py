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

    def after(self, inputs, state):
        """The state after a step.

        See `OneProduct.after` for the arguments.
        """
        del state
        return (self.activation(inputs),)

    def coefficients(self, inputs, previous):
        """The slope of the activation; `inputs` are the states after, where they suffice.

        See `Cell.coefficients` for the arguments.
        """
        del previous
        if self.activation.slope is not None:
            return (self.activation.slope(inputs),)
        return (self.activation.with_slope(inputs)[1],)

    def columns_back(self, coefficients, cotangent):
        """The cotangent of the activation's input.

        See `OneProduct.columns_back` for the arguments.
        """
        return cotangent[0] * coefficients[0], (0,)

    def gradients(self, product, emitted, inputs, previous):
        """One product for the recurrent kernel of all steps.

        See `Cell.gradients` for the arguments.
        """
        del inputs
        d_recurrent, total = product.outer_and_sum(previous[0], *emitted)
        return emitted, (total,), d_recurrent, None
