"""Private names for files that Keras saves: what is where in them, and loading without copies."""

import functools
import io
import logging
import math
import os
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
from keras.src.saving import saving_api, saving_lib

from keras_tpu_dist._keras import seam
from keras_tpu_dist._keras.active import active_strategy
from keras_tpu_dist._keras.seam import Replacement
from keras_tpu_dist.common.left_out import counted

logger = logging.getLogger("keras_tpu_dist")

_WEIGHTS = "model.weights.h5"
_MOST_BYTES_OF_A_MAP = 64 * 2**20
# Weights up to this size may be in host memory all at once.
_MOST_BYTES_AT_ONCE = 64 * 2**20
# The header of a file in a zip archive: 26 bytes, and the lengths of its name and extra field.
_LOCAL_HEADER = struct.Struct("<26sHH")


class _WhatIsSaved(saving_lib.H5IOStore):
    """A store of weights that records what is saved where, and writes nothing."""

    def __init__(self):
        self.found: dict[str, Any] = {}
        self._path = ""

    def __bool__(self):
        return True

    def make(self, path, metadata=None):
        self._path = path
        return self

    def __setitem__(self, key, value):
        self.found[_name(self._path, key)] = value


class _Visited(set):
    """Notes where each object that is saved stands, once its own variables were recorded."""

    def __init__(self, recorder: _WhatIsSaved):
        super().__init__()
        self.paths: dict[int, str] = {}
        self._recorder = recorder

    def add(self, element):
        self.paths[element] = self._recorder._path
        super().add(element)


def names_in_files(model: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """What a model saves, by its names in Keras's files, and the folder of each object.

    Public replacement: none; `save_weights` writes them.

    Args:
        model: A built model. Saved values that are not variables of a layer are left out.

    Returns:
        A dict from names to variables of layers and of the optimizer, or to other values that a
        layer saves; and a dict from the `id` of a layer to the start of its names.
    """
    recorder = _WhatIsSaved()
    visited = _Visited(recorder)
    saving_lib._save_state(model, recorder, None, "", visited)
    # An optimizer saves values, not variables.
    slots = getattr(getattr(model, "optimizer", None), "variables", ())
    found = recorder.found | {_name("optimizer", str(i)): v for i, v in enumerate(slots)}
    return found, {saved: _name(path, "") for saved, path in visited.paths.items()}


class WeightsFile:
    """The weights in a `.keras`, `.weights.h5` or sharded `.weights.json` file of Keras.

    It is safe for files from any source: an array only takes memory when it is read, and not more
    than its shape implies.

    Args:
        path: The file.
        most_bytes: The maximal size of the weights in a compressed `.keras` file. Keras does not
            compress them, so they are usually read in place.
    """

    def __init__(self, path: str, most_bytes: int):
        self._archive = None
        _check_regular(path)
        if path.endswith(".keras"):
            self._archive = _Archive(path, most_bytes)
            # Keras calls `open` on the archive that it gets, and reads the result.
            archive: Any = self._archive
            self._store: Any = saving_lib.H5IOStore(_WEIGHTS, archive=archive)
        elif path.endswith(".json"):
            _check_regular(path, _MOST_BYTES_OF_A_MAP)
            self._store = saving_lib.ShardedH5IOStore(path)
        else:
            self._store = saving_lib.H5IOStore(Path(path))

    def names(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its arrays, by name."""
        return {
            _name(path, key): tuple(self._dataset(path, key).shape) for path, key in self._keys()
        }

    def dtypes(self) -> dict[str, np.dtype]:
        """The dtypes of its arrays, by name."""
        return {_name(path, key): _dtype(self._dataset(path, key)) for path, key in self._keys()}

    def name_of(self, start: str) -> str:
        """The name that an object had when it was saved, or `""`.

        Args:
            start: What the names of its arrays begin with.
        """
        self._store.get(start.removesuffix("/").removesuffix("vars").strip("/"))
        name = getattr(self._store._h5_entry_group, "attrs", {}).get("name")
        return name if isinstance(name, str) else ""

    def read(self, name: str) -> np.ndarray:
        """One array.

        Args:
            name: Its name.
        """
        path, _, key = name.rpartition("/vars/") if "/vars/" in name else ("", "", name[5:])
        dataset = self._dataset(path, key)
        dtype, chunks = dataset.dtype, dataset.chunks or dataset.shape
        numbers = dtype.names is None and dtype.subdtype is None and dtype.kind in "biufcV"
        if (
            not numbers
            or dtype.itemsize > 16
            or any(c > n for c, n in zip(chunks, dataset.shape, strict=True))
        ):
            raise ValueError(f"{name} holds {dtype} in chunks {chunks} of {dataset.shape}")
        return np.array(dataset, dtype=_dtype(dataset))

    def close(self) -> None:
        """Closes the file."""
        self._store.close()
        if self._archive is not None:
            self._archive.close()

    def _dataset(self, path: str, key: str) -> Any:
        """An array before it is read; an array in another file is refused, as in Keras."""
        self._store.get(path)
        for filename in getattr(self._store, "current_shard_filenames", ()):
            if key in self._store._h5_entry_group:
                break
            self._store._switch_h5_file(filename, mode="r")
        return saving_lib.safe_get_h5_dataset(self._store._h5_entry_group, key)

    def _keys(self) -> Iterator[tuple[str, str]]:
        paths = getattr(self._store, "sharding_config", {}).get("weight_map")
        if paths is None:
            paths = []
            self._store.h5_file.visit(paths.append)
            paths = [p.rpartition("vars")[0].strip("/") for p in paths if p.endswith("vars")]
        for path in paths:
            path = path.strip("/").removesuffix("vars").strip("/")
            yield from ((path, key) for key in list(self._store.get(path).keys()))


class _Archive:
    """The interface of a zip file that Keras's weight store needs; weights are read in place."""

    def __init__(self, path: str, most_bytes: int):
        self._path, self._most_bytes = path, most_bytes
        self._zip = zipfile.ZipFile(path)

    def open(self, name: str, mode: str) -> Any:
        """A part of the archive, as a seekable file."""
        del mode
        info = self._zip.getinfo(name)
        if _is_in_place(info):
            return _MemberOfZip(self._path, info.header_offset, info.file_size)
        if info.file_size > self._most_bytes:
            raise ValueError(
                f"its {name} takes {info.file_size} bytes when uncompressed, this model at most "
                f"{self._most_bytes}"
            )
        with self._zip.open(info) as opened:
            # Not more than that, whatever the archive claims.
            return io.BytesIO(opened.read(info.file_size))

    def close(self) -> None:
        """Closes the file."""
        self._zip.close()


def _is_in_place(info: zipfile.ZipInfo) -> bool:
    """Whether a part of an archive is neither compressed nor encrypted."""
    stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
    return stored and not info.flag_bits & 1


class _MemberOfZip(io.RawIOBase):
    """An uncompressed part of a zip file."""

    def __init__(self, path: str, header: int, size: int):
        super().__init__()
        self._file = open(path, "rb")  # noqa: SIM115
        self._file.seek(header)
        local = self._file.read(_LOCAL_HEADER.size)
        *_, name, extra = _LOCAL_HEADER.unpack(local)
        self._begin, self._size, self._at = header + _LOCAL_HEADER.size + name + extra, size, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self):
        return self._at

    def readinto(self, buffer):
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._size - self._at)])
        self._at += count
        return count

    def close(self):
        self._file.close()
        super().close()


def _check_regular(path: str, most_bytes: int | None = None) -> None:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or (most_bytes and status.st_size > most_bytes):
        raise ValueError(f"it is not a regular file, or has more bytes than {most_bytes}")


def _dtype(dataset: Any) -> np.dtype:
    attributes = dataset.attrs
    # Keras writes bfloat16 as bytes, with the dtype's name as an attribute.
    named = "dtype" in attributes and attributes.get_id("dtype").get_storage_size() < 64
    if named and attributes["dtype"] == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return dataset.dtype


def _name(path: str, key: str) -> str:
    return f"{path}/vars/{key}" if path else f"vars/{key}"


def serve_loading(find_strategy: Callable[[Any], Any]) -> None:
    """Declares the replacements of functions that load weights.

    Args:
        find_strategy: Returns the strategy of a model, or `None`.
    """
    seam.declare(
        Replacement(
            "keras.src.saving.saving_lib",
            "is_memory_sufficient",
            functools.partial(_is_memory_sufficient, find_strategy),
            why="Keras holds a `.keras` file twice in host memory, whatever its size",
            hook="a limit for files that are held in memory",
            parameters=("model",),
        ),
        Replacement(
            "keras.src.saving.saving_lib:H5IOStore",
            "_get_h5_file",
            _h5_file,
            why="weights in a `.keras` file are read where they are, if its folder is read-only; "
            "before Python 3.13, Keras reads from the start of the file for each",
            hook="a store of weights in an archive that is not extracted",
            parameters=("path_or_io", "mode"),
        ),
        Replacement(
            "keras.src.saving.saving_api",
            "load_weights",
            _load_weights,
            why="Keras skips weights in a directory of Orbax that have other paths, in silence",
            hook="an error for weights that are not loaded",
            parameters=("model", "filepath", "skip_mismatch"),
        ),
        Replacement(
            "keras.src.saving.saving_api",
            "_load_model_from_orbax_checkpoint",
            _load_model,
            why="it finds no weight of a `Sequential` in a directory of Orbax, in silence",
            hook="an error for weights that are not loaded",
            parameters=("filepath", "custom_objects", "compile", "safe_mode"),
        ),
    )


def _is_memory_sufficient(find_strategy, stock, model):
    # If not, Keras reads from, or writes to, a file beside the archive.
    if find_strategy(model) is not None:
        sizes = [math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in model.variables]
        if sum(sizes) > _MOST_BYTES_AT_ONCE:
            return False
    return stock(model)


def _h5_file(stock, store, path_or_io, mode=None):
    path = getattr(store.archive, "filename", None)
    if (mode or store.mode) == "r" and isinstance(path, str) and active_strategy() is not None:
        info = store.archive.getinfo(str(path_or_io))
        if _is_in_place(info):
            store.io_file = _MemberOfZip(path, info.header_offset, info.file_size)
            return h5py.File(store.io_file, mode="r")
    return stock(store, path_or_io, mode)


def _load_weights(stock, model, filepath, skip_mismatch=False, **kwargs):
    stock(model, filepath, skip_mismatch=skip_mismatch, **kwargs)
    if os.path.isdir(filepath) and saving_api.is_orbax_checkpoint(filepath):
        _say_what_is_left(model, os.fspath(filepath))


def _saved_by_orbax(directory: str) -> Mapping[str, Any]:
    """The names in a checkpoint of Orbax, or the latest one, by group."""
    path = directory
    if any(name.isdigit() for name in saving_api.file_utils.listdir(directory)):
        path = saving_api.find_latest_orbax_checkpoint(directory)
    return saving_api.ocp.checkpointables_metadata(path).metadata["pytree"]


def _say_what_is_left(model: Any, directory: str) -> None:
    """Logs which weights Keras has not loaded from a directory of Orbax, if any, in silence."""
    saved = counted(
        f"weights of model {model.name!r} that Keras has not loaded from {directory!r}",
        lambda: _saved_by_orbax(directory),
        None,
        logger.warning,
    )
    if saved is None:
        return
    groups = ("trainable_variables", "non_trainable_variables")
    left = [
        variable.path
        for group in groups
        for variable in getattr(model, group)
        if not _is_at(saved.get(group), variable.path.split("/"))
    ]
    if left:
        logger.warning(
            "%d of the %d weights of model %r were not loaded from %r, and Keras does not say so "
            "(the first: %r): it has them under other paths. Build the model by the code that "
            "saved it, with names for the model and its layers, and call load_weights; or save by "
            "model.save or keras_tpu_dist.callbacks.Checkpoint",
            len(left),
            len(model.variables),
            model.name,
            directory,
            left[0],
        )


def _is_at(tree: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _load_model(stock, filepath, *args, **kwargs):
    model = stock(filepath, *args, **kwargs)
    _say_what_is_left(model, os.fspath(filepath))
    return model
