"""Layers side by side that differ in names, seeds and the values of their weights alone."""

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

from keras_tpu_dist import _keras

# Keys of configs that tell equal layers apart.
_NAMES = ("name", "layer_name")
_OWN = {"seed", "shared_object_id", "build_config", "registered_name"}


def equal_layers(model: Any) -> dict[int, Hashable]:
    """The layers with weights that have an equal one beside them, the outermost of each.

    Args:
        model: A built model.

    Returns:
        From the `id` of a layer to what it has in common with those that are equal.

    Example:

    >>> import keras
    >>> blocks = [keras.layers.Dense(4, "relu", name=f"block_{i}") for i in range(3)]
    >>> model = keras.Sequential([keras.Input((4,)), *blocks, keras.layers.Dense(1)])
    >>> [id(layer) in equal_layers(model) for layer in model.layers]
    [True, True, True, False]
    """
    found: dict[int, Hashable] = {}
    inner = {id(layer): layer for layer in _keras.sublayers(model) if layer.variables}
    keys = {number: what_counts(layer) for number, layer in inner.items()}
    counts = Counter(keys.values())
    for number, layer in inner.items():
        if counts[keys[number]] > 1:
            found[number] = keys[number]
        else:
            found.update(equal_layers(layer))
    return found


def what_counts(layer: Any) -> Hashable:
    """What a layer has in common with those that are equal to it.

    Args:
        layer: A built layer.
    """
    weights = tuple((tuple(v.shape), str(v.dtype), v.trainable, _spec(v)) for v in layer.variables)
    return type(layer), config_of(layer), weights


def _spec(variable: Any) -> str:
    return str(getattr(_keras.variable_layout(variable), "spec", None))


def config_of(layer: Any) -> str:
    """A layer's config without what is its own; of one that has none, nothing.

    What the layers compute is compared as well, in the program.

    Args:
        layer: The layer.
    """
    try:
        config = layer.get_config()
    except NotImplementedError:
        return ""
    names = {name: f"#{i}" for i, name in enumerate(dict.fromkeys(_names(config)))}
    return repr(_without_names(config, names))


def _names(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        for key, value in config.items():
            if key in _NAMES and isinstance(value, str):
                yield value
            elif key != "dtype":
                yield from _names(value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _names(value)


def _without_names(config: Any, names: dict[str, str]) -> Any:
    if isinstance(config, dict):
        return {
            key: value if key == "dtype" else _without_names(value, names)
            for key, value in config.items()
            if key not in _OWN
        }
    if isinstance(config, (list, tuple)):
        return [_without_names(value, names) for value in config]
    if isinstance(config, str):
        return names.get(config, config)
    return config
