"""The output of several processes: passed on by line, with folded tracebacks, and in files."""

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

# What the library that joins the processes prints of each group of devices that it connects.
_OF_GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks")
_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
# The last line of a traceback: the error's class, and its text if it has one.
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*(?P<name>[A-Za-z_]\w*)(?::.*)?$")
_MOST_LINES = 20_000
# Two files of a process's output; what is older than both is dropped.
_MOST_BYTES = 32 * 2**20
# Where installed packages lie, and Python's own modules.
_PACKAGE = re.compile(r".*[/\\](?:site|dist)-packages[/\\](?P<name>[\w-]+)")
_OF_PYTHON = re.compile(r"<frozen .*>|.*[/\\]lib[/\\]python3\.\d+[/\\](?!site-|dist-)")


class Folded:
    """Lines with each traceback cut to the user's own frames.

    Args:
        package: The folder of this package, whose frames are no user's.

    Attributes:
        error: The class of the error of the last traceback, and the whole line.
        frames: The user's frames of the last traceback, and what was folded.
    """

    def __init__(self, package: str):
        self._package = package
        self._held: list[str] = []
        self.error: tuple[str, str] | None = None
        self.frames: list[str] = []

    def take(self, line: str) -> Iterator[str]:
        """What to print once a line has come.

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
            yield line  # of another thread
            return
        self.frames = list(self._folded())
        self.error = (found["name"], line) if found else None
        self._held = []
        yield from [*self.frames, line]

    def rest(self) -> Iterator[str]:
        """What to print at the end of the output."""
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


class KeptOutput:
    """The output of one process in a file of bounded size.

    If it cannot be written, as on a full disk, that is printed once and the run goes on.

    Args:
        path: The file; what is older than the last 32 MiB moves to a second one, `.1`.
        number: Which process.
    """

    def __init__(self, path: Path, number: int):
        self.path = path
        self._number = number
        self._file: IO[bytes] | None = None
        self._try(self._open)

    def write(self, line: str) -> None:
        """Adds a line.

        Args:
            line: The line with its end.
        """
        self._try(lambda: self._add(line.encode(errors="replace")))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        # Unbuffered: a process that hangs is looked at while it does.
        self._file = self.path.open("ab", buffering=0)

    def _add(self, line: bytes) -> None:
        if self._file is None:
            return
        self._file.write(line)
        if self._file.tell() > _MOST_BYTES:
            self._file.close()
            self.path.replace(f"{self.path}.1")
            self._open()

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self.close()
            self._file = None
            said = f"launch: what process {self._number} prints is no longer kept: {error}"
            print(said, file=sys.stderr, flush=True)


class Reader:
    """Passes on what one process prints, with the process's number in front.

    Args:
        lines: Its output.
        number: Which process.
        path: The file that gets all of it.
        write: Prints a text.

    Attributes:
        folded: What its tracebacks were.
        path: As given.
    """

    def __init__(self, lines: IO[str], number: int, path: Path, write: Callable[[str], object]):
        self.folded = Folded(str(Path(__file__).parents[1]))
        self.path = path
        self._lines, self._number, self._write = lines, number, write
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the output.

        Args:
            timeout_s: The most seconds.
        """
        self._thread.join(timeout_s)

    def _run(self) -> None:
        kept = KeptOutput(self.path, self._number)
        with self._lines as lines:
            for line in lines:
                kept.write(line)
                if not _OF_GLOO.match(line):
                    self._pass_on(self.folded.take(line.removesuffix("\n")))
        self._pass_on(self.folded.rest())
        kept.close()

    def _pass_on(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(f"[{self._number}] {line}\n")
