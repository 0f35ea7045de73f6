"""What callbacks ask of the fit that runs: where it begins, when it ends, who looks on."""

from collections.abc import Callable
from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.input.iterator import DeviceIterator
from keras_tpu_dist.input.position import InputPosition, random_numbers
from keras_tpu_dist.training.finite import FiniteWatch


class FitControl:
    """What the callbacks of a running fit have asked of the loop; each fit ends it.

    Attributes:
        steps_left: How many more train steps may run, or `None` for all; `StopAtStep` sets it.
        more_steps: What is asked for more when none is left.
        watch: Looks for values that are not finite; `NameNaN` sets it.
        batches_to_skip: How many batches of the epoch were trained on before the interruption;
            `Checkpoint` sets it.
        made_before: Whether the launch that was just made was made before the interruption, and
            callbacks saw its end then.
        begin_at: Where their input began.
        after_launch: Called with the number of steps of each launch, once it is made; `Checkpoint`
            sets it.
        after_other_launch: Called after each launch that the thread makes within the fit, beside
            the fit's own: of its validation, and of what its callbacks run; `Checkpoint` sets it.
        input: What the launches before took their batches from, or `None`.
    """

    def __init__(self):
        self.end()

    def end(self) -> None:
        """Forgets what the callbacks of a fit asked for."""
        self.steps_left: int | None = None
        self.more_steps: Callable[[], int] | None = None
        self.watch: FiniteWatch | None = None
        self.batches_to_skip = 0
        self.made_before = False
        self.begin_at: InputPosition | None = None
        self.after_launch: Callable[[int], None] | None = None
        self.after_other_launch: Callable[[], None] | None = None
        self.input: DeviceIterator | None = None
        self._drawn_with: dict[str, Any] | None = None

    def begin_epoch(self) -> None:
        """Notes the random numbers with which workers of a `PyDataset` draw the epoch's order."""
        iterator: Any = _keras.epoch_iterator_of_fit()
        ahead = iterator is not None and _keras.orders_ahead(iterator.data_adapter)
        self._drawn_with = random_numbers() if ahead else None

    def reads(self, iterator: DeviceIterator) -> None:
        """Notes the input that the next launch takes its batches from.

        Args:
            iterator: The input; where training goes on in the middle of it, it is sent there.
        """
        self.input = iterator
        if self.after_launch is not None:
            iterator.progress.keep_states()
        if self._drawn_with is not None:
            iterator.progress.drew_with(self._drawn_with)
        if self.begin_at is not None:
            position, self.begin_at = self.begin_at, None
            iterator.begin_at(position)

    def input_position(self, done: int) -> InputPosition | None:
        """Where in its input training stands, or `None` before its first step.

        Args:
            done: The steps made of the running epoch.
        """
        return None if self.input is None else self.input.progress.position(done)

    def within(self, steps: int) -> int:
        """How many of so many steps may run.

        Args:
            steps: How many a launch would make.
        """
        return steps if self.steps_left is None else min(steps, self.steps_left)

    def skip(self, most: int) -> int:
        """Counts batches that are skipped, as they were trained on before.

        Args:
            most: How many a launch would take.

        Returns:
            How many of those to skip.
        """
        steps = min(most, self.batches_to_skip)
        self.batches_to_skip -= steps
        # The last of them was saved before callbacks saw its end.
        self.made_before = steps == most and self.batches_to_skip > 0
        return steps

    @property
    def stops_before_more(self) -> bool:
        """Whether all that may run was run before the interruption, and is skipped."""
        return self.batches_to_skip == 0 and self.steps_left == 0

    def spend(self, steps: int) -> bool:
        """Counts train steps; whether the last that may run has run.

        Args:
            steps: How many steps the launch that was just made had.
        """
        if self.steps_left is None:
            return False
        self.steps_left = max(self.steps_left - steps, 0)
        if self.steps_left == 0 and self.more_steps is not None:
            self.steps_left = self.more_steps()
        return self.steps_left == 0
