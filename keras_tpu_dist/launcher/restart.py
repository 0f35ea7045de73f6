"""Restarts all processes once one has failed, with the remaining ones and within limits."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.goodput import records

# What ends a process from outside; it may come again at the same step by chance.
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "exit code 75", "exit code 137")
_MOST_PROCESSES = 4096
# Seconds that a program which says how many processes there are may take, and between two looks
# while there are none.
_LONGEST_PROGRAM_S, _LOOK_S = 60.0, 5.0


class Interrupted(BaseException):
    """The launcher itself is to end."""


@dataclass(frozen=True)
class Restarts:
    """Whether and how processes are started again.

    Attributes:
        limit: The most restarts.
        backoff_s: Seconds before a restart; twice as many after each that made no step.
        longest_backoff_s: The most of them.
        processes_from: A file with the number of processes to start, or if it is executable a
            program that prints it, looked at before each restart; `None` for as many as before.

    Raises:
        ValueError: If `processes_from` is no file.
    """

    limit: int = 0
    backoff_s: float = 1.0
    longest_backoff_s: float = 300.0
    processes_from: str | None = None

    def __post_init__(self):
        path = self.processes_from
        if path is not None and not Path(path).is_file():
            raise ValueError(
                message(
                    "The number of processes is read from a file, or printed by a program.",
                    received={"processes_from": path},
                    fix="Give the path of one that exists.",
                )
            )


@dataclass(frozen=True)
class Outcome:
    """How one start ended.

    Attributes:
        code: The exit code, as a shell has it.
        processes: How many were started.
        seconds: How long it took.
        step: The last train step that was made, if that is known.
        first: The process that failed first.
        error: What ended it: the class of an exception, a signal, an exit code.
        words: The same in words.
        frames: The user's frames of its traceback.
        log: The file with all of its output.
    """

    code: int
    processes: int
    seconds: float
    step: int | None = None
    first: int | None = None
    error: str = ""
    words: str = ""
    frames: tuple[str, ...] = ()
    log: str = ""

    @property
    def from_outside(self) -> bool:
        """Whether something outside of the program ended it."""
        return self.error in _FROM_OUTSIDE


@dataclass
class _Loop:
    """What is known of the starts before.

    Attributes:
        restarts: As the user gave it.
        made: How many restarts were made.
        best: The last step of all starts.
        fruitless: How many starts in a row went no further.
        last: How the start before ended.
    """

    restarts: Restarts
    made: int = 0
    best: int = -1
    fruitless: int = 0
    last: Outcome | None = None
    _said: set[str] = field(default_factory=set)

    def why_not(self, outcome: Outcome) -> str | None:
        """Why there is no restart, or `None`.

        Args:
            outcome: How the last start ended.
        """
        last, self.last = self.last, outcome
        same = last is not None and (last.error, last.step) == (outcome.error, outcome.step)
        if same and not outcome.from_outside and self.restarts.limit:
            return f"{outcome.error} came again {_at(outcome.step)}: a restart does not mend that"
        if self.made >= self.restarts.limit:
            return f"{self.made} of {self.restarts.limit} restarts were made"
        return None

    def wait_s(self, outcome: Outcome) -> float:
        """The seconds to wait before the next start.

        Args:
            outcome: How the last start ended.
        """
        step = -1 if outcome.step is None else outcome.step
        self.fruitless = 0 if step > self.best else self.fruitless + 1
        self.best = max(self.best, step)
        wait_s = self.restarts.backoff_s * 2.0 ** min(self.fruitless, 64)
        return min(wait_s, self.restarts.longest_backoff_s)

    def processes(self, before: int) -> int:
        """How many processes to start next.

        Args:
            before: How many there were.
        """
        path = self.restarts.processes_from
        if path is None:
            return before
        while True:
            try:
                number = _number_in(path)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                _say(f"{path} says no number of processes ({error}): {before}, as before")
                return before
            if number:
                return number
            if path not in self._said:
                self._said.add(path)
                _say(f"waiting until {path} says that there is a process to start")
            time.sleep(max(self.restarts.backoff_s, _LOOK_S))


def started_again(
    start: Callable[[int, int], Outcome],
    num_processes: int,
    restarts: Restarts,
    goodput: str | None = None,
) -> int:
    """Starts processes until they come to their end, or a limit is reached.

    Args:
        start: From the number of processes, and which start it is from 1, to how it ended.
        num_processes: How many to start first.
        restarts: The limits.
        goodput: The file that says what the time went to.

    Returns:
        The exit code of the last start.
    """
    loop = _Loop(restarts)
    while True:
        attempt = loop.made + 1
        if goodput is not None:
            # A file that cannot be written is an error before the run, and no end of one.
            add = records.append if attempt == 1 else records.try_append
            add(goodput, records.LAUNCH, processes=num_processes, number=attempt)
        outcome = start(num_processes, attempt)
        if not outcome.code:
            if goodput is not None:
                records.try_append(goodput, records.ENDED, code=0, step=outcome.step)
            return 0
        _say_what_failed(outcome)
        why_not = loop.why_not(outcome)
        if why_not is not None:
            if restarts.limit:
                _say(f"no restart: {why_not}")
            return outcome.code
        wait_s = loop.wait_s(outcome)
        time.sleep(wait_s)
        before, num_processes = num_processes, loop.processes(num_processes)
        loop.made += 1
        changed = "" if before == num_processes else f" ({before} before)"
        _say(
            f"restart {loop.made} of {restarts.limit} after {wait_s:g} s, with "
            f"{_counted(num_processes)}{changed}: process {outcome.first} failed "
            f"{_at(outcome.step)}: {_first_line(outcome.words)}"
        )


def _say_what_failed(outcome: Outcome) -> None:
    text = (
        f"process {outcome.first} of {outcome.processes} on {socket.gethostname()} failed first, "
        f"{_at(outcome.step)}, {outcome.seconds:.0f} s after its start: {outcome.words}"
    )
    _say("\n".join([text, *outcome.frames, f"  all that it printed: {outcome.log}"]))


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _at(step: int | None) -> str:
    return "before its first step" if step is None else f"at step {step}"


def _counted(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _first_line(words: str) -> str:
    line = words.splitlines()[0] if words else ""
    return line if len(line) <= 160 else f"{line[:160]}..."


def _number_in(path: str) -> int:
    """The number that a file holds, or that it prints."""
    if os.access(path, os.X_OK):
        command = [os.path.abspath(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_PROGRAM_S, check=True
        )
        text = done.stdout
    else:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(100)
    number = int(text)
    if not 0 <= number <= _MOST_PROCESSES:
        raise ValueError(f"{number} is not between 0 and {_MOST_PROCESSES}")
    return number
