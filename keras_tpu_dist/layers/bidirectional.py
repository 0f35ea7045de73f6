"""A `Bidirectional` layer whose two directions share one time loop."""

from typing import Any, cast

import jax.numpy as jnp
import keras
from keras import ops

from keras_tpu_dist._keras import in_symbolic_scope
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.layers.place import find
from keras_tpu_dist.layers.recurrent import FastRecurrence, check_mask, weights_of
from keras_tpu_dist.recurrence import Variant, Weights, recur


@keras.saving.register_keras_serializable("keras_tpu_dist")
class Bidirectional(keras.layers.Bidirectional):
    """`keras.layers.Bidirectional` whose two directions share one time loop.

    Constructor, call arguments, weights, config and results are Keras's. The directions run
    together if both are the same fast layer of this package, with the same units, activations and
    bias, stateless, without dropout in this call, not segmented, and without a regularizer of their
    outputs. Otherwise they run one after the other, as in Keras. Together they need one loop
    instead of two, which is faster because every step of a loop waits for its products.

    Args:
        layer: The forward layer.
        merge_mode: One of "concat", "sum", "mul", "ave" or None. Defaults to `"concat"`.
        backward_layer: The backward layer; by default like the forward layer.

    Example:

    >>> import numpy as np
    >>> import keras_tpu_dist as ktd
    >>> layer = ktd.layers.Bidirectional(ktd.layers.LSTM(4, return_sequences=True))
    >>> layer(np.ones((2, 3, 5), "float32")).shape
    (2, 3, 8)
    """

    def call(self, sequences, initial_state=None, mask=None, training=None):
        """Runs both directions over `(batch, time, features)`."""
        place = find()
        arithmetic = self._together(place, training, sequences.shape)
        if arithmetic is None:
            return super().call(
                sequences, initial_state=initial_state, mask=mask, training=training
            )
        forward, backward = self.forward_layer, self.backward_layer
        sequences = cast(Any, ops.convert_to_tensor(sequences, dtype=self.compute_dtype))
        mask = mask[0] if isinstance(mask, list | tuple) else mask
        mask = check_mask(self.name, mask, sequences.shape)
        weights = _stack([weights_of(forward.cell), weights_of(backward.cell)])
        half = arithmetic.num_states
        if initial_state is None:
            initial_state = forward.get_initial_state(sequences.shape[0]) * 2
        states: list[Any] = [
            ops.convert_to_tensor(s, dtype=self.compute_dtype) for s in initial_state
        ]
        state = tuple(jnp.stack(pair) for pair in zip(states[:half], states[half:], strict=True))
        variant = forward._variant(arithmetic, sequences.shape, place, directions=2)
        loop = forward._loop(arithmetic, place, variant, directions=2)
        hs, last = recur(loop, place.split, sequences, weights, state, mask)
        return self._merge(
            self._directions(hs, last, mask), [s[0] for s in last] + [s[1] for s in last]
        )

    def variant(self, shape) -> Variant | tuple[Variant, Variant]:
        """Which variant of the gradient runs for an input shape, and why.

        Args:
            shape: The global shape `(batch, time, features)`.

        Returns:
            The variant of the loop that both directions share, or those of the forward and the
            backward layer if they run one after the other.

        Raises:
            ValueError: If a layer takes Keras's path, which has no variants.

        Example:

        >>> import keras_tpu_dist as ktd
        >>> layer = ktd.layers.Bidirectional(ktd.layers.LSTM(128))
        >>> layer.build((32, 100, 64))
        >>> print(layer.variant((32, 100, 64)).unroll)
        1
        """
        place = find()
        arithmetic = self._together(place, None, shape)
        if arithmetic is None:
            layers = self.forward_layer, self.backward_layer
            for layer in layers:
                if not isinstance(layer, FastRecurrence):
                    raise value_error(
                        "Only the recurrent layers of this package have variants.",
                        received=f"layer {layer.name!r}, a {type(layer).__name__} of Keras.",
                        fix=f"Write ktd.layers.{type(layer).__name__}, or convert the model.",
                    )
            return layers[0].variant(shape), layers[1].variant(shape)
        return self.forward_layer._variant(arithmetic, shape, place, directions=2)

    def _together(self, place, training, shape):
        """The recurrence that both directions share, or None if they run one after the other."""
        forward, backward = self.forward_layer, self.backward_layer
        if not isinstance(forward, FastRecurrence) or type(forward) is not type(backward):
            return None
        if forward.go_backwards or not (forward.built and backward.built) or in_symbolic_scope():
            return None
        places = [layer._at(place) for layer in (forward, backward)]
        pair = [
            layer._fast(at, training) for layer, at in zip((forward, backward), places, strict=True)
        ]
        same = pair[0] == pair[1] and not isinstance(pair[0], str)
        for name in ("units", "use_bias", "compute_dtype", "unroll", "zero_output_for_mask"):
            same = same and getattr(forward, name) == getattr(backward, name)
        for layer in (forward, backward):
            plain = not layer.stateful and layer.segment is None
            plain = plain and layer.activity_regularizer is None and layer.unroll is not True
            same = same and plain and not (training and layer.dropout)
        if not same or forward._variant(pair[0], shape, places[0]).unrolled:
            return None  # without a loop there is no waiting to share
        return pair[0]

    def _directions(self, hs, last, mask):
        """Outputs of both directions, in the time order of the input."""
        forward = self.forward_layer
        if hs is None:
            ahead, behind = last[0][0], last[0][1]
            if mask is not None:
                # The last step of the backward direction is the first of the input.
                ahead = forward._hide_last(ahead, mask[..., None])
                hidden = jnp.where(mask[:, :1], behind, 0)
                behind = hidden if forward.zero_output_for_mask else behind
            return ahead, behind
        ahead, behind = hs[0], jnp.flip(hs[1], axis=1)
        if mask is not None:
            ahead, behind = (forward._hide(h, mask[..., None]) for h in (ahead, behind))
        return ahead, behind

    def _merge(self, directions, states):
        ahead, behind = (cast(Any, ops.cast(h, self.compute_dtype)) for h in directions)
        merged = {
            "concat": lambda: ops.concatenate([ahead, behind], axis=-1),
            "sum": lambda: ahead + behind,
            "ave": lambda: (ahead + behind) / 2,
            "mul": lambda: ahead * behind,
            None: lambda: (ahead, behind),
        }[self.merge_mode]()
        if not self.return_state:
            return merged
        return (merged if self.merge_mode is None else (merged,)) + tuple(states)


def _stack(weights: list[Weights]) -> Weights:
    stacked: Any = [
        None if pair[0] is None else jnp.stack(pair) for pair in zip(*weights, strict=True)
    ]
    return Weights(*stacked)
