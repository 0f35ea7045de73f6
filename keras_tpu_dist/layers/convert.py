"""The same model with Keras's recurrent layers replaced by those of this package."""

import logging

import keras

from keras_tpu_dist._keras import Functional
from keras_tpu_dist.errors import message
from keras_tpu_dist.layers.bidirectional import Bidirectional
from keras_tpu_dist.layers.recurrent import GRU, LSTM, SimpleRNN
from keras_tpu_dist.layers.time_distributed import TimeDistributed

logger = logging.getLogger("keras_tpu_dist")

_REPLACED = {
    getattr(keras.layers, ours.__name__): ours
    for ours in (LSTM, GRU, SimpleRNN, Bidirectional, TimeDistributed)
}
_BY_NAME = {ours.__name__: ours for ours in _REPLACED.values()}


def convert(model):
    """Clones a model, with its recurrent layers and `TimeDistributed` replaced by faster ones.

    Weights, random states, names, and the compiled optimizer with its slots, loss and metrics are
    kept; the original is not touched. Functional and Sequential models are converted at any depth.
    Of a subclassed model, which needs a working `get_config`, the layers that are attributes (or
    lists in attributes) of the model are replaced; any that remain are named in a warning of the
    logger "keras_tpu_dist".

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
    if not model.built:
        raise ValueError(
            message(
                "Only a built model can be converted, because its weights are kept.",
                received={"model": model.name, "built": False},
                fix="Call model.build(input_shape), or the model on one batch, first.",
            )
        )
    config = _replace(keras.saving.serialize_keras_object(model))
    build, compiled = config.pop("build_config", None), config.pop("compile_config", None)
    clone = _make(model, config)
    if not clone.built:
        _replace_attributes(clone)
        clone.build_from_config(build)
    _copy(model.weights, clone.weights, model)
    _copy(_random_states(model), _random_states(clone), model)
    if compiled:
        clone.compile_from_config(compiled)
        if model.optimizer is not None and model.optimizer.built:
            clone.optimizer.build(clone.trainable_variables)
            _copy(model.optimizer.variables, clone.optimizer.variables, model)
    left = [layer.path for layer in clone._flatten_layers() if type(layer) in _REPLACED]
    if left:
        logger.warning("convert(%s) could not reach: %s", model.name, ", ".join(left))
    return clone


def _replace(config):
    """The same config with our classes where Keras's recurrent layers stood."""
    if isinstance(config, list | tuple):
        return [_replace(item) for item in config]
    if not isinstance(config, dict):
        return config
    config = {key: _replace(value) for key, value in config.items()}
    ours = _BY_NAME.get(config.get("class_name"))
    if ours is not None and config.get("module") == "keras.layers":
        name = keras.saving.get_registered_name(ours)
        config.update(module=ours.__module__, registered_name=name)
    return config


def _make(model, config):
    try:
        if isinstance(model, keras.Sequential | Functional):
            return keras.saving.deserialize_keras_object(config)
        return type(model).from_config(config["config"])
    except (TypeError, NotImplementedError) as error:
        raise ValueError(
            message(
                "A model can be converted if it can be made from its own config.",
                received=f"{type(model).__name__}.from_config failed: {error}",
                fix="Give the model a get_config() that returns the arguments of its __init__, or "
                "use ktd.layers.LSTM and its kin when you build it.",
            )
        ) from error


def _replace_attributes(model):
    for name, value in list(vars(model).items()):
        if type(value) in _REPLACED:
            setattr(model, name, _clone(value))
        elif isinstance(value, list) and not name.startswith("_"):
            for index, item in enumerate(value):
                if type(item) in _REPLACED:
                    value[index] = _clone(item)


def _clone(layer):
    return _REPLACED[type(layer)].from_config(_replace(layer.get_config()))


def _random_states(model):
    weights = {id(weight) for weight in model.weights}
    return [v for v in model.variables if id(v) not in weights and "seed" in v.path]


def _copy(sources, targets, model):
    if [tuple(v.shape) for v in sources] != [tuple(v.shape) for v in targets]:
        raise ValueError(
            message(
                "The converted model must have the variables of the original.",
                received=f"model {model.name!r} with {[v.path for v in sources]}, converted to "
                f"{[v.path for v in targets]}.",
                fix="Check that the model's get_config() says all that its __init__ was given.",
            )
        )
    for source, target in zip(sources, targets):
        target.assign(source.value)
