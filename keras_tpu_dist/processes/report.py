"""This process's report to its launcher: the current step, and the error that ends it."""

import contextlib
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path

from keras_tpu_dist.common import phases
from keras_tpu_dist.launcher.names import REPORT
from keras_tpu_dist.launcher.reports import END, ERROR, STEP, WIDTH, ended_in

logger = logging.getLogger("keras_tpu_dist")

_MOST_WORDS = 2000
# The file of this process, without its ending, if a launcher has named one.
_path = ""


def begin() -> None:
    """Starts to report, if a launcher has named a file."""
    global _path
    path = _path = os.environ.pop(REPORT, "")
    if not path:
        return
    try:
        file = os.open(path + STEP, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _warn(path, error)
        return
    writes = True

    # A write to the page cache, which outlives the process, however it ends.
    def write(step: int) -> None:
        nonlocal writes
        if writes:
            try:
                os.pwrite(file, b"%*d" % (WIDTH, step), 0)
            except OSError as error:
                writes = False
                _warn(path, error)

    phases.on_step(write)
    before = sys.excepthook

    def hook(kind, error, trace):
        with contextlib.suppress(OSError):
            _write_error(kind.__name__, "".join(traceback.format_exception_only(kind, error)))
        before(kind, error, trace)

    sys.excepthook = hook


def _warn(path: str, error: OSError) -> None:
    """Logs a warning: a missing report must not end a run."""
    logger.warning("the launcher cannot see the current step of this process: %s: %s", path, error)


def end(words: str, *, leaves: bool) -> None:
    """Reports that this program ends without an error.

    Args:
        words: What it did.
        leaves: Whether it ends within a call that all processes make.
    """
    if _path:
        with contextlib.suppress(OSError):
            _write_error("SystemExit" if leaves else END, words)


def ended() -> set[int]:
    """The numbers of the processes that the launcher saw end with exit code 0."""
    return ended_in(Path(_path).parent) if _path else set()


def _write_error(name: str, words: str) -> None:
    half = Path(f"{_path}.half")
    half.write_text(json.dumps([time.monotonic(), name, words.strip()[:_MOST_WORDS]]))
    half.replace(_path + ERROR)
