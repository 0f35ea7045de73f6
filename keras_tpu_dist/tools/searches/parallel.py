"""Runs several compilations in parallel, each in a separate process."""

import contextlib
import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from keras_tpu_dist.tools.dryrun import worker

# A compilation takes one processor, and less than 1 GiB for the models of benchmarks/search.py.
_MEMORY_OF_ONE = 4 * 2**30
_CONTAINER = Path("/sys/fs/cgroup")


def compiled_together(
    chosen: Sequence[Any],
    lower: Callable[[Any], Any],
    compile_: Callable[[Any, Any], Any],
    *,
    begin: Callable[[str], Any],
    until: float,
    first: bool,
) -> tuple[list[Any], list[Any]]:
    """Lowers candidates one after the other, and compiles several at a time.

    Args:
        chosen: The candidates, each with a `candidate`.
        lower: Creates the program, in this thread; if that fails, it returns a candidate instead.
        compile_: Compiles a candidate's program, in another thread.
        begin: Called with the name of the stage that starts.
        until: The time after which no other compilation starts, by `time.monotonic()`.
        first: Whether one compilation starts in any case.

    Returns:
        The compiled candidates, in the order given, and those for which there was no time.
    """
    results: list[Any] = []
    number = at_once()
    with ThreadPoolExecutor(number) as pool, _ending_together(results):
        running: set[Future] = set()
        for tried in chosen:
            if len(running) >= number:
                running = wait(running, return_when=FIRST_COMPLETED).not_done
            if time.monotonic() > until and (results or not first):
                break
            begin(str(tried.candidate))
            lowered = lower(tried)
            if isinstance(lowered, type(tried)):
                results.append(lowered)
                continue
            results.append(pool.submit(contextvars.copy_context().run, compile_, tried, lowered))
            running.add(results[-1])
        done = [r.result() if isinstance(r, Future) else r for r in results]
    return done, list(chosen[len(done) :])


@contextlib.contextmanager
def _ending_together(results: list[Any]) -> Iterator[None]:
    """An interrupt or an error ends running compilations, and those that wait."""
    stop = threading.Event()
    token = worker.STOP.set(stop)
    try:
        yield
    except BaseException:
        stop.set()
        for result in results:
            if isinstance(result, Future):
                result.cancel()
        raise
    finally:
        worker.STOP.reset(token)


def at_once() -> int:
    """The number of compilations that this machine has processors and memory for, at least one."""
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    return max(1, min(processors, container_processors(), available_memory() // _MEMORY_OF_ONE))


def available_memory() -> int:
    """Bytes that other programs leave free, 0 if the system does not report it."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return min(int(fields["MemAvailable"].split()[0]) * 1024, _container_memory())
    except (OSError, KeyError, ValueError):
        return 0


def container_processors() -> int:
    """The number of processors that a container may use; infinite if there is no limit.

    References:
        - https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    quota, period = _said("cpu.max", "max 1").split()
    return sys.maxsize if quota == "max" else max(1, int(quota) // int(period))


def _container_memory() -> int:
    limit = _said("memory.max", "max").strip()
    if limit == "max":
        return sys.maxsize
    fields = dict(line.split() for line in _said("memory.stat", "").splitlines())
    # Files that have not been read for a while can be dropped.
    used = int(_said("memory.current", "0")) - int(fields.get("inactive_file", 0))
    return max(0, int(limit) - used)


def _said(name: str, otherwise: str) -> str:
    try:
        return (_CONTAINER / name).read_text()
    except OSError:
        return otherwise
