"""JAX's cache of compiled programs, with entries of ours."""

import functools
import logging
from typing import Protocol

import jax
from jax.experimental.compilation_cache import compilation_cache

from keras_tpu_dist._keras.seam import at
from keras_tpu_dist.common.once import log_once

_JAX = "jax._src.compilation_cache"
_FOLDER, _SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


class Entries(Protocol):
    """The entries of a cache."""

    def get(self, key: str) -> bytes | None:
        """The entry for a key, or `None`."""
        ...

    def put(self, key: str, program: bytes) -> None:
        """Stores an entry."""
        ...


class _Served:
    """Entries with the attribute that JAX reads, where it ends a cache."""

    def __init__(self, path: str, entries: Entries):
        self._path, self.get, self.put = path, entries.get, entries.put


# The folder that JAX has from us and its entries, and the seconds that JAX had before.
_ours: dict[str, _Served] = {}
_seconds_before: list[float] = []


def jax_caches_in() -> str | None:
    """The folder in which JAX caches compiled programs by the user's word, or `None`."""
    folder = jax.config.jax_compilation_cache_dir
    return None if folder in _ours else folder


def we_cache_in() -> str | None:
    """The folder in which JAX caches compiled programs by `begin_caching`, or `None`."""
    folder = jax.config.jax_compilation_cache_dir
    return folder if folder in _ours else None


def jax_may_cache() -> bool:
    """Whether JAX's caches are not switched off (`JAX_ENABLE_COMPILATION_CACHE`)."""
    return bool(jax.config.jax_enable_compilation_cache)


def most_bytes_cached() -> int | None:
    """The size that the user set for JAX's cache, or `None`."""
    size = jax.config.jax_compilation_cache_max_size
    return None if size < 0 else size


def begin_caching(path: str, entries: Entries, keeps_all: bool) -> None:
    """Makes JAX look for compiled programs in a cache, and put them there.

    Args:
        path: The folder's name, for JAX.
        entries: The cache.
        keeps_all: Whether programs are stored that took less than a second, JAX's least time.
    """
    end_caching()
    if not _serve_entries():
        log_once(
            f"JAX {jax.__version__} has no get_file_cache, so it stores compiled programs in "
            f"{path} by itself: the folder is not bounded, and nothing says why one is missing.",
            logging.WARNING,
        )
    _ours[path] = _Served(path, entries)
    jax.config.update(_FOLDER, path)
    if keeps_all and getattr(jax.config, _SECONDS) == 1.0:
        _seconds_before.append(1.0)
        jax.config.update(_SECONDS, 0)
    compilation_cache.reset_cache()


def end_caching() -> None:
    """Undoes `begin_caching`, unless the user has set JAX's folder since."""
    if we_cache_in() is not None:
        jax.config.update(_FOLDER, None)
        compilation_cache.reset_cache()
    _ours.clear()
    while _seconds_before:
        jax.config.update(_SECONDS, _seconds_before.pop())


@functools.cache
def _serve_entries() -> bool:
    """Makes JAX use our entries for our folder; whether this JAX can."""
    module = at(_JAX)
    stock = getattr(module, "get_file_cache", None)
    if stock is None:
        return False

    def get_file_cache(path: str):
        return (_ours[path], path) if path in _ours else stock(path)

    module.get_file_cache = get_file_cache
    return True
