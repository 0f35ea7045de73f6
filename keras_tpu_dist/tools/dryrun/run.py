"""Dry run: compile any Keras model for a TPU slice that you don't have."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from keras_tpu_dist.common.checks import FLAG, FUNCTION, SECONDS, one_of, require, whole
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.left_out import counted
from keras_tpu_dist.hardware.crossings import crossings, num_hosts
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.show.text import size_text
from keras_tpu_dist.tools.dryrun.build import MODE, Build, Lowered, Subject, lower
from keras_tpu_dist.tools.dryrun.cache import Cache, without_source_lines
from keras_tpu_dist.tools.dryrun.changes import what_to_change
from keras_tpu_dist.tools.dryrun.compile import (
    EFFORTS,
    Compiled,
    How,
    bytes_in_message,
    compile_lowered,
    has_libtpu,
    larger_twin,
)
from keras_tpu_dist.tools.dryrun.figures import Estimate, estimate
from keras_tpu_dist.tools.dryrun.inputs import Inputs, check_asked
from keras_tpu_dist.tools.dryrun.largest import find_largest
from keras_tpu_dist.tools.dryrun.report import DryRun as DryRun
from keras_tpu_dist.tools.hlo import LoopCost, ProgramCost, Wire, analyze, analyze_loop
from keras_tpu_dist.tools.hlo.layers import layers_of
from keras_tpu_dist.training.protocol import Strategy

logger = logging.getLogger("keras_tpu_dist")

# This close to the limit, the quick compilation is repeated at full effort.
_NEAR_LIMIT = 0.10
# For a program with loops or convolutions, quick compilation reports up to this many times the true
# memory (measured: 3.3 for two LSTM layers over 128 steps, 2.2 for MobileNetV2).
_OVERSTATEMENT = 4.0

# A note appears if the share of cycles that we estimate, because the compiler reports none, exceeds
# this.
_LITTLE = 0.02

Progress = Callable[[str], None]


def dry_run(
    build: Build,
    strategy: Strategy | None = None,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    sequence_length: int | None = None,
    batch_size: int | None = None,
    rows: int | None = None,
    mode: str = "train",
    effort: str = "quick",
    timeout: float = 1800.0,
    verify: bool = False,
    progress: Progress | None = None,
) -> DryRun:
    """Compiles one step of a model for a TPU slice, and reports its memory, time and collectives.

    The model is built without memory for its weights. The real TPU compiler compiles it in a
    separate process, on any machine with libtpu (`pip install 'jax[tpu]'`). Without libtpu, the CPU
    compiler partitions the program instead: you get memory and collectives, but no times.

    Args:
        build: A function without arguments that builds, compiles and returns a model; or a built
            model, which is not changed.
        strategy: A `TPUStrategy`, usually with `topology="v5e:16x16"`. Defaults to the one that
            the model belongs to, or that is in scope.
        x: The input: an array, `jax.ShapeDtypeStruct((1, 512), "int32")`, or a structure of them.
            `batch_size` replaces the number of its rows. Defaults to the model's declared inputs.
        y: The target, likewise. By default it is derived from the model's outputs and its loss.
        sample_weight: Sample weights, likewise.
        sequence_length: The length of texts and other sequences, if the model's inputs leave it
            open, as KerasHub's tasks do. It fills every open size of arrays with at most three
            dimensions. Give other open sizes, such as those of images, with `x`.
        batch_size: The global batch size. By default, the largest batch that fits is found, with up
            to eight compilations of effort `effort`, and a note. Sizes are multiples of the number
            of parts that the batch is split into, and within 5 % of a batch that was refused. At
            effort "quick" the memory is within 6 % of that in training, but up to three times too
            high for recurrent layers and convolutions: leave that much room, or use "exact".
        rows: The rows of your data: the report then has the time of an epoch, without input,
            compiling and validation. In mode `"evaluate"` or `"predict"`, of one call.
        mode: `"train"`, `"evaluate"`, `"predict"`, or `"generate"` for a language model of
            KerasHub; then the report is for one token in every row.
        effort: `"quick"` (XLA's `EFFORT_O1`) or `"exact"`, as in training. Quick is about three
            times faster. It is repeated as exact if the memory is within 10 % of the limit (within
            four times the limit for programs with loops or convolutions, whose memory it
            overstates). Its cycle estimates are about twice too high, so reports show the range
            that contains the exact ones.
        timeout: Seconds after which a compilation is stopped.
        verify: Whether to run the program on simulated devices too, beside one device, as
            `keras_tpu_dist.verify` does; `run.verification` has the result. The model is built with
            values for that, so it must fit into your memory.
        progress: Called with a line of text at every stage.

    Returns:
        A `DryRun`. If the model does not fit, you see it in the report; no error is raised.
        Operations are those that run, so recomputation in the backward pass counts again, and flash
        attention counts the blocks that its mask leaves.

    Raises:
        ValueError: If an argument is wrong, or `build` does not return a compiled model.
        RuntimeError: If the compiler fails for a reason other than memory.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> from keras_tpu_dist.tools.dryrun.run import dry_run
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, name="dense")])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> strategy = ktd.TPUStrategy({"data": 8}, topology="v5e:2x4")
    >>> run = dry_run(build, strategy, batch_size=64)  # doctest: +SKIP
    >>> run.fits, [c.axes for c in run.cost.collectives]  # doctest: +SKIP
    (True, [('data',)])
    """
    require("dry_run", whole(1), True, sequence_length=sequence_length, rows=rows)
    if rows is not None and mode == "generate":
        raise value_error(
            "A report of mode 'generate' is for one token: no number of rows has a time.",
            received={"rows": rows, "mode": mode},
            fix="Leave rows out, or write mode='predict'.",
        )
    strategy = check_asked(build, strategy)
    step = Subject(build, strategy, 1, Inputs(x, y, sample_weight, sequence_length), mode)
    how = How(effort, timeout, progress=progress)
    require("dry_run", FLAG, verify=verify)
    if batch_size is None:
        run = _of_the_largest(step, how)
    else:
        run = run_once(replace(step, batch_size=batch_size), replace(how, thorough=True))
    run = replace(run, rows=rows)
    if not verify:
        return run
    given = {**vars(step.inputs), "batch_size": run.batch_size, "mode": mode, "timeout": timeout}
    return replace(run, verification=strategy._verified(build, **given))


def _of_the_largest(step: Subject, how: How) -> DryRun:
    """The dry run of the largest batch that fits, or of the smallest one if none fits."""
    strategy = step.strategy
    if strategy.topology is None or not has_libtpu():
        lacks = "libtpu" if strategy.topology else "a slice, whose memory is known"
        raise value_error(
            "Without a batch size, a dry run uses the largest that fits, which needs a slice "
            "and its compiler.",
            received=f"batch_size=None, without {lacks}.",
            fix="Give batch_size, the rows of all devices together"
            + (", or pip install 'jax[tpu]'." if strategy.topology else "."),
        )
    unit = strategy.num_replicas_in_sync
    largest = find_largest(
        lambda rows: run_once(replace(step, batch_size=rows), how),
        unit,
        strategy.topology.hbm_bytes,
    )
    if largest.batch_size:
        which = f"{largest.batch_size} is the largest that fits"
    else:
        which = f"not even {unit}, the smallest, fits"
    note = f"batch_size was not given: {which}, found with {largest.compilations} compilation(s)"
    return replace(largest.run, notes=(note, *largest.run.notes))


def run_once(step: Subject, how: How) -> DryRun:
    """One dry run."""
    require("a dry run", one_of(*EFFORTS), effort=how.effort)
    require("a dry run", SECONDS, timeout=how.timeout)
    require("a dry run", FUNCTION, True, progress=how.progress)
    require("a dry run", MODE, mode=step.mode)
    with stages(f"dry run, {step.mode} step", 3) as begin:

        def tell(words: str) -> None:
            begin(words)
            (how.progress or logger.debug)(words)

        tell("building and lowering")
        lowered = lower_once(step, how.cache)
        return compile_once(lowered, replace(how, progress=tell))


def lower_once(step: Subject, cache: Cache | None = None) -> Lowered:
    """The first half of `run_once`, which needs Keras, and therefore the thread that set it up.

    Args:
        cache: The cache of compilations; with it, equal programs do not differ in source lines.
    """
    for_tpu = has_libtpu() and _is_tpu(step.strategy)
    with contextlib.nullcontext() if cache is None else without_source_lines():
        lowered = lower(step, "tpu" if for_tpu else "cpu")
    if _is_tpu(step.strategy) and not for_tpu:
        logger.warning(_NO_LIBTPU)
        lowered = replace(lowered, notes=(*lowered.notes, _NO_LIBTPU))
    return lowered


def compile_once(lowered: Lowered, how: How) -> DryRun:
    """The second half of `run_once`, for any thread.

    Args:
        lowered: From `lower_once`.
        how: How to compile: effort, time limit, cache, and whom to tell.
    """
    progress, effort = how.progress or logger.debug, how.effort
    options: dict[str, Any] = {"timeout": how.timeout, "cache": how.cache}
    notes = list(lowered.notes)
    where = lowered.topology.name if lowered.topology else "CPU"
    progress(f"compiling for {where}, effort {effort}")
    compiled = [compile_lowered(lowered, effort=effort, **options)]
    if how.thorough and effort == "quick" and _near_limit(compiled[-1], lowered):
        progress("near the memory limit: compiling again, effort exact")
        why = ", and overstates loops and convolutions" if lowered.overstated else ""
        notes.append(f"quick compilation came near the memory limit{why}: this is the exact one")
        compiled.append(compile_lowered(lowered, effort="exact", **options))
    verdict = compiled[-1]
    sized_on = None
    twin = larger_twin(lowered) if verdict.error and how.thorough else None
    if twin is not None:
        progress(f"does not fit: measuring on {twin.name}")
        compiled.append(compile_lowered(lowered, effort="quick", topology=twin, **options))
        sized_on = twin.name if compiled[-1].error is None else None
    progress("analysing")
    return _report(lowered, compiled, verdict, sized_on, notes)


_NO_LIBTPU = (
    "libtpu is not installed, so XLA's CPU partitioner replaces the TPU compiler: memory and "
    "collectives are approximate, attention is plain XLA operations, and there are no times. "
    "To install it: pip install 'jax[tpu]'."
)


def _is_tpu(strategy: Strategy) -> bool:
    return strategy.mesh.devices.flat[0].platform == "tpu"


def _near_limit(compiled: Compiled, lowered: Lowered) -> bool:
    if lowered.topology is None:
        return False
    limit = lowered.topology.hbm_bytes
    if compiled.error is None:
        return compiled.total_bytes > (1 - _NEAR_LIMIT) * limit
    stated = bytes_in_message(compiled.error, argument_bytes=lowered.state.arguments)
    hope = _OVERSTATEMENT if lowered.overstated else 1 + _NEAR_LIMIT
    return bool(stated) and stated[0] < hope * limit and lowered.state.lasting < limit


def _report(
    lowered: Lowered,
    compiled: list[Compiled],
    verdict: Compiled,
    sized_on: str | None,
    notes: list[str],
) -> DryRun:
    measured = compiled[-1] if sized_on else verdict
    topology = lowered.topology
    sized = Topology.parse(sized_on) if sized_on else topology
    loop, cost = _costs(lowered, measured, sized, notes)
    times = _estimated(lowered, cost, verdict)
    of_prompt = None if loop is None else _estimated(lowered, loop.outside, verdict)
    stated = bytes_in_message(verdict.error or "", argument_bytes=lowered.state.arguments)
    total = stated[0] if stated else measured.total_bytes
    layer_of = layers_of(lowered.layer_names)
    if times is not None and topology is not None and cost is not None:
        notes.append(_assumption(verdict, topology, cost))
    notes += _beside_the_step(lowered, topology)
    notes += [] if cost is None else _uncounted(cost)
    run = DryRun(
        mode=lowered.mode,
        compiled_for=verdict.compiled_for,
        mesh=lowered.axes,
        batch_size=lowered.rows,
        parameters=lowered.parameters,
        fits=None if topology is None else verdict.error is None,
        limit_bytes=topology.hbm_bytes if topology else None,
        total_bytes=total,
        memory=measured.memory,
        state=lowered.state,
        cost=cost,
        estimate=times,
        effort=verdict.effort,
        tokens=lowered.tokens,
        error=verdict.error,
        sized_on=sized_on,
        rematerialized=tuple(dict.fromkeys(map(layer_of, verdict.rematerialized))),
        build_seconds=lowered.seconds,
        compile_seconds=sum(c.seconds for c in compiled),
        compile_cpu_seconds=sum(c.cpu_seconds for c in compiled),
        compile_peak_bytes=max(c.peak_process_bytes for c in compiled),
        findings=lowered.findings,
        notes=tuple(notes),
        hosts=num_hosts(lowered.mesh),
        crossings=tuple(crossings(lowered.mesh).items()),
        model_flops=lowered.model_flops,
        hidden_flops=lowered.hidden_flops,
        peak_flops=topology.peak_flops() if topology else None,
        prompt_s=None if of_prompt is None else of_prompt.step,
        prompt_range=None if of_prompt is None else of_prompt.span,
        steps=lowered.steps,
        token_limit_s=_token_limit_s(lowered, loop),
    )
    levers = lowered.levers
    if levers is None:
        return run
    changes = counted("what to change", lambda: what_to_change(run, levers), (), notes.append)
    return replace(run, changes=changes, notes=tuple(notes))


def _costs(
    lowered: Lowered, compiled: Compiled, topology: Topology | None, notes: list[str]
) -> tuple[LoopCost | None, ProgramCost | None]:
    """The costs of a loop over tokens, and of a round of it or of the step."""
    of_loop = functools.partial(_loop_cost, lowered, compiled, topology)
    loop = counted("the loop over tokens", of_loop, None, notes.append)
    if loop is not None:
        return loop, loop.round
    of_step = functools.partial(_cost, lowered, compiled, topology)
    return None, counted("operations, bytes and times", of_step, None, notes.append)


def _beside_the_step(lowered: Lowered, topology: Topology | None) -> Iterator[str]:
    """Notes about memory of training that one launch does not show, and what a launch is."""
    if topology is not None and lowered.ready_bytes > topology.hbm_bytes / 100:
        ready = size_text(lowered.ready_bytes)
        yield f"besides, training holds {ready} of other batches on each device"
    if (steps := lowered.steps) > 1:
        yield (
            f"a launch of {steps} steps was compiled, as fit makes it: the memory is the launch's, "
            f"with {steps} batches; times, operations and collectives are for one of its steps"
        )


def _uncounted(cost: ProgramCost) -> Iterator[str]:
    """Notes about operations that the figures leave out."""
    if cost.unestimated_kernels:
        yield (
            f"{len(cost.unestimated_kernels)} hand-written kernel(s) report no cost: their "
            "operations are missing from the FLOPs"
        )
    if cost.whole_kernels:
        yield (
            f"{len(cost.whole_kernels)} attention kernel(s) skip what a mask in the data leaves "
            "out: counted as if they skipped nothing"
        )
    if cost.unknown_loops:
        yield f"{len(cost.unknown_loops)} loop(s) run as often as the data says; counted once"


def _cost(lowered: Lowered, compiled: Compiled, topology: Topology | None) -> ProgramCost | None:
    if not compiled.text:
        return None
    wire = _wire(lowered, topology)
    return analyze(compiled.text, wire=wire, layer_names=lowered.layer_names, steps=lowered.steps)


def _estimated(lowered: Lowered, cost: ProgramCost | None, verdict: Compiled) -> Estimate | None:
    if lowered.topology is None or cost is None or verdict.error:
        return None
    return estimate(cost, lowered.topology, verdict.effort)


def _loop_cost(lowered: Lowered, compiled: Compiled, topology: Topology | None) -> LoopCost | None:
    """The costs of a loop over tokens, if the program generates."""
    if lowered.tokens_loop is None or not compiled.text:
        return None
    wire = _wire(lowered, topology)
    return analyze_loop(compiled.text, wire=wire, layer_names=lowered.layer_names)


def _token_limit_s(lowered: Lowered, loop: LoopCost | None) -> float | None:
    """Seconds that a device needs for a token if it reads weights and caches once."""
    tokens, topology = lowered.tokens_loop, lowered.topology
    if tokens is None or loop is None or topology is None:
        return None
    return tokens.read_bytes(loop.carried) / topology.hbm_bandwidth or None


def _wire(lowered: Lowered, topology: Topology | None) -> Wire:
    devices = lowered.devices if topology is lowered.topology else ()
    return Wire.of(dict(lowered.axes), devices if topology else (), topology)


def _assumption(verdict: Compiled, topology: Topology, cost: ProgramCost) -> str:
    chip = topology.chip
    note = (
        f"the step's time is the compiler's cycle estimates at {chip.clock / 1e9:.2f} GHz plus the "
        "collectives it does not overlap, without the input pipeline; it was not measured"
    )
    if cost.kernel_flops:
        note += (
            "; hand-written kernels such as attention's count at 65% of full speed, and from 35% "
            "to 100% in ranges"
        )
    if cost.silent_cycles > _LITTLE * cost.cycles:
        note += (
            f"; {cost.silent_cycles / cost.cycles:.0%} of the cycles are estimated here, as the "
            "compiler states none for scatters, gathers, some slices and sorts"
        )
    if verdict.effort == "quick":
        note += "; the cycles of effort quick come out about twice too high, so times are ranges"
    if chip.assumed:
        names = " and ".join(name.replace("_", " ") for name in chip.assumed)
        note += f"; Google publishes no {names} of {chip.name}, the one used here is assumed"
    return note
