"""Prints the output of several processes with short tracebacks, and writes all of it to files."""

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

# Gloo, the library that connects the processes, prints this for every group of devices.
_OF_GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks")
# JAX prints this before it aborts a process because the coordinator, or another process, is gone.
_BY_JAX = "the JAX distributed service detected fatal errors"
_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
# The last line of a traceback: the error's class, and its text if it has one.
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*(?P<name>[A-Za-z_]\w*)(?::.*)?$")
_MOST_LINES = 20_000
# The folders of installed packages and of Python's own modules.
_PACKAGE = re.compile(r".*[/\\](?:site|dist)-packages[/\\](?P<name>[\w-]+)")
_OF_PYTHON = re.compile(r"<frozen .*>|.*[/\\]lib[/\\]python3\.\d+[/\\](?!site-|dist-)")


class Folded:
    """Shortens tracebacks in lines of output to the user's own frames.

    Args:
        package: The folder of this package, whose frames are left out.

    Attributes:
        error: The error class of the last traceback, and the full line.
        frames: The lines of the last traceback: the user's frames, and the numbers of others.
    """

    def __init__(self, package: str):
        self._package = package
        self._held: list[str] = []
        self.error: tuple[str, str] | None = None
        self.frames: list[str] = []

    def take(self, line: str) -> Iterator[str]:
        """Takes a line, and yields the lines to print now.

        Args:
            line: The line, without its end.
        """
        if not self._held:
            if line == _BEGIN:
                self._held = [line]
            else:
                yield line
            return
        if line.startswith(" ") and len(self._held) < _MOST_LINES:
            self._held.append(line)
            return
        found = _ERROR.match(line)
        if found is None and len(self._held) < _MOST_LINES:
            yield line  # from another thread
            return
        self.frames = list(self._folded())
        self.error = (found["name"], line) if found else None
        self._held = []
        yield from [*self.frames, line]

    def rest(self) -> Iterator[str]:
        """Yields the remaining lines at the end of the output."""
        yield from self._held
        self._held = []

    def _folded(self) -> Iterator[str]:
        left: Counter[str] = Counter()
        for frame in _frames(self._held[1:]):
            owner = self._owner(frame[0])
            if owner is None:
                yield from _of_others(left)
                left.clear()
                yield from frame
            else:
                left[owner] += 1
        yield from _of_others(left)

    def _owner(self, line: str) -> str | None:
        """The package that a frame belongs to; `None` for the user's own code."""
        found = _FRAME.match(line)
        if found is None:
            return None
        path = found["path"]
        package = _PACKAGE.match(path)
        if path.startswith(self._package):
            return "keras_tpu_dist"
        if package is not None:
            return package["name"]
        # Python writes the constructor of a dataclass.
        made = path == "<string>" and found["function"] == "__init__"
        return "python" if made or _OF_PYTHON.match(path) else None


def _frames(lines: Iterable[str]) -> Iterator[list[str]]:
    frame: list[str] = []
    for line in lines:
        if _FRAME.match(line):
            if frame:
                yield frame
            frame = []
        frame.append(line)
    if frame:
        yield frame


def _of_others(left: Counter[str]) -> list[str]:
    number = sum(left.values())
    if not number:
        return []
    frames = "1 frame" if number == 1 else f"{number} frames"
    return [f"  … {frames} in {', '.join(left)} …"]


class Reader:
    """Reads the output of one process, and prints it with the process's number in front.

    Args:
        lines: Its output.
        number: The process's number.
        path: The log file.
        write: A function that prints a text.

    Attributes:
        ended_by_jax: Whether JAX aborted the process because another one is gone.
    """

    def __init__(self, lines: IO[str], number: int, path: Path, write: Callable[[str], object]):
        self.folded = Folded(str(Path(__file__).parents[2]))
        self.path = path
        self.ended_by_jax = False
        self._file: IO[bytes] | None = None
        self._is_logged = True
        self._lines, self._number, self._write = lines, number, write
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the output.

        Args:
            timeout_s: The longest time to wait, in seconds.
        """
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._log("")
        with self._lines as lines:
            for line in lines:
                self._log(line)
                self.ended_by_jax |= _BY_JAX in line
                if not _OF_GLOO.match(line):
                    self._print(self.folded.take(line.removesuffix("\n")))
        self._print(self.folded.rest())
        if self._file is not None:
            self._file.close()

    def _log(self, line: str) -> None:
        """Adds a line to the file. If that fails, as on a full disk, the run continues."""
        if not self._is_logged:
            return
        try:
            if self._file is None:
                # Unbuffered, so that the log of a hanging process is complete.
                self._file = self.path.open("ab", buffering=0)
            self._file.write(line.encode(errors="replace"))
        except OSError as error:
            self._is_logged = False
            words = f"launch: the output of process {self._number} is no longer logged: {error}"
            print(words, file=sys.stderr, flush=True)

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(f"[{self._number}] {line}\n")
