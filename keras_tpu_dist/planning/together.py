"""Several compilations at a time, each in a process of its own."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

# A compilation takes one processor, and less than 1 GiB for the models of benchmarks/search.py.
_MEMORY_OF_ONE = 4 * 2**30


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
        lower: Makes the program, in this thread; a candidate in its place is one that failed.
        compile_: Compiles a candidate's program, in another.
        begin: Told what begins.
        until: When no other begins, by `time.monotonic()`.
        first: Whether one begins in any case.

    Returns:
        Those compiled, in the order given, and those for which there was no time.
    """
    results: list[Any] = []
    number = at_once()
    with ThreadPoolExecutor(number) as pool:
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
            results.append(pool.submit(compile_, tried, lowered))
            running.add(results[-1])
        done = [r.result() if isinstance(r, Future) else r for r in results]
    return done, list(chosen[len(done) :])


def at_once() -> int:
    """How many compilations this machine has processors and memory for, at least one."""
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    return max(1, min(processors, available_memory() // _MEMORY_OF_ONE))


def available_memory() -> int:
    """Bytes that other programs leave, 0 where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
