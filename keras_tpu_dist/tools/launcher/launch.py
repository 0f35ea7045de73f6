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

from keras_tpu_dist.common import records
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
    step_of,
)
from keras_tpu_dist.common.paths import absolute_path
from keras_tpu_dist.hardware.environment import simulated_environment
from keras_tpu_dist.tools.launcher.output import Reader
from keras_tpu_dist.tools.launcher.restart import Interrupted, Outcome, Restarts, started_again

_GRACE_S = 10.0
# If a process was killed, the errors of the others explain nothing, so there is no need to wait.
_GRACE_AFTER_KILL_S = 1.0
# The time from SIGTERM until a preempted machine goes away, less a reserve.
_TO_SAVE_S = 25.0
_POLL_S = 0.05
# For reading the last output of the processes after all have ended.
_TO_READ_S = 5.0
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
    restarts: Restarts | None = None,
    logs: str | os.PathLike | None = None,
    goodput: str | os.PathLike | None = None,
) -> int:
    """Runs a command as several processes that `ktd.initialize()` joins.

    It prints every line of a process with the process's number in front, except lines of the
    library that connects them. Tracebacks contain only the user's frames; the full output goes to
    files. The first process that fails ends all others; Ctrl-C, SIGTERM and the death of the
    launcher end all of them. They listen only on the loopback address.

    Args:
        devices: Simulated CPU devices per process; `None` for one process with the environment of
            the launcher and the devices of this machine.
        grace_s: Seconds for the others to end by themselves after one has failed, and again
            between SIGTERM and SIGKILL.
        restarts: Whether and how to restart all processes; by default, they are not restarted.
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
    file = None if goodput is None else absolute_path(goodput)
    code = 1
    limits = restarts or Restarts()
    codes: list[int] = []

    def one(number: int, attempt: int) -> Outcome:
        again = limits.limit > 0
        outcome = _Start(command, number, devices, folder, attempt, file, again).run(grace_s)
        codes.append(outcome.code)
        return outcome

    try:
        with _sigterm_raises():
            code = started_again(one, num_processes, limits, file)
    except (KeyboardInterrupt, Interrupted) as error:
        code = 128 + (signal.SIGTERM if isinstance(error, Interrupted) else signal.SIGINT)
        if file is not None:
            records.try_append(file, records.ENDED, code=code)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder / _REPORTS, ignore_errors=True)
            # Messages about a failure name a file in the folder.
            if logs is None and not code and not any(codes):
                shutil.rmtree(folder, ignore_errors=True)
    return code


_REPORTS = ".reports"


class _Terminated(Interrupted):
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
        goodput: str | None,
        again: bool,
    ):
        self._again = again
        self._command, self._number, self._devices = command, num_processes, devices
        self._folder, self._attempt, self._goodput = folder, attempt, goodput
        self._reports = folder / _REPORTS / str(attempt)
        self._processes: list[subprocess.Popen] = []
        self._readers: list[Reader] = []
        self._ends: dict[int, _End] = {}

    def run(self, grace_s: float) -> Outcome:
        """Starts all processes, and waits until all have ended."""
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
        return self._outcome(time.monotonic() - began)

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
            if self._goodput is not None:
                one[records.GOODPUT] = self._goodput
            found.append(one)
        return found

    def _wait(self, grace_s: float) -> None:
        while not self._poll():
            time.sleep(_POLL_S)
        failed = [end for end in self._ends.values() if end.code]
        if not failed:
            return
        if self._goodput is not None:
            first = self._first(failed)
            step = self._step()
            fields = {"process": first.number, "code": first.code, "step": step}
            records.try_append(self._goodput, records.FAILED, **fields)
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
        before = [end for end in ended if end.at < first.at]
        lost = first.failure is not None and _LOST in first.failure.words
        consequence = lost or self._rank(first)[0] >= _CONSEQUENCE
        return min(before, key=lambda end: end.at) if consequence and before else first

    def _step(self) -> int | None:
        steps = [step_of(self._reports / str(number)) for number in range(self._number)]
        return max((step for step in steps if step is not None), default=None)

    def _outcome(self, seconds: float) -> Outcome:
        reports = [failure_of(self._reports / str(number)) for number in range(self._number)]
        # Processes that reported an error, and were ended while they waited for the others.
        late = [
            _End(number, 1, failure.at, failure)
            for number, failure in enumerate(reports)
            if failure is not None and number not in self._ends
        ]
        failed = [end for end in (*self._ends.values(), *late) if end.code]
        if not failed:
            return Outcome(0, self._number, seconds, self._step())
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
        return Outcome(
            code=code if code > 0 else 128 - code,
            processes=self._number,
            seconds=seconds,
            step=self._step(),
            first=first.number,
            error=error,
            words=words,
            frames=tuple(reader.folded.frames if of_this else ()),
            log=str(reader.path),
        )


def _named(end: _End, reader: Reader, aborted: bool) -> tuple[str, str]:
    """The name of the cause that ended a process, and a description."""
    if end.code < 0 and not (aborted and end.failure is not None):
        number = -end.code
        known = number in {Signal.value for Signal in signal.Signals}  # not a real-time signal
        name = signal.Signals(number).name if known else f"signal {number}"
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
