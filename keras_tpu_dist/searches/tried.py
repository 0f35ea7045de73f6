"""A candidate on its way: forecast, lowered, compiled."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from keras_tpu_dist.dryrun.build import Build, Lowered
from keras_tpu_dist.dryrun.cache import Cache
from keras_tpu_dist.dryrun.run import DryRun, compile_once, lower_once
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.searches.candidates import Candidate
from keras_tpu_dist.searches.forecast import Forecast

logger = logging.getLogger("keras_tpu_dist")

# What says that a candidate is none.
_FAULTS = (ValueError, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class Tried:
    """A candidate, what was forecast of it, and what the compiler said.

    Attributes:
        candidate: The strategy's arguments.
        rows: Rows of all devices together.
        forecast: In closed form.
        run: The dry run, `None` for one that was not compiled; its `effort` is `"exact"` for those
            that the end of a search looked at once more.
        error: Why it could not be compiled.
    """

    candidate: Candidate
    rows: int
    forecast: Forecast
    run: DryRun | None = None
    error: str | None = None

    @property
    def seconds_a_row(self) -> float:
        """Seconds of all devices for one row: the compiler's, or else the forecast's."""
        estimate = None if self.run is None else self.run.estimate
        return (self.forecast.step_s if estimate is None else estimate.step) / self.rows


def lowered_step(
    build: Build, topology: Topology, given: Mapping[str, Any], cache: Cache | None, tried: Tried
) -> Lowered | Tried:
    """A candidate's step, lowered; or the candidate, with why it has none.

    Args:
        build: The build function.
        topology: The slice.
        given: `x`, `y` and `sample_weight`.
        cache: Where compilations are kept.
        tried: The candidate.
    """
    try:
        return lower_once(
            build,
            tried.candidate.strategy(topology),
            inputs=given,
            batch_size=tried.rows,
            mode="train",
            cache=cache,
        )
    except _FAULTS as error:
        return _failed(tried, error)


def compiled_step(
    cache: Cache | None, tried: Tried, lowered: Lowered, effort: str = "quick"
) -> Tried:
    """A candidate with what the compiler says, or why it says nothing.

    Args:
        cache: Where compilations are kept.
        tried: The candidate.
        lowered: Its step.
        effort: As in `dry_run`.
    """
    try:
        run = compile_once(
            lowered,
            mode="train",
            effort=effort,
            timeout=1800.0,
            progress=logger.debug,
            thorough=False,
            cache=cache,
        )
    except _FAULTS as error:
        return _failed(tried, error)
    return replace(tried, run=run)


def _failed(tried: Tried, error: Exception) -> Tried:
    logger.info("%s: %s", tried.candidate, error)
    return replace(tried, error=str(error))


def rank(tried: Tried) -> tuple[int, bool, float]:
    """What candidates are sorted by: those that fit first, then those looked at twice, the faster.

    Args:
        tried: The candidate.
    """
    if tried.run is None:
        return 2, False, 0.0
    return (0 if tried.run.fits else 1), tried.run.effort != "exact", tried.seconds_a_row
