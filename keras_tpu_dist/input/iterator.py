"""The batches of an epoch, in launches; read and transferred ahead of the step that uses them."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_tpu_dist.input.clock import InputClock
from keras_tpu_dist.input.own_input import ShardBatch
from keras_tpu_dist.input.position import InputPosition, Progress

logger = logging.getLogger("keras_tpu_dist")


def in_stacks(
    batches: list,
    length: int,
    place: Callable[[Any], Any],
    place_many: Callable[[list], Any],
) -> Iterator[tuple[Any, int]]:
    """Places host batches; stacks them if they fill scans and have the same shapes.

    Args:
        batches: The host batches.
        length: The steps of a scan.
        place: Transfers a host batch to the devices.
        place_many: Transfers stacked host batches; returns `None` if their shapes differ.

    Yields:
        A placed batch, or stacked ones, and the number of steps.
    """
    placed = 0
    while length > 1 and placed < len(batches) and not len(batches) % length:
        try:
            stacked = place_many(batches[placed : placed + length])
        except ValueError:
            # One of the batches is wrong; placed alone, it raises the error at its step.
            stacked = None
        if stacked is None:
            break
        yield stacked, length
        placed += length
    for batch in batches[placed:]:
        yield place(batch), 1


class DeviceIterator:
    """Batches on the devices, some ahead of the step that uses them.

    `launches` yields batches to launch. Plain iteration yields host batches, one at a time and
    without prefetching: Keras builds unbuilt models from them.

    If reading ahead fails, the error is raised at the step that would have used the batch. So a
    failing input stops training at the same step as without prefetching. A generator is never read
    beyond the steps of the running epoch.

    Args:
        batches: The host batches.
        prefetch: How many batches to transfer ahead.
        steps_per_epoch: Steps after which the caller may stop reading, or `None` if it reads to the
            end.
        clock: Measures how long the devices wait for the batches.
        num_batches: The number of batches in an epoch if known, for the clock.
        not_made: Called with the number of steps that were counted for a launch and did not run,
            and whether the end of the input was the reason.
        source_batches: The number of batches after which the input starts again, if it does.
        data_adapter: Keras's adapter for the input, which may count epochs and use them to shuffle.
        chosen_steps: The steps of a launch if they were chosen automatically, without regard to the
            memory for its batches; or `None`.
        epoch: What is known of an epoch. See `InputPosition`.

    Attributes:
        clock: As given.
        progress: Counts the batches, and knows the position in the input.
        chosen_steps: As given.
        num_batches: As given.
        rows_before: The rows of the last batch that was transferred; 0 before the first.
        rows_seen: The different numbers of rows of its batches.
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
        chosen_steps: int | None = None,
        epoch: dict[str, int] | None = None,
    ):
        self._batches = iter(batches)
        self.clock = clock or InputClock()
        self.progress = Progress(self._batches, data_adapter, epoch)
        self.chosen_steps = chosen_steps
        self.rows_before = 0
        self.rows_seen: set[int] = set()
        self.num_batches = num_batches
        self._not_made = not_made
        self._prefetch = prefetch
        self._steps_per_epoch = steps_per_epoch
        self._source_batches = source_batches
        # Launches that are ready, as batch and steps, or an exception to raise at their turn.
        self._ahead: deque[Any] = deque()
        self._num_read = 0
        self._ended = False
        # Batches to skip without reading: the input has moved past them by its own state.
        self._passed = 0

    def __iter__(self):
        return self

    def __next__(self):
        self._num_read += 1
        batch = next(self._batches)
        return batch.batch if isinstance(batch, ShardBatch) else batch

    def launches(
        self,
        wanted: int,
        place: Callable[[Any], Any],
        several: Callable[[list], Iterable[tuple[Any, int]]] | None = None,
        wanted_next: Callable[[], int] | None = None,
    ) -> Iterator[tuple[Any, int]]:
        """Yields the next batches to launch; nothing at the end of the input.

        A batch counts as used once it is yielded. When the caller comes back after the last one, it
        has launched all of them. Then the next batches are read and transferred while the devices
        work.

        Args:
            wanted: How many steps the caller runs, if the input and the epoch have as many.
            place: Transfers a host batch to the devices.
            several: Transfers host batches and yields them, perhaps stacked, with their numbers of
                steps. Without it the caller runs one step at a time.
            wanted_next: How many steps the caller runs next, if it runs several.

        Yields:
            A placed batch and its number of steps.
        """
        left = wanted
        while left > 0:
            launch = self.take(left, place, several)
            if launch is None:
                break
            left -= launch[1]
            yield launch
            if left > 0 and self._at_epoch_end:
                break
        if left and left < wanted:
            ran_out = self._ended and not self._at_epoch_end and left >= self._left_in_epoch()
            self._not_made(left, ran_out)
        self.read_ahead(wanted_next() if wanted_next is not None else 1, place, several)

    def take(
        self,
        wanted: int,
        place: Callable[[Any], Any],
        several: Callable[[list], Iterable[tuple[Any, int]]] | None = None,
    ) -> tuple[Any, int] | None:
        """The next launch, a placed batch and its number of steps; `None` at the end of the input.

        Args:
            wanted: How many batches are read if none is ready.
            place: See `launches`.
            several: See `launches`.
        """
        if not self._ahead:
            self._read_group(wanted, place, several)
        if not self._ahead:
            self.clock.finish()
            return None
        item = self._ahead.popleft()
        if isinstance(item, Exception):
            raise item
        steps = item[1]
        self.progress.made += steps
        if self.progress.follows:
            self.progress.follow(steps)
        if self.num_batches:
            self.clock.at_end = not (self._ahead or self._num_read % self.num_batches)
        return item

    def read_ahead(
        self,
        wanted: int,
        place: Callable[[Any], Any],
        several: Callable[[list], Iterable[tuple[Any, int]]] | None = None,
    ) -> None:
        """Reads and transfers the next batches, while the devices work.

        Args:
            wanted: How many steps the caller runs next, if it runs several.
            place: See `launches`.
            several: See `launches`.
        """
        if several is None:
            self._fill(place)
        elif not (self._ahead or self._at_epoch_end):
            self._read_group(wanted, place, several)

    def split_ahead(self, most: int, split: Callable[[Any], Iterable[Any]]) -> None:
        """Takes batches apart that were prepared for a launch of more steps.

        Args:
            most: How many steps the next launch may have.
            split: Splits stacked batches into single ones.
        """
        if self._ahead and not isinstance(self._ahead[0], Exception) and self._ahead[0][1] > most:
            stacked, _ = self._ahead.popleft()
            self._ahead.extendleft((batch, 1) for batch in reversed(list(split(stacked))))

    def skip(self, batches: int) -> int:
        """Reads batches and drops them.

        Args:
            batches: How many batches to read and drop.

        Returns:
            How many there were: fewer if the input ends before.
        """
        for number in range(batches):
            if self._passed:
                self._passed -= 1
            elif self._ended:
                return number
            else:
                try:
                    self._read()
                except StopIteration:
                    self._ended = True
                    return number
                self.progress.follow(1)
            self._num_read += 1
            self.progress.made += 1
        return batches

    def begin_at(self, position: InputPosition) -> None:
        """Goes to a position, before the first batch is read.

        Batches of the running epoch are not read here, but skipped as steps of the epoch.

        Args:
            position: The position of an iterator over the same input in an earlier process.
        """
        begins = position.begins(self._steps_per_epoch, self._source_batches)
        stands = self.progress.goes_to(position, begins)
        if stands:
            self._passed = position.made
        earlier = 0 if begins or not self._steps_per_epoch else position.made - position.done
        if not earlier:
            return
        start = time.perf_counter()
        self.skip(earlier)
        self._not_made(-earlier, False)
        self.progress.has_epoch_of(position)
        if not stands:
            logger.info(
                "%d batches of the input were read again, to resume where training stopped: %.1f s",
                earlier,
                time.perf_counter() - start,
            )

    @property
    def _at_epoch_end(self) -> bool:
        """Whether all steps of an epoch of known length have been handed out."""
        return bool(self._steps_per_epoch) and not (
            self._ahead or self._num_read % self._steps_per_epoch
        )

    def _left_in_epoch(self) -> Any:
        """The number of unread batches in the epoch; at its end, those in the next one."""
        if not self._steps_per_epoch:
            return math.inf
        return self._steps_per_epoch - self._num_read % self._steps_per_epoch

    def _fill(self, place) -> None:
        """Reads `prefetch` batches ahead, within the running epoch."""
        while len(self._ahead) < self._prefetch and not self._ended:
            if self._steps_per_epoch and not self._num_read % self._steps_per_epoch:
                return
            self._read_group(1, place, None)

    def _read_group(self, steps: int, place, several) -> None:
        """Reads a number of batches, fewer at an end, and transfers them."""
        group: list = []
        error = None
        if steps > 1:
            steps = min(steps, self._left_in_epoch())
        try:
            while len(group) < steps and not self._ended:
                group.append(self._read())
        except StopIteration:
            self._ended = True
        except Exception as caught:
            # `launches` raises it, after the steps of the batches before it.
            self._ended, error = True, caught
        self._num_read += len(group)
        try:
            if len(group) == 1:
                self._ahead.append((place(group[0]), 1))
            elif group and several is not None:
                for launch in several(group):
                    self._ahead.append(launch)
        except Exception as caught:
            self._ended, error = True, caught
        if error is not None:
            self._ahead.append(error)

    def _read(self) -> Any:
        if not self.progress.made:
            self.progress.begins()
        start = time.perf_counter()
        batch = next(self._batches)
        self.clock.was_read(start, time.perf_counter())
        if self.progress.follows:
            self.progress.was_read()
        return batch
