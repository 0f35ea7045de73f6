"""What layers keep beside their variables, in checkpoints and in files of Keras."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_tpu_dist.checkpoint.manifest import Manifest, Saved
from keras_tpu_dist.checkpoint.names import Entry, automatic_names, match, names_of_models, numbered
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.layers.beside import (
    MARKS,
    files_of,
    give_beside,
    layers_with_more,
    taking,
    values_beside,
)
from keras_tpu_dist.training import membership

logger = logging.getLogger("keras_tpu_dist")

BESIDE = "beside"
# Besides the model's size: a vocabulary may be larger than a small model.
_MOST_BYTES = 64 * 2**20


def load_values(layer: Any, values: Mapping[str, Any], where: str, models: Sequence[Any]) -> None:
    """Lets a layer load all of its state from a file of Keras."""
    with taking(layer, where) as changed:
        layer.load_own_variables(dict(values))
    if changed:
        membership.constants.changed(models)


def give_to_layers(model: Any, loaded: Sequence[Any], where: str, others: set) -> None:
    """Lets layers compute what they keep of their variables, which have been loaded."""
    ids = {id(variable) for variable in loaded}
    for layer in layers_with_more(model):
        mine = any(id(variable) in ids for variable in layer.variables)
        if mine and layer not in others and give_beside(layer, {}, where):
            membership.constants.changed([model])
    lost = [each.name for each in layers_with_more(model) if files_of(each)]
    if lost:
        logger.warning(
            "%s is read for its weights alone, so vocabularies and other files of %d layers stay "
            "as they are (%s): keras.models.load_model reads all of a .keras file",
            where,
            len(lost),
            ", ".join(lost[:3]),
        )


def rows_beside(models: Sequence[Any]) -> list[list[tuple[str, Entry, Any]]]:
    """The arrays that the layers of models keep beside their variables, for a snapshot."""
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
    return [
        (number, layer, path, nth)
        for (number, layer), (path, nth) in zip(layers.values(), names, strict=True)
    ]


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
        loaded: The variables that were loaded; layers of which none was are left alone.
        among: For each model, its number among those that a loop saved; none if it is all of them.
    """
    ids = {id(variable) for variable in loaded}
    here = [
        (number, layer, path, nth)
        for number, layer, path, nth in _numbered(models)
        if not layer.variables or any(id(variable) in ids for variable in layer.variables)
    ]
    counts = [count for _, count in manifest.objects(BESIDE)]
    if max(among, default=len(counts)) >= len(counts):
        among, counts = [0] * len(models), [len(manifest.arrays.get(BESIDE, ()))]
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    by_layer: dict[tuple[int, str, int], dict[str, Saved]] = defaultdict(dict)
    # If they are too many, none is loaded.
    for owner, saved in zip(owners, _small_enough(manifest, models), strict=False):
        path, name = _split(saved.entry.path)
        by_layer[owner, path, saved.entry.nth][name] = saved
    automatic = automatic_names(models)
    pairs: dict[int, dict[str, Saved]] = {}
    for number in set(among):
        mine = [i for i, (owner, *_) in enumerate(here) if among[owner] == number]
        theirs = [key for key in by_layer if key[0] == number]
        # By the layers' paths: what a layer has now may have other names, and other shapes.
        matching = match(
            [Entry(here[i][2], (), "float32", nth=here[i][3]) for i in mine],
            [Entry(path, (), "float32", nth=nth) for _, path, nth in theirs],
            automatic=automatic,
            automatic_there=manifest.automatic,
            rename=rename,
            models=names_of_models(models) if len(models) == 1 else (),
        )
        pairs |= {mine[i]: by_layer[theirs[j]] for i, j in matching.pairs.items()}
    lacking = []
    for i, (_, layer, _, _) in enumerate(here):
        arrays = pairs.get(i, {})
        values = load([(saved, None, saved.entry.dtype) for saved in arrays.values()])
        by_name = dict(zip(arrays, values, strict=True))
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
    for mark in MARKS:
        before, separator, after = path.partition(f"/{mark}")
        if separator:
            return before, mark + after
    return path, ""


def _small_enough(manifest: Manifest, models: Sequence[Any]) -> tuple[Saved, ...]:
    saved = manifest.arrays.get(BESIDE, ())
    size = sum(bytes_of(array.entry) for array in saved)
    bytes_of_models = sum(variable.value.nbytes for model in models for variable in model.variables)
    if size <= max(bytes_of_models, _MOST_BYTES):
        return saved
    logger.warning(
        "the checkpoint has %d bytes beside the variables of its layers, more than the model and "
        "than 64 MiB: they are not loaded",
        size,
    )
    return ()
