"""Compiled programs in a folder: whole or absent, each with what it was compiled for."""

import contextlib
import contextvars
import hashlib
import heapq
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from keras_tpu_dist.common.bounded_folder import BoundedFolder
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.setting import setting

logger = logging.getLogger("keras_tpu_dist")

# The name of a program, and a description of it in words, by what each is about.
Described = Mapping[str, str]
_compiled: contextvars.ContextVar[tuple[str, Callable[[], Described]] | None]
_compiled = contextvars.ContextVar("compiled", default=None)

_SUFFIX, _PART = ".compiled", "program-"
_OWN = re.compile(r".+-[0-9a-f]{64}" + re.escape(_SUFFIX))
# An entry: these bytes, the hash of what follows and of the key, how long the description is, the
# description, and the program as JAX wrote it.
_BEGINS, _HASH, _LENGTH = b"keras_tpu_dist program 1\n", 32, 4
_MOST_DESCRIBED = 64 * 1024
# With so many earlier programs of its name a program is compared, and so much is said of it.
_MOST_COMPARED, _MOST_SAID, _MOST_WORDS = 32, 5, 160


@contextlib.contextmanager
def compiling(name: str, describe: Callable[[], Described]) -> Iterator[None]:
    """A context in which a program may be compiled, or found in a cache.

    Args:
        name: The name of its function.
        describe: Returns what decides which program it is; called only if it is not found.
    """
    with setting(_compiled, (name, describe)):
        yield


class CompiledPrograms:
    """The compiled programs of a folder, by JAX's keys.

    A program is written completely or not at all, so processes may share the folder. What cannot be
    read, or is damaged, counts as missing and is written again. Nothing of an entry is unpickled.

    Args:
        folder: The folder: a `Path`, or an `epath.Path` in a bucket.
        most_bytes: The maximal size of a local folder, above which the least recently used programs
            are removed. A bucket is not bounded here.
    """

    def __init__(self, folder: Any, most_bytes: int):
        self.folder, self.most_bytes = folder, most_bytes
        local = isinstance(folder, Path)
        self._files = BoundedFolder(folder, _OWN, _PART, most_bytes) if local else None

    def get(self, key: str) -> bytes | None:
        """The program for a key, or `None`, with the reason in the log.

        Args:
            key: The name of the program, and a hash of what decides it.
        """
        path = self.folder / (key + _SUFFIX)
        try:
            program = _program(self._read(path), key)
        except FileNotFoundError:
            self._explain(key)
            return None
        except (OSError, ValueError) as error:
            log_once(
                f"{path} is compiled again, because it cannot be read: {error}", logging.WARNING
            )
            return None
        if self._files is not None:
            self._files.used(path.name)
        return program

    def put(self, key: str, program: bytes) -> None:
        """Stores a program.

        Args:
            key: As in `get`.
            program: The program.
        """
        about = json.dumps(_description(key) or {}).encode()
        if len(about) > _MOST_DESCRIBED:
            about = b"{}"
        rest = len(about).to_bytes(_LENGTH, "big") + about + program
        data = _BEGINS + _hash(key, rest) + rest
        try:
            if self._files is None:
                (self.folder / (key + _SUFFIX)).write_bytes(data)  # a bucket has no half objects
            elif len(data) <= self.most_bytes:
                self._files.write(key + _SUFFIX, data)
            else:
                log_once(
                    f"a program of {len(data)} bytes is not cached: {self.folder} may have at most "
                    f"{self.most_bytes} (jax_compilation_cache_max_size)",
                    logging.WARNING,
                )
        except OSError as error:
            log_once(f"compiled programs are not cached in {self.folder}: {error}", logging.WARNING)

    def _read(self, path: Any) -> bytes:
        """The content of a file; a local one is a file, and no larger than the folder may be."""
        if self._files is not None:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > self.most_bytes:
                raise ValueError(f"it is no file, or has {status.st_size} bytes")
        return path.read_bytes()

    def _explain(self, key: str) -> None:
        """Logs in what a program differs from the nearest that is there."""
        if not logger.isEnabledFor(logging.INFO) or (here := _description(key)) is None:
            return
        name = key.rpartition("-")[0]
        try:
            abouts = [_about(path) for path in self._alike(name)]
        except OSError as error:
            logger.info("%s is compiled; %s cannot be listed: %s", name, self.folder, error)
            return
        differing = [_differing(here, about) for about in abouts if about]
        reason = _reason(min(differing, key=len, default=None), len(abouts))
        logger.info("%s is compiled: %s", name, reason)

    def _alike(self, name: str) -> list[Any]:
        """The newest programs of a name."""
        names = [path for path in self.folder.iterdir() if _name_of(path) == name]
        if self._files is None:
            return names[:_MOST_COMPARED]
        return heapq.nlargest(_MOST_COMPARED, names, key=os.path.getmtime)


def _program(data: bytes, key: str) -> bytes:
    head = len(_BEGINS) + _HASH
    rest = memoryview(data)[head:]
    if not data.startswith(_BEGINS) or data[len(_BEGINS) : head] != _hash(key, rest):
        raise ValueError("it is damaged, or of another program")
    return bytes(rest[_LENGTH + int.from_bytes(rest[:_LENGTH], "big") :])


def _hash(key: str, rest: bytes | memoryview) -> bytes:
    found = hashlib.sha256(key.encode())
    found.update(rest)
    return found.digest()


def _name_of(path: Any) -> str:
    return path.name.rpartition("-")[0] if _OWN.fullmatch(path.name) else ""


def _description(key: str) -> Described | None:
    """What the program of a key is for, if it is the one that is announced."""
    announced = _compiled.get()
    if announced is None or key.rpartition("-")[0] != f"jit_{announced[0]}":
        return None
    return announced[1]()


def _about(path: Any) -> Described | None:
    """The description in a file, if it has one."""
    with contextlib.suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        about = json.loads(_described_in(file))
        if isinstance(about, dict) and all(isinstance(value, str) for value in about.values()):
            return about
    return None


def _described_in(file: BinaryIO) -> bytes:
    if file.read(len(_BEGINS)) != _BEGINS:
        raise ValueError("it is no program")
    length = int.from_bytes(file.read(_HASH + _LENGTH)[_HASH:], "big")
    return file.read(min(length, _MOST_DESCRIBED))


def _differing(here: Described, there: Described) -> list[str]:
    """What is another here than there, in words."""
    return [
        f"{name} was {_words(there.get(name))} and is {_words(here.get(name))}"
        for name in dict.fromkeys([*here, *there])
        if here.get(name) != there.get(name)
    ]


def _words(value: str | None) -> str:
    # A file is anybody's: nothing of it reaches a terminal but text.
    return "absent" if value is None else ascii(value)[1:-1][:_MOST_WORDS]


def _reason(differing: list[str] | None, number: int) -> str:
    if differing is None:
        of_this_name = f"{number} of this name in the cache do not say what they are for"
        return of_this_name if number else "no program of this name is in the cache"
    if not differing:
        return (
            "its arguments, options and versions are those of a cached one, so the function is "
            "another: layers, loss, metrics, optimizer, constants, or a flag of JAX"
        )
    more = f", and {len(differing) - _MOST_SAID} more" if len(differing) > _MOST_SAID else ""
    return f"compared with the nearest in the cache, {'; '.join(differing[:_MOST_SAID])}{more}"
