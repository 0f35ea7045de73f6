"""What layers keep beside their variables: saved and loaded by the layers' own methods.

`save_own_variables` and `load_own_variables` may hold more than variables, `save_assets` and
`load_assets` have files, and loading may compute something, as `Normalization` does.
"""

import contextlib
import logging
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.marked import NUMBERS
from keras_tpu_dist.common.once import log_once

# These layers write their variables, with LoRA merged into them, and keep nothing else.
_OF_VARIABLES = tuple(
    kind.save_own_variables
    for kind in (
        keras.layers.Dense,
        keras.layers.EinsumDense,
        keras.layers.Embedding,
        keras.layers.Conv2D,
    )
)
# Attributes of Keras's layers that no method saves: what `adapt` found, whether it was called on a
# `FeatureSpace`, and whether kernels were quantized by data that the model has seen.
_ATTRIBUTES = {
    "built": "bool",
    "bin_boundaries": "float32",
    "is_gptq_calibrated": "bool",
    "is_awq_calibrated": "bool",
}
_VALUES, _FILES, _OTHERS = MARKS = "values/", "files/", "attributes/"


def layers_with_more(model: Any) -> list:
    """The layers that say themselves how they are saved or loaded, parents first."""
    return [layer for layer in _keras.flatten_layers(model) if has_more(layer)]


def has_more(layer: Any) -> bool:
    """Whether a layer says itself how it is saved or loaded."""
    kind, stock = type(layer), keras.Layer
    if kind.save_own_variables in _OF_VARIABLES:
        return bool(_attributes_of_keras(layer))
    return (
        kind.save_own_variables is not stock.save_own_variables
        or kind.load_own_variables is not stock.load_own_variables
        or hasattr(layer, "save_assets")
    )


def values_beside(layer: Any) -> dict[str, Any]:
    """The arrays that a layer keeps beside its variables, by name; files as bytes."""
    values: dict[str, Any] = {}
    if type(layer).save_own_variables not in _OF_VARIABLES:
        for key, value in (_recorded(layer) or {}).items():
            if isinstance(value, keras.Variable):
                continue
            array = value if hasattr(value, "sharding") else np.array(value)
            if str(array.dtype) in NUMBERS:
                values[_VALUES + key] = array
            else:
                log_once(
                    f"layer {layer.name!r} saves {key!r} as {array.dtype}, which a checkpoint does "
                    "not hold: save numbers",
                    logging.WARNING,
                )
    for name in _attributes_of_keras(layer):
        if getattr(layer, name) is not None:
            values[_OTHERS + name] = np.asarray(getattr(layer, name), _ATTRIBUTES[name])
    for path, content in files_of(layer).items():
        values[_FILES + path] = np.frombuffer(content, np.uint8)
    return values


def _attributes_of_keras(layer: Any) -> list[str]:
    if isinstance(layer, keras.layers.Discretization):
        return ["bin_boundaries"] if layer.num_bins is not None else []
    if isinstance(layer, keras.utils.FeatureSpace):
        return ["built"]
    if type(layer).save_own_variables in _OF_VARIABLES:
        # Of other layers, they say nothing.
        mode = f"is_{getattr(layer, 'quantization_mode', None)}_calibrated"
        return [mode] if mode in _ATTRIBUTES and hasattr(layer, mode) else []
    return []


def _recorded(layer: Any) -> dict[str, Any] | None:
    """What the layer writes; `None` if it can only write once it was adapted."""
    recorded: dict[str, Any] = {}
    try:
        layer.save_own_variables(recorded)
    except AttributeError:
        if isinstance(layer, _ADAPTED):
            return None
        raise
    return recorded


_ADAPTED = (
    keras.layers.IntegerLookup,
    keras.layers.StringLookup,
    keras.layers.TextVectorization,
)


def files_of(layer: Any) -> dict[str, bytes]:
    """The files that a layer saves, by their paths in its folder."""
    if not hasattr(layer, "save_assets"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(folder)
        root = pathlib.Path(folder)
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def give_beside(layer: Any, saved: Mapping[str, Any], where: str) -> bool:
    """Lets a layer load its state, whose variables have their values already, and keep them.

    Args:
        saved: Values of `values_beside`, by name; what is missing stays as it is.

    Returns:
        Whether something beside the variables has changed, so that programs are made anew.
    """
    kept = [(variable, variable.value) for variable in layer.variables]
    with taking(layer, where) as changed:
        of_variables = type(layer).save_own_variables in _OF_VARIABLES
        recorded = None if of_variables else _recorded(layer)
        store = {
            key: value.value if isinstance(value, keras.Variable) else value
            for key, value in (recorded or {}).items()
        }
        store |= {k.removeprefix(_VALUES): v for k, v in saved.items() if k.startswith(_VALUES)}
        if recorded is not None or store:
            layer.load_own_variables(store)
        for name in _attributes_of_keras(layer):
            if _OTHERS + name not in saved:
                continue
            if name == "built":
                layer.build_from_config({})
            else:
                setattr(layer, name, np.asarray(saved[_OTHERS + name], _ATTRIBUTES[name]).tolist())
        _give_files(layer, saved)
    for variable, value in kept:
        if variable.value is not value:
            variable.assign(value)
    return bool(changed)


@contextlib.contextmanager
def taking(layer: Any, where: str) -> Iterator[list]:
    """A context in which a layer loads something; what it yields has elements afterwards if
    something beside the variables has changed, so that programs are made anew.
    """
    before, changed = _attributes(layer), []
    try:
        yield changed
    except Exception as error:
        raise value_error(
            f"Layer {layer.name!r} does not take what it keeps beside its variables.",
            received=f"{type(error).__name__}: {error} ({where}).",
            fix="Let its load_own_variables take what its save_own_variables writes.",
        ) from error
    now = _attributes(layer)
    if before.keys() != now.keys() or not all(_same(now[name], before[name]) for name in now):
        changed.append(layer.name)


def _give_files(layer: Any, saved: Mapping[str, Any]) -> None:
    files = {k.removeprefix(_FILES): v for k, v in saved.items() if k.startswith(_FILES)}
    contents = {name: np.asarray(v, np.uint8).tobytes() for name, v in files.items()}
    # A table of words takes long to make, and programs that have it would be compiled again.
    if not contents or not hasattr(layer, "load_assets") or contents == files_of(layer):
        return
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve()
        for name, content in contents.items():
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise ValueError(f"a file outside of the layer's folder: {name!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        layer.load_assets(folder)


def _attributes(layer: Any) -> dict[str, Any]:
    """The layer's attributes that are neither variables nor layers."""
    held = (keras.Variable, keras.Layer)
    return {name: value for name, value in vars(layer).items() if not isinstance(value, held)}


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if hasattr(one, "shape") and hasattr(other, "shape"):
        return one.shape == other.shape and bool((np.asarray(one) == np.asarray(other)).all())
    # Private lists and trackers compare by their elements, or by identity.
    with contextlib.suppress(Exception):
        return bool(one == other)
    return False
