"""Requests of callbacks to the running fit: its start, its end, calls after launches."""

from collections.abc import Callable
from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.input.iterator import DeviceIterator
from keras_tpu_dist.input.position import InputPosition, random_numbers
from keras_tpu_dist.training.finite import FiniteWatch


class FitControl:
    """The requests of a running fit's callbacks to its loop; reset at the end of the fit.

    Attributes:
        steps_left: How many more train steps may run, or `None` for all; `StopAtStep` sets it.
        more_steps: Called when no step is left, for the number of further steps.
        watch: Looks for values that are not finite; `NameNaN` sets it.
        batches_to_skip: How many batches of the epoch were trained before the interruption;
            `Checkpoint` sets it.
        made_before: Whether the last launch ran before the interruption, when callbacks saw its
            end.
        begin_at: The position at which the interrupted run's input began.
        after_launch: Called after every launch with its number of steps; `Checkpoint` sets it.
        after_other_launch: Called after launches in this thread that are not the fit's own: those
            of its validation and of its callbacks; `Checkpoint` sets it.
        on_launch: Called after every launch as `on_launch(step, steps, batch, outputs)`, for
            callbacks that only observe.
        step: The train steps in the model's life, if a callback observes.
        at_end: Called when the fit ends, also by an exception; `Profile` adds to it.
    """

    def __init__(self):
        self.at_end: list[Callable[[], None]] = []
        self.end()

    def end(self) -> None:
        """Forgets the requests of a fit's callbacks."""
        ending, self.at_end = self.at_end, []
        for end in ending:
            end()
        self.steps_left: int | None = None
        self.more_steps: Callable[[], int] | None = None
        self.watch: FiniteWatch | None = None
        self.batches_to_skip = 0
        self.made_before = False
        self.begin_at: InputPosition | None = None
        self.after_launch: Callable[[int], None] | None = None
        self.after_other_launch: Callable[[], None] | None = None
        self.input: DeviceIterator | None = None
        self.on_launch: list[Callable[[int, int, Any, Any], None]] = []
        self.outputs: Any = None
        self.step: int | None = None
        self._drawn_with: dict[str, Any] | None = None

    def counts_from(self, step: int) -> None:
        """Records the number of train steps in the model's life, before the first launch.

        Args:
            step: The number.
        """
        self.step = step

    def launched(self, steps: int, batch: Any, outputs: Any) -> None:
        """Calls the callbacks that observe launches.

        Args:
            steps: The number of steps in the launch.
            batch: Its batch, or several.
            outputs: Its outputs.
        """
        self.outputs = outputs
        if self.step is not None:
            self.step += steps
            for observer in self.on_launch:
                observer(self.step, steps, batch, outputs)

    def begin_epoch(self) -> None:
        """Records the random numbers with which workers of a `PyDataset` draw the epoch's order."""
        iterator: Any = _keras.epoch_iterator_of_fit()
        ahead = iterator is not None and _keras.orders_ahead(iterator.data_adapter)
        self._drawn_with = random_numbers() if ahead else None

    def reads(self, iterator: DeviceIterator) -> None:
        """Records the input of the next launch, and moves it to where training resumes.

        Args:
            iterator: The input.
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
        """The position in the input, or `None` before the first step.

        Args:
            done: The number of steps that ran in the current epoch.
        """
        return None if self.input is None else self.input.progress.position(done)

    def within(self, steps: int) -> int:
        """The number of steps that a launch may have.

        Args:
            steps: The number it would have.
        """
        return steps if self.steps_left is None else min(steps, self.steps_left)

    def skip(self, most: int) -> int:
        """Counts batches that are skipped because they were trained before.

        Args:
            most: The number of batches in a launch.
        """
        steps = min(most, self.batches_to_skip)
        self.batches_to_skip -= steps
        # Not the last one: it was saved before callbacks saw its end, so they see it now.
        self.made_before = steps == most and self.batches_to_skip > 0
        return steps

    @property
    def stops_before_more(self) -> bool:
        """Whether all allowed steps ran before the interruption and are skipped."""
        return self.batches_to_skip == 0 and self.steps_left == 0

    def spend(self, steps: int) -> bool:
        """Counts train steps; returns whether the last allowed step has run.

        Args:
            steps: The number of steps in the launch that has just run.
        """
        if self.steps_left is None:
            return False
        self.steps_left = max(self.steps_left - steps, 0)
        if self.steps_left == 0 and self.more_steps is not None:
            self.steps_left = self.more_steps()
        return self.steps_left == 0
