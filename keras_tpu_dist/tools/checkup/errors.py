"""Errors in a launch: the program gets them, and the devices still work afterwards."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from keras_tpu_dist.tools.checkup.bench import Bench, HangError, Job, rows_of, same_bits, spread
from keras_tpu_dist.tools.checkup.report import LEAVE_OUT, RIGHT, CheckPart, Problem, numbered

_WIDTH = 64
_REPORT = "Report it with the output of `ktd --version`."


class _OnPurposeError(Exception):
    """Raised by a callback."""


def launch_errors(bench: Bench) -> CheckPart:
    """Lets a launch fail on each device, and computes on all of them afterwards.

    JAX does not define what happens if a callback raises, and on a TPU the launch could wait
    forever for its result. There, only a NaN is tried, which JAX finds on the host.

    Args:
        bench: The check's shared state.
    """
    kinds = {"a NaN under jax_debug_nans": _nan}
    if bench.platform != "tpu":
        kinds["an exception of a callback"] = _callback
    problems: list[Problem] = []
    with _quiet():
        for words, fails in kinds.items():
            lost = [device.id for device in bench.local if not fails(bench, device)]
            lost = bench.some(f"lost errors after {words}", lost)
            problems += [_lost(words, lost)] if lost else []
            wrong = bench.some(f"results after {words}", _wrong_after(bench))
            problems += [_spoiled(words, wrong)] if wrong else []
    named = " and ".join(kinds)
    words = f"{named}, on every device"
    if not problems:
        words = f"{named}: each is raised, and every device works afterwards"
    if bench.platform == "tpu":
        words += "; a callback that raises is not tried on a TPU, because it may hang"
    return CheckPart("errors", RIGHT, words, tuple(problems))


def _callback(bench: Bench, device: Any) -> bool:
    """Whether the program gets the exception of a callback in a launch."""

    def fail(x: Any) -> Any:
        raise _OnPurposeError

    def program(x):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    return _fails(bench, Job("callback"), jax.jit(program), device)


def _nan(bench: Bench, device: Any) -> bool:
    """Whether a NaN in the results of a launch raises an error."""
    with jax.debug_nans(True):
        return _fails(bench, Job("nan"), jax.jit(lambda x: jax.numpy.log(-x)), device)


def _fails(bench: Bench, job: Job, program: Any, device: Any) -> bool:
    try:
        bench.launches.run(job, program, jax.device_put(np.ones(_WIDTH, np.float32), device))
    except HangError:
        raise
    except Exception:
        return True
    return False


def _wrong_after(bench: Bench) -> list[int]:
    """The devices of this process whose results, after a sum over all devices, are wrong."""
    row, start = bench.row, np.arange(bench.row.size * _WIDTH, dtype=np.int32)
    start = start.reshape(bench.row.size, _WIDTH)
    spec = PartitionSpec("device")

    def add(x):
        return 3 * x + lax.psum(x, "device")

    program = jax.jit(jax.shard_map(add, mesh=row, in_specs=spec, out_specs=spec))
    job = Job("after an error")
    found = rows_of(bench.launches.run(job, program, spread(row, lambda i: start[i])))
    expected = 3 * start + start.sum(axis=0, dtype=np.int32)
    return [
        device.id
        for place, device in enumerate(bench.devices)
        if device.id in found and not same_bits(found[device.id][0], expected[place])
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context in which JAX neither logs nor prints these errors."""
    logger = logging.getLogger("jax")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _lost(words: str, devices: list[int]) -> Problem:
    return Problem(
        f"{numbered(devices)}: {words} in a launch raised no error in the program",
        "Training would continue with the results of a failed step.",
        _REPORT,
        tuple(devices),
    )


def _spoiled(words: str, devices: list[int]) -> Problem:
    return Problem(
        f"{numbered(devices)}: after {words} in a launch, the results of the next launch differ "
        "from the host's",
        "A program that catches an error and continues computes wrong results. Restart it instead.",
        LEAVE_OUT,
        tuple(devices),
    )
