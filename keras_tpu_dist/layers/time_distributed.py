"""Applies a layer at every timestep, in a program whose size does not grow with time."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from keras import layers, ops, tree

from keras_tpu_dist._keras import (
    AutocastScope,
    Functional,
    call_takes,
    flatten_layers,
    full_precision,
    graph,
    owner_of_loss,
    sublayers,
)

# Layers that compute every row independently: time can be folded into the batch.
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
# Keras operations that compute every element from the input elements at the same place.
# fmt: off
_ELEMENT_WISE = frozenset(
    (
        "Absolute", "Add", "Cast", "Cos", "Divide", "Elu", "Erf", "Exp", "Expm1", "Gelu",
        "HardSigmoid", "LeakyRelu", "Log", "Log1p", "LogSigmoid", "Maximum", "Minimum",
        "Multiply", "Negative", "Power", "Reciprocal", "Relu", "Relu6", "Rsqrt", "Selu",
        "Sigmoid", "Sign", "Silu", "Sin", "Softplus", "Softsign", "Sqrt", "Square",
        "StopGradient", "Subtract", "Tanh", "TrueDivide",
    )
)
# fmt: on


def rows_are_independent(layer, training) -> bool:
    """Whether a layer computes every row independently, without state changes or random numbers.

    The exact class counts, because a subclass may do anything in its `call`.

    Args:
        layer: The layer. If it is a wrapper or a model, all its layers must be independent too.
        training: Whether the call is in training mode; None counts as False.
    """
    if layer.activity_regularizer is not None:
        return False
    if isinstance(layer, layers.Wrapper | layers.Bidirectional):
        known = isinstance(layer, layers.TimeDistributed | layers.Bidirectional)
        return known and all(rows_are_independent(child, training) for child in sublayers(layer))
    if type(layer) is keras.Sequential:
        return all(rows_are_independent(child, training) for child in layer.layers)
    if type(layer) is Functional:
        calls = graph(layer) or ()
        return all(_call_keeps_rows(node, called, training) for node, called, _ in calls)
    if not _arguments_keep_rows(layer, training):
        return False
    if type(layer) is layers.BatchNormalization:
        # With fixed statistics it is a scale and a shift; with those of the batch it is not.
        return not (training and layer.trainable)
    if isinstance(layer, _RECURRENT) and type(layer).__name__ in ("LSTM", "GRU", "SimpleRNN"):
        return not layer.stateful and not (training and (layer.dropout or layer.recurrent_dropout))
    if isinstance(layer, layers.Dropout) and type(layer) is layers.Dropout:
        return not training
    return type(layer) in _ROW_BY_ROW


def _call_keeps_rows(node, called, training):
    """Whether a call in the graph of a functional model keeps rows independent."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    if isinstance(called, keras.Layer):
        # A constant may have different values for the rows of one step.
        constant = any(_rank(a) for a in tree.flatten((args, kwargs)) if not _is_symbolic(a))
        training = kwargs.get("training") if training is None else training
        return not constant and rows_are_independent(called, training)
    if type(called).__name__ not in _ELEMENT_WISE or not _is_library_made(type(called)):
        return False
    # Other ranks are broadcast: an operand without a row dimension is the same for all rows.
    rank = node.output_tensors[0].ndim
    return all(
        _rank(a) == rank if _is_symbolic(a) else _rank(a) < min(rank, 2)
        for a in (*args, *kwargs.values())
    )


def _arguments_keep_rows(layer, training):
    """Whether a layer's arguments (functions, axes) keep rows independent."""
    for name in ("activation", "recurrent_activation"):
        function = getattr(layer, name, None)
        if isinstance(function, keras.Layer):
            if not rows_are_independent(function, training):
                return False
        elif function is not None and not _is_library_made(function):
            return False
    axis = getattr(layer, "axis", -1)
    # Without the rank, of all negative axes only -1 is known not to be the rows.
    return all(i == -1 or i > 0 for i in (axis if isinstance(axis, list | tuple) else [axis]))


def _is_symbolic(argument):
    return isinstance(argument, keras.KerasTensor)


def _rank(argument):
    return argument.ndim if _is_symbolic(argument) else np.ndim(argument)


def _is_library_made(function):
    """Whether a function or class belongs to Keras or JAX, and not to the user."""
    return (getattr(function, "__module__", None) or "").split(".")[0] in ("keras", "jax")


@keras.saving.register_keras_serializable("keras_tpu_dist")
class TimeDistributed(layers.TimeDistributed):
    """`keras.layers.TimeDistributed` whose program does not grow with the number of timesteps.

    Constructor, call arguments, weights, config and results are Keras's. If the wrapped layer
    computes every row independently (dense, convolution, pooling, normalization within a row,
    reshaping, recurrent layers, and models of these), time is folded into the batch and the layer
    is called once. Any other layer (batch normalization and dropout in training, custom layers) is
    called in a compiled loop over time, once per step as in Keras: statistics over the batch of
    that step, updated step after step, and new random numbers in every step.

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
        """Applies the layer at every timestep of `(batch, time, ...)`."""
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

        inside, owners = flatten_layers(self.layer), []

        def step(values, now):
            x, m = now
            # With a policy that casts, the scope would hold, and the loop carry, rounded values.
            with AutocastScope(None):
                state = [*fixed, *zip(changing, values, strict=True)]
                scope = keras.StatelessScope(state_mapping=state, collect_losses=True)
            with scope:
                extra = kwargs if m is None else {**kwargs, "mask": m}
                outputs = self.layer.call(x, **extra)
            owners[:] = [owner_of_loss(loss, inside) for loss in scope.losses]
            after = [scope.get_current_value(v) for v in changing]
            return after, (outputs, list(scope.losses))

        swapped = jax.tree.map(
            lambda a: jnp.swapaxes(a, 0, 1), (ops.convert_to_tensor(inputs), mask)
        )
        with AutocastScope(None):
            # A value may begin with another dtype than its variable's; a scope casts it.
            first = [full_precision(v).astype(v.dtype) for v in changing]
        values, (outputs, losses) = lax.scan(step, first, swapped)
        for variable, value in zip(changing, values, strict=True):
            variable.assign(value)
        for owner, loss in zip(owners, losses, strict=True):
            # Keras adds up losses in float32.
            owner.add_loss(jnp.sum(loss, axis=0, dtype=jnp.promote_types(loss.dtype, jnp.float32)))
        return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), outputs)


def _check(mask, inputs):
    if mask is None:
        return
    shape, expected = tuple(mask.shape), tuple(inputs.shape[:2])
    # The message begins with Keras's own words, which users and Keras's tests know.
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
