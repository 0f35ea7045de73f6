"""Starts several processes on one machine with simulated devices: a pod on a laptop."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.launched import (
    COORDINATOR,
    END,
    EXIT_PEER,
    EXIT_TERMINATED,
    LAUNCHER,
    NUM_PROCESSES,
    PROCESS_ID,
    REPORT,
    Failure,
    failure_of,
    note_ended,
)
from keras_tpu_dist.common.paths import absolute_path
from keras_tpu_dist.hardware.environment import simulated_environment
from keras_tpu_dist.tools.launcher.output import Reader

_GRACE_S = 10.0
# If a process was killed, the errors of the others explain nothing, so there is no need to wait.
_GRACE_AFTER_KILL_S = 1.0
# The time from SIGTERM until a preempted machine goes away, less a reserve.
_TO_SAVE_S = 25.0
_POLL_S = 0.05
# For reading the last output of the processes after all have ended.
_TO_READ_S = 5.0
# What ends within such a time of another end may be its cause.
_SAME_S = 1.0
# The first rank of ends that only follow from the end of another process.
_CONSEQUENCE = 3
# Errors in other processes that follow from the failure of one.
_OF_OTHERS = ("JaxRuntimeError", "XlaRuntimeError", "PeerError")
# What ends a program on simulated devices whose collective lost a process.
_LOST = "Gloo"
# On Linux the kernel ends the program with the launcher (PR_SET_PDEATHSIG); on other systems
# `initialize` checks. A separate process calls `exec`, because `preexec_fn` is not safe in a
# process with threads.
_WITH_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def launch(
    command: Sequence[str],
    num_processes: int,
    devices: int | None,
    grace_s: float = _GRACE_S,
    *,
    restarts: int = 0,
    logs: str | os.PathLike | None = None,
) -> int:
    """Runs a command as several processes that `ktd.initialize()` joins.

    It prints every line of a process with the process's number in front, except lines of the
    library that connects them. Tracebacks contain only the user's frames; the full output goes to
    files. The first process that fails ends all others; Ctrl-C, SIGTERM and the death of the
    launcher end all of them. They listen only on the loopback address.

    Args:
        command: The program and its arguments.
        num_processes: The number of processes.
        devices: Simulated CPU devices per process; `None` for one process with the environment of
            the launcher and the devices of this machine.
        grace_s: Seconds for the others to end by themselves after one has failed, and again
            between SIGTERM and SIGKILL.
        restarts: How many times all processes start again after one has failed.
        logs: The folder for the full output; by default a temporary folder, deleted if nothing
            fails.

    Returns:
        The exit code: 0, or that of the first process that failed, in a shell's form: 128 plus the
        number of the signal if it was killed, or if the launcher got a signal.
    """
    # Absolute, because a process may change its directory before it reports.
    named = tempfile.mkdtemp(prefix="ktd-launch-") if logs is None else logs
    folder = Path(absolute_path(named))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise value_error(
            "The logs of the processes need a folder.",
            received=f"logs={named!r}, which is a file or in a file.",
            fix="Pass the path of a folder.",
        ) from None
    # A killed launcher may have left files.
    shutil.rmtree(folder / _REPORTS, ignore_errors=True)
    code, attempt = 1, 0
    try:
        with _sigterm_raises():
            while code and attempt <= restarts:
                if attempt:
                    _print(f"restart {attempt} of {restarts}")
                attempt += 1
                start = _Start(command, num_processes, devices, folder, attempt, restarts > 0)
                code = start.run(grace_s)
            if code and restarts:
                _print(f"no restart: {restarts} of {restarts} restarts are used up")
    except (KeyboardInterrupt, _Terminated) as error:
        code = 128 + (signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder / _REPORTS, ignore_errors=True)
            # Messages about a failure name a file in the folder.
            if logs is None and not code and attempt == 1:
                shutil.rmtree(folder, ignore_errors=True)
    return code


_REPORTS = ".reports"


class _Terminated(BaseException):
    """The launcher got SIGTERM, and must end its processes."""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """A context in which the first SIGTERM raises, and later ones do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def act(signum, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, act)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@dataclass(frozen=True)
class _End:
    """How a process ended.

    Attributes:
        code: Its `returncode` in `subprocess`.
        at: The time of detection, in seconds of `time.monotonic()`.
    """

    number: int
    code: int
    at: float
    failure: Failure | None = None


class _Start:
    """One start of all processes.

    Args:
        devices: Simulated devices per process; `None` for the devices of this machine.
        again: Whether there may be another start, so that it need not wait for the errors of all
            processes.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_processes: int,
        devices: int | None,
        folder: Path,
        attempt: int,
        again: bool,
    ):
        self._again = again
        self._command, self._number, self._devices = command, num_processes, devices
        self._folder, self._attempt = folder, attempt
        self._reports = folder / _REPORTS / str(attempt)
        self._processes: list[subprocess.Popen] = []
        self._readers: list[Reader] = []
        self._ends: dict[int, _End] = {}

    def run(self, grace_s: float) -> int:
        """Starts all processes, waits until all have ended, and prints what failed first.

        Returns:
            The exit code.
        """
        self._reports.mkdir(parents=True)
        began = time.monotonic()
        last_s = grace_s
        try:
            for number, environment in enumerate(self._environments()):
                self._processes.append(_started(self._command, environment))
                output = self._processes[-1].stdout
                assert output is not None
                start = "" if self._attempt == 1 else f".start{self._attempt}"
                path = self._folder / f"{number}{start}.log"
                self._readers.append(Reader(output, number, path, _write))
            self._wait(grace_s)
            if self._again and len(self._ends) < self._number:
                # They cannot save anything newer than the last common checkpoint.
                last_s = 0.0
        except BaseException as error:
            last_s = _TO_SAVE_S if isinstance(error, _Terminated) else grace_s
            raise
        finally:
            _end(self._processes, last_s)
            # A child of a process may hold its output open.
            until = time.monotonic() + _TO_READ_S
            for reader in self._readers:
                reader.join(max(0.0, until - time.monotonic()))
        return self._code(time.monotonic() - began)

    def _environments(self) -> list[dict[str, str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        found = []
        for number in range(self._number):
            one = {
                **os.environ,
                LAUNCHER: str(os.getpid()),
                REPORT: str(self._reports / str(number)),
                "PYTHONUNBUFFERED": "1",
            }
            if self._devices is not None:
                one |= simulated_environment(self._devices)
                one |= {COORDINATOR: address, NUM_PROCESSES: str(self._number)}
                one[PROCESS_ID] = str(number)
            found.append(one)
        return found

    def _wait(self, grace_s: float) -> None:
        while not self._poll():
            time.sleep(_POLL_S)
        failed = [end for end in self._ends.values() if end.code]
        if not failed:
            return
        killed = self._again and any(end.code < 0 for end in failed)
        end = time.monotonic() + (min(grace_s, _GRACE_AFTER_KILL_S) if killed else grace_s)
        while time.monotonic() < end and len(self._ends) < self._number:
            self._poll()
            time.sleep(_POLL_S)

    def _poll(self) -> bool:
        """Records ended processes; returns whether one has failed, or all have ended."""
        for number, process in enumerate(self._processes):
            code = process.poll()
            if code is not None and number not in self._ends:
                failure = failure_of(self._reports / str(number))
                self._ends[number] = _End(number, code, time.monotonic(), failure)
                if not code and len(self._ends) < self._number:
                    # The others may wait for it, and cannot see that it is gone.
                    ended = [end.number for end in self._ends.values() if not end.code]
                    note_ended(self._reports, ended)
        failed = any(end.code for end in self._ends.values())
        return failed or len(self._ends) == self._number

    def _rank(self, end: _End) -> tuple[int, float]:
        """Sorts failures: consequences of other failures last, then by time."""
        failure = end.failure
        if failure is None and self._is_aborted(end):
            return _CONSEQUENCE + 1, end.at
        if end.code == EXIT_PEER:
            return _CONSEQUENCE, end.at
        if failure is None:
            return 0, end.at - _POLL_S
        if failure.error == END:
            return _CONSEQUENCE - 1, failure.at
        return int(failure.error in _OF_OTHERS), failure.at

    def _is_aborted(self, end: _End) -> bool:
        # JAX aborts a process after another one, with the coordinator, has ended.
        return end.code == -signal.SIGABRT and self._readers[end.number].ended_by_jax

    def _first(self, failed: list[_End]) -> _End:
        """The end of which others are the consequence, maybe one without an error.

        Among those with an error the first by rank. If its error is itself a consequence, such as a
        lost connection, a process that had already ended without an error was the first.
        """
        ended = [end for end in self._ends.values() if not end.code]
        first = min((*failed, *(end for end in ended if end.failure)), key=self._rank)
        # Ends within one look at the processes have no order; one that left without a word, as by
        # `os._exit(0)`, is what ended the others.
        left = [end for end in ended if not end.failure and end.at < first.at + _SAME_S]
        reported = first.failure is not None
        if not reported and first.code == -signal.SIGABRT and not self._is_aborted(first):
            # Not JAX says that another one is gone: only what ended just then can be the cause.
            before = [end for end in left if end.at > first.at - _SAME_S]
        elif self._rank(first)[0] >= _CONSEQUENCE or _LOST in self._words(first):
            before = [end for end in ended if end.at < first.at or end in left]
        else:
            before = []
        return min(before, key=lambda end: end.at, default=first)

    def _words(self, end: _End) -> str:
        """The text of a process's error, as it reported or printed it."""
        printed = self._readers[end.number].folded.error
        return end.failure.words if end.failure is not None else (printed or ("", ""))[1]

    def _code(self, seconds: float) -> int:
        """The exit code; prints which process failed first, if one failed."""
        reports = [failure_of(self._reports / str(number)) for number in range(self._number)]
        # Processes that reported an error, and were ended while they waited for the others.
        late = [
            _End(number, 1, failure.at, failure)
            for number, failure in enumerate(reports)
            if failure is not None and number not in self._ends
        ]
        failed = [end for end in (*self._ends.values(), *late) if end.code]
        if not failed:
            return 0
        first = self._first(failed)
        aborted = self._is_aborted(first)
        others = [end for end in failed if end is not first]
        # One that ended by itself has the exit code of the first process that waited for it.
        code = first.code
        if (aborted or not code) and others:
            code = min(others, key=self._rank).code
        reader = self._readers[first.number]
        error, words = _named(first, reader, aborted)
        of_this = reader.folded.error is not None and reader.folded.error[0] == error
        text = (
            f"process {first.number} of {self._number} on {socket.gethostname()} failed first, "
            f"{seconds:.0f} s after its start: {words}"
        )
        frames = reader.folded.frames if of_this else ()
        _print("\n".join([text, *frames, f"  full output: {reader.path}"]))
        return code if code > 0 else 128 - code


def _named(end: _End, reader: Reader, aborted: bool) -> tuple[str, str]:
    """The name of the cause that ended a process, and a description."""
    if end.code < 0 and not (aborted and end.failure is not None):
        number = -end.code
        has_name = number in {member.value for member in signal.Signals}  # not a real-time signal
        name = signal.Signals(number).name if has_name else f"signal {number}"
        return name, f"killed by {name}"
    if end.code == EXIT_TERMINATED:
        return "SIGTERM", f"preempted (SIGTERM, exit code {EXIT_TERMINATED})"
    if end.failure is not None:
        return end.failure.error, end.failure.words
    if not end.code:
        return "exit code 0", "ended with exit code 0, while the others waited for it"
    if end.code == 1 and reader.folded.error is not None:
        return reader.folded.error
    return f"exit code {end.code}", f"exit code {end.code}"


def _print(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _started(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen:
    if sys.platform == "linux":
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(command[0])
        starter = [sys.executable, "-I", "-S", "-c", _WITH_LAUNCHER, str(os.getpid())]
        command = [*starter, *command]
    return subprocess.Popen(
        [*command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _end(processes: list[subprocess.Popen], grace_s: float) -> None:
    ways = (subprocess.Popen.terminate, grace_s), (subprocess.Popen.kill, _GRACE_S)
    for ask, seconds in ways:
        for process in processes:
            if process.poll() is None:
                ask(process)
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(p.poll() is None for p in processes):
            time.sleep(_POLL_S)
