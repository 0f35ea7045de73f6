"""Finds the largest batch that fits, with the compiler."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from keras_tpu_dist.common.checks import PositiveInt, Requirement, known_words
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.hardware.calibration import Calibration, calibrated
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.memory.remat import LayerPolicies
from keras_tpu_dist.show.page import Report, Table, TableCell
from keras_tpu_dist.show.text import size_text
from keras_tpu_dist.tools.dryrun.build import Subject
from keras_tpu_dist.tools.dryrun.compile import How
from keras_tpu_dist.tools.dryrun.inputs import Inputs, check_asked
from keras_tpu_dist.tools.dryrun.largest import MOST_COMPILES, TOLERANCE, find_largest
from keras_tpu_dist.tools.dryrun.run import Build, DryRun, Progress, run_once
from keras_tpu_dist.tools.searches.candidates import Candidate
from keras_tpu_dist.training.protocol import Strategy

_SHARE = Requirement(
    "a share of the batch, 0 or more",
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0,
    "0.05",
)
_HEADER = ("batch size", "", "per device")


@dataclass(frozen=True, repr=False)
class LargestBatch(Report):
    """The largest batch that fits, and how it was found.

    Args:
        batch_size: Rows of all devices together; 0 if not even the smallest fits.
        run: The dry run of that batch, or of the smallest one if none fits.
        tried: Batch size, whether it fits, and bytes on one device (0 if unknown), in order.
        strategy: The strategy as a line of Python.
    """

    batch_size: int
    run: DryRun
    tried: tuple[tuple[int, bool, int], ...]
    strategy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        tried = [{"batch_size": b, "fits": ok, "bytes": n} for b, ok, n in self.tried]
        own = {"batch_size": self.batch_size, "strategy": self.strategy, "tried": tried}
        return {**own, "run": self.run.to_dict()}

    def _title(self) -> str:
        return (
            f"largest batch on {self.run.compiled_for}: {self.batch_size}, "
            f"found with {len(self.tried)} compilation(s)"
            + (f", calibrated by {self.run.calibration}" if self.run.calibration else "")
        )

    def _tables(self) -> list[Table]:
        rows = [
            (TableCell(str(b), b), "fits" if ok else "too large", TableCell(size_text(n), n))
            for b, ok, n in self.tried
        ]
        return [Table("", _HEADER, rows)]

    def _code(self) -> list[str]:
        fits = self.batch_size and self.strategy
        return [f"{self.strategy}  # batch_size={self.batch_size}"] if fits else []

    def _below(self) -> list[str]:
        run = f"<h2>The step with a batch of {self.run.batch_size}</h2>"
        return [run, *self.run._blocks()]


@known_words
def largest_batch(
    build: Build,
    strategy: Strategy | None = None,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    sequence_length: PositiveInt | None = None,
    mode: str = "train",
    remat: Any = None,
    effort: str = "quick",
    tolerance: Annotated[float, _SHARE] = TOLERANCE,
    max_compiles: PositiveInt = MOST_COMPILES,
    timeout: float = 1800.0,
    progress: Progress | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
) -> LargestBatch:
    """Finds the largest batch whose step fits, with the compiler.

    Memory grows almost in proportion to the batch. So two compilations predict the result, a third
    one usually confirms it, and bisection closes the remaining gap. The peak memory of quick
    compilations is within 6 % of that in training, but up to three times too high for recurrent
    layers and convolutions: leave that much room, or set `effort="exact"`.

    The arguments that are not listed are those of `dry_run`.

    Args:
        strategy: A `TPUStrategy` with a `topology`. Defaults to the one that the model belongs to,
            or that is in scope.
        remat: Which activations to recompute, as in `TPUStrategy(remat=)`, instead of the
            strategy's own setting: `"full"`, `{"block_*": "dots"}` and so on.
        effort: `"quick"` or `"exact"`, as in `dry_run`.
        tolerance: Stop if the result is within this fraction of a larger batch that was refused, or
            of the memory that is left.
        max_compiles: Stop after this number of compilations in any case.
        calibration: See `dry_run`. It decides the times in the report, not the batch.

    Returns:
        A `LargestBatch`. Sizes are multiples of the number of parts that the batch is split into.

    Raises:
        ValueError: If the strategy has no topology, the policy does not exist, or `calibration` is
            of another chip.
        RuntimeError: If libtpu is not installed.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> from keras_tpu_dist.tools.searches.largest_batch import largest_batch
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> strategy = ktd.TPUStrategy(topology="v5e:2x4")
    >>> print(largest_batch(build, strategy))  # doctest: +SKIP
    """
    strategy = check_asked(build, strategy, "largest_batch")
    topology = _checked_topology(strategy)
    limit, (_, measured) = topology.hbm_bytes, calibrated(topology, calibration)
    inputs = Inputs(x, y, sample_weight, sequence_length)
    how = How(effort, timeout, calibration=measured, progress=progress)

    def run_with(batch_size: int) -> DryRun:
        with _computing_again(strategy, remat):
            return run_once(Subject(build, strategy, batch_size, inputs, mode), how)

    unit = strategy.num_replicas_in_sync
    found = find_largest(run_with, unit, limit, tolerance=tolerance, max_compiles=max_compiles)
    policy = strategy.options.remat if remat is None else remat
    line = replace(Candidate.of(strategy), remat=policy).line
    return LargestBatch(found.batch_size, found.run, found.tried, line)


@contextlib.contextmanager
def _computing_again(strategy: Strategy, remat: Any) -> Iterator[None]:
    """The strategy with another `remat`, unless it is `None`."""
    own = strategy.remat
    strategy.remat = own if remat is None else LayerPolicies(remat)
    try:
        yield
    finally:
        strategy.remat = own


def _checked_topology(strategy: Strategy) -> Topology:
    topology = getattr(strategy, "topology", None)
    if topology is None:
        raise value_error(
            "Finding the largest batch needs a slice whose memory is known.",
            received={"strategy": strategy},
            fix='Use TPUStrategy(mesh, layout, topology="v5e:2x4").',
        )
    return topology
