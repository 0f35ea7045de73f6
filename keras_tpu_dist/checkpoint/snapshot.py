"""A model's training state for a checkpoint: arrays by key, and their manifest."""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding

from keras_tpu_dist.checkpoint.beside import BESIDE, rows_beside
from keras_tpu_dist.checkpoint.fingerprint import is_small, small_on_host, start_fingerprints
from keras_tpu_dist.checkpoint.manifest import Manifest, Saved, check_name
from keras_tpu_dist.checkpoint.names import (
    WEIGHTS,
    Entry,
    automatic_names,
    dtype_of,
    named_state,
)
from keras_tpu_dist.checkpoint.optimizers import kinds_of_optimizers
from keras_tpu_dist.checkpoint.packed import pack
from keras_tpu_dist.checkpoint.trained import Base
from keras_tpu_dist.common.version import __version__

logger = logging.getLogger("keras_tpu_dist")

EXTRA = "extra"
# What a callback may save beside a model that is smaller.
MOST_BYTES_OF_CALLBACK = 2**22


def snapshot(
    model: Any,
    training: Mapping[str, Any],
    extra: Mapping[str, np.ndarray],
    state_of: Callable[[Any], dict[str, list]] = named_state,
    objects: Sequence[Any] = (),
    base: Base | None = None,
) -> tuple[dict[str, Any], Callable[[], Manifest]]:
    """The arrays of a model's training state on the devices, and their manifest.

    Args:
        model: A built model.
        training: The state of training; plain data.
        extra: Further host arrays of the state, by name.
        state_of: A function from the model to its variables with their entries, by kind.
        objects: What a loop saves, models and others; by default the model alone.
        base: What the run's checkpoints leave out; `None` if nothing.

    Returns:
        The arrays by key, and a function that returns the manifest. The function waits for the
        devices, which compute the fingerprints. It describes the state at the time of this call,
        even if training continues.
    """
    state = state_of(model)
    models = [item for item in objects or [model] if isinstance(item, keras.Layer)]
    left = {} if base is None else base.left_out(models)
    rows = [
        (kind, entry, None if id(v) in left else declared(v))
        for kind, pairs in state.items()
        for entry, v in pairs
    ]
    numbers_left = [left[id(v)] for pairs in state.values() for _, v in pairs if id(v) in left]
    beside = rows_beside(models)
    rows += [row for of_model in beside for row in of_model]
    for name, array in extra.items():
        rows.append((EXTRA, Entry(name, array.shape, str(array.dtype)), array))
    axes = [_axes(value) for *_, value in rows]
    values = small_on_host([value for *_, value in rows])
    numbers = start_fingerprints([value for value in values if value is not None])
    parts = {part for _, entry, _ in rows for part in entry.path.split("/")}
    automatic = automatic_names(objects or [model]) & parts
    source = base.source if left and base is not None else None
    training, written = copy.deepcopy(dict(training)), _written(model, objects, source)
    if objects:
        training["objects"] = {**training["objects"], BESIDE: _counted(models, beside)}
    counts = dict.fromkeys((*state, BESIDE, EXTRA), 0)
    arrays: dict[str, Any] = {}
    described: list[tuple[str, Entry, str, tuple, bool]] = []
    small: dict[str, np.ndarray] = {}
    for (kind, entry, _), value, split in zip(rows, values, axes, strict=True):
        check_name(entry.path)
        key = f"{kind}_{counts[kind]:05}"
        counts[kind] += 1
        if value is not None:
            is_packed = isinstance(value, np.ndarray) and is_small(value)
            (small if is_packed else arrays)[key] = value
        described.append((kind, entry, key, split, value is None))

    stored, places = pack(small)
    arrays |= stored

    def manifest() -> Manifest:
        by_kind: dict[str, list[Saved]] = {kind: [] for kind in counts}
        finite = True
        saved, of_left = iter(numbers()), iter(numbers_left)
        for kind, entry, key, axes, is_left in described:
            number, is_finite = next(of_left if is_left else saved)
            by_kind[kind].append(Saved(entry, key, number, axes, places.get(key), is_left))
            finite &= is_finite or kind != WEIGHTS
        arrays = {kind: tuple(rows) for kind, rows in by_kind.items()}
        return Manifest(
            arrays, training, {**written, "finite": finite}, automatic=frozenset(automatic)
        )

    return arrays, manifest


def _counted(models: Sequence[Any], beside: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The names of models, and how many arrays each has beside its variables."""
    return [[item.name, len(of_model)] for item, of_model in zip(models, beside, strict=True)]


def extra_of(manifest: Manifest, model: Any, callbacks: int) -> tuple[Saved, ...]:
    """The arrays that callbacks saved, if they need at most the model's memory per callback.

    One of a small model may need as much as `MOST_BYTES_OF_CALLBACK`.

    Args:
        manifest: The checkpoint's manifest.
        model: The model that it was loaded into.
        callbacks: The number of callbacks.
    """
    saved = manifest.arrays.get(EXTRA, ())
    numbers = sum(math.prod(array.entry.shape) for array in saved)
    most = callbacks * most_of_callback(model)
    if numbers <= most:
        return saved
    logger.warning(
        "the checkpoint has %d numbers for %d callbacks, more than the size of the model per "
        "callback: they are not loaded",
        numbers,
        callbacks,
    )
    return ()


def most_of_callback(model: Any) -> int:
    """How many numbers, or bytes of its own, a callback may save beside a model."""
    size = sum(math.prod(variable.shape) for variable in model.variables)
    return max(size, MOST_BYTES_OF_CALLBACK)


def declared(variable: Any) -> Any:
    """The value of a variable, in the dtype that the variable declares.

    An initializer may give another one, which a variable keeps until it is first assigned.
    """
    value, dtype = variable.value, dtype_of(variable)
    return value if value.dtype == dtype else value.astype(dtype)


def _axes(value: Any) -> tuple:
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return ()
    return tuple(list(part) if isinstance(part, tuple) else part for part in sharding.spec)


def _written(model: Any, objects: Sequence[Any], base: str | None) -> dict[str, Any]:
    kinds = kinds_of_optimizers(objects or [getattr(model, "optimizer", None)])
    value = next((v.value for v in model.weights), None)
    mesh = getattr(getattr(value, "sharding", None), "mesh", None)
    return {
        "model": model.name,
        "optimizer": type(getattr(model, "optimizer", None)).__name__,
        **({"optimizers": kinds} if len(kinds) > 1 else {}),
        **({} if base is None else {"base": base}),
        "mesh": {} if mesh is None else dict(mesh.shape),
        "processes": jax.process_count(),
        "keras_tpu_dist": __version__,
        "keras": keras.__version__,
        "jax": jax.__version__,
    }
