"""Runs the parts of a check in order, within a time limit, the same parts in all processes."""

import importlib.metadata
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from keras_tpu_dist.common.own_mesh import own_mesh
from keras_tpu_dist.processes.encoding import PeerError
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.tools.checkup.batch import NOTHING, Given
from keras_tpu_dist.tools.checkup.bench import Bench, HangError, Launcher
from keras_tpu_dist.tools.checkup.collectives import collectives
from keras_tpu_dist.tools.checkup.products import products
from keras_tpu_dist.tools.checkup.programs import programs
from keras_tpu_dist.tools.checkup.report import Check, CheckPart, Problem, joined
from keras_tpu_dist.tools.checkup.step import own_step
from keras_tpu_dist.training.protocol import Strategy

_VERSIONS = ("keras_tpu_dist", "keras", "jax", "jaxlib", "libtpu")


@dataclass(frozen=True)
class Planned:
    """A part to run.

    Args:
        name: Its name.
        run: The function that runs it.
        seconds: Approximately the longest time it takes; it is left out if less time remains.
    """

    name: str
    run: Callable[[Bench], CheckPart]
    seconds: float


def steps(model: Any = None, given: Given = NOTHING) -> list[Planned]:
    """All parts, in order.

    Args:
        model: The user's model, or `None`.
        given: Its batch.
    """
    own = [Planned("step", partial(own_step, model=model, given=given), 20.0)]
    return [
        Planned("products", products, 10.0),
        Planned("collectives", collectives, 20.0),
        *(own if model is not None else []),
        Planned("programs", programs, 40.0),
    ]


def run_check(
    strategy: Strategy,
    todo: Sequence[Planned],
    minutes: float,
    launches: Launcher | None = None,
    only: Iterable[str] | None = None,
) -> Check:
    """Runs parts of a check.

    Args:
        strategy: The strategy.
        todo: The parts.
        minutes: The time limit.
        launches: Starts programs; tests pass one with faulty devices.
        only: The names of the parts to run; by default all.
    """
    bench = Bench(strategy, launches or Launcher(), minutes)
    wanted = [step for step in todo if only is None or step.name in set(only)]
    parts: list[CheckPart] = []
    hung = ""
    with own_mesh(), stages("check", len(wanted)) as begin:
        for step in wanted:
            begin(step.name)
            part = _left_out(step, hung) if hung else _run(bench, step)
            if part.hangs:
                hung = f"{part.name} hangs, and so would all later parts"
            parts.append(part)
    return Check(
        device_kind=bench.devices[0].device_kind,
        platform=bench.platform,
        mesh=tuple(bench.mesh.shape.items()),
        processes=strategy.num_hosts,
        minutes=minutes,
        seconds=time.monotonic() - bench.began,
        parts=tuple(parts),
        versions=tuple(_versions()),
    )


def _run(bench: Bench, step: Planned) -> CheckPart:
    """Runs a part in all processes, or leaves it out in all of them."""
    left = bench.agreed(f"time for {step.name}", bench.left_s, min)
    if left < step.seconds:
        why = f"it may take {step.seconds:.0f} s, and {max(left, 0):.0f} s remained"
        return replace(_left_out(step, why), no_time=True)
    begin, part = time.monotonic(), CheckPart(step.name)
    try:
        part = _ran(bench, step)
        part = _of_all(bench, f"the result of {step.name}", part)
    except PeerError:
        # Another process failed within the part while this one waited for it there. Now all
        # processes are at this point, unless one has ended.
        part = _of_all(bench, f"how {step.name} ended", part)
        if part.ok:
            raise
    return replace(part, seconds=bench.agreed("seconds", time.monotonic() - begin, max))


def _ran(bench: Bench, step: Planned) -> CheckPart:
    """The result of a part in this process."""
    try:
        return step.run(bench)
    except PeerError:
        raise
    except Exception as error:
        problem, hangs = _raised(step, error), isinstance(error, HangError)
        return CheckPart(step.name, "ended with an error", (problem,), hangs=hangs)


def _of_all(bench: Bench, what: str, part: CheckPart) -> CheckPart:
    """The joined result of all processes."""
    if bench.strategy.placer.is_local:
        return part

    def as_one(every: list[dict[str, Any]]) -> dict[str, Any]:
        return joined([CheckPart.of_dict(found) for found in every]).to_dict()

    return CheckPart.of_dict(bench.agreed(what, part.to_dict(), as_one))


def _left_out(step: Planned, why: str) -> CheckPart:
    return CheckPart(step.name, left_out=why)


def _raised(step: Planned, error: Exception) -> Problem:
    lines = str(error).splitlines() or [""]
    if isinstance(error, HangError):
        return Problem(
            lines[0],
            "Devices wait for a device that never joins: a link or a chip is down, or a process "
            "runs another program.",
            "End this process. Check whether all processes of the pod run; restart the slice.",
        )
    return Problem(
        f"{type(error).__name__}: {lines[0][:300]}",
        f"{step.name} cannot run here.",
        "If the error is not caused by your code, report it with the output of `ktd --version`.",
    )


def _versions() -> Iterable[tuple[str, str]]:
    for name in _VERSIONS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield "devices", str(jax.device_count())
