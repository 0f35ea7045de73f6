"""A callback that adds the speed of training to the logs of every epoch."""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import jax
import keras

from keras_tpu_dist.callbacks.in_fit import InFit
from keras_tpu_dist.common import phases
from keras_tpu_dist.common.checks import checked_arguments
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.left_out import counted
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.phases import INPUT, TRAIN, Timeline
from keras_tpu_dist.hardware.chips import of_kind
from keras_tpu_dist.input.batches import PlacedBatch
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.show.text import duration_text, span_text
from keras_tpu_dist.training.flops import count_tokens, model_flops
from keras_tpu_dist.training.membership import is_local

if TYPE_CHECKING:
    from keras_tpu_dist.tools.dryrun.report import DryRun

_FIX = "Give the same Rates callback to fit in all processes."


@dataclass
class _Counts:
    """What was made of an epoch.

    Attributes:
        flops: Operations of the matrix products, by the model's formula.
        waited: How much of that devices waited for input.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0


class Rates(InFit):
    """Adds the speed of training to the logs of every epoch.

    `CSVLogger`, `TensorBoard` and the history get these values, wherever this callback is in the
    list:

    - `steps_per_second`, `rows_per_second`, and `tokens_per_second` if the model's input is
      `(batch, time)` of integers: for all devices together;
    - `mfu`: model FLOPs utilisation, by the formula of `DryRun.mfu`: the operations of the step's
      matrix products over what all devices could do in that time. Only on chips that `Topology`
      knows;
    - `input_wait`: the share of the time in which devices waited for input;
    - `peak_memory_gib`: the maximal memory in use on one device of this host since the process
      began. Only if JAX reports it, on TPU and GPU.

    The time is that of the epoch's steps, without compiling, validation and saving. With several
    processes, the values are those of process 0. If a run resumes within an epoch, the steps and
    the time before the interruption count too.

    With a dry run, each epoch also prints the time of a step, with its wait for input, over the
    estimate, and what published programs of this kind took over theirs (docs/published.md). It
    names the rows and the devices of both, since only equal ones can be compared.

    Args:
        expected: A `DryRun` of the training step, with times.

    Raises:
        ValueError: If `expected` is no such dry run; in `fit`, without a `TPUStrategy`.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd
    >>> with ktd.TPUStrategy().scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> x, y = np.ones((64, 4)), np.ones((64, 1))
    >>> history = model.fit(x, y, verbose=0, callbacks=[ktd.callbacks.Rates()])
    >>> sorted(history.history)
    ['input_wait', 'loss', 'rows_per_second', 'steps_per_second']
    """

    # It does nothing after a batch, because the strategy's loop counts.
    async_safe = True

    @checked_arguments
    def __init__(self, expected: "DryRun | None" = None):
        super().__init__()
        self._expected = None if expected is None else _checked(expected)
        self._counts, self._before = _Counts(), _Counts()
        # Only within a fit: a timeline cannot be copied, and callbacks are.
        self._timeline: Timeline | None = None
        # From shapes without rows to the operations of one row.
        self._flops: dict[Any, float] = {}
        self._peak: float | None = None
        self._devices = 1

    def before_fit(self, arguments: Mapping[str, Any]) -> None:
        """Starts to measure time.

        Args:
            arguments: The arguments of `fit`.
        """
        self._timeline = Timeline()
        self._flops.clear()  # other layers may be frozen now
        phases.count(self._timeline)

    def after_fit(self) -> None:
        """Stops measuring."""
        if self._timeline is not None:
            phases.stop(self._timeline)
            self._counts, self._before = self._now(), _Counts()
            self._timeline = None

    def on_train_begin(self, logs=None):
        """Looks for the loop that counts."""
        control = self._strategys_loop("Rates counts in the loop of a TPUStrategy.")
        control.on_launch.append(self._launched)
        self._flops = {}
        # Of one device at its fastest, in bfloat16.
        chip = of_kind(jax.local_devices()[0].device_kind)
        self._peak = None if chip is None else dict(chip.flops)["bfloat16"] / chip.devices

    def on_epoch_begin(self, epoch, logs=None):
        """Resets the counts."""
        self._counts, self._before = _Counts(), self._spent()

    def before_epoch_end(self, epoch, logs=None) -> None:
        """Adds the rates to the logs, before any callback sees them.

        Args:
            epoch: The epoch, from 0.
            logs: Its logs.
        """
        if logs is None:
            return
        rates = self._rates()
        if not is_local(self._trainer):
            what = f"rates of epoch {epoch}"
            rates = agree(what, _FIX, rates, lambda of_all: of_all[0])
        logs.update(rates)
        if rates and self._expected is not None and jax.process_index() == 0:
            # As Keras's callbacks: below the progress bar.
            print(f"\nEpoch {epoch + 1}: {self._beside(self._expected, rates)}", flush=True)

    def _beside(self, run: "DryRun", rates: Mapping[str, float]) -> str:
        """What was measured over what is estimated, in words."""
        estimate, spread = run.estimate, run.spread
        assert estimate is not None
        seconds = 1 / rates["steps_per_second"]
        # Of what was counted: a rate's product with its time is rounded to either side.
        rows = f"{self._counts.rows / self._counts.steps:,.1f}".removesuffix(".0")
        low, high = (seconds / end for end in reversed(estimate.span))
        published = "none of this kind"
        if spread is not None and run.effort == "exact":
            published = f"{spread.span} times the estimate: {spread.programs}"
        elif spread is not None:
            # Their ratios are to a sum, which is too high at this effort; an estimate is a range.
            least, most = estimate.step * spread.low, estimate.step * spread.high
            published = f"{span_text(least, most, duration_text)}: {spread.programs}"
        return (
            f"{duration_text(seconds)} a step, {span_text(low, high, '{:,.2f}'.format)} times the "
            f"estimate of {estimate.span_words}\n"
            f"  measured: {rows} rows on {self._devices} x "
            f"{jax.local_devices()[0].device_kind}, {rates['input_wait']:.0%} of the time waiting "
            "for input\n"
            f"  estimated: {run.batch_size:,} rows on {run.compiled_for}, effort {run.effort}\n"
            f"  published: {published}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The counts of the running epoch."""
        return asdict(self._now())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the counts of the epoch before an interruption.

        Args:
            state: A result of `state_dict`. Names and values of another kind are left out.

        Raises:
            ValueError: If it is not a dict.
        """
        if not isinstance(state, Mapping):
            raise value_error(
                "The state of Rates must be a dict.",
                received={"state": state},
                fix="Pass a result of state_dict().",
            )
        known = {field.name: field.type for field in fields(_Counts)}
        numbers = {name: state[name] for name in known if _is_amount(state.get(name))}
        self._counts, self._before = _Counts(**numbers), self._spent()

    def _launched(self, step: int, steps: int, batch: PlacedBatch, outputs: Any) -> None:
        leaves, structure = jax.tree.flatten(batch.data)
        described = _described(batch, steps)
        one_step = jax.tree.unflatten(structure, [leaf for _, leaf in described])
        x, y, weights = keras.utils.unpack_x_y_sample_weight(one_step)
        rows = next((leaf.shape[axis] for axis, leaf in described if axis is not None), 0)
        counts = self._counts
        self._devices = len(leaves[0].sharding.device_set)
        counts.steps += steps
        counts.rows += steps * rows
        counts.tokens += steps * count_tokens(x)
        if self._peak and rows:
            key = tuple(
                tuple(n for i, n in enumerate(leaf.shape) if i != axis) for axis, leaf in described
            )
            if key not in self._flops:
                # A training step of the model's own may call it on other inputs, or not at all.
                flops = counted(
                    "Rates: mfu",
                    lambda: model_flops(self._trainer, (x, y, weights), "train").full,
                    0.0,
                    lambda words: log_once(words, logging.WARNING, "mfu of Rates"),
                )
                self._flops[key] = flops / rows
            counts.flops += self._flops[key] * steps * rows

    def _spent(self) -> _Counts:
        seconds = {} if self._timeline is None else self._timeline.read()
        waited = seconds.get(INPUT, 0.0)
        return _Counts(seconds=seconds.get(TRAIN, 0.0) + waited, waited=waited)

    def _now(self) -> _Counts:
        spent, before, counts = self._spent(), self._before, self._counts
        return _Counts(
            counts.steps,
            counts.rows,
            counts.tokens,
            counts.flops,
            counts.seconds + spent.seconds - before.seconds,
            counts.waited + spent.waited - before.waited,
        )

    def _rates(self) -> dict[str, float]:
        made = self._now()
        if not made.steps or made.seconds <= 0:
            return {}
        rates = {
            "steps_per_second": made.steps / made.seconds,
            "rows_per_second": made.rows / made.seconds,
            "input_wait": made.waited / made.seconds,
        }
        if made.tokens:
            rates["tokens_per_second"] = made.tokens / made.seconds
        if self._peak and made.flops:
            rates["mfu"] = made.flops / (self._devices * self._peak * made.seconds)
        stats = (device.memory_stats() or {} for device in jax.local_devices())
        peak_bytes = max((stat.get("peak_bytes_in_use", 0) for stat in stats), default=0)
        if peak_bytes:
            rates["peak_memory_gib"] = peak_bytes / 2**30
        return rates


def _checked(expected: Any) -> "DryRun":
    # Imported here: most fits have no dry run.
    from keras_tpu_dist.tools.dryrun.report import DryRun

    if not isinstance(expected, DryRun):
        raise value_error(
            "expected of Rates is a dry run of the training step.",
            received={"expected": expected},
            fix="Pass a result of ktd.dry_run, or leave it out.",
        )
    if expected.mode != "train" or expected.estimate is None:
        times = "with" if expected.estimate else "without"
        raise value_error(
            "expected of Rates is a dry run of the training step, with times.",
            received=f"mode={expected.mode!r}, {times} times.",
            fix='Use mode="train", a TPU slice and libtpu, and a batch that fits.',
        )
    return expected


def _is_amount(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _described(batch: PlacedBatch, steps: int) -> list[tuple[int | None, jax.ShapeDtypeStruct]]:
    """Of each array the batch axis, and the true shape of one step."""
    found: list[tuple[int | None, jax.ShapeDtypeStruct]] = []
    for leaf, slot in zip(jax.tree.leaves(batch.data), batch.slots, strict=True):
        shape = list(leaf.shape[1:] if steps > 1 else leaf.shape)
        rows = slot.rows if slot.filled is None else sum(slot.filled)
        if slot.axis is not None and rows is not None:
            shape[slot.axis] = rows
        found.append((slot.axis, jax.ShapeDtypeStruct(shape, leaf.dtype)))
    return found
