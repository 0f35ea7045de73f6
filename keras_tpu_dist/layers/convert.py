"""Replaces Keras's recurrent layers, and mixtures of experts, by faster ones."""

import warnings
from typing import Any

import jax.numpy as jnp
import keras
from keras import tree

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import check_model
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.layers.beside import give_beside, has_more, values_beside
from keras_tpu_dist.layers.bidirectional import Bidirectional
from keras_tpu_dist.layers.experts import route_experts
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

    The clone has the weights and random states of the model, what `adapt` found, what trains of it,
    quantization, LoRA, and its compiled optimizer with slots, loss and metrics. It keeps the names
    of layers if Keras keeps them in a config (functional and Sequential models, at any depth), and
    the marks of `split`, `replicate`, `assign`, `remat` and `scan_blocks`. A subclassed model needs
    a `get_config` that can rebuild it. The original is not changed. `RNN(cell)`, `ConvLSTM` and
    subclasses of Keras's layers are not replaced.

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
    clone, build, compiled = _make_again(model)
    for layer in _keras.flatten_layers(clone):
        if type(layer) in _REPLACED:
            # Our classes add methods to Keras's and no state. So the layer of the clone can change
            # its class in place, in whatever attribute, list or wrapper it is.
            layer.__class__ = _REPLACED[type(layer)]
    if not clone.built:
        clone.build_from_config(build)
    _repeat_changes(model, clone)
    _copy(model.weights, clone.weights, model)
    _copy(_random_states(model), _random_states(clone), model)
    for before, after in zip(_keras.flatten_layers(model), _keras.flatten_layers(clone)):
        if has_more(before):
            give_beside(after, values_beside(before), f"model {model.name!r}")
    _copy_what_is_written(model, clone)
    route_experts(clone)
    if compiled:
        _compile(model, clone, compiled)
    return clone


def _make_again(model):
    """A new model from the model's config, and functions that build and compile it."""
    try:
        with warnings.catch_warnings():
            # Nothing is saved here: the functions that a model was compiled with are passed on.
            warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
            config: Any = keras.saving.serialize_keras_object(model)
        build, compiled = config.pop("build_config", None), config.pop("compile_config", None)
        if isinstance(model, keras.Sequential | _keras.Functional):
            return keras.saving.deserialize_keras_object(config), build, compiled
        return type(model).from_config(config["config"]), build, compiled
    except (TypeError, NotImplementedError) as error:
        raise value_error(
            "convert rebuilds a model from its own config.",
            received=f"{type(model).__name__}: {str(error).strip().splitlines()[0]}",
            fix="Give the model a get_config() that returns the arguments of its __init__.",
        ) from error


def _repeat_changes(model, clone):
    """Repeats what was done to layers since they were made, which no config of a layer that holds
    them knows: quantization, LoRA, and what trains.
    """
    pairs = list(zip(_keras.flatten_layers(model), _keras.flatten_layers(clone)))
    for before, after in pairs:
        mode = getattr(before, "quantization_mode", None)
        if mode and not getattr(after, "quantization_mode", mode):
            after.quantize(mode, config=before.quantization_config)
    for before, after in pairs:
        if getattr(before, "lora_enabled", False) and not getattr(after, "lora_enabled", True):
            after.enable_lora(before.lora_rank, lora_alpha=before.lora_alpha)
    for before, after in pairs:  # a layer before the layers in it, as its flag is theirs too
        if after.trainable != before.trainable:
            after.trainable = before.trainable
    for before, after in zip(model.variables, clone.variables):
        if after.trainable != before.trainable:
            after.trainable = before.trainable


def _random_states(layer):
    weights = {id(weight) for weight in layer.weights}
    return [v for v in layer.variables if id(v) not in weights and "seed" in v.path]


def _compile(model, clone, config):
    if type(model).compile_from_config is not keras.Model.compile_from_config:
        clone.compile_from_config(config)
    else:
        clone.compile(**_arguments(model, config))
    if model.optimizer is not None and model.optimizer.built:
        clone.optimizer.build(clone.trainable_variables)
        _copy(model.optimizer.variables, clone.optimizer.variables, model)


def _arguments(model, config) -> dict[str, Any]:
    """The arguments to compile the clone with; objects with state are copied."""
    given: Any = config
    made: Any
    if type(model).get_compile_config is keras.Model.get_compile_config:
        # The given arguments have functions that cannot be rebuilt from the config.
        given = _keras.compile_arguments(model)
    try:
        if given is config:
            made = keras.saving.deserialize_keras_object(config)
        else:
            made = tree.map_structure(_anew, given)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise value_error(
            "convert copies the arguments that the model is compiled with, so it must be able "
            "to "
            "rebuild them from their config.",
            received=f"model {model.name!r}: {str(error).strip().splitlines()[0]}",
            fix="Register your classes with keras.saving.register_keras_serializable(), or "
            "convert the model before you compile it.",
        ) from error
    return made


def _anew(given):
    """A copy of a Keras object; anything else is used as it is."""
    if isinstance(given, type) or not hasattr(given, "get_config"):
        return given
    return keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(given))


def _copy(sources, targets, model):
    if [tuple(v.shape) for v in sources] != [tuple(v.shape) for v in targets]:
        before, after = [v.path for v in sources], [v.path for v in targets]
        raise ValueError(_not_alike("variables", before, after, model))
    for source, target in zip(sources, targets):
        # A train step donates its model's arrays; if they were shared, the other model would lose
        # them.
        target.assign(jnp.copy(source.value))


def _copy_what_is_written(model, clone):
    before, after = ([layer.name for layer in _keras.flatten_layers(m)] for m in (model, clone))
    if len(before) != len(after):
        raise ValueError(_not_alike("layers", before, after, model))
    # Files have only a part of the marks, and a converted layer has its own methods.
    _keras.copy_marks(model, clone)


def _not_alike(what, original, converted, model) -> str:
    return message(
        f"The converted model must have the {what} of the original.",
        received=f"model {model.name!r} with {original}, converted to {converted}.",
        fix="Check that the model's get_config() returns all arguments of its __init__.",
    )
