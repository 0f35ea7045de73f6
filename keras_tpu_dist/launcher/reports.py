"""Reads and checks the reports of processes to their launcher."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

STEP, ERROR, ENDED = ".step", ".error", "ended"
# In the place of an error: the program came to its end.
END = "end"
WIDTH = 20
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True)
class Failure:
    """A process's report of its failure.

    Attributes:
        at: The time in seconds of `time.monotonic()`, which is the same for all processes of a
            host.
        error: The class of the error.
        words: Its class and message.
    """

    at: float
    error: str
    words: str


def step_of(path: Path) -> int | None:
    """The last step that a process reported, or `None`.

    Args:
        path: The file, without its ending.
    """
    text = _text(path, STEP).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= WIDTH else None


def ended_in(folder: Path) -> set[int]:
    """The numbers of the processes that the launcher saw end with exit code 0.

    Args:
        folder: The folder of the reports.
    """
    numbers = _text(folder / ENDED, "").split()
    return {int(each) for each in numbers if each.isascii() and each.isdigit() and len(each) < 9}


def failure_of(path: Path) -> Failure | None:
    """The error that a process reported, or `None`.

    Args:
        path: The file, without its ending.
    """
    try:
        found = json.loads(_text(path, ERROR))
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
