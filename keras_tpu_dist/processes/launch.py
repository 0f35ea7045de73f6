"""Several processes on one machine, each with simulated devices: a pod on a laptop."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from keras_tpu_dist.hardware.simulation import simulated_environment
from keras_tpu_dist.processes.start import COORDINATOR, NUM_PROCESSES, PROCESS_ID

_GRACE_S = 10.0


def launch(
    command: Sequence[str], num_processes: int, devices: int, grace_s: float = _GRACE_S
) -> int:
    """Runs a command as several processes that `ktd.initialize()` joins.

    Each line that a process prints is passed on with its number in front. The first that fails
    ends all others.

    Args:
        command: The program and its arguments.
        num_processes: How often to start it.
        devices: Simulated CPU devices of each.
        grace_s: Seconds that the others get to end by themselves once one has failed, and again
            between SIGTERM and SIGKILL.

    Returns:
        The exit code: 0, or that of the first process that failed, as a shell has it: 128 and the
        signal's number for one that was killed.
    """
    address = f"127.0.0.1:{_free_port()}"
    started, readers = [], []
    for number in range(num_processes):
        environment = {
            **os.environ,
            **simulated_environment(devices),
            COORDINATOR: address,
            NUM_PROCESSES: str(num_processes),
            PROCESS_ID: str(number),
            "PYTHONUNBUFFERED": "1",
        }
        process = subprocess.Popen(
            [*command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        started.append(process)
        reader = threading.Thread(target=_pass_on, args=(process, number), daemon=True)
        reader.start()
        readers.append(reader)
    try:
        return _wait(started, grace_s)
    except KeyboardInterrupt:
        _end(started, grace_s)
        return 128 + signal.SIGINT
    finally:
        for reader in readers:
            reader.join(timeout=5)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _pass_on(process: subprocess.Popen, number: int) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
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
