"""Which Keras activations the fast recurrences take."""

import keras

from keras_tpu_dist.recurrence import BUILT_IN, Activation

# Element-wise functions of one argument: the derivative of each output is a single number. Softmax
# and its kin mix the units, and a function of the user's own might.
_ELEMENT_WISE = {
    *("celu", "elu", "exponential", "gelu", "hard_sigmoid", "hard_silu", "hard_tanh"),
    *("leaky_relu", "linear", "log_sigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu"),
    *("soft_shrink", "softplus", "softsign", "squareplus", "tanh", "tanh_shrink"),
}


def translate(function) -> Activation | None:
    """A Keras activation as the recurrences know it, or None if they must not take it.

    Args:
        function: What `keras.activations.get` returned.
    """
    name = getattr(function, "__name__", None)
    if name not in _ELEMENT_WISE or getattr(keras.activations, name, None) is not function:
        return None
    return BUILT_IN.get(name) or Activation(name, function)
