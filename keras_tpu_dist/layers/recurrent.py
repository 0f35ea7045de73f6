"""LSTM, GRU and SimpleRNN: Keras's layers with a gradient that leaves the time loop."""

import keras

from keras_tpu_dist import recurrence
from keras_tpu_dist.layers.activations import translate
from keras_tpu_dist.layers.base import FastRecurrence


def _refuse(activation):
    name = getattr(activation, "__name__", activation)
    return f"activation {name!r} is not an element-wise function of Keras"


def _gated(arithmetic, layer):
    for function in (layer.activation, layer.recurrent_activation):
        if translate(function) is None:
            return _refuse(function)
    return arithmetic(translate(layer.activation), translate(layer.recurrent_activation))


@keras.saving.register_keras_serializable("keras_tpu_dist")
class LSTM(FastRecurrence, keras.layers.LSTM):
    """Long short-term memory whose gradient leaves the time loop.

    Constructor, call arguments, weights, config and results are those of `keras.layers.LSTM`,
    whose weights and files it reads and writes. What differs:

    Args:
        unroll: False for what `variant` says, True for no loop of the compiler's (on TPU one kernel
            where there can be one), or the number of steps in each iteration
            of the compiled loop. Defaults to `False`.
        segment: None to keep the states of all steps for the gradient; the number of steps between
            kept states, between which all is computed again for the gradient; or `"auto"` for
            about the square root of the number of steps. Defaults to `None`.

    `recurrent_dropout`, activations that are not element-wise functions of Keras, and cuDNN on GPU
    take Keras's path, which is logged once with the reason. With `stateful=True` the states are
    carried by `fit` and `predict` too. `layer.variant((batch, time, features))` says how the loop
    runs, on TPU as one kernel if it fits on the chip, and why.

    Raises:
        ValueError: If `unroll` or `segment` cannot be, if `unroll=True` meets an unknown number of
            timesteps, or if a mask does not fit the input.

    Example:

    >>> import numpy as np
    >>> import keras_tpu_dist as ktd
    >>> layer = ktd.layers.LSTM(4, return_sequences=True)
    >>> layer(np.ones((2, 3, 5), "float32")).shape
    (2, 3, 4)
    """

    def _arithmetic(self):
        return _gated(recurrence.LSTM, self)


@keras.saving.register_keras_serializable("keras_tpu_dist")
class GRU(FastRecurrence, keras.layers.GRU):
    """Gated recurrent unit whose gradient leaves the time loop.

    Constructor, call arguments, weights, config and results are those of `keras.layers.GRU`,
    whose weights and files it reads and writes. What differs:

    Args:
        unroll: False for what `variant` says, True for no loop of the compiler's (on TPU one kernel
            where there can be one), or the number of steps in each iteration
            of the compiled loop. Defaults to `False`.
        segment: None to keep the states of all steps for the gradient; the number of steps between
            kept states, between which all is computed again for the gradient; or `"auto"` for
            about the square root of the number of steps. Defaults to `None`.

    `recurrent_dropout`, activations that are not element-wise functions of Keras, and cuDNN on GPU
    take Keras's path, which is logged once with the reason. With `stateful=True` the states are
    carried by `fit` and `predict` too. `layer.variant((batch, time, features))` says how the loop
    runs, on TPU as one kernel if it fits on the chip, and why.

    Raises:
        ValueError: If `unroll` or `segment` cannot be, if `unroll=True` meets an unknown number of
            timesteps, or if a mask does not fit the input.

    Example:

    >>> import numpy as np
    >>> import keras_tpu_dist as ktd
    >>> layer = ktd.layers.GRU(4, return_sequences=True)
    >>> layer(np.ones((2, 3, 5), "float32")).shape
    (2, 3, 4)
    """

    def _arithmetic(self):
        return _gated(recurrence.GRU if self.reset_after else recurrence.GRUResetBefore, self)


@keras.saving.register_keras_serializable("keras_tpu_dist")
class SimpleRNN(FastRecurrence, keras.layers.SimpleRNN):
    """Recurrence whose output is its state, and whose gradient leaves the time loop.

    Constructor, call arguments, weights, config and results are those of `keras.layers.SimpleRNN`,
    whose weights and files it reads and writes. What differs:

    Args:
        unroll: False for what `variant` says, True for no loop of the compiler's (on TPU one kernel
            where there can be one), or the number of steps in each iteration
            of the compiled loop. Defaults to `False`.
        segment: None to keep the states of all steps for the gradient; the number of steps between
            kept states, between which all is computed again for the gradient; or `"auto"` for
            about the square root of the number of steps. Defaults to `None`.

    `recurrent_dropout`, activations that are not element-wise functions of Keras, and cuDNN on GPU
    take Keras's path, which is logged once with the reason. With `stateful=True` the states are
    carried by `fit` and `predict` too. `layer.variant((batch, time, features))` says how the loop
    runs, on TPU as one kernel if it fits on the chip, and why.

    Raises:
        ValueError: If `unroll` or `segment` cannot be, if `unroll=True` meets an unknown number of
            timesteps, or if a mask does not fit the input.

    Example:

    >>> import numpy as np
    >>> import keras_tpu_dist as ktd
    >>> layer = ktd.layers.SimpleRNN(4, return_sequences=True)
    >>> layer(np.ones((2, 3, 5), "float32")).shape
    (2, 3, 4)
    """

    def _arithmetic(self):
        activation = translate(self.activation)
        return _refuse(self.activation) if activation is None else recurrence.SimpleRNN(activation)
