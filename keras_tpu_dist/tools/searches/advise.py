"""advise: compiles what a dry run says to change, and compares."""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras

from keras_tpu_dist.common.checks import PositiveInt, known_words
from keras_tpu_dist.hardware.calibration import Calibration, checked_calibration
from keras_tpu_dist.layers.convert import convert
from keras_tpu_dist.layout.planner import layout_named
from keras_tpu_dist.show.page import Report, Table, TableCell
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.show.text import size_text
from keras_tpu_dist.strategy import TPUStrategy
from keras_tpu_dist.tools.dryrun.build import Subject
from keras_tpu_dist.tools.dryrun.cache import Cache
from keras_tpu_dist.tools.dryrun.changes import Change
from keras_tpu_dist.tools.dryrun.compile import How
from keras_tpu_dist.tools.dryrun.inputs import Inputs, check_asked
from keras_tpu_dist.tools.dryrun.run import Build, DryRun, Progress, run_once
from keras_tpu_dist.training.protocol import Strategy

logger = logging.getLogger("keras_tpu_dist")

_HEADER = ("change", "counted", "compiled", "memory", "step")
_OF_A_FUNCTION = "pass the function that builds the model"


@dataclass(frozen=True, repr=False)
class Advised:
    """A change that was compiled.

    Attributes:
        change: The change, with its effect by a count.
        run: The dry run with the change, or `None` if it could not be compiled.
        factor: The compiled figure, relative to the one without the change; `None` without one.
        why_not: Why it could not be compiled, or `""`.
    """

    change: Change
    run: DryRun | None
    factor: float | None
    why_not: str = ""


@dataclass(frozen=True, repr=False)
class Advice(Report):
    """What to change about a step, by the compiler.

    Attributes:
        run: The dry run without changes.
        tried: The changes, in the order of the report.
    """

    run: DryRun
    tried: tuple[Advised, ...]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "run": self.run.to_dict(),
            "changes": [
                {
                    **vars(tried.change),
                    "counted": tried.change.factor,
                    "compiled": tried.factor,
                    "run": tried.run and tried.run.to_dict(),
                }
                for tried in self.tried
            ],
        }

    def _title(self) -> str:
        return self.run._title()

    def _tables(self) -> list[Table]:
        as_it_is = ("as it is", "", "", *_memory_and_step(self.run))
        rows: list[tuple[TableCell | str, ...]] = [as_it_is]
        for tried in self.tried:
            change = tried.change
            compiled = tried.why_not or ("-" if tried.factor is None else f"{tried.factor:.2f}")
            of_run = ("-", "-") if tried.run is None else _memory_and_step(tried.run)
            counted = TableCell(f"{change.factor:.2f}", change.factor)
            rows.append((change.figure, counted, TableCell(compiled, tried.factor), *of_run))
        return [Table("", _HEADER, rows)]

    def _code(self) -> list[str]:
        return [f"{tried.change.line}  # {tried.change.figure}" for tried in self.tried]

    def _below(self) -> list[str]:
        return self.run._blocks()


def _memory_and_step(run: DryRun) -> tuple[TableCell, TableCell]:
    memory = f"{size_text(run.total_bytes)}{'' if run.fits else ', too large'}"
    estimate = run.estimate
    step = TableCell("-") if estimate is None else TableCell(estimate.span_words, estimate.step)
    return TableCell(memory, run.total_bytes), step


@known_words
def advise(
    build: Build,
    strategy: Strategy | None = None,
    *,
    batch_size: PositiveInt,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    sequence_length: PositiveInt | None = None,
    effort: str = "quick",
    timeout: float = 1800.0,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    cache: Any = True,
) -> Advice:
    """Compiles what a dry run says to change, and compares memory and time.

    A dry run ends with at most three changes, each with its effect by a count. Here each is made
    and compiled: bfloat16, a larger or smaller batch, a plan, recomputed activations, a larger
    slice, converted recurrent layers, more steps in a launch.

    The arguments that are not listed are those of `dry_run`.

    Args:
        build: See `dry_run`. A model that is built cannot be changed to bfloat16, converted, or
            given other steps: for these, pass the function that builds it.
        batch_size: The global batch size.
        cache: See `search`.

    Returns:
        An `Advice`, whose lines can be copied.

    Raises:
        ValueError: If an argument is wrong, or `build` does not return a compiled model.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> strategy = ktd.TPUStrategy(topology="v5e:2x4")
    >>> print(ktd.advise(build, strategy, batch_size=64))  # doctest: +SKIP
    """
    strategy = check_asked(build, strategy, "advise")
    inputs = Inputs(x, y, sample_weight, sequence_length)
    measured = checked_calibration(calibration)
    how = How(effort, timeout, True, Cache.of(cache), measured, progress)
    step = Subject(build, strategy, batch_size, inputs)
    run = run_once(step, how)
    tried = []
    with stages("advise", len(run.changes) or 1) as begin:
        for change in run.changes:
            begin(f"compiling with {change.line}")
            if change.kind in _OF_BUILD and isinstance(build, keras.Model):
                tried.append(Advised(change, None, None, _OF_A_FUNCTION))
                continue
            changed = run_once(_changed(step, change), how)
            before, after = change.of(run), change.of(changed)
            factor = after / before if before and after is not None else None
            tried.append(Advised(change, changed, factor))
    return Advice(run, tuple(tried))


def _changed(step: Subject, change: Change) -> Subject:
    """What is dry-run, with the change."""
    if change.kind == "batch":
        return replace(step, batch_size=change.value)
    if change.kind in _OF_BUILD:
        return replace(step, build=functools.partial(_OF_BUILD[change.kind], step.build, change))
    own = step.strategy
    options, layout = own.options.as_arguments(), own.layouts.layout
    if change.kind in options:
        options[change.kind] = change.value
    elif change.value:
        layout = layout_named(change.value)
    strategy = TPUStrategy(dict(own.mesh.shape), layout, topology=own.topology, **options)
    if change.kind == "slice":
        strategy = strategy.on_topology(change.line.split('"')[-2])
    return replace(step, strategy=strategy)


def _in_bfloat16(build: Callable[[], keras.Model], _: Change) -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return build()
    finally:
        keras.config.set_dtype_policy(before)


def _converted(build: Callable[[], keras.Model], _: Change) -> keras.Model:
    return convert(build())


def _in_launches(build: Callable[[], keras.Model], change: Change) -> keras.Model:
    model = build()
    model.steps_per_execution = change.value
    return model


# Changes of the function that builds the model.
_OF_BUILD = {"bfloat16": _in_bfloat16, "convert": _converted, "steps": _in_launches}
