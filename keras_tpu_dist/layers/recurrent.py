"""LSTM, GRU and SimpleRNN with weight gradients computed outside of the time loop."""

import dataclasses
import logging

import jax.numpy as jnp
import keras
from keras import tree

from keras_tpu_dist import recurrence
from keras_tpu_dist._keras import full_precision, in_symbolic_scope
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.layers.place import Place, axes_of, find
from keras_tpu_dist.recurrence import (
    BUILT_IN,
    Activation,
    Gathering,
    Loop,
    Product,
    Variant,
    Weights,
    check_segment,
    check_unroll,
    choose,
    gathering,
    recur,
)

# Element-wise functions of one argument: the derivative of an output is a single number. Softmax
# and its siblings mix the units, and so might a custom function.
# fmt: off
_ELEMENT_WISE = {
    "celu", "elu", "exponential", "gelu", "hard_sigmoid", "hard_silu", "hard_tanh",
    "leaky_relu", "linear", "log_sigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu",
    "soft_shrink", "softplus", "softsign", "squareplus", "tanh", "tanh_shrink",
}
# fmt: on


def translate(function) -> Activation | None:
    """Our activation for a Keras activation, or None if there is none.

    Args:
        function: The function that `keras.activations.get` returned.
    """
    name = getattr(function, "__name__", None)
    if name not in _ELEMENT_WISE or getattr(keras.activations, name, None) is not function:
        return None
    return BUILT_IN.get(name) or Activation(name, function)


logger = logging.getLogger("keras_tpu_dist")


class FastRecurrence:
    """Mixin for a `keras.layers.RNN` subclass; runs its loop with a custom gradient.

    Subclasses define `_arithmetic()`: the recurrence, or the reason why Keras's path runs.
    """

    # Class attributes, so that `convert` can turn one of Keras's layers into one of ours.
    segment = None
    _warned = ()

    def __init__(self, *args, segment=None, **kwargs):
        super().__init__(*args, **kwargs)
        check_unroll(self.unroll)
        self.segment = check_segment(segment)

    def get_config(self):
        """Keras's config. It contains `segment` only if that is set, so that stock layers can read
        it."""
        config = super().get_config()
        return config if self.segment is None else {**config, "segment": self.segment}

    def build(self, sequences_shape, initial_state_shape=None):
        """Creates the weights, as Keras does."""
        if self.unroll is True and sequences_shape[1] is None:
            raise value_error(
                "`unroll=True` needs a known number of timesteps.",
                received={"layer": self.name, "input_shape": tuple(sequences_shape)},
                fix="Give keras.Input the number of timesteps, or write unroll=8 to unroll a "
                "loop of "
                "any length by 8 steps.",
            )
        check_segment(self.segment, sequences_shape[1])
        super().build(sequences_shape, initial_state_shape)

    @property
    def variables(self):
        """Keras's variables and, if `stateful`, the carried states.

        The compiled train step only takes and returns variables in this list. The states are not
        weights, so files and `get_weights` stay compatible with Keras's layers.
        """
        return super().variables + (list(tree.flatten(self.states)) if self.states else [])

    def inner_loop(self, sequences, initial_state, mask, training=False):
        """Runs all steps. Keras's `RNN.call` calls it and handles states and dropout masks.

        Args:
            sequences: `(batch, time, features)`.
            initial_state: The states before the first step, each `(batch, units)`.
            mask: As for `check_mask`, False where the state is carried over; of a list, the first
                is used.
            training: Whether the layer is in training mode, so that its dropout applies.

        Returns:
            The last output, the outputs in the order of the loop (without `return_sequences` only
            the last), and the final states.
        """
        if in_symbolic_scope():
            # Only shapes are asked for, with sizes that cannot be compared or split over devices.
            return self._by_keras(sequences, initial_state, mask, training)
        place = self._at(find())
        arithmetic = self._fast(place, training)
        if tree.is_nested(mask):
            mask = mask[0]
        mask = check_mask(self.name, mask, sequences.shape)
        if isinstance(arithmetic, str):
            return self._stock_loop(arithmetic, sequences, initial_state, mask, training)
        if not jnp.issubdtype(sequences.dtype, jnp.floating):
            # Keras casts floats only; without this, states would take the integer dtype of the
            # input.
            sequences = sequences.astype(self.compute_dtype)
        if training and self.dropout:
            sequences = sequences * self.cell.get_dropout_mask(sequences[:, 0, :])[:, None, :]
        variant = self._variant(arithmetic, sequences.shape, place)
        loop = self._loop(arithmetic, place, variant)
        hs, last = recur(
            loop,
            place.split,
            sequences,
            weights_of(self.cell),
            tuple(tree.flatten(initial_state)),
            mask,
        )
        return self._outputs(hs, list(last), mask)

    def variant(self, shape) -> Variant:
        """Which variant of the gradient runs for an input shape, and why.

        Args:
            shape: The global shape `(batch, time, features)`.
        """
        arithmetic = self._arithmetic()
        if isinstance(arithmetic, str):
            raise value_error(
                "Only the fast path has variants.",
                received=f"layer {self.name!r} takes Keras's path: {arithmetic}.",
                fix="Change what the reason names, or do not call variant().",
            )
        return self._variant(arithmetic, shape, self._at(find()))

    def _variant(self, arithmetic, shape, place: Place, directions=1) -> Variant:
        return choose(
            arithmetic,
            platform=place.platform,
            batch=-(-shape[0] // place.split.parts),
            steps=shape[1],
            units=self.units,
            features=shape[2],
            unroll=self.unroll,
            segment=self.segment,
            directions=directions,
            core=self._core(place),
        )

    def _core(self, place: Place):
        core = place.core
        if not isinstance(core, str) and self._rounded_to(place) != "bfloat16":
            return f"kernels multiply bfloat16, not {self.compute_dtype}"
        return core

    def _rounded_to(self, place: Place) -> str | None:
        """The dtype that operands of products are rounded to."""
        compute = jnp.dtype(self.compute_dtype)
        if compute.itemsize < 4:
            return compute.name
        # A TPU rounds float32 operands in any case. If we round them here, arrays that only
        # products read take half the memory.
        return "bfloat16" if place.rounds else None

    def _loop(self, arithmetic, place: Place, variant: Variant, directions=1) -> Loop:
        rounded = self._rounded_to(place)
        if variant.unrolled and jnp.dtype(self.compute_dtype).itemsize >= 4:
            # No array is kept for products alone, and rounding would be one more kernel in every
            # step.
            rounded = None
        return Loop(
            arithmetic,
            product=Product(rounded),
            sequences=self.return_sequences,
            reverse=self.go_backwards,
            directions=directions,
            keep=variant.keep,
            hoist=variant.hoist,
            segment=variant.segment,
            unroll=variant.unroll,
            pin_layout=place.alone and place.platform == "tpu",
            kernel=variant.kernel,
            unrolled=variant.unrolled,
        )

    def _fast(self, place: Place, training):
        """The recurrence, or the reason why Keras's path runs."""
        if getattr(self, "use_cudnn", False) is True:
            return "use_cudnn=True asks for Keras's cuDNN path"
        if place.platform == "gpu" and getattr(self, "use_cudnn", False):
            return "on GPU Keras's path can use cuDNN"
        if self.recurrent_dropout:
            return "recurrent_dropout masks the state inside every step"
        if training and self.dropout and getattr(self.cell, "implementation", 2) == 1:
            return "implementation=1 draws one dropout mask per gate"
        if place.gathering is not None and not place.gathering.gather:
            return place.gathering.reason
        return self._arithmetic()

    def _at(self, place: Place) -> Place:
        """The place, with the gathering of this layer's weights."""
        found = None if place.split.mesh is None else self.gathering(axes_of)
        return dataclasses.replace(place, gathering=found)

    def gathering(self, axes_of) -> Gathering | None:
        """How weights that are split over devices are gathered; None if none is split.

        Args:
            axes_of: Returns how a variable is split, by dimension.
        """
        if not self.built:
            return None
        weights = [self.cell.kernel, self.cell.recurrent_kernel, self.cell.bias]
        weights = [v for v in weights if v is not None]
        if not any(any(axes_of(v)) for v in weights):
            return None
        return gathering(sum(map(bytes_of, weights)))

    def _stock_loop(self, reason, sequences, initial_state, mask, training):
        if reason not in self._warned:
            self._warned = (*self._warned, reason)
            logger.warning("%s takes Keras's path: %s", self.name, reason)
        return self._by_keras(sequences, initial_state, mask, training)

    def _by_keras(self, sequences, initial_state, mask, training):
        unroll = self.unroll
        # Keras reads any true value as "all steps".
        self.unroll = unroll is True
        try:
            return super().inner_loop(sequences, initial_state, mask, training)
        finally:
            self.unroll = unroll

    def _outputs(self, hs, last, mask):
        """The results of Keras's backend loop: last output, outputs in loop order, states."""
        if mask is not None:
            mask = mask[..., None]
        if hs is None:
            hidden = last[0] if mask is None else self._hide_last(last[0], mask)
            return hidden, hidden, last
        if mask is not None:
            hs = self._hide(hs, mask)
        if self.go_backwards:
            hs = jnp.flip(hs, axis=1)
        return hs[:, -1], hs, last

    def _hide(self, hs, mask):
        if self.unroll is True:
            # Keras's unrolled path ignores zero_output_for_mask. Before the first unmasked step it
            # returns zeros instead of the initial state.
            seen = jnp.flip(mask, 1) if self.go_backwards else mask
            seen = jnp.cumsum(seen, axis=1) > 0
            mask = jnp.flip(seen, 1) if self.go_backwards else seen
            return jnp.where(mask, hs, 0)
        return jnp.where(mask, hs, 0) if self.zero_output_for_mask else hs

    def _hide_last(self, last, mask):
        if self.unroll is True:
            return jnp.where(mask.any(axis=1), last, 0)
        if self.zero_output_for_mask:
            return jnp.where(mask[:, 0 if self.go_backwards else -1], last, 0)
        return last


def weights_of(cell) -> Weights:
    """A Keras cell's weights in the recurrence's form, in their own precision.

    Args:
        cell: A built cell of Keras's `LSTM`, `GRU` or `SimpleRNN`.
    """
    bias = None if cell.bias is None else full_precision(cell.bias)
    recurrent_bias = None
    if bias is not None and bias.ndim == 2:  # GRU with reset_after: one for each product
        bias, recurrent_bias = bias
    return Weights(
        full_precision(cell.kernel), bias, full_precision(cell.recurrent_kernel), recurrent_bias
    )


def check_mask(name, mask, shape):
    """Checks a mask and returns it as `(batch, time)` booleans.

    Args:
        name: The layer's name.
        mask: None, `(batch, time)` or `(batch, time, any)`, boolean or integer.
        shape: The shape of the layer's input.
    """
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.ndim not in (2, 3) or mask.shape[:2] != tuple(shape[:2]):
        raise value_error(
            "A mask must have one entry for every row and timestep.",
            received={"layer": name, "mask.shape": mask.shape, "input.shape": tuple(shape)},
            fix=f"Pass a boolean mask of shape {tuple(shape[:2])}.",
        )
    if not (jnp.issubdtype(mask.dtype, jnp.bool_) or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise value_error(
            "A mask must be boolean (or integers 0 and 1).",
            received={"layer": name, "mask.dtype": str(mask.dtype)},
            fix="Write mask != 0, or mask.astype(bool).",
        )
    mask = mask.astype(bool)
    return mask.any(axis=-1) if mask.ndim == 3 else mask


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
    """Long short-term memory with weight gradients computed outside of the time loop.

    Constructor, call arguments, weights, config and results are those of `keras.layers.LSTM`, and
    it reads and writes the same weights and files. It differs in two arguments:

    Args:
        unroll: False if `variant` decides, True for no compiler loop (on TPU a single kernel if it
            fits), or the number of steps in one iteration of the compiled loop. Defaults to
            `False`.
        segment: None to keep the states of all steps for the gradient; the number of steps between
            kept states, to recompute the states between them for the gradient; or `"auto"` for
            about the square root of the number of steps. Defaults to `None`.

    With `recurrent_dropout`, with activations that are not element-wise functions of Keras, and
    with cuDNN on GPU, Keras's path runs; a warning gives the reason once. With `stateful=True`,
    `fit` and `predict` carry the states too. `layer.variant((batch, time, features))` returns how
    the loop runs and why; on TPU it is one kernel if it fits on the chip.

    Raises:
        ValueError: If `unroll` or `segment` has no valid value, if `unroll=True` and the number of
            timesteps is unknown, or if a mask does not fit the input.

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
    """Gated recurrent unit with weight gradients computed outside of the time loop.

    It differs from `keras.layers.GRU` in what `ktd.layers.LSTM` differs from Keras's. With
    `reset_after=False`, Keras's path runs.

    Args:
        unroll: See `ktd.layers.LSTM`.
        segment: See `ktd.layers.LSTM`.

    Example:

    >>> import numpy as np
    >>> import keras_tpu_dist as ktd
    >>> layer = ktd.layers.GRU(4, return_sequences=True)
    >>> layer(np.ones((2, 3, 5), "float32")).shape
    (2, 3, 4)
    """

    def _arithmetic(self):
        if not self.reset_after:
            return "with reset_after=False, the reset gate acts before the recurrent product"
        return _gated(recurrence.GRU, self)


@keras.saving.register_keras_serializable("keras_tpu_dist")
class SimpleRNN(FastRecurrence, keras.layers.SimpleRNN):
    """Simple recurrent layer with weight gradients computed outside of the time loop.

    It differs from `keras.layers.SimpleRNN` in what `ktd.layers.LSTM` differs from Keras's.

    Args:
        unroll: See `ktd.layers.LSTM`.
        segment: See `ktd.layers.LSTM`.

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
