"""A model's training state as a checkpoint has it: arrays by key, and what they are."""

import datetime
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding

from keras_tpu_dist.checkpoint.fingerprint import fingerprints_of
from keras_tpu_dist.checkpoint.manifest import Manifest, Saved
from keras_tpu_dist.checkpoint.names import Entry, named_state

EXTRA = "extra"


def snapshot(
    model: Any, training: Mapping[str, Any], extra: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], Manifest]:
    """The arrays of a model's training state as they lie on the devices, and their manifest.

    Args:
        model: A built model.
        training: Where training stands; plain data.
        extra: Arrays of the host that belong to it, by name.

    Returns:
        The arrays by key, and the manifest.
    """
    state = named_state(model)
    rows = [(kind, entry, v.value) for kind, pairs in state.items() for entry, v in pairs]
    for name, array in extra.items():
        rows.append((EXTRA, Entry(name, array.shape, str(array.dtype)), array))
    arrays: dict[str, Any] = {}
    found: dict[str, list[Saved]] = {kind: [] for kind in (*state, EXTRA)}
    for (kind, entry, value), number in zip(rows, fingerprints_of([value for *_, value in rows])):
        key = f"{kind}_{len(found[kind]):05}"
        arrays[key] = value
        found[kind].append(Saved(entry, key, number, _axes(value)))
    return arrays, Manifest(
        {kind: tuple(each) for kind, each in found.items()}, dict(training), _written(model)
    )


def _axes(value: Any) -> tuple:
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return ()
    return tuple(list(part) if isinstance(part, tuple) else part for part in sharding.spec)


def _written(model: Any) -> dict[str, Any]:
    value = next((v.value for v in model.weights), None)
    mesh = getattr(getattr(value, "sharding", None), "mesh", None)
    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model.name,
        "optimizer": type(getattr(model, "optimizer", None)).__name__,
        "mesh": {} if mesh is None else dict(mesh.shape),
        "processes": jax.process_count(),
        "keras_tpu_dist": metadata.version("keras_tpu_dist"),
        "keras": keras.__version__,
        "jax": jax.__version__,
    }
