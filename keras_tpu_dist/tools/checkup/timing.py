"""Measures a step of the user's model: its time and its memory."""

import time
from typing import Any

import keras

from keras_tpu_dist.show.text import duration_text, size_text
from keras_tpu_dist.tools.checkup.aside import aside
from keras_tpu_dist.tools.checkup.batch import Given
from keras_tpu_dist.tools.checkup.bench import Bench, Job
from keras_tpu_dist.tools.checkup.prepared import prepared
from keras_tpu_dist.tools.checkup.report import FAST, CheckPart

_STEPS = 10


def own_step_time(bench: Bench, model: keras.Model, given: Given) -> CheckPart:
    """Times the step with the model's own optimizer, without its input."""
    rows, job = given.rows(bench.strategy), Job("step")
    with aside(), prepared(bench, model, given) as step:
        args = step.placed_state, step.placed_batch
        begin = time.perf_counter()
        bench.launches.run(job, step.program, *args)
        first = time.perf_counter() - begin
        later = min(bench.launches.seconds(job, step.program, *args) for _ in range(_STEPS))
    step_s = bench.agreed("time of the step", later, max)
    figures: dict[str, Any] = {"first": first, "step": step_s, "rows": rows}
    words = [
        f"{duration_text(step_s)} for {rows} rows, without input",
        f"the first, with compilation, {duration_text(first)}",
    ]
    peak = (bench.local[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak is not None:
        figures["peak_bytes_in_use"] = peak
        words.append(f"memory at most {size_text(peak)} on a device")
    return CheckPart("step time", FAST, "; ".join(words), (), figures)
