"""One layer at every timestep, in a program whose size does not grow with time."""

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
# Operations of Keras that compute every element from those at its place.
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
    """Whether a layer computes every row without the others, changes nothing and draws nothing.

    Exact types count: a subclass may do anything in its `call`.

    Args:
        layer: The layer. Of a wrapper or a model every layer inside must be independent too.
        training: Whether the call is one of training; None counts as not.
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
        # Fixed statistics make it a scale and a shift; a batch's own do not.
        return not (training and layer.trainable)
    if isinstance(layer, _RECURRENT) and type(layer).__name__ in ("LSTM", "GRU", "SimpleRNN"):
        return not layer.stateful and not (training and (layer.dropout or layer.recurrent_dropout))
    if isinstance(layer, layers.Dropout) and type(layer) is layers.Dropout:
        return not training
    return type(layer) in _ROW_BY_ROW


def _call_keeps_rows(node, called, training):
    """Whether one call in the graph of a functional model keeps rows apart."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    if isinstance(called, keras.Layer):
        # A constant may have values for the rows of one step.
        constant = any(_rank(a) for a in tree.flatten((args, kwargs)) if not _is_symbolic(a))
        training = kwargs.get("training") if training is None else training
        return not constant and rows_are_independent(called, training)
    if type(called).__name__ not in _ELEMENT_WISE or not _is_library_made(type(called)):
        return False
    # Other ranks are broadcast: what has no dimension of rows is the same for all of them.
    rank = node.output_tensors[0].ndim
    return all(
        _rank(a) == rank if _is_symbolic(a) else _rank(a) < min(rank, 2)
        for a in (*args, *kwargs.values())
    )


def _arguments_keep_rows(layer, training):
    """Whether a layer was made with functions and axes that leave rows alone."""
    for name in ("activation", "recurrent_activation"):
        function = getattr(layer, name, None)
        if isinstance(function, keras.Layer):
            if not rows_are_independent(function, training):
                return False
        elif function is not None and not _is_library_made(function):
            return False
    axis = getattr(layer, "axis", -1)
    # Without the rank, only the last of the axes that are counted from the end is known.
    return all(i == -1 or i > 0 for i in (axis if isinstance(axis, list | tuple) else [axis]))


def _is_symbolic(argument):
    return isinstance(argument, keras.KerasTensor)


def _rank(argument):
    return argument.ndim if _is_symbolic(argument) else np.ndim(argument)


def _is_library_made(function):
    """Whether a function or class is of Keras or JAX, not of the user's own."""
    return (getattr(function, "__module__", None) or "").split(".")[0] in ("keras", "jax")


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

        inside, owners = flatten_layers(self.layer), []

        def step(values, now):
            x, m = now
            # A policy that casts would have the scope hold, and the loop carry, rounded values.
            with AutocastScope(None):
                state = [*fixed, *zip(changing, values)]
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
        values, (outputs, losses) = lax.scan(step, [full_precision(v) for v in changing], swapped)
        for variable, value in zip(changing, values):
            variable.assign(value)
        for owner, loss in zip(owners, losses):
            # Keras adds losses up in float32.
            owner.add_loss(jnp.sum(loss, axis=0, dtype=jnp.promote_types(loss.dtype, jnp.float32)))
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
