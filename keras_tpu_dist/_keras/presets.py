"""Private names of KerasHub: where the weights of a preset lie, and the layers with LoRA."""

import json
import os
import sys
from typing import Any

from keras_tpu_dist._keras.structure import flatten_layers
from keras_tpu_dist.common.errors import value_error

CONFIG_OF_PRESET = "config.json"
_WEIGHTS, _MAP = "model.weights.h5", "model.weights.json"


def backbones_in(model: Any) -> list:
    """The backbones of KerasHub in a model, which may be one itself."""
    # A model that has one has imported it.
    keras_hub = sys.modules.get("keras_hub")
    if keras_hub is None:
        return []
    kind = keras_hub.models.Backbone
    return [layer for layer in flatten_layers(model) if isinstance(layer, kind)]


def weights_of_preset(preset: str) -> str:
    """The file with the weights of a preset's backbone, which KerasHub downloads if need be.

    Public replacement: none; `Backbone.from_preset` makes a second model.

    Args:
        preset: A folder that `save_to_preset` wrote, or a name that `from_preset` takes.
    """
    for name in (_WEIGHTS, _MAP):
        try:
            path = _file_of(preset, name)
        except FileNotFoundError:
            continue
        if name == _MAP:
            with open(path, encoding="utf-8") as file:
                shards = json.load(file)["weight_map"].values()
            names = {name for of_layer in shards for name in _listed(of_layer)}
            for shard in sorted(names):
                _file_of(preset, shard)
        return path
    raise value_error(
        "A preset as the base has weights in Keras's format.",
        received=f"{preset!r}, which has neither {_WEIGHTS} nor {_MAP}.",
        fix="Build the model with from_preset, which converts other formats; then it has its base.",
    )


def _file_of(preset: str, name: str) -> str:
    if os.path.isdir(preset):
        path = os.path.join(preset, name)
        if not os.path.isfile(path):
            raise FileNotFoundError(path)
        return path
    from keras_hub.src.utils import preset_utils

    return str(preset_utils.get_file(preset, name))


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [value]
