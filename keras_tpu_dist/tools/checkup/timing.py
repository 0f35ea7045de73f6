"""Measures a step of the user's model: its time, the time by layer, and its memory."""

import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import keras

from keras_tpu_dist.show.text import duration_text, size_text, span_text
from keras_tpu_dist.tools.checkup.aside import aside
from keras_tpu_dist.tools.checkup.batch import Given
from keras_tpu_dist.tools.checkup.bench import Bench, Job
from keras_tpu_dist.tools.checkup.calibrated import FACTORS, calibration_of
from keras_tpu_dist.tools.checkup.prepared import Prepared, prepared
from keras_tpu_dist.tools.checkup.report import FAST, CheckPart
from keras_tpu_dist.tools.dryrun.build import Subject
from keras_tpu_dist.tools.dryrun.compile import How
from keras_tpu_dist.tools.dryrun.measured import MeasuredSteps, read_profile
from keras_tpu_dist.tools.dryrun.report import DryRun
from keras_tpu_dist.tools.dryrun.run import run_once
from keras_tpu_dist.training.profiles import Trace

_STEPS, _TRACED = 10, 3
# The compiler needs a minute or more for an estimate.
_FOR_ESTIMATE_S = 60.0
_MOST_NAMED = 3


@dataclass(frozen=True)
class _Timed:
    """The measurements of a step in this process."""

    first: float
    later: float
    profile: MeasuredSteps | None
    why: str


def own_step_time(bench: Bench, model: keras.Model, given: Given) -> CheckPart:
    """Times the step with the model's own optimizer, without its input."""
    rows = given.rows(bench.strategy)
    with aside():
        timed = _timed(bench, model, given)
    step_s = bench.agreed("time of the step", timed.later, max)
    figures: dict[str, Any] = {"first": timed.first, "step": step_s, "rows": rows}
    words = [
        f"{duration_text(step_s)} for {rows} rows, without input",
        f"the first, with compilation, {duration_text(timed.first)}",
        *_memory(bench, figures),
    ]
    runs, estimates = _estimates(bench, model, given, step_s, figures)
    words += [*estimates, _by_layer(bench, timed, runs.get("exact"), figures)]
    return CheckPart("step time", FAST, "; ".join(words), (), figures)


def _timed(bench: Bench, model: keras.Model, given: Given) -> _Timed:
    job = Job("step")
    with prepared(bench, model, given) as step:
        args = step.placed_state, step.placed_batch
        begin = time.perf_counter()
        bench.launches.run(job, step.program, *args)
        first = time.perf_counter() - begin
        later = min(bench.launches.seconds(job, step.program, *args) for _ in range(_STEPS))
        try:
            return _Timed(first, later, _profile(model, step), "")
        except (RuntimeError, OSError, ValueError) as error:
            return _Timed(first, later, None, str(error).partition("\n")[0][:120])


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


def _estimates(
    bench: Bench, model: keras.Model, given: Given, step_s: float, figures: dict[str, Any]
) -> tuple[dict[str, DryRun], list[str]]:
    """Dry runs of the step with the measured rates, by effort, and their results in words."""
    if bench.chip is None:
        return {}, []
    if jax.process_count() > 1:
        return {}, ["no estimate: it takes a minute, and other processes would wait"]
    rates = calibration_of(bench.chip, bench.figures, source="this check")
    rows = given.rows(bench.strategy)
    runs: dict[str, DryRun] = {}
    words = []
    for effort in ("exact", "quick"):
        if bench.left_s < _FOR_ESTIMATE_S:
            words.append(f"no estimate of effort {effort}: it takes a minute")
            continue
        try:
            how = How(effort, bench.left_s, thorough=True, calibration=rates)
            run = run_once(Subject(model, bench.strategy, rows, given), how)
        except (ValueError, RuntimeError) as error:
            return runs, [*words, f"no estimate: {str(error).partition(chr(10))[0][:120]}"]
        if run.estimate is not None and run.step_range is not None:
            # Near the memory limit, a dry run of effort "quick" becomes "exact".
            runs[run.effort] = run
            span = span_text(*run.step_range, duration_text)
            words.append(f"the dry run estimates {span}, effort {run.effort}")
    figures[FACTORS] = {
        effort: step_s / run.estimate.step for effort, run in runs.items() if run.estimate
    }
    figures["estimated bytes"] = {effort: run.total_bytes for effort, run in runs.items()}
    words += [f"{size_text(run.total_bytes)} on a device" for run in [*runs.values()][:1]]
    return runs, words


def _by_layer(bench: Bench, timed: _Timed, run: DryRun | None, figures: dict[str, Any]) -> str:
    """The times by layer in words; `figures` gets them by layer and kind of collective."""
    profile = timed.profile
    mine: dict[str, Any] = {}
    if profile is not None:
        mine = {"layers": dict(profile.layers), "collectives": dict(profile.collectives)}
    every = bench.agreed("times by layer", mine, _averaged)
    times = {**every.get("layers", {}), **every.get("collectives", {})}
    if not times:
        return f"by layer: no profile could be read{f', {timed.why}' if timed.why else ''}"
    estimated: dict[str, tuple[float, float] | None] = {}
    if run is not None and profile is not None:
        beside = run.compare(profile)
        estimated = {layer.name: layer.estimated for layer in (*beside.layers, *beside.collectives)}
    figures["by layer"] = [
        {"name": name, "measured": seconds, "estimated": estimated.get(name)}
        for name, seconds in times.items()
    ]
    total = sum(times.values()) or 1.0
    longest = sorted(times.items(), key=lambda item: -item[1])[:_MOST_NAMED]
    return "by layer: " + ", ".join(f"{name} {s / total:.0%}" for name, s in longest)


def _averaged(every: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The times by name, averaged over the processes that could read a profile."""
    known = [process for process in every if process]
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for of_process in known:
        for kind, times in of_process.items():
            for name, seconds in times.items():
                found[kind][name] += seconds / len(known)
    return {kind: dict(times) for kind, times in found.items()}
