"""Measures a step of the user's model: its time, the time by layer, and its memory."""

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import keras

from keras_tpu_dist.show.text import duration_text, size_text
from keras_tpu_dist.tools.checkup.aside import aside
from keras_tpu_dist.tools.checkup.batch import Given
from keras_tpu_dist.tools.checkup.bench import Bench, Job
from keras_tpu_dist.tools.checkup.prepared import Prepared, prepared
from keras_tpu_dist.tools.checkup.report import FAST, CheckPart
from keras_tpu_dist.tools.dryrun.measured import MeasuredSteps, read_profile
from keras_tpu_dist.training.profiles import Trace

_STEPS, _TRACED = 10, 3
_MOST_NAMED = 3


def own_step_time(bench: Bench, model: keras.Model, given: Given) -> CheckPart:
    """Times the step with the model's own optimizer, without its input."""
    rows, job = given.rows(bench.strategy), Job("step")
    profile, why = None, ""
    with aside(), prepared(bench, model, given) as step:
        args = step.placed_state, step.placed_batch
        begin = time.perf_counter()
        bench.launches.run(job, step.program, *args)
        first = time.perf_counter() - begin
        later = min(bench.launches.seconds(job, step.program, *args) for _ in range(_STEPS))
        try:
            profile = _profile(model, step)
        except (RuntimeError, OSError, ValueError) as error:
            why = str(error).partition("\n")[0][:120]
    step_s = bench.agreed("time of the step", later, max)
    figures: dict[str, Any] = {"first": first, "step": step_s, "rows": rows}
    words = [
        f"{duration_text(step_s)} for {rows} rows, without input",
        f"the first, with compilation, {duration_text(first)}",
        *_memory(bench, figures),
        _by_layer(bench, profile, why, figures),
    ]
    return CheckPart("step time", FAST, "; ".join(words), (), figures)


def _profile(model: keras.Model, step: Prepared) -> MeasuredSteps:
    """The times of some steps by layer.

    Raises:
        RuntimeError: If JAX's profiler is already on.
        OSError: If its files cannot be written.
    """
    args = step.placed_state, step.placed_batch
    text = step.program.lower(*args).compile().as_text()
    with tempfile.TemporaryDirectory(prefix="ktd_check_") as folder:
        trace = Trace(Path(folder) / "process_0" / "from_step_1", 1)
        try:
            for _ in range(_TRACED):
                jax.block_until_ready(step.program(*args))
        finally:
            trace.stop()
        # Other steps of this process have instructions of the same names.
        trace.describe(_TRACED, (1, _TRACED), model, [("jit_train_step", text)])
        return read_profile(folder)


def _memory(bench: Bench, figures: dict[str, Any]) -> list[str]:
    stats = bench.local[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    if peak is None:
        return []
    figures["peak_bytes_in_use"] = peak
    return [f"memory at most {size_text(peak)} on a device"]


def _by_layer(
    bench: Bench, profile: MeasuredSteps | None, why: str, figures: dict[str, Any]
) -> str:
    """The times by layer in words; `figures` gets them by layer and kind of collective."""
    mine = {} if profile is None else dict(profile.layers + profile.collectives)
    times = bench.agreed("times by layer", mine, _averaged)
    if not times:
        return f"by layer: no profile could be read{f', {why}' if why else ''}"
    figures["by layer"] = [{"name": name, "measured": seconds} for name, seconds in times.items()]
    total = sum(times.values()) or 1.0
    longest = sorted(times.items(), key=lambda item: -item[1])[:_MOST_NAMED]
    return "by layer: " + ", ".join(f"{name} {s / total:.0%}" for name, s in longest)


def _averaged(every: list[dict[str, float]]) -> dict[str, float]:
    """The times by name, averaged over the processes that could read a profile."""
    known = [process for process in every if process]
    found: dict[str, float] = defaultdict(float)
    for times in known:
        for name, seconds in times.items():
            found[name] += seconds / len(known)
    return dict(found)
