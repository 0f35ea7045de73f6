"""The largest batch that fits, found by asking the compiler."""

import contextlib
import html
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.dryrun.run import Build, DryRun, Progress, check_how, run_once
from keras_tpu_dist.hardware.topology import Topology
from keras_tpu_dist.memory.remat import LayerPolicies
from keras_tpu_dist.searches.candidates import Candidate
from keras_tpu_dist.show.page import Page, code, document
from keras_tpu_dist.show.progress import stages
from keras_tpu_dist.show.text import html_table, size_text, text_table
from keras_tpu_dist.training.protocol import Strategy

# No guess is more than this many times what is known to fit.
_LARGEST_STEP = 256


_HEADER = ("batch size", "", "per device")


@dataclass(frozen=True, repr=False)
class LargestBatch(Page):
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
        """The answer as plain data."""
        tried = [{"batch_size": b, "fits": ok, "bytes": n} for b, ok, n in self.tried]
        own = {"batch_size": self.batch_size, "strategy": self.strategy, "tried": tried}
        return {**own, "run": self.run.to_dict()}

    def __str__(self) -> str:
        return "\n".join([self._title(), text_table(_HEADER, self._rows()), *self._line()])

    def _title(self) -> str:
        return (
            f"largest batch on {self.run.compiled_for}: {self.batch_size}, "
            f"found with {len(self.tried)} compilation(s)"
        )

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(str(b), "fits" if ok else "too large", size_text(n)) for b, ok, n in self.tried]

    def _line(self) -> list[str]:
        """The choice, to copy."""
        fits = self.batch_size and self.strategy
        return [f"{self.strategy}  # batch_size={self.batch_size}"] if fits else []

    def _blocks(self) -> list[str]:
        return [html_table(_HEADER, self._rows()), *map(code, self._line())]

    def _page(self) -> str:
        """What was tried, then the dry run of the answer."""
        head = f"<h1>{html.escape(self._title())}</h1>"
        run = f"<h2>The step with a batch of {self.run.batch_size}</h2>"
        return document(self._title(), [head, *self._blocks(), run, *self.run._blocks()])


def largest_batch(
    build: Build,
    strategy: Strategy,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    mode: str = "train",
    remat: Any = None,
    effort: str = "quick",
    tolerance: float = 0.05,
    max_compiles: int = 8,
    timeout: float = 1800.0,
    progress: Progress | None = None,
) -> LargestBatch:
    """Finds the largest batch whose step fits, by asking the compiler.

    Memory grows almost in proportion to the batch, so two compilations predict the answer, a
    third usually confirms it, and bisection closes what is left. Quick compilations state a peak
    memory within 6 % of what training would need, but up to three times too much for recurrent
    layers and convolutions: leave that much room, or ask for `effort="exact"`.

    Args:
        build: As in `dry_run`.
        strategy: A `TPUStrategy` with a `topology`.
        x: As in `dry_run`.
        y: As in `dry_run`.
        sample_weight: As in `dry_run`.
        mode: As in `dry_run`.
        remat: Which activations are computed again instead of kept, as in `TPUStrategy(remat=)`,
            in the place of the strategy's own: `"full"`, `{"block_*": "dots"}` and so on.
        effort: `"quick"` or `"exact"`, as in `dry_run`.
        tolerance: Stop when a larger batch that was refused, or the memory that is left, is within
            this fraction of the answer.
        max_compiles: Stop after so many compilations in any case.
        timeout: As in `dry_run`.
        progress: As in `dry_run`.

    Returns:
        A `LargestBatch`. Sizes are multiples of the number of parts that the batch is split into.

    Raises:
        ValueError: If the strategy has no topology, or there is no such policy.
        RuntimeError: If libtpu is not installed.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> from keras_tpu_dist.searches.largest_batch import largest_batch
    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> strategy = ktd.TPUStrategy(topology="v5e:2x4")
    >>> print(largest_batch(build, strategy))  # doctest: +SKIP
    """
    limit = _checked_topology(strategy).hbm_bytes
    _check_compiles(max_compiles)
    check_how(mode, timeout, progress)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(
            message(
                "tolerance is the share of the batch that may be missing, 0 or more.",
                received={"tolerance": tolerance},
                fix="Leave it out, or write for example tolerance=0.05.",
            )
        )
    unit = strategy.num_replicas_in_sync
    inputs = {"x": x, "y": y, "sample_weight": sample_weight}
    runs: dict[int, DryRun] = {}

    def fits(parts: int) -> bool:
        with _computing_again(strategy, remat):
            runs[parts] = run_once(
                build,
                strategy,
                inputs=inputs,
                batch_size=parts * unit,
                mode=mode,
                effort=effort,
                timeout=timeout,
                progress=progress,
                thorough=False,
            )
        return _verdict(runs[parts])

    low, high = 0, None
    guess: int | None = 1
    with stages("largest batch", max_compiles) as begin:
        while guess is not None and len(runs) < max_compiles:
            begin(f"does {guess * unit} fit?")
            if fits(guess):
                low = guess
            else:
                high = guess
            guess = _next_guess(runs, low, high, limit, tolerance)
    tried = tuple((p * unit, bool(r.fits), r.total_bytes) for p, r in runs.items())
    policy = strategy.options.remat if remat is None else remat
    line = replace(Candidate.of(strategy), remat=policy).line
    return LargestBatch(low * unit, runs[low or min(runs)], tried, line)


def _next_guess(
    runs: dict[int, DryRun], low: int, high: int | None, limit: int, tolerance: float
) -> int | None:
    """The number of parts to try next, or `None` when the answer is known well enough."""
    if low == 0:
        return None
    if high is not None and high - low <= max(1, tolerance * low):
        return None
    fitting = sorted(p for p, run in runs.items() if run.fits)
    if len(fitting) == 1:
        fixed = runs[low].state.lasting
        room = max(0, limit - fixed) / max(1, runs[low].total_bytes - fixed)
        # a small batch is mostly padding; a quarter of what it predicts is safe, and tells more
        predicted = low + int(low * (room - 1) / 4)
    else:
        # the steepest: near the limit the compiler saves memory, which makes it look flat there
        slopes = [
            (runs[b].total_bytes - runs[a].total_bytes) / (b - a)
            for a, b in itertools.pairwise(fitting)
        ]
        room = int((limit - runs[low].total_bytes) / max(1e-9, *slopes))
        if high is None and room < tolerance * low:
            return None
        predicted = low + room * (2 if slopes[-1] < max(slopes) / 2 else 1)
    predicted = min(predicted, _LARGEST_STEP * low)
    step = max(1, math.ceil(tolerance * low))
    if high is None:
        return max(low + step, predicted)
    if not low + step <= predicted < high or len(runs) > 4:
        predicted = (low + high) // 2
    return min(max(predicted, low + 1), high - 1)


@contextlib.contextmanager
def _computing_again(strategy: Strategy, remat: Any) -> Iterator[None]:
    """The strategy with another `remat`, unless it is `None`."""
    own = strategy.remat
    strategy.remat = own if remat is None else LayerPolicies(remat)
    try:
        yield
    finally:
        strategy.remat = own


def _verdict(run: DryRun) -> bool:
    if run.fits is None:
        raise RuntimeError(
            message(
                "The largest batch is what the TPU compiler says that fits.",
                received="libtpu, which has that compiler, is not installed.",
                fix="pip install 'jax[tpu]'.",
            )
        )
    return run.fits


def _check_compiles(max_compiles: int) -> None:
    if not is_count(max_compiles, 1):
        raise ValueError(
            message(
                "max_compiles is a number of compilations, 1 or more.",
                received={"max_compiles": max_compiles},
                fix="Leave it out, or write for example max_compiles=8.",
            )
        )


def _checked_topology(strategy: Strategy) -> Topology:
    topology = getattr(strategy, "topology", None)
    if topology is None:
        raise ValueError(
            message(
                "Finding the largest batch needs a slice whose memory is known.",
                received={"strategy": strategy},
                fix='Use TPUStrategy(mesh, layout, topology="v5e:2x4").',
            )
        )
    return topology
