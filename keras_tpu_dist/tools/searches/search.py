"""search: finds the best strategy for a model on one or several slices, with the compiler."""

import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from keras_tpu_dist.common.checks import (
    FUNCTION,
    NaturalInt,
    PositiveInt,
    Seconds,
    above_zero,
    checked_arguments,
)
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.topology import CHIPS, Topology
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.strategy import TPUStrategy
from keras_tpu_dist.tools.dryrun.build import Build, Lowered, Subject, fails_anywhere
from keras_tpu_dist.tools.dryrun.cache import Cache
from keras_tpu_dist.tools.dryrun.compile import How
from keras_tpu_dist.tools.dryrun.inputs import Inputs, check_batch_size
from keras_tpu_dist.tools.dryrun.run import Progress, compile_once, lower_once
from keras_tpu_dist.tools.hlo import Wire
from keras_tpu_dist.tools.searches.candidates import (
    POLICIES,
    Candidate,
    candidates,
    candidates_of,
)
from keras_tpu_dist.tools.searches.facts import DescribedModel, Facts, describing
from keras_tpu_dist.tools.searches.forecast import Ground, forecast
from keras_tpu_dist.tools.searches.parallel import compiled_together
from keras_tpu_dist.tools.searches.ranking import Ranking, Tried, rank

logger = logging.getLogger("keras_tpu_dist")

_COMPILATIONS = 8
# The share of compilations that try another mesh or layout every time.
_OF_OTHER_WAYS = 0.6
# A forecast of memory may be wrong by this factor.
_DOUBT = 1.3
_MOST_ROWS_A_DEVICE = 1024
# If the batch size is chosen to fill the memory, it fills this share.
_FILLED = 0.85
_CHIP_OF = {name: chip.name for chip in CHIPS.values() for name in (chip.name, *chip.aliases)}
_PRICE = above_zero("any currency", "1.2")
# Errors that mean that a candidate is not possible.
_FAULTS = (ValueError, RuntimeError, NotImplementedError)


@checked_arguments
def search(
    build: Annotated[Build, FUNCTION],
    topology: str | Topology | Sequence[str | Topology],
    batch_size: PositiveInt | None = None,
    *,
    price_per_chip_hour: Mapping[str, float] | None = None,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    sequence_length: PositiveInt | None = None,
    compilations: PositiveInt | None = None,
    exact: NaturalInt = 4,
    budget_s: Seconds = 900.0,
    among: Sequence[Candidate | Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
    cache: Any = True,
) -> Ranking:
    """Finds the best strategy for training a model on one or several slices.

    On one slice, the fastest is the best. On several, all candidates are in one ranking: by the
    price of a row if you give prices, else by chips times hours for a row.

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
        topology: The slice, such as `"v5e:4x4"`, or several, such as `["v5e-8", "v6e-8"]`.
        batch_size: The global batch size. With `None`, every candidate gets as many rows as it has
            memory for, at most 1024 per device, and rows per second decide.
        price_per_chip_hour: The price of a chip-hour in any currency, by the chip's name, such as
            `{"v5e": 1.2, "v6e": 2.7}`.
        x: See `dry_run`.
        y: See `dry_run`.
        sample_weight: See `dry_run`.
        sequence_length: See `dry_run`.
        compilations: How many candidates to compile for each slice. Defaults to 8, or to all of
            `among`.
        exact: How many of them to compile again, with effort "exact".
        budget_s: Seconds for each slice after which no further compilation starts.
        among: The strategies to compare, each as a mapping with the arguments `mesh`, `layout`,
            `shard_optimizer` and `remat` of `TPUStrategy`, such as
            `{"mesh": {"data": 2, "model": 4}, "layout": "tensor_parallel"}`; or candidates of a
            ranking. Those that cannot be built come last, with the reason. Defaults to all meshes
            of the axes "data", "fsdp" and "model", in all orders that differ on the links.
        progress: Called with a line of text at every stage.
        cache: A folder for a cache of compilations, by program, options, slice and versions; `True`
            for `~/.cache/keras_tpu_dist` (or in `$XDG_CACHE_HOME`), which is limited to 1 GiB;
            `False` for none.

    Returns:
        A `Ranking` with all candidates, the bottleneck of the best one, and `strategy()`.

    Raises:
        ValueError: If an argument has the wrong type or value, a chip has no price, or nothing fits
            a slice and the model.

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
    chosen = None if among is None else candidates_of(among)
    number = compilations or (_COMPILATIONS if chosen is None else len(chosen))
    slices = _slices(topology)
    prices = _prices(price_per_chip_hour, slices)
    given, kept = Inputs(x, y, sample_weight, sequence_length), Cache.of(cache)
    compiled: list[Tried] = []
    others: list[Tried] = []
    name = ""
    with stages("search", len(slices)) as begin:
        for slice_ in slices:
            begin(slice_.name)
            until = time.monotonic() + budget_s
            name, found = _forecasts(build, slice_, batch_size, given, chosen)
            tell(f"{len(found)} candidates for {slice_.name}")
            found = [replace(tried, price=prices.get(slice_.chip.name)) for tried in found]
            compiled += [tried for tried in found if tried.error]
            ranked = [tried for tried in found if not tried.error]
            compiler = _Compiler(build, slice_, given, kept, until, tell)
            compiled += compiler.most_promising(ranked, number, exact)
            others += ranked
    return Ranking(
        model=name,
        topologies=tuple(slice_.name for slice_ in slices),
        compiled=tuple(sorted(compiled, key=rank)),
        others=tuple(sorted(others, key=_promise)),
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class _Compiler:
    """Compiles candidates for a slice.

    Attributes:
        until: The time after which no further compilation starts, by `time.monotonic()`.
        tell: Called with a line of text for every compilation.
    """

    build: Build
    topology: Topology
    given: Inputs
    cache: Cache | None
    until: float
    tell: Progress

    def most_promising(self, ranked: list[Tried], compilations: int, exact: int) -> list[Tried]:
        """Compiles some candidates, and the fastest of them again; takes them out of `ranked`."""
        compiled: list[Tried] = []
        with stages("compiling", compilations + exact) as begin:

            def compile_(chosen: list[Tried], effort: str) -> tuple[list[Tried], list[Tried]]:
                return compiled_together(
                    chosen,
                    functools.partial(
                        lowered_step, self.build, self.topology, self.given, self.cache
                    ),
                    functools.partial(compiled_step, How(effort, cache=self.cache)),
                    begin=lambda tried: (begin(tried), self.tell(f"compiling {tried}")),
                    until=self.until,
                    first=not compiled,
                )

            def look_at(chosen: list[Tried]) -> None:
                for tried in chosen:
                    ranked.remove(tried)
                run, left = compile_(chosen, "quick")
                compiled.extend(run)
                ranked[:0] = left

            look_at(_of_other_ways(ranked, max(1, round(compilations * _OF_OTHER_WAYS))))
            look_at(_like_the_best(ranked, compiled, compilations - len(compiled)))
            fastest, rest = _fastest(compiled, exact)
            again, left = compile_(fastest, "exact")
        return [*again, *left, *rest]


def lowered_step(
    build: Build,
    topology: Topology,
    given: Inputs,
    cache: Cache | None,
    tried: Tried,
) -> Lowered | Tried:
    """Lowers a candidate's step; returns the candidate with the reason if that is not possible.

    Args:
        build: The build function.
        topology: The slice.
        given: `x`, `y`, `sample_weight` and `sequence_length`.
        cache: The cache of compilations.
        tried: The candidate.
    """
    try:
        step = Subject(build, tried.candidate.strategy(topology), tried.rows, given)
        return lower_once(step, cache)
    except _FAULTS as error:
        if fails_anywhere(error):
            raise
        return _failed(tried, error)


def compiled_step(how: How, tried: Tried, lowered: Lowered) -> Tried:
    """A candidate with the compiler's report, or the reason why there is none.

    Args:
        tried: The candidate.
        lowered: Its step.
    """
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
    """The model's name, and all candidates, the most promising first.

    Those of `among` that cannot be built come last, with the reason.
    """
    devices = topology.num_devices
    chosen = list(candidates(devices, topology) if among is None else among)
    rows = devices if batch_size is None else batch_size
    # At least two rows per device: operations cannot see a batch of one row as a dimension.
    most = max(1, rows // 2)
    parts = max(i for i in range(1, devices + 1) if devices % i == 0 and i <= most)
    base = TPUStrategy({"data": parts, "model": devices // parts}, topology=topology)
    found, refused = [], []
    with describing(build, base, given, rows) as model:
        policies = sorted({*POLICIES[:1], *(c.remat for c in chosen)}, key=str)
        facts = model.facts(rows, policies)
        for candidate in chosen:
            try:
                found += _forecast_of(model, facts, candidate, topology, batch_size)
            except ValueError as error:
                first = Tried(candidate, topology, batch_size or 0)
                refused.append(_failed(first, error))
    if not found:
        raise value_error(
            "No candidate fits the slice and the model.",
            received={"model": model.name, "topology": topology.name, "tried": len(chosen)},
            fix="Give others with among=[...], or a batch_size that more meshes can split. "
            f"The first cannot be built: {refused[0].error}",
        )
    found.sort(key=_promise)
    return model.name, found if among is None else found + refused


def _promise(tried: Tried) -> tuple[float, float]:
    """The sort key of forecasts: the cheapest first, then those too large, the smallest first."""
    memory = 0.0 if tried.forecast is None else tried.forecast.memory_bytes
    limit = tried.topology.hbm_bytes
    return (memory if memory > _DOUBT * limit else 0.0), tried.cost


def _forecast_of(
    model: DescribedModel,
    facts: Facts,
    candidate: Candidate,
    topology: Topology,
    batch_size: int | None,
) -> list[Tried]:
    strategy = candidate.strategy(topology)
    # The mesh may leave the size of an axis open.
    candidate = replace(candidate, mesh=tuple(strategy.mesh.shape.items()))
    specs = model.specs(strategy)
    wire = Wire.of(dict(strategy.mesh.shape), list(strategy.mesh.devices.flat), topology)
    ground = Ground(wire, topology, tuple(strategy.data_axes), candidate.shard_optimizer)
    parts = ground.ways(ground.data_axes)
    if batch_size is not None:
        check_batch_size(batch_size, strategy)

    def tried(rows: int) -> tuple[Tried, float]:
        expected = forecast(facts, specs, ground, rows, candidate.remat)
        return Tried(candidate, topology, rows, expected), expected.memory_bytes

    if batch_size is not None:
        return [tried(batch_size)[0]]
    best = None
    for power in range(int(math.log2(_MOST_ROWS_A_DEVICE)) + 1):
        larger, memory_bytes = tried(parts * 2**power)
        if best is not None and memory_bytes > _FILLED * topology.hbm_bytes:
            break
        best = larger
    return [] if best is None else [best]


def _slices(topology: Any) -> list[Topology]:
    """The slices of a search."""
    if isinstance(topology, str) or not isinstance(topology, Sequence):
        topology = [topology]
    slices = [Topology.parse(name) for name in topology]
    if not slices or len({slice_.name for slice_ in slices}) < len(slices):
        raise value_error(
            "A search takes one slice or several, each of them once.",
            received={"topology": topology},
            fix='Write for example ["v5e-8", "v6e-8"].',
        )
    return slices


def _prices(price_per_chip_hour: Any, slices: list[Topology]) -> dict[str, float]:
    """The price of each chip, by its name; empty if no prices are given."""
    if price_per_chip_hour is None:
        return {}
    received = {"price_per_chip_hour": price_per_chip_hour}
    if not isinstance(price_per_chip_hour, Mapping):
        raise value_error(
            "Prices of a chip-hour are by the names of chips.",
            received=received,
            fix='Write for example price_per_chip_hour={"v5e": 1.2, "v6e": 2.7}.',
        )
    prices = {}
    for name, price in price_per_chip_hour.items():
        if name not in _CHIP_OF:
            raise value_error(
                "Prices of a chip-hour are by the names of chips.",
                received=received,
                fix=f"Use some of: {', '.join(CHIPS)}.",
                name=str(name),
                choices=_CHIP_OF,
            )
        if not _PRICE.holds(price):
            raise value_error(
                "The price of a chip-hour is a number above 0.",
                received=received,
                fix=f'Write for example price_per_chip_hour={{"{name}": 1.2}}.',
            )
        prices[_CHIP_OF[name]] = float(price)
    missing = [slice_.chip.name for slice_ in slices if slice_.chip.name not in prices]
    if missing:
        raise value_error(
            "Every chip of a search needs a price, or none.",
            received=received | {"without a price": missing},
            fix=f'Add "{missing[0]}" to it.',
        )
    return prices
