"""Processes that compare: an abort of the compiler and a hang are findings like a wrong value."""

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# By what runs libtpu's program: an operation without a counterpart on simulated devices. By libtpu:
# float64, where float32 differs and it would decide; windows that it does not implement. By JAX: an
# operation that it has no translation of for a TPU.
_REFUSALS = ("CannotRun: ", "X{64|128}", "UNIMPLEMENTED: ", "not found for platform tpu")


@dataclass(frozen=True)
class Finding:
    """What became of a job: "right", "wrong", "refused", "error", "abort" or "hang"."""

    job: dict
    outcome: str
    detail: str
    seconds: float

    def __str__(self):
        job = self.job
        name = job.get("name") or (
            f"{job['kind']} {job['case']} on {job['mesh']}, {job['rows']} rows, {job['plan']}"
        )
        return f"{self.outcome:6} {name}: {self.detail}"


class Worker:
    """A process whose script answers each line of JSON with one; started anew after it died."""

    def __init__(self, script: Path, timeout: float):
        self._script = script
        self._timeout = timeout
        self._process: subprocess.Popen | None = None
        # How many jobs this process has done.
        self.answered = 0
        self._files = contextlib.ExitStack()

    def compare(self, job: dict) -> Finding:
        if self._process is None:
            self._start()
        start = time.perf_counter()
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._line()
        seconds = time.perf_counter() - start
        self.answered += 1
        if line is None or not line:
            outcome, ended = "hang", ""
            if line is not None:
                # A negative one is a signal.
                outcome, ended = "abort", f"exit code {self._process.wait()}: "
            self._log.seek(0)
            lines = self._log.readlines()
            words = [line for line in lines if line.startswith(("F", "E"))] or lines[-3:]
            self.stop()
            return Finding(job, outcome, ended + "".join(words)[:300].strip(), seconds)
        answer = json.loads(line)
        if "error" in answer:
            refused = any(words in answer["error"] for words in _REFUSALS)
            return Finding(job, "refused" if refused else "error", answer["error"], seconds)
        detail = f"{answer['difference']:.1e} at {answer['where']}"
        return Finding(job, "right" if answer["right"] else "wrong", detail, seconds)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
        self._files.close()
        self._process = None

    def _start(self) -> None:
        self.answered = 0
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by stop)
        self._log = self._files.enter_context(log)
        self._process = subprocess.Popen(
            [sys.executable, str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )

    def _line(self) -> str | None:
        """The next answer, `""` if the process died, `None` if it takes too long."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(self._timeout)
        return self._process.stdout.readline() if ready else None


def work_through(
    items: Iterable[Any],
    do: Callable[[Worker, Any], None],
    script: Path,
    *,
    processes: int,
    timeout: float,
) -> None:
    """Does something with each item, in several processes."""
    todo: queue.SimpleQueue = queue.SimpleQueue()
    for item in items:
        todo.put(item)

    def work() -> None:
        worker = Worker(script, timeout)
        try:
            while True:
                do(worker, todo.get_nowait())
        except queue.Empty:
            return
        finally:
            worker.stop()

    threads = [threading.Thread(target=work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
