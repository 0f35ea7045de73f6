"""Whether and where compiled programs are cached for the next process."""

import logging
import os
from pathlib import Path
from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import checked_path
from keras_tpu_dist.common.compiled_programs import CompiledPrograms
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.paths import absolute_path

FOLDER = "KTD_COMPILATION_CACHE"
_OFF = "0"
_MOST_BYTES = 4 * 2**30
_FIX = 'Write for example compilation_cache="/tmp/programs", True for the default, False for none.'
# Others who may write to a folder could have this process run what they compiled.
_OTHERS_WRITE = 0o022
# Whether the folder in use is the default one.
_by_default: list[bool] = [False]


def checked_cache(given: Any) -> Any:
    """The argument `compilation_cache` of a strategy: `None`, a bool, or an absolute path.

    Args:
        given: What was given.

    Raises:
        ValueError: If it is something else.
    """
    if given is None or isinstance(given, bool):
        return given
    return absolute_path(checked_path("TPUStrategy", _FIX, compilation_cache=given))


def use_cache(given: bool | str | None, platform: str, processes: int) -> None:
    """Begins or ends the cache for a new strategy. JAX has one for the process.

    Args:
        given: From `checked_cache`.
        platform: The platform of the strategy's devices.
        processes: The number of processes whose devices they are.
    """
    named = os.environ.get(FOLDER)
    if given is None and named:
        given = False if named == _OFF else absolute_path(named)
    if given is False:
        _keras.end_caching()
        return
    if given is None and (platform != "tpu" or _keras.we_cache_in() is not None):
        return
    if not _keras.jax_may_cache() or _keras.jax_caches_in() is not None:
        _say_that_jax_decides(given)
        return
    if isinstance(given, str):
        _by_default[0] = False
        _begin(given, processes)
    elif (folder := _default_folder()) is not None:
        _by_default[0] = True
        _begin(folder, processes)


def cache_beside(checkpoints: str) -> None:
    """Moves the default cache to a bucket that has the checkpoints of the run.

    A machine that is replaced loses its disk. A folder on a disk is left alone: what is beside
    checkpoints in it may be a download, and a program from there would be a stranger's.

    Args:
        checkpoints: The folder or bucket of the checkpoints.
    """
    folder = f"{checkpoints.rstrip('/')}-compiled"
    if "://" in checkpoints and _by_default[0] and _keras.we_cache_in() not in (None, folder):
        _begin(folder, 1)


def _begin(folder: str, processes: int) -> None:
    if folder == _keras.we_cache_in():
        return
    where = _opened(folder)
    most = _keras.most_bytes_cached()
    bound = _MOST_BYTES if most is None else most
    # Each small program would be an object that every start asks a bucket for.
    _keras.begin_caching(folder, CompiledPrograms(where, bound), isinstance(where, Path))
    size = f"at most {bound / 2**30:.3g} GiB" if isinstance(where, Path) else "not bounded"
    shared = "; process 0 writes, so all hosts must share this folder" if processes > 1 else ""
    log_once(
        f"compiled programs are cached in {folder} ({size}) for the next start{shared}; "
        "compilation_cache=False turns this off"
    )


def _opened(folder: str) -> Any:
    """A folder as a path, which exists if it is local."""
    if "://" in folder:
        from etils import epath

        return epath.Path(folder)
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise value_error(
            f"compilation_cache, or {FOLDER}, is a folder that can be created.",
            received=f"{folder!r}: {error}.",
            fix=_FIX,
        ) from None
    return Path(folder)


def _default_folder() -> str | None:
    """The folder in this user's cache, or `None`, with a warning, if others may write to it."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(caches, "keras_tpu_dist", "compiled")
    if not folder.is_absolute():
        return _not_cached("this user has no home")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return _not_cached(f"{folder}: {error}")
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE:
        return _not_cached(f"others may write to {folder}, and programs from there would run here")
    return str(folder)


def _not_cached(reason: str) -> None:
    log_once(
        f"compiled programs are not cached for the next start: {reason}. Name a folder with "
        f"compilation_cache=... or {FOLDER}.",
        logging.WARNING,
    )


def _say_that_jax_decides(given: bool | str | None) -> None:
    if not isinstance(given, str):
        return
    why = f"JAX caches them in {_keras.jax_caches_in()!r} (JAX_COMPILATION_CACHE_DIR)"
    if not _keras.jax_may_cache():
        why = "JAX's caches are switched off (JAX_ENABLE_COMPILATION_CACHE)"
    log_once(f"compiled programs are not cached in {given!r}: {why}, which stays.", logging.WARNING)
