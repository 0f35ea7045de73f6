"""Replaces Keras's recurrent layers, and mixtures of experts, by faster ones."""

from typing import Any

import jax.numpy as jnp
import keras
from keras import tree

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import check_model
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.layers.beside import give_beside, has_more, values_beside
from keras_tpu_dist.layers.bidirectional import Bidirectional
from keras_tpu_dist.layers.experts import route_experts
from keras_tpu_dist.layers.freezing import repeat_frozen
from keras_tpu_dist.layers.recurrent import GRU, LSTM, SimpleRNN
from keras_tpu_dist.layers.time_distributed import TimeDistributed

_REPLACED = {
    getattr(keras.layers, ours.__name__): ours
    for ours in (LSTM, GRU, SimpleRNN, Bidirectional, TimeDistributed)
}


def convert(model):
    """Clones a model and replaces its recurrent layers and `TimeDistributed` by faster ones.

    Layers that compute every expert for every token, and weight the results by `top_k`, then
    compute the chosen experts only. This works for layers of any class.

    The clone has the weights, random states and carried states of the model, its names and paths,
    what `adapt` found, what trains of it, quantization, LoRA, and what `compile` was given: the
    optimizer as it is now, with slots, the loss, and metrics that begin anew. It also has what
    `freeze`, `split`, `replicate`, `assign`, `remat` and `scan_blocks` marked. Functions and
    classes, such as that of a `Lambda`, are used as they are and need not be registered. A
    subclassed model needs a `get_config` that can rebuild it. The original is not changed.
    `RNN(cell)`, `ConvLSTM` and subclasses of Keras's layers are not replaced.

    Args:
        model: A built `keras.Model`.

    Returns:
        A new model of the same class.

    Raises:
        ValueError: If the model is not built, or cannot be rebuilt from its config.

    Example:

    >>> import keras
    >>> import keras_tpu_dist as ktd
    >>> model = keras.Sequential([keras.Input((None, 3)), keras.layers.LSTM(4)])
    >>> type(ktd.convert(model).layers[0]).__module__
    'keras_tpu_dist.layers.recurrent'
    """
    check_model(model, "convert")
    if not model.built:
        raise value_error(
            "Only a built model can be converted, because its weights are copied.",
            received={"model": model.name, "built": False},
            fix="Call model.build(input_shape), or the model on one batch, first.",
        )
    clone = _remade(model)
    for layer in _keras.flatten_layers(clone):
        if type(layer) in _REPLACED:
            # Our classes add methods to Keras's and no state. So the layer of the clone can change
            # its class in place, in whatever attribute, list or wrapper it is.
            layer.__class__ = _REPLACED[type(layer)]
    if not clone.built:
        clone.build_from_config(model.get_build_config())
    _repeat_changes(_keras.paired_layers(model, clone))
    pairs = _keras.paired(model, clone)
    _keras.repeat_names(pairs)
    for before, after in pairs.variables:
        if after.trainable != before.trainable:
            after.trainable = before.trainable
        # A train step donates its model's arrays; if they were shared, the other model would lose
        # them.
        after.assign(jnp.copy(before.value))
    repeat_frozen(pairs)
    for before, after in pairs.layers:
        if has_more(before):
            give_beside(after, values_beside(before), f"model {model.name!r}")
    # Files have only a part of the marks, and a converted layer has its own methods.
    _keras.copy_marks(pairs.layers)
    route_experts(clone)
    if getattr(model, "compiled", False):
        _compile(model, clone, pairs)
    return clone


def _remade(model):
    """A new model from the model's config."""
    try:
        return _keras.remade(model)
    except Exception as error:
        layer, words = _culprit(model, error)
        raise value_error(
            "convert rebuilds a model from its own config.",
            received=f"layer {layer.name!r} ({type(layer).__name__}): {words}",
            fix=f"Give {'the model' if layer is model else 'the layer'} a get_config() that "
            "returns the arguments of its __init__, and a from_config() if some are layers.",
        ) from error


def _culprit(model, error):
    """The innermost layer that fails likewise when it is rebuilt alone, and the first line of its
    error.
    """
    for layer in reversed(_keras.flatten_layers(model)):
        try:
            _keras.remade(layer)
        except Exception as failure:
            if str(failure) in str(error):
                return layer, _first_line(failure)
    return model, _first_line(error)


def _first_line(error) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _repeat_changes(layers):
    """Repeats what was done to layers since they were made, which no config of a layer that holds
    them knows: quantization, LoRA, and what trains.
    """
    for before, after in layers:
        mode = getattr(before, "quantization_mode", None)
        if mode and not getattr(after, "quantization_mode", mode):
            after.quantize(mode, config=before.quantization_config)
    for before, after in layers:
        if getattr(before, "lora_enabled", False) and not getattr(after, "lora_enabled", True):
            after.enable_lora(before.lora_rank, lora_alpha=before.lora_alpha)
    for before, after in layers:  # a layer before the layers in it, as its flag is theirs too
        if after.trainable != before.trainable:
            after.trainable = before.trainable


def _compile(model, clone, pairs):
    copier = _keras.Copier([*pairs.layers, *pairs.variables])
    made: Any
    try:
        kind = type(model)
        if kind.compile_from_config is not keras.Model.compile_from_config:
            clone.compile_from_config(model.get_compile_config())
        elif kind.get_compile_config is not keras.Model.get_compile_config:
            made = keras.saving.deserialize_keras_object(model.get_compile_config())
            clone.compile(**made)
        else:
            made = tree.map_structure(
                lambda given: _anew(given, copier), _keras.compile_arguments(model)
            )
            clone.compile(**made)
        for name, value in vars(model).items():
            # As they are now; `compile` may have been given a word for one.
            if isinstance(value, keras.optimizers.Optimizer):
                setattr(clone, name, copier.of(value))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise value_error(
            "convert compiles the new model with copies of the arguments that the model is "
            "compiled with.",
            received=f"model {model.name!r}: {_first_line(error)}",
            fix="Give a model with a compile() of its own a get_compile_config() and a "
            "compile_from_config(), or convert the model before you compile it.",
        ) from error


def _anew(given, copier: _keras.Copier):
    """A copy of what has a state, or refers to layers; anything else is used as it is."""
    if not isinstance(given, _keras.COPIED):
        return given
    copied = copier.of(given)
    if isinstance(given, keras.metrics.Metric):
        copied.reset_state()
    return copied
