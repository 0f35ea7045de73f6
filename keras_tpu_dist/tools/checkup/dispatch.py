"""Tests asynchronous launches: their order, donated buffers, and whether they return early."""

import time
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from keras_tpu_dist.show.text import duration_text
from keras_tpu_dist.tools.checkup.bench import Bench, Job, rows_of, same_bits, spread
from keras_tpu_dist.tools.checkup.report import LEAVE_OUT, RIGHT, CheckPart, Problem, numbered

# Launches in flight at once.
_IN_FLIGHT = 8
_WIDTH = 4096
_TRIES = 3
# A launch that returns only after this share of its time was not asynchronous.
_WAITED = 0.8


def async_dispatch(bench: Bench) -> CheckPart:
    """Chains launches with donated buffers, and waits only for the last one.

    Args:
        bench: The check's shared state.
    """
    wrong, donated = _chained(bench)
    problems = [_wrong_order(wrong)] if wrong else []
    returned, ended = _times(bench)
    if bench.platform == "tpu" and returned > _WAITED * ended:
        problems.append(_waits(returned, ended))
    words = (
        f"{_IN_FLIGHT} launches in flight, {'with' if donated else 'without'} donated buffers"
        f"{'' if wrong else ': same results as on the host'}; a launch of {duration_text(ended)} "
        f"returned after {duration_text(returned)}"
    )
    figures = {"returned": returned, "ended": ended, "donated": donated}
    return CheckPart("async dispatch", RIGHT, words, tuple(problems), figures)


def _chained(bench: Bench) -> tuple[list[int], bool]:
    """The devices whose results differ from the host's, and whether buffers were donated."""
    row = bench.row
    size = row.size
    around = [(i, (i + 1) % size) for i in range(size)]
    spec = PartitionSpec("device")

    def mix(x):
        return 3 * x + lax.ppermute(x, "device", around) + 1

    mixed = jax.shard_map(mix, mesh=row, in_specs=spec, out_specs=spec)
    program = jax.jit(mixed, donate_argnums=0)
    start = np.arange(size * _WIDTH, dtype=np.int32).reshape(size, _WIDTH)
    first = spread(row, lambda i: start[i])

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_IN_FLIGHT):
            x = program(x)
        return x

    found = rows_of(bench.launches.run(Job("launches in flight"), chain, first))
    expected = start
    for _ in range(_IN_FLIGHT):
        expected = 3 * expected + np.roll(expected, 1, axis=0) + 1
    wrong = [
        device.id
        for place, device in enumerate(bench.devices)
        if device.id in found and not same_bits(found[device.id][0], expected[place])
    ]
    donated = bench.agreed("donation", first.is_deleted(), all)
    return bench.some("results of launches in flight", wrong), donated


def _times(bench: Bench) -> tuple[float, float]:
    """After how long a launch of some milliseconds returned, and after how long it ended."""
    size, times = (4096, 20) if bench.platform == "tpu" else (256, 20)
    matrix = jax.device_put(np.eye(size, dtype=np.float32), bench.local[0])
    program = jax.jit(lambda a: lax.fori_loop(0, times, lambda _, c: c @ a, a))
    bench.launches.run(Job("launch"), program, matrix)
    tries = [_time(program, matrix) for _ in range(_TRIES)]
    return min(tries, key=lambda each: each[0] / each[1])


def _time(program: Any, matrix: jax.Array) -> tuple[float, float]:
    begin = time.perf_counter()
    outputs = program(matrix)
    returned = time.perf_counter() - begin
    jax.block_until_ready(outputs)
    return returned, time.perf_counter() - begin


def _wrong_order(devices: list[int]) -> Problem:
    return Problem(
        f"{numbered(devices)}: {_IN_FLIGHT} launches in flight with donated buffers differ from "
        "the host's result",
        "A launch reads a buffer before the previous launch has written it, or overwrites a buffer "
        "that is still in use.",
        LEAVE_OUT + " Until then, TPUStrategy(donate_state=False) keeps the old buffers.",
        tuple(devices),
    )


def _waits(returned: float, ended: float) -> Problem:
    return Problem(
        f"a launch of {duration_text(ended)} returns after {duration_text(returned)}",
        "The host waits for every launch, so the devices are idle while it prepares the next one.",
        "Turn off jax_debug_nans, jax_log_compiles and profilers.",
    )
