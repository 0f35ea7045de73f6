"""Distributed datasets: batches that are read ahead, and the position of training in them."""

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from keras_tpu_dist.common.errors import type_error, value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.tensorflow_names import TensorFlowNames
from keras_tpu_dist.input.iterator import DeviceIterator, in_stacks
from keras_tpu_dist.input.position import (
    InputPosition,
    position_before_first,
    say_begins_anew,
    set_random_numbers,
)
from keras_tpu_dist.replica.values import in_single_steps

logger = logging.getLogger("keras_tpu_dist")


class DistributedDataset(TensorFlowNames):
    """Batches with a part for every replica. You can iterate as often as the source allows.

    Args:
        batches: Returns an iterator over host batches.
        place: Transfers a host batch to the mesh.
        prefetch: The number of batches to transfer ahead.
        length: The number of batches, if known.
        place_many: Transfers several host batches, stacked; returns `None` if their shapes differ.
        batch_size: The rows of a batch, if the source is arrays.
        reads_once: Whether `batches` returns the same iterator each time, such as a generator.

    Example:

    >>> import jax, numpy as np, keras_tpu_dist as ktd
    >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    >>> dataset = strategy.distribute_dataset(np.arange(8), batch_size=4)
    >>> isinstance(dataset, ktd.DistributedDataset), len(dataset)
    (True, 2)
    """

    def __init__(
        self,
        batches: Callable[[], Iterator],
        place: Callable[[Any], Any],
        prefetch: int,
        length: int | None = None,
        place_many: Callable[[list], Any] = lambda batches: None,
        batch_size: int | None = None,
        reads_once: bool = False,
    ):
        self._batches = batches
        self._place = place
        self._place_many = place_many
        self._prefetch = prefetch
        self._length = length
        self._batch_size = batch_size
        self._reads_once = reads_once
        # What was read of a source that can only be read once: all iterations share it.
        self._once: DeviceIterator | None = None
        # Iterations that were begun and have not ended, in the order in which they were begun, with
        # what they read. Those that were left have no object any more.
        self._iterations: list[tuple[weakref.ref, DeviceIterator]] = []
        # The position that a restore asked for in `begin_at`, and the iteration that goes there. If
        # that one is garbage by then, the next one that is begun does.
        self._seek: tuple[InputPosition | None, Callable[[], Any]] | None = None
        self._keeps_position = False

    def __iter__(self) -> "DistributedIterator":
        return DistributedIterator(self)

    def _begun(self, iterator: "DistributedIterator") -> DeviceIterator:
        """Starts an iteration over the source."""
        self._iterations = [
            iteration for iteration in self._iterations if iteration[0]() is not None
        ]
        position = None
        if self._seek is not None and self._seek[1]() in (None, iterator):
            position, self._seek = self._seek[0], None
        ahead = self._once
        if ahead is None:
            ahead = DeviceIterator(self._batches(), self._prefetch)
            if self._keeps_position:
                ahead.progress.keep_states()
            if position is not None:
                ahead.begin_at(position)
                skipped = ahead.skip(position.made)
                if skipped < position.made and not self._reads_once:
                    say_begins_anew(position, {"batches": skipped})
                    return self._begun(iterator)
                if skipped < position.made:
                    logger.warning(
                        "nothing is left to train on: the checkpoint was saved after %d batches of "
                        "a generator, which has only %d now",
                        position.made,
                        skipped,
                    )
        elif position is not None:
            # Some of it was read in this process, and some may be on the devices already.
            while ahead.progress.made < position.made:
                ahead.split_ahead(1, in_single_steps)
                if ahead.take(1, self._place) is None:
                    break
        if self._reads_once:
            self._once = ahead
        self._iterations.append((weakref.ref(iterator), ahead))
        return ahead

    def _ended(self, iterator: "DistributedIterator") -> None:
        """Notes that an iteration has come to the end of the source."""
        self._iterations = [
            iteration for iteration in self._iterations if iteration[0]() is not iterator
        ]

    def keep_position(self) -> None:
        """Lets iterations record their position in the source; `LoopCheckpoint` calls it."""
        self._keeps_position = True

    def position(self) -> InputPosition:
        """The position of training in the source; `LoopCheckpoint` calls it.

        If a second pass was begun within another one, such as an evaluation, it is that of the
        outer one.
        """
        if self._seek is not None:
            return self._seek[0] or position_before_first(self._epoch)
        ahead = self._once or (self._iterations[0][1] if self._iterations else None)
        if ahead is None:
            return position_before_first(self._epoch)
        if self._once is None and len(self._open_iterations) > 1:
            log_once(
                "several iterations over one distributed dataset are under way: the first that was "
                "begun is taken for that of training. If it is not, drop its iterator (`del it`) "
                "before you save or restore",
                logging.WARNING,
            )
        progress = ahead.progress
        return replace(progress.position(progress.made), epoch=self._epoch)

    def check_goes_to(self, position: InputPosition | None) -> None:
        """Raises a `ValueError` if the source cannot be read from a position.

        Args:
            position: See `begin_at`.
        """
        made = 0 if self._once is None else self._once.progress.made
        wanted = 0 if position is None else position.made
        if wanted < made:
            raise value_error(
                "A generator cannot go back to the position of a checkpoint.",
                received=f"a dataset over an iterator, of which {made} batches were used, and "
                f"a checkpoint after {wanted}.",
                fix="Distribute batches that can be read again, or leave the dataset out of "
                "LoopCheckpoint, to go on with the generator's next batch.",
            )

    def begin_at(self, position: InputPosition | None) -> None:
        """Moves training to a position in the source; `LoopCheckpoint` calls it.

        An iteration that is under way goes on from there; if there is none, the next one begins
        there.

        Args:
            position: A result of `position`, maybe from another process.
        """
        if position is not None:
            position = position.in_epoch(self._epoch)
            if not position.made:
                # Now, not with the first batch: code before it may draw numbers too.
                set_random_numbers(position.now)
                position = None
        living = self._open_iterations
        # The other ones, such as an evaluation around this call, go on where they are.
        self._iterations = [
            iteration for iteration in self._iterations if iteration[0]() in living[1:]
        ]
        self._seek = position, lambda: None
        if living:
            self._seek = position, weakref.ref(living[0])
            living[0]._ahead = None

    @property
    def _open_iterations(self) -> list["DistributedIterator"]:
        """The iterations that were begun, and were neither left nor have ended."""
        return [iterator for running, _ in self._iterations if (iterator := running()) is not None]

    @property
    def _epoch(self) -> dict[str, int]:
        found = {"steps": self._length, "batches": self._length, "rows": self._batch_size}
        return {name: number for name, number in found.items() if number is not None}

    def __len__(self) -> int:
        if self._length is None:
            raise type_error(
                "The number of batches is only known if the source knows it.",
                received="a distributed dataset over a source without len().",
                fix="Count them while you iterate.",
            )
        return self._length


class DistributedIterator(TensorFlowNames):
    """One iteration over a distributed dataset, of which `strategy.run` takes several steps.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset
        self._ahead: DeviceIterator | None = None

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> Any:
        launch = self.take(1)
        if launch is None:
            raise StopIteration
        # Before the user's code runs.
        self.read_ahead(1)
        return launch[0]

    def take(self, steps: int, alike: bool = True) -> tuple[Any, int] | None:
        """The batches of the next launch.

        Args:
            steps: The number of steps that may run.
            alike: Whether to stack batches of one shape, to launch them together.

        Returns:
            A batch and 1; or a batch with `Steps` instead of arrays, and their number; `None` at
            the end.
        """
        if self._ahead is None:
            # Not earlier: a checkpoint may be restored in the meantime.
            self._ahead = self._dataset._begun(self)
        self._ahead.split_ahead(steps if alike else 1, in_single_steps)
        launch = self._ahead.take(steps, self._dataset._place, self._several(steps, alike))
        if launch is None:
            self._dataset._ended(self)
        return launch

    def read_ahead(self, steps: int, alike: bool = True) -> None:
        """Reads and transfers the next batches while the devices work.

        Args:
            steps: See `take`.
            alike: See `take`.
        """
        if self._ahead is not None:
            place = self._dataset._place
            self._ahead.read_ahead(steps, place, self._several(steps, alike))

    def _several(self, steps: int, alike: bool) -> Callable[[list], Iterator] | None:
        place, place_many = self._dataset._place, self._dataset._place_many
        if steps == 1:
            return None
        return lambda batches: in_stacks(batches, steps if alike else 1, place, place_many)
