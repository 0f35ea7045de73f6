"""Private names for the files that Keras saves: which variable stands where in them."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.saving import saving_lib


class _Recorder(saving_lib.H5IOStore):
    """A store of weights that notes what is saved where, and writes nothing."""

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


def names_in_files(model: Any) -> dict[str, keras.Variable]:
    """The variables of a model by the names under which Keras's files hold them.

    Public replacement: none; `save_weights` writes them.

    Args:
        model: A built model. What a layer saves that is no variable of it is left out.
    """
    recorder = _Recorder()
    saving_lib._save_state(model, recorder, None, "", set())
    # An optimizer saves values, not variables.
    slots = getattr(getattr(model, "optimizer", None), "variables", ())
    found = recorder.found | {_name("optimizer", str(i)): v for i, v in enumerate(slots)}
    return {n: v for n, v in found.items() if isinstance(v, keras.Variable)}


class WeightsFile:
    """The weights in a `.keras`, `.weights.h5` or sharded `.weights.json` file of Keras.

    Args:
        path: The file.
    """

    def __init__(self, path: str):
        self._archive = None
        if path.endswith(".keras"):
            self._archive = zipfile.ZipFile(path)
            content = io.BytesIO(self._archive.read("model.weights.h5"))
            self._store: Any = saving_lib.H5IOStore(content)
        elif path.endswith(".json"):
            self._store = saving_lib.ShardedH5IOStore(path)
        else:
            self._store = saving_lib.H5IOStore(Path(path))

    def names(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what it holds, by name."""
        return {_name(path, key): tuple(self._entry(path)[key].shape) for path, key in self._keys()}

    def dtypes(self) -> dict[str, np.dtype]:
        """The dtypes of what it holds, by name."""
        return {_name(path, key): self._entry(path)[key].dtype for path, key in self._keys()}

    def read(self, name: str) -> np.ndarray:
        """One array.

        Args:
            name: Its name.
        """
        path, _, key = name.rpartition("/vars/") if "/vars/" in name else ("", "", name[5:])
        return np.asarray(self._entry(path)[key])

    def close(self) -> None:
        """Closes the file."""
        self._store.close()
        if self._archive is not None:
            self._archive.close()

    def _entry(self, path: str) -> Any:
        return self._store.get(path)

    def _keys(self) -> Iterator[tuple[str, str]]:
        paths = getattr(self._store, "sharding_config", {}).get("weight_map")
        if paths is None:
            paths = []
            self._store.h5_file.visit(paths.append)
            paths = [p.rpartition("vars")[0].strip("/") for p in paths if p.endswith("vars")]
        for path in paths:
            path = path.strip("/").removesuffix("vars").strip("/")
            yield from ((path, key) for key in list(self._entry(path).keys()))


def _name(path: str, key: str) -> str:
    return f"{path}/vars/{key}" if path else f"vars/{key}"
