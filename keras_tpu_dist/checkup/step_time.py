"""How long a step of the user's model takes, and the memory that it needs."""

import contextlib
import time
from typing import Any

import jax
import keras

from keras_tpu_dist.checkup.batch import Given, values
from keras_tpu_dist.checkup.bench import Bench, Job
from keras_tpu_dist.checkup.report import FAST, CheckPart
from keras_tpu_dist.checkup.step import aside, host_state, optimized_by, placed_state, why_not
from keras_tpu_dist.dryrun.build import described, fresh_optimizer
from keras_tpu_dist.dryrun.run import dry_run
from keras_tpu_dist.show.text import duration_text, size_text
from keras_tpu_dist.training.step import jitted_step

_STEPS = 10
# An estimate takes the compiler a minute or more.
_FOR_ESTIMATE_S = 60.0


def own_step_time(bench: Bench, model: keras.Model, given: Given) -> CheckPart:
    """Times the step with the model's own optimizer, without its input.

    Args:
        bench: What parts share.
        model: The user's model, which is left as it is.
        given: The batch.
    """
    why = why_not(model)
    if why:
        return CheckPart("step time", FAST, left_out=why)
    rows = given.rows(bench.strategy)
    with aside():
        first, later = _times(bench, model, given)
    later = bench.agreed("time of the step", later, max)
    figures: dict[str, Any] = {"first": first, "step": later, "rows": rows}
    words = (
        f"{duration_text(later)} for {rows} rows, without input; the first, which compiles, "
        f"{duration_text(first)}"
    )
    stats = bench.local[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        figures["peak_bytes_in_use"] = stats["peak_bytes_in_use"]
        words += f"; memory at most {size_text(stats['peak_bytes_in_use'])} on a device"
    return CheckPart(
        "step time", FAST, words + _estimated(bench, model, given, figures), (), figures
    )


def _times(bench: Bench, model: keras.Model, given: Given) -> tuple[float, float]:
    """Seconds of the first launch, and of the fastest of those that follow."""
    strategy, rows = bench.strategy, given.rows(bench.strategy)
    with contextlib.ExitStack() as stack:
        if not model.optimizer.built:
            fresh = fresh_optimizer(model.optimizer)
            fresh.build(model.trainable_variables)
            stack.enter_context(optimized_by(model, fresh))
        prepared = described(model, strategy, given.by_name(), rows, "train", [])
        _, shapes = stack.enter_context(prepared)
        data = values(model, shapes, given, strategy.placer)
        state = placed_state(model, host_state(model))
        options = strategy.runner.compiler_options
        program = jitted_step(model, "train", strategy.placer, False, compiler_options=options)
        batch, job = strategy.placer.place(data), Job("step")
        begin = time.perf_counter()
        bench.launches.run(job, program, state, batch)
        first = time.perf_counter() - begin
        return first, min(bench.launches.seconds(job, program, state, batch) for _ in range(_STEPS))


def _estimated(bench: Bench, model: Any, given: Given, figures: dict[str, Any]) -> str:
    """The dry run's estimate, where the chip is known and there is time."""
    if bench.chip is None:
        return ""
    left = bench.agreed("time for an estimate", bench.left_s, min)
    if left < _FOR_ESTIMATE_S or jax.process_count() > 1:
        return "; no estimate: it takes a minute, of one process"
    try:
        run = dry_run(
            model,
            bench.strategy,
            **given.by_name(),
            batch_size=given.rows(bench.strategy),
            effort="exact",
            timeout=left,
        )
    except Exception as error:
        return f"; no estimate: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    if run.estimate is None:
        return "; no estimate: the slice is not known"
    figures |= {"estimate": run.estimate.step, "estimated bytes": run.total_bytes}
    memory = f", {size_text(run.total_bytes)} on a device" if run.total_bytes else ""
    return f"; the dry run estimates {duration_text(run.estimate.step)}{memory}"
