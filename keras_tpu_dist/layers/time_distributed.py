"""One layer at every timestep, in a program whose size does not grow with time."""

import jax
import jax.numpy as jnp
import keras
from jax import lax
from keras import layers, ops, tree

from keras_tpu_dist._keras import (
    AutocastScope,
    call_takes,
    flatten_layers,
    full_precision,
    owner_of_loss,
)
from keras_tpu_dist.layers.rows import rows_are_independent


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
