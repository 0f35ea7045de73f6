"""Batches on the devices, some ahead of the step that uses them."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from keras_tpu_dist import _keras
from keras_tpu_dist.input.clock import InputClock
from keras_tpu_dist.input.own_input import Share
from keras_tpu_dist.input.position import (
    InputPosition,
    random_numbers,
    set_random_numbers,
    set_state,
    state_of,
)

logger = logging.getLogger("keras_tpu_dist")


class DeviceIterator:
    """Batches on the devices, some ahead of the step that uses them.

    Plain iteration yields host batches, one at a time and without look-ahead: Keras builds
    unbuilt models from them. `take` yields placed ones.

    What goes wrong while looking ahead is raised when the step that would have used that batch
    comes, so that a failing input stops training exactly where it would without look-ahead; and
    a generator is never read beyond the steps of the running epoch.

    Args:
        batches: The host batches.
        prefetch: How many batches to hold ready on the devices.
        steps_per_epoch: Steps after which the caller may stop reading, or `None` if it reads to
            the end.
        clock: Measures how long the devices wait for the batches.
        num_batches: The number of batches of an epoch where it is known, for the clock.
        source_batches: The number of batches after which the input begins anew, if it does.
        not_made: Told how many steps a launch made less than it was counted for, and whether it
            was the epoch's last one, cut short by the end of the input.
        data_adapter: Keras's adapter of the input, which may count epochs and shuffle by that.
    """

    def __init__(
        self,
        batches: Iterable,
        prefetch: int,
        steps_per_epoch: int | None = None,
        clock: InputClock | None = None,
        num_batches: int | None = None,
        not_made: Callable[[int, bool], None] = lambda steps, ran_out: None,
        source_batches: int | None = None,
        data_adapter: Any = None,
    ):
        self._batches = iter(batches)
        self._clock = clock or InputClock()
        self._num_batches = num_batches
        self._not_made = not_made
        self._prefetch = prefetch
        self._steps_per_epoch = steps_per_epoch
        self._ahead: deque = deque()
        self._taken = 0
        self._ended = False
        self._source_batches = source_batches
        # The random numbers before the first batch was read, and the batches launched since.
        self._start: dict[str, Any] | None = None
        self._made = 0
        # The epochs, as Keras's data adapter counts them, of the first batch and of the newest.
        self._data_adapter = data_adapter
        self._start_epoch = self._newest_epoch = _keras.shuffling_epoch(data_adapter)
        # What the input said of its place after each batch that was read and not launched yet.
        self._states: deque | None = None
        self._state: Any = None
        # Batches that need not be read to be skipped: the input stands behind them already.
        self._passed = 0

    def __iter__(self):
        return self

    def __next__(self):
        self._taken += 1
        batch = next(self._batches)
        return batch.batch if isinstance(batch, Share) else batch

    def position(self, done: int) -> InputPosition:
        """Where in the input training stands.

        Args:
            done: The steps made of the running epoch.
        """
        now, epoch = random_numbers(), _keras.shuffling_epoch(self._data_adapter)
        if epoch is not None and self._newest_epoch is not None and not done:
            # Keras does not count an epoch that a callback ends.
            epoch = max(epoch, self._newest_epoch + 1)
        return InputPosition(
            start=self._start or now,
            now=now,
            made=self._made,
            done=done,
            state=self._state,
            start_epoch=self._start_epoch,
            now_epoch=epoch,
        )

    def drew_with(self, numbers: dict[str, Any]) -> None:
        """Notes the random numbers with which the order of an input was drawn ahead.

        Args:
            numbers: What `random_numbers` returned before.
        """
        self._start = self._start or numbers

    def keep_states(self) -> None:
        """From now on asks the input for its place, if it can tell, for `position`."""
        if self._states is None and hasattr(self._batches, "get_state"):
            self._states = deque()

    def begin_at(self, position: InputPosition) -> None:
        """Goes to a position, before the first batch is read.

        Batches of the running epoch are not read here: they are skipped as steps of it.

        Args:
            position: That of an iterator over the same input in an earlier process.
        """
        begins = position.begins(self._steps_per_epoch, self._source_batches)
        stands = bool(not begins and position.state) and set_state(self._batches, position.state)
        if not _keras.orders_ahead(self._data_adapter):
            set_random_numbers(position.now if begins or stands else position.start)
        if stands:
            self._passed, self._state = position.made, position.state
            self._start = position.start
        earlier = 0 if begins or not self._steps_per_epoch else position.made - position.done
        if earlier:
            start = time.perf_counter()
            self.skip(earlier)
            self._not_made(-earlier, False)
            if position.now_epoch is not None and self._newest_epoch is not None:
                self._newest_epoch = position.now_epoch
                _keras.set_shuffling_epoch(self._data_adapter, position.now_epoch)
            if not stands:
                logger.info(
                    "%d batches of the input were read again, to go on where training stopped: "
                    "%.1f s",
                    earlier,
                    time.perf_counter() - start,
                )

    def launched(self, outputs: Any, last: bool, steps: int = 1) -> None:
        """Tells the clock that training launched what was taken, and whether it stops there.

        Args:
            outputs: What the launch returned.
            last: Whether training stops after this launch, wherever in the epoch that is.
            steps: How many steps it made.
        """
        self._made += steps
        self._newest_epoch = _keras.shuffling_epoch(self._data_adapter)
        self._follow(steps)
        self._clock.launched(outputs)
        whole = self._num_batches and not (self._ahead or self._taken % self._num_batches)
        if whole or last:
            self._clock.finish()

    def handed_out(self) -> None:
        """Counts a batch that was taken in a loop of one's own."""
        self._made += 1
        self._follow(1)

    def _read(self) -> Any:
        if self._start is None:
            self._start = random_numbers()
        if not self._made:
            self._start_epoch = _keras.shuffling_epoch(self._data_adapter)
        start = time.perf_counter()
        batch = next(self._batches)
        self._clock.was_read(start, time.perf_counter())
        if self._states is not None:
            self._states.append(state_of(self._batches))
        return batch

    def _follow(self, steps: int) -> None:
        states = self._states or deque()
        for _ in range(min(steps, len(states))):
            self._state = states.popleft()

    def not_made(self, steps: int) -> None:
        """Tells whoever counts that a launch ended `steps` steps before its end.

        Args:
            steps: How many of the steps counted for the launch it did not make.
        """
        ends = not self.at_epoch_end and steps >= self._left_in_epoch()
        self._not_made(steps, ends and self._ended)

    def skip(self, batches: int) -> None:
        """Reads batches that nobody needs any more; fewer if the input ends before.

        Args:
            batches: How many batches to read and drop.

        Raises:
            StopIteration: If it had ended already.
        """
        for number in range(batches):
            try:
                if self._passed:
                    self._passed -= 1
                else:
                    self._read()
                    self._follow(1)
            except StopIteration:
                if not number:
                    raise
                self._ended = True
                return
            self._taken += 1
            self._made += 1

    def take(self, place: Callable[[Any], Any]) -> Any:
        """The next batch, on the devices.

        Args:
            place: Puts a host batch on the devices.

        Raises:
            StopIteration: At the end of the input.
        """
        while not self._ended and len(self._ahead) <= self._look_ahead():
            self._pull(place)
        if not self._ahead:
            self._clock.finish()
            raise StopIteration
        self._taken += 1
        item = self._ahead.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def take_steps(self, steps: int, place_group: Callable[[list], list]) -> tuple[Any, int]:
        """What to launch next: one placed batch, or several of one shape stacked.

        Args:
            steps: The most steps the caller wants to run.
            place_group: From host batches to a list of `(placed, number of steps)`, or of
                exceptions in place of what could not be placed.

        Returns:
            A placed batch and its number of steps.

        Raises:
            StopIteration: At the end of the input.
        """
        if not self._ahead:
            self._read_group(min(steps, self._left_in_epoch()), place_group)
        if not self._ahead:
            self._clock.finish()
            raise StopIteration
        item = self._ahead.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def prepare_steps(self, steps: int, place_group: Callable[[list], list]) -> None:
        """Reads and transfers the next group while the devices run the one before.

        Args:
            steps: The most steps that the next launch will run.
            place_group: Places host batches, as in `take_steps`.
        """
        if not self._ahead and not self.at_epoch_end:
            self._read_group(min(steps, self._left_in_epoch()), place_group)

    @property
    def made(self) -> int:
        """How many batches were launched, or handed out."""
        return self._made

    @property
    def at_epoch_end(self) -> bool:
        """Whether all steps of an epoch of known length have been taken."""
        return bool(self._steps_per_epoch) and not (
            self._ahead or self._taken % self._steps_per_epoch
        )

    def _read_group(self, steps: float, place_group) -> None:
        group: list = []
        error = None
        try:
            while not self._ended and len(group) < steps:
                group.append(self._read())
        except StopIteration:
            self._ended = True
        except Exception as caught:
            # Kept, not swallowed: raised after the steps that come before it.
            self._ended, error = True, caught
        self._taken += len(group)
        try:
            if group:
                self._ahead.extend(place_group(group))
        except Exception as caught:
            self._ended, error = True, caught
        if error is not None:
            self._ahead.append(error)

    def _left_in_epoch(self) -> float:
        if not self._steps_per_epoch:
            return math.inf
        return self._steps_per_epoch - self._taken % self._steps_per_epoch

    def _look_ahead(self) -> int:
        return int(min(self._prefetch, self._left_in_epoch() - 1))

    def _pull(self, place) -> None:
        try:
            self._ahead.append(place(self._read()))
        except StopIteration:
            self._ended = True
        except Exception as error:
            # Kept, not swallowed: `take` raises it when this batch's turn comes.
            self._ended = True
            self._ahead.append(error)
