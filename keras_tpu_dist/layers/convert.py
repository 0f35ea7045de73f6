"""The same model with Keras's recurrent layers, and mixtures of experts, made faster."""

import warnings
from typing import Any

import jax.numpy as jnp
import keras
from keras import tree

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import check_model
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.layers.bidirectional import Bidirectional
from keras_tpu_dist.layers.experts import route_experts
from keras_tpu_dist.layers.recurrent import GRU, LSTM, SimpleRNN
from keras_tpu_dist.layers.time_distributed import TimeDistributed

_REPLACED = {
    getattr(keras.layers, ours.__name__): ours
    for ours in (LSTM, GRU, SimpleRNN, Bidirectional, TimeDistributed)
}


def convert(model):
    """Clones a model, with its recurrent layers and `TimeDistributed` replaced by faster ones.

    Layers of any class that compute every expert for every token, and weight them by what `top_k`
    chose, compute the chosen experts only.

    Weights, random states, and the compiled optimizer with its slots, loss and metrics are kept,
    and the names of layers where Keras keeps them in a config (functional and Sequential models,
    at any depth), and what `split`, `replicate`, `assign`, `remat` and `scan_blocks` wrote on
    layers. A subclassed model needs a `get_config` from which it can be made again. The original
    is not touched. `RNN(cell)`, `ConvLSTM` and subclasses of Keras's layers stay as they
    are.

    Args:
        model: A built `keras.Model`.

    Returns:
        A new model of the same class.

    Raises:
        ValueError: If the model is not built, or cannot be made again from its config.

    Example:

    >>> import keras
    >>> import keras_tpu_dist as ktd
    >>> model = keras.Sequential([keras.Input((None, 3)), keras.layers.LSTM(4)])
    >>> type(ktd.convert(model).layers[0]).__module__
    'keras_tpu_dist.layers.recurrent'
    """
    check_model(model, "convert")
    if not model.built:
        raise ValueError(
            message(
                "Only a built model can be converted, because its weights are kept.",
                received={"model": model.name, "built": False},
                fix="Call model.build(input_shape), or the model on one batch, first.",
            )
        )
    clone, build, compiled = _make_again(model)
    for layer in _keras.flatten_layers(clone):
        if type(layer) in _REPLACED:
            # Our classes add methods to Keras's and no state, so that the clone's layer becomes
            # one of ours where it stands, in whatever attribute, list or wrapper that is.
            layer.__class__ = _REPLACED[type(layer)]
    if not clone.built:
        clone.build_from_config(build)
    _copy(model.weights, clone.weights, model)
    _copy(_random_states(model), _random_states(clone), model)
    _copy_what_is_written(model, clone)
    route_experts(clone)
    if compiled:
        _compile(model, clone, compiled)
    return clone


def _make_again(model):
    """A new model from the model's config, and how to build and compile it."""
    try:
        with warnings.catch_warnings():
            # Nothing is stored: the functions that a model was compiled with are handed on.
            warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
            config: Any = keras.saving.serialize_keras_object(model)
        build, compiled = config.pop("build_config", None), config.pop("compile_config", None)
        if isinstance(model, keras.Sequential | _keras.Functional):
            return keras.saving.deserialize_keras_object(config), build, compiled
        return type(model).from_config(config["config"]), build, compiled
    except (TypeError, NotImplementedError) as error:
        raise ValueError(
            message(
                "A model can be converted if it can be made from its own config.",
                received=f"{type(model).__name__}: {str(error).strip().splitlines()[0]}",
                fix="Give the model a get_config() that returns the arguments of its __init__, or "
                "use ktd.layers.LSTM and its kin when you build it.",
            )
        ) from error


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
    """What to compile the clone with: nothing that holds state is the original's own."""
    given: Any = config
    made: Any
    if type(model).get_compile_config is keras.Model.get_compile_config:
        # What was given, unlike its config, has the functions that no config can give back.
        given = _keras.compile_arguments(model)
    try:
        if given is config:
            made = keras.saving.deserialize_keras_object(config)
        else:
            made = tree.map_structure(_anew, given)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            message(
                "What a model is compiled with is copied, so it must be possible to make it from "
                "its own config.",
                received=f"model {model.name!r}: {str(error).strip().splitlines()[0]}",
                fix="Register your classes with keras.saving.register_keras_serializable(), or "
                "convert the model before you compile it.",
            )
        ) from error
    return made


def _anew(given):
    """A copy of an object of Keras; anything else is used as it is."""
    if isinstance(given, type) or not hasattr(given, "get_config"):
        return given
    return keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(given))


def _copy(sources, targets, model):
    if [tuple(v.shape) for v in sources] != [tuple(v.shape) for v in targets]:
        before, after = [v.path for v in sources], [v.path for v in targets]
        raise ValueError(_not_alike("variables", before, after, model))
    for source, target in zip(sources, targets):
        # A train step gives its model's arrays away; shared ones would take the other's along.
        target.assign(jnp.copy(source.value))


def _copy_what_is_written(model, clone):
    before, after = ([each.name for each in _keras.flatten_layers(m)] for m in (model, clone))
    if len(before) != len(after):
        raise ValueError(_not_alike("layers", before, after, model))
    # Files keep a part of it only, and a layer that has become one of ours has methods of its own.
    _keras.copy_marks(model, clone)


def _not_alike(what, original, converted, model) -> str:
    return message(
        f"The converted model must have the {what} of the original.",
        received=f"model {model.name!r} with {original}, converted to {converted}.",
        fix="Check that the model's get_config() says all that its __init__ was given.",
    )
