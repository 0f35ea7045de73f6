"""Several processes on one machine, each with simulated devices: a pod on a laptop."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from keras_tpu_dist.hardware.simulation import simulated_environment
from keras_tpu_dist.processes.start import COORDINATOR, LAUNCHER, NUM_PROCESSES, PROCESS_ID

_GRACE_S = 10.0
# What the library that joins the processes prints of each group of devices that it connects.
_OF_GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks")
# On Linux the kernel ends the program with the launcher (PR_SET_PDEATHSIG); elsewhere `initialize`
# checks. A process of its own calls `exec`: `preexec_fn` is not safe in a process with threads.
_WITH_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def launch(
    command: Sequence[str], num_processes: int, devices: int, grace_s: float = _GRACE_S
) -> int:
    """Runs a command as several processes that `ktd.initialize()` joins.

    Every line that a process prints is passed on with the process's number in front, except those
    of the library that connects them. The first process that fails ends all others, and so do
    Ctrl-C and SIGTERM. If the launcher itself is killed, they end too. They listen on the loopback
    address only.

    Args:
        command: The program and its arguments.
        num_processes: How often to start it.
        devices: Simulated CPU devices of every process.
        grace_s: Seconds for the others to end by themselves once one has failed, and again between
            SIGTERM and SIGKILL.

    Returns:
        The exit code: 0, or that of the first process that failed, as a shell has it: 128 and the
        signal's number for one that was killed, or if this process was to end.
    """
    started: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    with _sigterm_raises():
        try:
            for number, environment in enumerate(_environments(num_processes, devices)):
                started.append(_started(command, environment))
                reader = threading.Thread(target=_pass_on, args=(started[-1], number), daemon=True)
                reader.start()
                readers.append(reader)
            return _wait(started, grace_s)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except _Terminated:
            return 128 + signal.SIGTERM
        finally:
            _end(started, grace_s)
            for reader in readers:
                reader.join(timeout=5)


class _Terminated(BaseException):
    """SIGTERM has come to the launcher alone: it has to end the processes that it started."""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """The context within which the first SIGTERM raises, and later ones do nothing."""
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


def _environments(num_processes: int, devices: int) -> list[dict[str, str]]:
    address = f"127.0.0.1:{_free_port()}"
    return [
        {
            **os.environ,
            **simulated_environment(devices),
            COORDINATOR: address,
            NUM_PROCESSES: str(num_processes),
            PROCESS_ID: str(number),
            LAUNCHER: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        for number in range(num_processes)
    ]


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


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _pass_on(process: subprocess.Popen, number: int) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if not _OF_GLOO.match(line):
                sys.stdout.write(f"[{number}] {line}")
                sys.stdout.flush()


def _wait(processes: list[subprocess.Popen], grace_s: float) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            _wait_for(processes, grace_s)
            _end(processes, grace_s)
            return failed if failed > 0 else 128 - failed
        if None not in codes:
            return 0
        time.sleep(0.05)


def _wait_for(processes: list[subprocess.Popen], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(p.poll() is None for p in processes):
        time.sleep(0.05)


def _end(processes: list[subprocess.Popen], grace_s: float) -> None:
    for ask in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for process in processes:
            if process.poll() is None:
                ask(process)
        _wait_for(processes, grace_s)
