"""What a launcher and its processes share: environment variables, exit codes, reports of ends.

A process reports how it ends in a file next to a path that the launcher has named. The launcher
notes there which processes have ended with exit code 0.
"""

import contextlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Environment variables that `launch` sets for its processes.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "KTD_COORDINATOR", "KTD_NUM_PROCESSES", "KTD_PROCESS_ID"
# The launcher's process id: its processes end when it is gone.
LAUNCHER = "KTD_LAUNCHER"
# The file for the error of a process, without its ending.
REPORT = "KTD_REPORT"
# From sysexits.h: a temporary failure in a remote system; an unavailable service.
EXIT_PEER, EXIT_UNAVAILABLE = 75, 69
# A shell's exit code for a process that SIGTERM ended.
EXIT_TERMINATED = 143

# In the place of an error: the program came to its end.
END = "end"
_ERROR, _ENDED = ".error", "ended"
_MOST_WORDS, _MOST_BYTES = 2000, 64 * 1024
# The file of this process, without its ending, if a launcher has named one.
_path = ""


def begin_reports() -> None:
    """Reports the error that ends this process, if a launcher has named a file."""
    global _path
    _path = os.environ.pop(REPORT, "")
    if not _path:
        return
    before = sys.excepthook

    def hook(kind, error, trace):
        with contextlib.suppress(OSError):
            _write_error(kind.__name__, "".join(traceback.format_exception_only(kind, error)))
        before(kind, error, trace)

    sys.excepthook = hook


def report_end(words: str, *, leaves: bool) -> None:
    """Reports that this program ends without an error."""
    if _path:
        with contextlib.suppress(OSError):
            _write_error("SystemExit" if leaves else END, words)


def _write_error(name: str, words: str) -> None:
    half = Path(f"{_path}.half")
    half.write_text(json.dumps([time.monotonic(), name, words.strip()[:_MOST_WORDS]]))
    half.replace(_path + _ERROR)


def note_ended(folder: Path, numbers: Iterable[int]) -> None:
    """Notes, in the launcher, which processes have ended with exit code 0."""
    (folder / _ENDED).write_text(" ".join(map(str, numbers)))


def ended() -> set[int]:
    """The numbers of the processes that the launcher saw end with exit code 0."""
    numbers = _text(Path(_path).parent / _ENDED, "").split() if _path else []
    return {
        int(number)
        for number in numbers
        if number.isascii() and number.isdigit() and len(number) < 9
    }


@dataclass(frozen=True)
class Failure:
    """A process's report of its failure.

    Attributes:
        at: The time in seconds of `time.monotonic()`, which is the same for all processes of a
            host.
    """

    at: float
    error: str
    words: str


def failure_of(path: Path) -> Failure | None:
    """The error that a process reported, or `None`.

    Args:
        path: The file, without its ending.
    """
    try:
        found = json.loads(_text(path, _ERROR))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or list(map(type, found)) != [float, str, str]:
        return None
    return Failure(*found) if math.isfinite(found[0]) else None


def _text(path: Path, ending: str) -> str:
    try:
        with open(f"{path}{ending}", "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
