"""One layer at every timestep, in a program whose size does not grow with time."""

import jax
import jax.numpy as jnp
import keras
from jax import lax
from keras import layers, ops, tree

from keras_tpu_dist._keras import Functional, call_takes, full_precision, sublayers

# Layers whose rows do not see each other: time can be folded into the batch.
_ROW_BY_ROW = (
    layers.Activation,
    layers.AveragePooling1D,
    layers.AveragePooling2D,
    layers.AveragePooling3D,
    layers.Conv1D,
    layers.Conv1DTranspose,
    layers.Conv2D,
    layers.Conv2DTranspose,
    layers.Conv3D,
    layers.Conv3DTranspose,
    layers.Cropping1D,
    layers.Cropping2D,
    layers.Cropping3D,
    layers.Dense,
    layers.DepthwiseConv1D,
    layers.DepthwiseConv2D,
    layers.EinsumDense,
    layers.ELU,
    layers.Embedding,
    layers.Flatten,
    layers.GlobalAveragePooling1D,
    layers.GlobalAveragePooling2D,
    layers.GlobalAveragePooling3D,
    layers.GlobalMaxPooling1D,
    layers.GlobalMaxPooling2D,
    layers.GlobalMaxPooling3D,
    layers.GroupNormalization,
    layers.Identity,
    layers.InputLayer,
    layers.LayerNormalization,
    layers.LeakyReLU,
    layers.MaxPooling1D,
    layers.MaxPooling2D,
    layers.MaxPooling3D,
    layers.Permute,
    layers.PReLU,
    layers.ReLU,
    layers.RepeatVector,
    layers.Rescaling,
    layers.Reshape,
    layers.RMSNormalization,
    layers.SeparableConv1D,
    layers.SeparableConv2D,
    layers.Softmax,
    layers.UnitNormalization,
    layers.UpSampling1D,
    layers.UpSampling2D,
    layers.UpSampling3D,
    layers.ZeroPadding1D,
    layers.ZeroPadding2D,
    layers.ZeroPadding3D,
)
_RECURRENT = (layers.LSTM, layers.GRU, layers.SimpleRNN)


def rows_are_independent(layer, training) -> bool:
    """Whether a layer computes every row without the others, changes nothing and draws nothing.

    Exact types count: a subclass may do anything in its `call`.

    Args:
        layer: The layer. Of a wrapper or a model every layer inside must be independent too.
        training: Whether the call is one of training; None counts as not.
    """
    if isinstance(layer, layers.Wrapper | layers.Bidirectional):
        known = isinstance(layer, layers.TimeDistributed | layers.Bidirectional)
        return known and all(rows_are_independent(child, training) for child in sublayers(layer))
    if type(layer) in (keras.Sequential, Functional):
        return all(rows_are_independent(child, training) for child in layer.layers)
    if layer.activity_regularizer is not None:
        return False
    if type(layer) is layers.BatchNormalization:
        # Fixed statistics make it a scale and a shift; a batch's own do not.
        return not (training and layer.trainable)
    if isinstance(layer, _RECURRENT) and type(layer).__name__ in ("LSTM", "GRU", "SimpleRNN"):
        return not layer.stateful and not (training and (layer.dropout or layer.recurrent_dropout))
    if isinstance(layer, layers.Dropout) and type(layer) is layers.Dropout:
        return not training
    return type(layer) in _ROW_BY_ROW


@keras.saving.register_keras_serializable("keras_tpu_dist")
class TimeDistributed(layers.TimeDistributed):
    """`keras.layers.TimeDistributed` whose program does not grow with the number of timesteps.

    Constructor, call arguments, weights, config and results are Keras's. Where the wrapped layer
    treats every row by itself (dense, convolution, pooling, normalization within a row, reshaping,
    recurrent layers, and models of these), time is folded into the batch and the layer called
    once. Any other layer (batch normalization and dropout in training, layers of the user's own) is
    called in a compiled loop over time, once per step as Keras calls it: statistics over the batch
    of that step, updated step after step, and fresh random numbers in every step.

    Args:
        layer: The layer to apply at every timestep.

    Example:

    >>> import numpy as np
    >>> import keras
    >>> import keras_tpu_dist as ktd
    >>> layer = ktd.layers.TimeDistributed(keras.layers.Dense(4))
    >>> layer(np.ones((2, 1000, 5), "float32")).shape
    (2, 1000, 4)
    """

    def call(self, inputs, training=None, mask=None):
        """The layer at every timestep of `(batch, time, ...)`."""
        _check(mask, inputs)
        if not call_takes(self.layer, "mask"):
            mask = None
        kwargs = {"training": training} if call_takes(self.layer, "training") else {}
        if rows_are_independent(self.layer, training):
            return self._fold(inputs, mask, kwargs)
        return self._loop(inputs, mask, kwargs)

    def _fold(self, inputs, mask, kwargs):
        batch, steps = inputs.shape[:2]

        def fold(a):
            return jnp.reshape(a, (batch * steps, *a.shape[2:]))

        if mask is not None:
            kwargs = {**kwargs, "mask": fold(jnp.asarray(mask))}
        outputs = self.layer.call(fold(ops.convert_to_tensor(inputs)), **kwargs)
        return tree.map_structure(lambda a: jnp.reshape(a, (batch, steps, *a.shape[1:])), outputs)

    def _loop(self, inputs, mask, kwargs):
        changing = [v for v in self.layer.variables if not v.trainable]
        fixed = [(v, full_precision(v)) for v in self.layer.variables if v.trainable]

        def step(values, now):
            x, m = now
            state = [*fixed, *zip(changing, values)]
            with keras.StatelessScope(state_mapping=state) as scope:
                extra = kwargs if m is None else {**kwargs, "mask": m}
                outputs = self.layer.call(x, **extra)
            after = [scope.get_current_value(v) for v in changing]
            return after, outputs

        swapped = jax.tree.map(
            lambda a: jnp.swapaxes(a, 0, 1), (ops.convert_to_tensor(inputs), mask)
        )
        values, outputs = lax.scan(step, [full_precision(v) for v in changing], swapped)
        for variable, value in zip(changing, values):
            variable.assign(value)
        return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), outputs)


def _check(mask, inputs):
    if mask is None:
        return
    shape, expected = tuple(mask.shape), tuple(inputs.shape[:2])
    # The first words are Keras's own, which its tests and its users know.
    if len(shape) < 2:
        raise ValueError(
            "The `mask` passed to the `TimeDistributed` layer must be at least 2D (batch, "
            f"timesteps). Received: mask.shape={shape}. Pass a mask of shape {expected}."
        )
    if shape[:2] != expected:
        raise ValueError(
            f"The `mask` passed to the `TimeDistributed` layer has a shape {shape} that is "
            f"incompatible with the input. Received: input.shape={tuple(inputs.shape)}. Pass a "
            f"mask of shape {expected}."
        )
