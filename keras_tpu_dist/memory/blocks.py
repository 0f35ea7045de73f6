"""Selects layers of a model: by patterns of their paths, or as its repeated blocks."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_tpu_dist import _keras


def layers_by_path(model: Any, path: str | None = None) -> Iterator[tuple[str, Any]]:
    """Every layer of a model with its path: the names of the layers around it, and its own.

    Args:
        model: The model, built or not; it comes first.
        path: The model's own path. Defaults to its name.
    """
    own = model.name if path is None else path
    yield own, model
    for layer in _keras.sublayers(model):
        yield from layers_by_path(layer, f"{own}/{layer.name}")


def matching(pattern: str, path: str) -> bool:
    """Whether a pattern matches the path of a layer.

    Args:
        pattern: Segments of the path from the right, with `*` and `?` as in file names; or a
            regular expression for them, as in `LayoutRules`.
        path: The layer's path.

    Example:

    >>> [matching(p, "decoder/block_3") for p in ("block_*", r"block_\\d", "decoder/*", "block")]
    [True, True, True, False]
    >>> matching("block_*", "decoder/block_3/attention")
    False
    """
    as_file_name = re.escape(pattern).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    forms = [as_file_name]
    try:
        re.compile(pattern)
        forms.append(pattern)
    except re.error:
        pass  # such as "*_block": only a file-name pattern
    return any(re.fullmatch(rf"(?:.*/)?(?:{form})", path) for form in forms)


def chosen_by_patterns(
    model: Any, rules: Mapping[str, Any]
) -> tuple[list[tuple[str, Any, Any]], set[str]]:
    """The layers that match the rules, and the patterns that match none.

    A layer inside another one that matches the same rule is left out.

    Args:
        model: A model.
        rules: From a pattern to any value; the first match counts.

    Returns:
        `(path, layer, value)` for every layer, and the patterns.
    """
    found: dict[int, tuple[str, Any, Any]] = {}
    unused = set(rules)
    claimed: list[tuple[str, str]] = []
    for path, layer in layers_by_path(model):
        names = {path, layer.path or path}
        used = [p for p in rules if any(matching(p, name) for name in names)]
        unused.difference_update(used)
        if not used or any(p == used[0] and path.startswith(f"{o}/") for p, o in claimed):
            continue
        claimed.append((used[0], path))
        found.setdefault(id(layer), (path, layer, rules[used[0]]))
    return list(found.values()), unused


def blocks(model: Any) -> list[tuple[str, Any]]:
    """The repeated blocks of a model, with their paths.

    These are composite layers of the same class that are side by side; nested models are searched
    first. If there are none, they are all composite layers; and in a model of plain layers, every
    layer with weights.

    Args:
        model: A built model.
    """
    found = _repeated(model, model.name) or _composite(model, model.name)
    return found or [
        (f"{model.name}/{layer.name}", layer)
        for layer in _keras.sublayers(model)
        if layer.variables
    ]


def _repeated(layer: Any, path: str) -> list[tuple[str, Any]]:
    inner = _composite(layer, path)
    counts = Counter(type(child) for _, child in inner)
    found = []
    for name, child in inner:
        is_block = counts[type(child)] > 1
        if is_block and not isinstance(child, keras.Model):
            found.append((name, child))
            continue
        within = _repeated(child, name)
        found += within or ([(name, child)] if is_block else [])
    return found


def _composite(layer: Any, path: str) -> list[tuple[str, Any]]:
    """The composite layers with weights in a layer."""
    children: Sequence[Any] = _keras.sublayers(layer)
    return [
        (f"{path}/{child.name}", child)
        for child in children
        if any(within.variables for within in _keras.sublayers(child))
    ]
