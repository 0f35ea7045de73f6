"""Layers that use TensorFlow's lookup tables on the host, within compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.utils.numerical_utils import encode_categorical_inputs

from keras_tpu_dist._keras.active import active_strategy
from keras_tpu_dist._keras.calls import route_calls
from keras_tpu_dist._keras.structure import flatten_layers
from keras_tpu_dist._keras.trainer import on_compile, on_new_layer
from keras_tpu_dist.common.errors import value_error

_PIPELINE = (
    "Apply the layer in the input: dataset.map(lambda x, y: (layer(x), y)), or layer(x) before fit."
)


def _looked_up(stock, layer, args, kwargs):
    """A call of `IntegerLookup`, on the device if it is within a compiled program."""
    inputs = args[0] if args else kwargs.get("inputs")
    # Stock Keras compiles it, too, if a strategy has compiled it before: see `_keras.compiling`.
    compiles = active_strategy() is not None or layer.supports_jit
    if not compiles or not isinstance(inputs, jax.core.Tracer):
        return stock(*args, **kwargs)
    _check_fits_in_program(layer)
    layer._ensure_known_vocab_size()
    indices = _indices(layer, inputs)
    if layer.output_mode == "int":
        return indices
    depth = layer.max_tokens if layer.pad_to_max_tokens else layer._frozen_vocab_size
    weighted = layer.output_mode == "tf_idf"
    mode = "count" if weighted else layer.output_mode
    encoded: Any = encode_categorical_inputs(indices, mode, depth, dtype=indices.dtype)
    if not weighted:
        return encoded
    weights = np.asarray(layer.idf_weights_const)
    return encoded.astype(weights.dtype) * weights


def _indices(layer, inputs) -> jax.Array:
    """The index of every value in the vocabulary; for an inverted layer, the value at an index."""
    dtype = jax.dtypes.canonicalize_dtype("int64")
    tokens = np.asarray(layer.get_vocabulary(include_special_tokens=False), "int64")
    places = np.arange(len(tokens)) + layer._token_start_index()
    keys, values = (places, tokens) if layer.invert else (tokens, places)
    if len(tokens) and max(abs(int(tokens.min())), int(tokens.max())) > np.iinfo(dtype).max:
        raise value_error(
            "In a compiled model, integers of a vocabulary must fit into JAX's integers.",
            received={"layer": layer.name, "largest": int(np.abs(tokens).max())},
            fix=f"Set JAX_ENABLE_X64=1. {_PIPELINE}",
        )
    inputs = inputs.astype(dtype)
    order = np.argsort(keys)
    keys, values = jnp.asarray(keys[order], dtype), jnp.asarray(values[order], dtype)
    found = jnp.full(inputs.shape, layer._default_value, dtype)
    if len(tokens):
        at = jnp.clip(jnp.searchsorted(keys, inputs), 0, len(tokens) - 1)
        found = jnp.where(keys[at] == inputs, values[at], found)
    if layer.mask_token is not None:
        mask = int(layer._mask_value.numpy())
        # The largest 64-bit integer stands for "leave out".
        mask = min(mask, np.iinfo(dtype).max)
        found = jnp.where(inputs == int(layer._mask_key.numpy()), mask, found)
    if not layer.invert and layer.num_oov_indices > 1:
        others = jnp.mod(inputs, layer.num_oov_indices) + layer._oov_start_index()
        found = jnp.where(found == layer._default_value, others, found)
    return found


def _check_fits_in_program(layer) -> None:
    options, fix = {}, _PIPELINE
    if not layer.invert and layer.num_oov_indices == 0:
        options = {"num_oov_indices": 0}
        fix = "A program cannot raise for a value that is not in the vocabulary: give the layer "
        fix += f"num_oov_indices=1. {_PIPELINE}"
    elif layer.num_oov_indices > 1 and layer.oov_method == "farmhash":
        options = {"oov_method": "farmhash"}
        fix = f'Give it oov_method="floormod". {_PIPELINE}'
    if options:
        raise value_error(
            "Not all options of IntegerLookup work in a compiled model.",
            received={"layer": layer.name, **options},
            fix=fix,
        )


def _refused(stock, layer, args, kwargs):
    """A call of a layer that only TensorFlow's operations on the host can compute."""
    arrays = [a for a in jax.tree.leaves((args, kwargs)) if isinstance(a, jax.core.Tracer)]
    if active_strategy() is None or not arrays:
        return stock(*args, **kwargs)
    raise value_error(
        f"{type(layer).__name__} computes on the host, with TensorFlow; a compiled model "
        "cannot hold it.",
        received={"layer": layer.name, "dtypes": [str(a.dtype) for a in arrays]},
        fix=f"{_PIPELINE} IntegerLookup and Discretization work in the model.",
    )


# Layers that TensorFlow computes on the host, and their replacements in a program.
_ROUTES = (
    (keras.layers.IntegerLookup, _looked_up),
    (keras.layers.Hashing, _refused),
    (keras.layers.HashedCrossing, _refused),
    (keras.layers.StringLookup, _refused),
    (keras.layers.TextVectorization, _refused),
)


def _route(layer: Any) -> None:
    for kind, around in _ROUTES:
        if isinstance(layer, kind):
            route_calls(type(layer), "lookups", around, "call")


def _route_all(model: Any, jit_compile: Any) -> None:
    for layer in flatten_layers(model) if active_strategy() is not None else ():
        _route(layer)


on_new_layer(_route)
on_compile(_route_all)
