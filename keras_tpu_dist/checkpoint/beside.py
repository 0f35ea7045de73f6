"""What layers keep beside their variables: saved and loaded by the layers' own methods.

`save_own_variables` and `load_own_variables` may hold more than variables, `save_assets` and
`load_assets` have files, and loading may compute something, as `Normalization` does.
"""

import contextlib
import logging
import math
import pathlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.manifest import Manifest, Saved
from keras_tpu_dist.checkpoint.names import Entry, automatic_names, match, numbered
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.training import membership

logger = logging.getLogger("keras_tpu_dist")

BESIDE = "beside"
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
_VALUES, _FILES, _OTHERS = "values/", "files/", "attributes/"
# Besides the model's size: a vocabulary may be larger than a small model.
_MOST_BYTES = 64 * 2**20


def layers_with_more(model: Any) -> list:
    """The layers that say themselves how they are saved or loaded, parents first.

    Args:
        model: A model, or a layer.
    """
    return [each for each in _keras.flatten_layers(model) if _has_more(each)]


def _has_more(layer: Any) -> bool:
    kind, stock = type(layer), keras.Layer
    if kind.save_own_variables in _OF_VARIABLES:
        return bool(_attributes_of_keras(layer))
    return (
        kind.save_own_variables is not stock.save_own_variables
        or kind.load_own_variables is not stock.load_own_variables
        or hasattr(layer, "save_assets")
    )


def values_beside(layer: Any) -> dict[str, Any]:
    """The arrays that a layer keeps beside its variables, by name; files as bytes.

    Args:
        layer: The layer.
    """
    found: dict[str, Any] = {}
    if type(layer).save_own_variables not in _OF_VARIABLES:
        for key, value in (_recorded(layer) or {}).items():
            if isinstance(value, keras.Variable):
                continue
            array = value if hasattr(value, "sharding") else np.array(value)
            if array.dtype.kind in "biufcV" and not array.dtype.names:
                found[_VALUES + key] = array
            else:
                log_once(
                    f"layer {layer.name!r} saves {key!r} as {array.dtype}, which a checkpoint does "
                    "not hold: save numbers",
                    logging.WARNING,
                )
    for name in _attributes_of_keras(layer):
        if getattr(layer, name) is not None:
            found[_OTHERS + name] = np.asarray(getattr(layer, name), _ATTRIBUTES[name])
    for path, content in _files(layer).items():
        found[_FILES + path] = np.frombuffer(content, np.uint8)
    return found


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


def _files(layer: Any) -> dict[str, bytes]:
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
        layer: The layer.
        saved: Values of `values_beside`, by name; what is missing stays as it is.
        where: The checkpoint, for errors.

    Returns:
        Whether something beside the variables has changed, so that programs are made anew.

    Raises:
        ValueError: If the layer does not take what was saved.
    """
    kept = [(variable, variable.value) for variable in layer.variables]
    with _taking(layer, where) as changed:
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


def load_values(layer: Any, values: Mapping[str, Any], where: str, models: Sequence[Any]) -> None:
    """Lets a layer load all of its state from a file of Keras.

    Args:
        layer: The layer.
        values: What it saved.
        where: The file, for errors.
        models: The models whose programs may have what it keeps.

    Raises:
        ValueError: If the layer does not take it.
    """
    with _taking(layer, where) as changed:
        layer.load_own_variables(dict(values))
    if changed:
        membership.constants.changed(models)


def give_to_layers(model: Any, loaded: Sequence[Any], where: str, others: set) -> None:
    """Lets layers compute what they keep of their variables, which have been loaded.

    Args:
        model: The model.
        loaded: The variables that were loaded.
        where: The file, for errors.
        others: Layers that have loaded their state.
    """
    ids = {id(variable) for variable in loaded}
    for layer in layers_with_more(model):
        mine = any(id(variable) in ids for variable in layer.variables)
        if mine and layer not in others and give_beside(layer, {}, where):
            membership.constants.changed([model])
    lost = [each.name for each in layers_with_more(model) if _files(each)]
    if lost:
        logger.warning(
            "%s is read for its weights alone, so vocabularies and other files of %d layers stay "
            "as they are (%s): keras.models.load_model reads all of a .keras file",
            where,
            len(lost),
            ", ".join(lost[:3]),
        )


@contextlib.contextmanager
def _taking(layer: Any, where: str) -> Iterator[list]:
    """A context in which a layer loads something; what it yields has elements afterwards if
    something beside the variables has changed, so that programs are made anew."""
    before, changed = _attributes(layer), []
    try:
        yield changed
    except Exception as error:
        raise ValueError(
            message(
                f"Layer {layer.name!r} does not take what it keeps beside its variables.",
                received=f"{type(error).__name__}: {error} ({where}).",
                fix="Give the layer the arguments that it had when it was saved, or let its "
                "load_own_variables and load_assets take what save_own_variables and save_assets "
                "write.",
            )
        ) from error
    now = _attributes(layer)
    if before.keys() != now.keys() or not all(_same(now[name], before[name]) for name in now):
        changed.append(layer.name)


def _give_files(layer: Any, saved: Mapping[str, Any]) -> None:
    files = {k.removeprefix(_FILES): v for k, v in saved.items() if k.startswith(_FILES)}
    contents = {name: np.asarray(v, np.uint8).tobytes() for name, v in files.items()}
    # A table of words takes long to make, and programs that have it would be compiled again.
    if not contents or not hasattr(layer, "load_assets") or contents == _files(layer):
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


def rows_beside(models: Sequence[Any]) -> list[list[tuple[str, Entry, Any]]]:
    """The arrays that the layers of models keep beside their variables, for a snapshot.

    Args:
        models: The models.

    Returns:
        For each model, the kind, the entry, and the array of each.
    """
    rows: list[list[tuple[str, Entry, Any]]] = [[] for _ in models]
    for number, layer, path, nth in _numbered(models):
        for name, array in values_beside(layer).items():
            entry = Entry(f"{path}/{name}", array.shape, str(array.dtype), nth=nth)
            rows[number].append((BESIDE, entry, array))
    return rows


def _numbered(models: Sequence[Any]) -> list[tuple[int, Any, str, int]]:
    """The layers of models with more than variables: the number of the model, the layer, its path,
    and how many equal paths are before it."""
    layers: dict[int, tuple[int, Any]] = {}
    for number, model in enumerate(models):
        for layer in layers_with_more(model):
            layers.setdefault(id(layer), (number, layer))
    names = numbered(layer.path or layer.name for _, layer in layers.values())
    return [(*each, path, nth) for each, (path, nth) in zip(layers.values(), names, strict=True)]


def load_beside(
    models: Sequence[Any],
    manifest: Manifest,
    load: Callable[[list[tuple[Saved, Any, Any]]], list[Any]],
    loaded: Sequence[Any],
    where: str,
    rename: Sequence[tuple[str, str]] = (),
    among: Sequence[int] = (),
) -> None:
    """Lets layers load their state, after their variables.

    Args:
        models: The models.
        manifest: The checkpoint's manifest.
        load: Reads arrays of it. See `Store.load`.
        loaded: The variables that were loaded; layers of which none was are left alone.
        where: The checkpoint, for errors.
        rename: See `restore`.
        among: For each model, its number among those that a loop saved; none if it is all of them.

    Raises:
        ValueError: If a layer does not take what was saved.
        CheckpointError: If an array cannot be read.
    """
    ids = {id(variable) for variable in loaded}
    here = [
        each
        for each in _numbered(models)
        if not each[1].variables or any(id(variable) in ids for variable in each[1].variables)
    ]
    counts = [count for _, count in manifest.objects(BESIDE)]
    if max(among, default=len(counts)) >= len(counts):
        among, counts = [0] * len(models), [len(manifest.arrays.get(BESIDE, ()))]
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    by_layer: dict[tuple[int, str, int], dict[str, Saved]] = defaultdict(dict)
    for owner, each in zip(owners, _small_enough(manifest, models)):
        path, name = _split(each.entry.path)
        by_layer[owner, path, each.entry.nth][name] = each
    automatic = automatic_names(models)
    pairs: dict[int, dict[str, Saved]] = {}
    for number in set(among):
        mine = [i for i, each in enumerate(here) if among[each[0]] == number]
        theirs = [each for each in by_layer if each[0] == number]
        # By the layers' paths: what a layer has now may have other names, and other shapes.
        found = match(
            [Entry(here[i][2], (), "float32", nth=here[i][3]) for i in mine],
            [Entry(path, (), "float32", nth=nth) for _, path, nth in theirs],
            automatic=automatic,
            automatic_there=manifest.automatic,
            rename=rename,
        )
        pairs |= {mine[i]: by_layer[theirs[j]] for i, j in found.pairs.items()}
    lacking = []
    for i, (_, layer, _, _) in enumerate(here):
        own = pairs.get(i, {})
        values = load([(each, None, each.entry.dtype) for each in own.values()])
        by_name = dict(zip(own, values, strict=True))
        if not by_name and values_beside(layer):
            lacking.append(layer.path)
        if give_beside(layer, by_name, where):
            membership.constants.changed(models)
    if lacking:
        logger.warning(
            "%s has nothing of what %d layers keep beside their variables (%s): they keep what "
            "they have",
            where,
            len(lacking),
            ", ".join(lacking[:3]),
        )


def _split(path: str) -> tuple[str, str]:
    """The layer's path, and the name of the value in it."""
    for mark in (_VALUES, _FILES, _OTHERS):
        before, found, after = path.partition(f"/{mark}")
        if found:
            return before, mark + after
    return path, ""


def _small_enough(manifest: Manifest, models: Sequence[Any]) -> tuple[Saved, ...]:
    saved = manifest.arrays.get(BESIDE, ())
    size = sum(math.prod(each.entry.shape) * _bytes_of(each) for each in saved)
    own = sum(variable.value.nbytes for model in models for variable in model.variables)
    if size <= max(own, _MOST_BYTES):
        return saved
    logger.warning(
        "the checkpoint has %d bytes beside the variables of its layers, more than the model and "
        "than 64 MiB: they are not loaded",
        size,
    )
    return ()


def _bytes_of(saved: Saved) -> int:
    return np.dtype(saved.entry.dtype).itemsize
