"""Loads the factors of LoRA that KerasHub's `save_lora_weights` wrote: all, or one error."""

import contextlib
import os
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.barriers import in_all
from keras_tpu_dist.checkpoint.compiled import has_trained
from keras_tpu_dist.checkpoint.keras_files import file_errors, most_bytes
from keras_tpu_dist.checkpoint.restored import Restored
from keras_tpu_dist.checkpoint.slots import begin_slots
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.patterns import matches

_SUFFIX = ".lora.h5"
_FACTOR = re.compile(r"lora/(\d{1,9})/vars/(lora_kernel_[ab])")


def is_lora_file(path: str | os.PathLike) -> bool:
    """Whether a path has the suffix of KerasHub's files of LoRA."""
    return os.fspath(path).endswith(_SUFFIX)


def load_lora_file(model: Any, path: str, exclude: tuple[str, ...], alone: bool) -> Restored:
    """Loads a file of LoRA into the layers of a model that have LoRA, in their order.

    Args:
        model: A built model, or a backbone.
        path: The file.
        exclude: Patterns of paths to leave unchanged.
        alone: Whether this process reads without the others, if there are several.
    """
    with contextlib.ExitStack() as stack:

        def opened() -> tuple[Any, dict]:
            with file_errors(path):
                file = _keras.WeightsFile(path, most_bytes(model))
                stack.callback(file.close)
                return file, file.names()

        def mark(opened: tuple[Any, dict]) -> str:
            return f"crc32 {zlib.crc32(repr(opened[1]).encode())}"

        file, saved = in_all(f"opening {path}", opened, mark, alone=alone)
        chosen = {
            name: variable
            for name, variable in _pairs(model, saved, path).items()
            if not matches(variable.path, exclude)
        }

        def read() -> list[np.ndarray]:
            with file_errors(path):
                return [file.read(name) for name in chosen]

        values = in_all(f"reading {path}", read, alone=alone)
    trained = has_trained(getattr(model, "optimizer", None))
    for variable, value in zip(chosen.values(), values, strict=True):
        variable.assign(value)
    if getattr(model, "optimizer", None) is not None:
        begin_slots(model, [], trained)
    _keras.forget_state(model)
    ids = {id(variable) for variable in chosen.values()}
    return Restored(
        directory=path,
        step=0,
        loaded=tuple(variable.path for variable in chosen.values()),
        kept=tuple(variable.path for variable in model.variables if id(variable) not in ids),
        unused=(),
        renamed={},
        optimizer=False,
    )


def _pairs(model: Any, saved: Mapping[str, tuple[int, ...]], path: str) -> dict[str, Any]:
    """The variables of a model by their names in the file, which numbers layers in their order."""
    found = [match for match in map(_FACTOR.fullmatch, saved) if match is not None]
    numbers = sorted({int(match[1]) for match in found})
    layers = [
        layer
        for layer in _keras.flatten_layers(model)
        if getattr(layer, "lora_enabled", False) and hasattr(layer, "lora_kernel_a")
    ]
    pairs = {
        f"lora/{number}/vars/{name}": getattr(layer, name)
        for number, layer in zip(numbers, layers, strict=False)
        for name in ("lora_kernel_a", "lora_kernel_b")
    }
    shapes = {name: tuple(variable.shape) for name, variable in pairs.items()}
    if len(numbers) != len(layers) or shapes != {match[0]: saved[match[0]] for match in found}:
        raise value_error(
            f"The file {path!r} must have exactly the factors of this model's layers with LoRA.",
            received=f"{_described(len(numbers), [saved[match[0]] for match in found])} in the "
            f"file, {_described(len(layers), list(shapes.values()))} in the model.",
            fix="Call enable_lora on the backbone with the rank and the layers of the model that "
            "saved it, and then restore.",
        )
    return pairs


def _described(layers: int, shapes: list[tuple[int, ...]]) -> str:
    return f"{layers} layers" + (f" (the first factor {shapes[0]})" if shapes else "")
