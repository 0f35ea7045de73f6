"""Keras's own files of weights, loaded as checkpoints are: all of it, or one clear error."""

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.manifest import CheckpointError
from keras_tpu_dist.checkpoint.names import said_of, same_kind
from keras_tpu_dist.checkpoint.optimizers import build_optimizer
from keras_tpu_dist.checkpoint.report import Restored
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.patterns import matches

logger = logging.getLogger("keras_tpu_dist")

SUFFIXES = (".keras", ".weights.h5", ".weights.json")
# Of HDF5's own, for names and the tree of groups.
_SLACK_BYTES = 16 * 2**20
_OPTIMIZER = "optimizer/"
# Keras saves what an optimizer holds, and again what one within it does.
_OPTIMIZER_VARIABLES = "optimizer/vars/"


def is_file_of_keras(path: str | os.PathLike) -> bool:
    """Whether a path names a file that Keras saves weights in.

    Args:
        path: The path.
    """
    return os.fspath(path).endswith(SUFFIXES)


def load_file(
    model: Any, path: str | os.PathLike, strict: bool, exclude: tuple[str, ...]
) -> Restored:
    """Loads a file of Keras's into a model, array by array.

    Keras's files know variables by the model's structure, not by their names, so there is nothing
    to rename.

    Args:
        model: A built model.
        path: The file.
        strict: See `restore`.
        exclude: See `restore`; patterns of the model's paths.

    Raises:
        ValueError: If the file does not fit.
        CheckpointError: If it cannot be read.
    """
    name = os.fspath(path)
    with _told(name):
        file = _keras.WeightsFile(name, _most_bytes(model))
    try:
        return _load(model, file, name, strict, exclude)
    finally:
        file.close()


def _most_bytes(model: Any) -> int:
    """What a file may take: each weight and three slots for it, in numbers of 8 bytes."""
    numbers = sum(math.prod(variable.shape) for variable in model.variables)
    return _SLACK_BYTES + 4 * 8 * numbers


def _load(model: Any, file: Any, name: str, strict: bool, exclude: tuple[str, ...]) -> Restored:
    # This opens every part of it, before anything of the model changes.
    with _told(name):
        saved, dtypes = file.names(), file.dtypes()
    here = _keras.names_in_files(model)
    weights = {n: v for n, v in here.items() if not n.startswith(_OPTIMIZER)}
    kept = {n for n, v in weights.items() if matches(v.path, exclude)}
    fitting = [
        n
        for n in weights
        if n not in kept
        and saved.get(n) == tuple(weights[n].shape)
        and same_kind(dtypes[n], weights[n].dtype)
    ]
    missing = [n for n in weights if n not in kept and n not in saved]
    reshaped = [n for n in weights if n not in kept and n in saved and n not in fitting]
    unexpected = [n for n in saved if not n.startswith(_OPTIMIZER) and n not in weights]
    if strict and (missing or reshaped or unexpected):
        shapes = [
            f"{weights[n].path} {tuple(weights[n].shape)}, saved as {saved[n]}"
            + ("" if saved[n] != tuple(weights[n].shape) else f" {dtypes[n]}")
            for n in reshaped
        ]
        raise ValueError(
            message(
                f"The file {name!r} must hold the weights of this model, no more and no fewer.",
                received="; ".join(
                    [
                        *said_of([weights[n].path for n in missing], unexpected),
                        *(f"of another shape or dtype: {words}" for words in shapes),
                    ]
                )
                + ".",
                fix="Pass exclude=[...] for what is to stay as it is, or strict=False to load "
                "what fits.",
            )
        )
    whole = not (missing or reshaped or kept)
    optimizer = _optimizer_that_fits(model, saved, name) if whole else {}
    for n, variable in {**{n: weights[n] for n in fitting}, **optimizer}.items():
        with _told(name):
            value = file.read(n)
        variable.assign(value)
    _keras.forget_state(model)
    return Restored(
        *(name, 0, tuple(weights[n].path for n in fitting)),
        kept=tuple(weights[n].path for n in (*sorted(kept), *missing, *reshaped)),
        unused=tuple(unexpected),
        renamed={},
        optimizer=bool(optimizer),
    )


def _optimizer_that_fits(model: Any, saved: dict[str, tuple[int, ...]], name: str) -> dict:
    """The optimizer's variables by name, where the file has as many, each of its shape."""
    shapes = {n: shape for n, shape in saved.items() if n.startswith(_OPTIMIZER_VARIABLES)}
    if not shapes:
        return {}
    build_optimizer(model)
    here = _keras.names_in_files(model)
    found = {n: v for n, v in here.items() if n.startswith(_OPTIMIZER_VARIABLES)}
    if found and shapes != {n: tuple(v.shape) for n, v in found.items()}:
        logger.warning("the optimizer's state is left as it is: that in %r does not fit", name)
        return {}
    return found


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Makes whatever fails while a file is read one `CheckpointError`."""
    try:
        yield
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{name!r} cannot be read: {words}") from error
