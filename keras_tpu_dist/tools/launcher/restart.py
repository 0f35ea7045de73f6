"""Restarts all processes after a failure, within limits."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keras_tpu_dist.common import records
from keras_tpu_dist.common.errors import value_error

# Causes from outside of the program; they may repeat at the same step by chance.
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "exit code 75", "exit code 137")
_MOST_PROCESSES = 4096
# The time limit for the program that prints the number of processes, and the interval between two
# calls while the number is 0.
_LONGEST_PROGRAM_S, _POLL_S = 60.0, 5.0


class Interrupted(BaseException):
    """The launcher must end."""


@dataclass(frozen=True)
class Restarts:
    """Whether and how to restart processes.

    Attributes:
        backoff_s: Seconds before a restart; doubled after every start without progress.
        longest_backoff_s: The largest number of seconds.
        processes_from: A file with the number of processes to start, or an executable file that
            prints it, read before every restart; `None` to start the same number again.

    Raises:
        ValueError: If `processes_from` is not a file.
    """

    limit: int = 0
    backoff_s: float = 1.0
    longest_backoff_s: float = 300.0
    processes_from: str | None = None

    def __post_init__(self):
        path = self.processes_from
        if path is not None and not Path(path).is_file():
            raise value_error(
                "processes_from must be a file with the number of processes, or a program "
                "that prints it.",
                received={"processes_from": path},
                fix="Pass the path of an existing file.",
            )


@dataclass(frozen=True)
class Outcome:
    """How one start ended.

    Attributes:
        error: The cause: the class of an exception, a signal, or an exit code.
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
        """Whether the cause is outside of the program."""
        return self.error in _FROM_OUTSIDE


@dataclass
class _Loop:
    """The state of the restart loop.

    Attributes:
        fruitless: The number of consecutive starts without progress.
    """

    restarts: Restarts
    done: int = 0
    best: int = -1
    fruitless: int = 0
    last: Outcome | None = None

    def why_not(self, outcome: Outcome) -> str | None:
        """Why there is no restart, or `None`."""
        last, self.last = self.last, outcome
        same = last is not None and (last.error, last.step) == (outcome.error, outcome.step)
        if same and not outcome.from_outside and self.restarts.limit:
            return f"{outcome.error} again {_at(outcome.step)}: a restart would not help"
        if self.done >= self.restarts.limit:
            return f"{self.done} of {self.restarts.limit} restarts are used up"
        return None

    def wait_s(self, outcome: Outcome) -> float:
        """The seconds to wait before the next start."""
        step = -1 if outcome.step is None else outcome.step
        self.fruitless = 0 if step > self.best else self.fruitless + 1
        self.best = max(self.best, step)
        wait_s = self.restarts.backoff_s * 2.0 ** min(self.fruitless, 64)
        return min(wait_s, self.restarts.longest_backoff_s)

    def processes(self, before: int) -> int:
        """The number of processes to start next."""
        path = self.restarts.processes_from
        if path is None:
            return before
        waits = False
        while True:
            try:
                number = _number_in(path)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                _print(f"no number of processes from {path} ({error}): starting {before} again")
                return before
            if number:
                return number
            if not waits:
                waits = True
                _print(f"waiting until {path} has a number of processes above 0")
            time.sleep(max(self.restarts.backoff_s, _POLL_S))


def started_again(
    start: Callable[[int, int], Outcome],
    num_processes: int,
    restarts: Restarts,
    goodput: str | None = None,
) -> int:
    """Starts processes until they end successfully, or a limit is reached.

    Args:
        start: A function from the number of processes and the number of the start, from 1, to its
            outcome.
    """
    loop = _Loop(restarts)
    while True:
        attempt = loop.done + 1
        if goodput is not None:
            # If the file cannot be written, that is an error before the run, but does not end it.
            add = records.append if attempt == 1 else records.try_append
            add(goodput, records.LAUNCH, processes=num_processes, number=attempt)
        outcome = start(num_processes, attempt)
        if not outcome.code:
            if goodput is not None:
                records.try_append(goodput, records.ENDED, code=0, step=outcome.step)
            return 0
        text = (
            f"process {outcome.first} of {outcome.processes} on {socket.gethostname()} failed "
            f"first, {_at(outcome.step)}, {outcome.seconds:.0f} s after its start: {outcome.words}"
        )
        _print("\n".join([text, *outcome.frames, f"  full output: {outcome.log}"]))
        why_not = loop.why_not(outcome)
        if why_not is not None:
            if restarts.limit:
                _print(f"no restart: {why_not}")
            return outcome.code
        wait_s = loop.wait_s(outcome)
        time.sleep(wait_s)
        before, num_processes = num_processes, loop.processes(num_processes)
        loop.done += 1
        counted = "1 process" if num_processes == 1 else f"{num_processes} processes"
        line = outcome.words.splitlines()[0] if outcome.words else ""
        line = line if len(line) <= 160 else f"{line[:160]}..."
        changed = "" if before == num_processes else f" ({before} before)"
        _print(
            f"restart {loop.done} of {restarts.limit} after {wait_s:g} s, with "
            f"{counted}{changed}: process {outcome.first} failed "
            f"{_at(outcome.step)}: {line}"
        )


def _print(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _at(step: int | None) -> str:
    return "before its first step" if step is None else f"at step {step}"


def _number_in(path: str) -> int:
    """The number in a file, or the number that it prints if it is executable."""
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
