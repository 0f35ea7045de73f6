"""search: finds the fastest strategy for a model on a slice, with the compiler."""

import functools
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from keras_tpu_dist.common.checks import FUNCTION, NaturalInt, PositiveInt, Seconds, known_words
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.calibration import Calibration, calibrated
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.strategy import TPUStrategy
from keras_tpu_dist.tools.dryrun.build import Build, Lowered, Subject, fails_anywhere
from keras_tpu_dist.tools.dryrun.cache import Cache
from keras_tpu_dist.tools.dryrun.compile import How
from keras_tpu_dist.tools.dryrun.inputs import Inputs
from keras_tpu_dist.tools.dryrun.run import Progress, compile_once, lower_once
from keras_tpu_dist.tools.hlo import Wire
from keras_tpu_dist.tools.searches.candidates import POLICIES, Candidate, candidates
from keras_tpu_dist.tools.searches.facts import DescribedModel, Facts, describing
from keras_tpu_dist.tools.searches.forecast import Ground, forecast
from keras_tpu_dist.tools.searches.parallel import compiled_together
from keras_tpu_dist.tools.searches.ranking import Ranking, Tried, rank

logger = logging.getLogger("keras_tpu_dist")

# The share of compilations that try another mesh or layout every time.
_OF_OTHER_WAYS = 0.6
# A forecast of memory may be wrong by this factor.
_DOUBT = 1.3
_MOST_ROWS_A_DEVICE = 1024
# If the batch size is chosen to fill the memory, it fills this share.
_FILLED = 0.85
# Errors that mean that a candidate is not possible.
_FAULTS = (ValueError, RuntimeError, NotImplementedError)


@known_words
def search(
    build: Annotated[Build, FUNCTION],
    topology: str | Topology,
    batch_size: PositiveInt | None = None,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    sequence_length: PositiveInt | None = None,
    compilations: PositiveInt = 8,
    exact: NaturalInt = 4,
    budget_s: Seconds = 900.0,
    among: Sequence[Candidate] | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    cache: Any = True,
) -> Ranking:
    """Finds the fastest strategy for training a model on a slice.

    A closed-form forecast of memory and time ranks meshes, plans, split optimizer slots and remat
    policies; it needs one trace of the model. Then the real TPU compiler compiles the most
    promising candidate for every mesh and layout, and others with the best mesh and layout, with
    effort "quick". The fastest of all that fit are compiled again as in training (effort "exact");
    that decides the ranking. The forecast may rank wrongly, so more compilations make the result
    more reliable. They run in parallel, as processors and memory allow; this does not affect the
    result.

    The arguments that are not listed are those of `dry_run`.

    Args:
        build: A function without arguments that builds, compiles and returns a model; or a built
            model.
        topology: The slice, such as `"v5e:4x4"`.
        batch_size: The global batch size. With `None`, every candidate gets as many rows as it has
            memory for, at most 1024 per device, and rows per second decide.
        compilations: How many candidates to compile.
        exact: How many of them to compile again, with effort "exact".
        budget_s: Seconds after which no further compilation starts.
        among: The candidates to choose from. Defaults to all meshes of the axes "data", "fsdp" and
            "model", in all orders that differ on the links.
        calibration: See `dry_run`. Forecasts use its rates, too.
        progress: Called with a line of text at every stage.
        cache: A folder for a cache of compilations, by program, options, slice and versions; `True`
            for `~/.cache/keras_tpu_dist` (or in `$XDG_CACHE_HOME`), which is limited to 1 GiB;
            `False` for none.

    Returns:
        A `Ranking` with all candidates, the bottleneck of the best one, and `strategy()`.

    Raises:
        ValueError: If an argument has the wrong type or value, or nothing fits the slice and the
            model.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> found = ktd.search(build, "v5e:2x4", batch_size=1024)  # doctest: +SKIP
    >>> found.best.candidate.mesh, found.strategy()  # doctest: +SKIP
    """
    started, tell = time.monotonic(), progress or logger.debug
    _check_candidates(among)
    given, kept = Inputs(x, y, sample_weight, sequence_length), Cache.of(cache)
    topology, measured = calibrated(topology, calibration)
    compiled: list[Tried] = []
    with stages("search", 1 + compilations + exact) as begin:
        begin("reading the model")
        tell("reading the model")
        name, ranked = _forecasts(build, topology, batch_size, given, among)
        tell(f"{len(ranked)} candidates")

        def compile_(chosen: list[Tried], effort: str = "quick") -> tuple[list[Tried], list[Tried]]:
            return compiled_together(
                chosen,
                functools.partial(lowered_step, build, topology, given, kept, measured),
                functools.partial(compiled_step, How(effort, cache=kept)),
                begin=lambda tried: (begin(f"compiling {tried}"), tell(f"compiling {tried}")),
                until=started + budget_s,
                first=not compiled,
            )

        def look_at(chosen: list[Tried]) -> None:
            for tried in chosen:
                ranked.remove(tried)
            run, left = compile_(chosen)
            compiled.extend(run)
            ranked[:0] = left

        look_at(_of_other_ways(ranked, max(1, round(compilations * _OF_OTHER_WAYS))))
        look_at(_like_the_best(ranked, compiled, compilations - len(compiled)))
        fastest, rest = _fastest(compiled, exact)
        again, left = compile_(fastest, "exact")
        compiled = [*again, *left, *rest]
    return Ranking(
        model=name,
        topology=topology.name,
        compiled=tuple(sorted(compiled, key=rank)),
        others=tuple(ranked),
        seconds=time.monotonic() - started,
        calibration="" if measured is None else str(measured),
    )


def lowered_step(
    build: Build,
    topology: Topology,
    given: Inputs,
    cache: Cache | None,
    calibration: Calibration | None,
    tried: Tried,
    mode: str = "train",
) -> Lowered | Tried:
    """Lowers a candidate's step; returns the candidate with the reason if that is not possible."""
    try:
        step = Subject(build, tried.candidate.strategy(topology), tried.rows, given, mode)
        return lower_once(step, cache).calibrated(calibration)
    except _FAULTS as error:
        if fails_anywhere(error):
            raise
        return _failed(tried, error)


def compiled_step(how: How, tried: Tried, lowered: Lowered) -> Tried:
    """A candidate with the compiler's report, or the reason why there is none."""
    # Its mesh may leave the size of an axis open.
    tried = replace(tried, candidate=replace(tried.candidate, mesh=lowered.axes))
    try:
        run = compile_once(lowered, how)
    except _FAULTS as error:
        return _failed(tried, error)
    return replace(tried, run=run)


def _failed(tried: Tried, error: Exception) -> Tried:
    logger.info("%s: %s", tried.candidate, error)
    return replace(tried, error=str(error))


def _of_other_ways(ranked: list[Tried], number: int) -> list[Tried]:
    """The most promising candidate for every mesh and layout.

    A forecast ranks candidates on one mesh better than it ranks meshes, because it does not know
    the compiler's kernels for them.
    """
    first = {}
    for tried in ranked:
        first.setdefault(tried.candidate.way, tried)
    return list(first.values())[:number]


def _like_the_best(ranked: list[Tried], compiled: list[Tried], number: int) -> list[Tried]:
    """Others with the best one's mesh and layout, then any."""
    best = min(compiled, key=rank, default=None)
    way = None if best is None else best.candidate.way
    alike = [tried for tried in ranked if tried.candidate.way == way]
    return [*alike, *(tried for tried in ranked if tried.candidate.way != way)][:number]


def _fastest(compiled: list[Tried], number: int) -> tuple[list[Tried], list[Tried]]:
    """The candidates to compile again, and the others.

    Quick compilation estimates two to three times too many cycles. So waiting for links counts too
    little, and you cannot see which programs full effort improves more than others: {"fsdp": 128,
    "model": 2} was 2.8 times as fast as estimated, and "fsdp" alone 3.4 times. Quick compilation
    does rank orders of the same axes correctly, so only the best of those is compiled again.
    """
    ranked = sorted(compiled, key=rank)
    timed = [t for t in ranked if t.run is not None and t.run.fits and t.run.estimate]
    first: dict[Any, Tried] = {}
    for tried in timed:
        first.setdefault(tried.candidate.whatever_order, tried)
    chosen = [*first.values(), *(t for t in timed if t not in first.values())][:number]
    return chosen, [tried for tried in ranked if tried not in chosen]


def _forecasts(
    build: Build,
    topology: Topology,
    batch_size: int | None,
    given: Inputs,
    among: Sequence[Candidate] | None,
) -> tuple[str, list[Tried]]:
    """The model's name, and all candidates, the most promising first."""
    devices = topology.num_devices
    chosen = list(candidates(devices, topology) if among is None else among)
    rows = devices if batch_size is None else batch_size
    # At least two rows per device: operations cannot see a batch of one row as a dimension.
    most = max(1, rows // 2)
    parts = max(i for i in range(1, devices + 1) if devices % i == 0 and i <= most)
    base = TPUStrategy({"data": parts, "model": devices // parts}, topology=topology)
    found = []
    with describing(build, base, given, rows) as model:
        policies = sorted({*POLICIES[:1], *(c.remat for c in chosen)}, key=str)
        facts = model.facts(rows, policies)
        for candidate in chosen:
            try:
                found += _forecast_of(model, facts, candidate, topology, batch_size)
            except ValueError as error:
                logger.info("%s: %s", candidate, error)
    if not found:
        raise value_error(
            "No candidate fits the slice and the model.",
            received={"model": model.name, "topology": topology.name, "tried": len(chosen)},
            fix="Give others with among=[...], or a batch_size that more meshes can split.",
        )
    found.sort(key=lambda tried: _promise(tried, topology.hbm_bytes))
    return model.name, found


def _promise(tried: Tried, limit: int) -> tuple[float, float]:
    """The sort key of forecasts: the fastest first, then those too large, the smallest first."""
    memory = 0.0 if tried.forecast is None else tried.forecast.memory_bytes
    return (memory if memory > _DOUBT * limit else 0.0), tried.seconds_a_row


def _forecast_of(
    model: DescribedModel,
    facts: Facts,
    candidate: Candidate,
    topology: Topology,
    batch_size: int | None,
) -> list[Tried]:
    strategy = candidate.strategy(topology)
    specs = model.specs(strategy)
    wire = Wire.of(dict(strategy.mesh.shape), list(strategy.mesh.devices.flat), topology)
    ground = Ground(wire, topology, tuple(strategy.data_axes), candidate.shard_optimizer)
    parts = ground.ways(ground.data_axes)
    if batch_size is not None and batch_size < parts:
        return []

    def tried(rows: int) -> tuple[Tried, float]:
        expected = forecast(facts, specs, ground, rows, candidate.remat)
        return Tried(candidate, rows, expected), expected.memory_bytes

    if batch_size is not None:
        return [tried(batch_size)[0]]
    best = None
    for power in range(int(math.log2(_MOST_ROWS_A_DEVICE)) + 1):
        larger, memory_bytes = tried(parts * 2**power)
        if best is not None and memory_bytes > _FILLED * topology.hbm_bytes:
            break
        best = larger
    return [] if best is None else [best]


def _check_candidates(among: Any) -> None:
    if among is None:
        return
    listed = isinstance(among, Sequence) and not isinstance(among, str)
    if not listed or not all(isinstance(candidate, Candidate) for candidate in among):
        raise value_error(
            "among takes candidates of a search.",
            received={"among": among},
            fix="Pass candidates that another search has ranked.",
        )
