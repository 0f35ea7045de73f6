"""A cache of compilations on disk, so that nothing is compiled twice."""

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from keras_tpu_dist.common.bounded_folder import BoundedFolder
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.tools.dryrun import worker

logger = logging.getLogger("keras_tpu_dist")

_MOST_BYTES = 2**30
# The text of a program compresses to about a tenth. What compresses to less than a hundredth is
# none, and would take a gigabyte of memory for each megabyte of its file.
_MOST_TEXT_BYTES, _MOST_EXPANSION = 2**30, 100
_SUFFIX = ".json.gz"
# The folder may hold other files, which must not be removed.
_OWN = re.compile(r"[0-9a-f]{64}" + re.escape(_SUFFIX))
_PART = "compilation-"
# Besides the program, the result depends on the compilers and how they are called.
_PACKAGES = ("keras_tpu_dist", "jax", "jaxlib", "libtpu")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error)


class Cache:
    """A folder of compilations; the least recently used one is removed first.

    An entry is compressed JSON of a known form, so reading a foreign one runs no code, and its text
    is at most 100 times its file. An entry that cannot be read counts as missing. If the folder
    cannot be written to, nothing is stored.

    Args:
        folder: The folder, which is created for the first entry.
        most_bytes: Its maximal size.
    """

    def __init__(self, folder: str | os.PathLike, most_bytes: int = _MOST_BYTES):
        self.folder = Path(folder).expanduser()
        self.files = BoundedFolder(self.folder, _OWN, _PART, most_bytes)

    @classmethod
    def of(cls, cache: Any) -> "Cache | None":
        """Creates the cache for a `cache` argument.

        Args:
            cache: A folder, `True` for the default one, `False` for none.
        """
        if cache is False:
            return None
        if cache is True:
            folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            if folder.startswith("~"):
                logger.warning("compilations are not cached: this user has no home; give cache=...")
                return None
            return cls(Path(folder, "keras_tpu_dist"))
        if isinstance(cache, (str, os.PathLike)) and str(cache):
            return cls(cache)
        raise value_error(
            "cache is a folder for compilations, True for the default one, or False.",
            received={"cache": cache},
            fix='Write for example cache="/tmp/compilations", or cache=False for none.',
        )

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry for a key, or `None`.

        Args:
            key: From `key_of`.
        """
        path = self._path(key)
        try:
            entry = json.loads(_decompressed(path))
            if entry["key"] != key:
                raise ValueError("it belongs to another program")
            self.files.used(path.name)
            return entry["value"]
        except FileNotFoundError:
            return None
        except (*_UNREADABLE, RecursionError) as error:
            logger.info("%s cannot be read, so its program is compiled again: %s", path, error)
            return None

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Stores an entry, completely or not at all.

        Args:
            key: From `key_of`.
            value: The entry, of plain data.
        """
        data = gzip.compress(json.dumps({"key": key, "value": value}).encode(), 1, mtime=0)
        try:
            self.files.write(self._path(key).name, data)
        except OSError as error:
            logger.warning("compilations are not cached in %s: %s", self.folder, error)

    def _path(self, key: str) -> Path:
        return self.folder / (key + _SUFFIX)


def _decompressed(path: Path) -> bytes:
    """The content of a file, up to the size of a program's text: anybody may have written it."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    most = min(_MOST_TEXT_BYTES, _MOST_EXPANSION * status.st_size)
    with gzip.open(path) as opened:
        data = opened.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it holds more than {most} bytes")
    return data


def key_of(job: Mapping[str, Any]) -> str:
    """A key for a compilation: the program, its target, the options, and the compilers.

    Args:
        job: The job of the compiling process.
    """
    parts = {
        **{name: part for name, part in job.items() if name != "program"},
        "program": hashlib.sha256(job["program"]).hexdigest(),
        "worker": hashlib.sha256(Path(worker.__file__).read_bytes()).hexdigest(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "compiler": _compiler_of(os.environ.get("TPU_LIBRARY_PATH")),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _compiler_of(path: str | None) -> list[Any] | None:
    """Identifies the library that JAX is to load, if a path is set: the file may be replaced."""
    try:
        status = os.stat(path) if path else None
    except OSError:
        return [path]
    return None if status is None else [path, status.st_size, status.st_mtime_ns]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def without_source_lines() -> Iterator[None]:
    """A context for lowering without source lines, so that programs do not differ by them."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)
