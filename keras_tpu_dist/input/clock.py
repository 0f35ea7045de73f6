"""Measures how long devices wait for input, and limits the wait."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.phases import waited_for_input
from keras_tpu_dist.common.printed import Printed

logger = logging.getLogger("keras_tpu_dist")

# An epoch is reported if the devices waited for more than this share of it, and for this long: a
# short epoch is mostly start-up.
REPORTED_SHARE, REPORTED_SECONDS = 0.1, 0.5

# Reading is only compared with every launch, which needs a thread, if it takes more than this share
# of an epoch and this long: devices cannot wait longer than reading takes.
_MEASURED_SHARE, _MEASURED_SECONDS = 0.05, 0.05


@dataclass(frozen=True, repr=False)
class InputWait(Printed):
    """How long the devices waited for input in one epoch of training.

    Attributes:
        seconds: The epoch's length, from reading its first batch to launching its last step.
        waited: How long the devices were idle because a batch was being read.
        reading: How long reading took, whether the devices worked meanwhile or not.
        batches: The number of batches read.
    """

    seconds: float
    waited: float
    reading: float
    batches: int

    @property
    def share(self) -> float:
        """`waited` as a share of the epoch."""
        return self.waited / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict:
        """The attributes, and the share, as a dict."""
        return {**asdict(self), "share": self.share}

    def __str__(self):
        each = self.reading / max(self.batches, 1)
        return (
            f"the devices waited for input for {self.share:.0%} of the epoch ({self.waited:.2f} of "
            f"{self.seconds:.2f} s); reading a batch took {1e3 * each:.1f} ms on average"
        )


class InputClock:
    """Measures how long the devices wait for input, epoch by epoch.

    A wait is time during which a batch is being read and the previous launch has ended. To see when
    a launch ends, a thread waits for it. It does so only in epochs whose reading takes long enough
    to matter.

    Args:
        on_finish: Called with the result of every epoch.

    Attributes:
        at_end: Whether the next launch is the last of an epoch; set by the code that hands out its
            batch.
    """

    def __init__(self, on_finish: Callable[[InputWait], None] | None = None):
        self._on_finish = on_finish
        self._watcher: _LaunchWatcher | None = None
        self._restart()

    def _restart(self) -> None:
        self._started: float | None = None
        self.at_end = self._launched = False
        self._reading = self._waited = 0.0
        self._batches = 0
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None

    def was_read(self, start: float, end: float) -> None:
        """Notes that a batch was read.

        Args:
            start: When reading it began, in seconds of `time.perf_counter()`.
            end: When reading it ended, on the same clock.
        """
        if self._started is None:
            self._started = start
        self._reading += end - start
        self._batches += 1
        if not self._launched:
            self._wait(end - start)
        elif self._watcher is not None:
            self._wait(self._watcher.idle(start, end))
        elif self._reading > max(_MEASURED_SECONDS, _MEASURED_SHARE * (end - self._started)):
            self._watcher = _LaunchWatcher()
            # An epoch that an exception ends is never finished: the thread ends with the clock.
            weakref.finalize(self, self._watcher.stop)

    def _wait(self, seconds: float) -> None:
        self._waited += seconds
        waited_for_input(seconds)

    def launched(self, outputs: Any, last: bool = False) -> None:
        """Notes a launch, by its outputs.

        Args:
            outputs: The outputs of the launch; when the first array is ready, the launch has ended.
            last: Whether training stops after it, even in the middle of an epoch.
        """
        self._launched = True
        if self._watcher is not None:
            self._watcher.watch(next(iter(jax.tree.leaves(outputs)), None))
        if last or self.at_end:
            self.finish()

    def finish(self) -> None:
        """Ends an epoch, if one has started."""
        if self._started is not None and self._launched and self._on_finish is not None:
            seconds = time.perf_counter() - self._started
            self._on_finish(InputWait(seconds, self._waited, self._reading, self._batches))
        self._restart()


class _LaunchWatcher:
    """Notes when launches end."""

    def __init__(self):
        self._arrays: queue.SimpleQueue = queue.SimpleQueue()
        self._newest = 0
        self._ended = (0, 0.0)
        threading.Thread(target=self._run, name="keras_tpu_dist launches", daemon=True).start()

    def watch(self, array: jax.Array | None) -> None:
        self._newest += 1
        self._arrays.put((self._newest, array))

    def idle(self, start: float, end: float) -> float:
        """How much of a time span came after the end of the newest launch."""
        number, ended = self._ended
        return max(0.0, end - max(start, ended)) if number == self._newest else 0.0

    def stop(self) -> None:
        self._arrays.put(None)

    def _run(self) -> None:
        while (item := self._arrays.get()) is not None:
            number, array = item
            if array is None:
                continue
            try:
                array.block_until_ready()
            except Exception as error:
                # The training loop gets the same error and raises it.
                logger.debug("launch %d failed: %s", number, error)
            self._ended = (number, time.perf_counter())


class _Ended:
    """Marks the end of the input, or holds the exception that ended it."""

    def __init__(self, error: BaseException):
        self.error = error


class TimedInput:
    """An iterator whose batches must arrive in time.

    A thread reads batches on request, one at a time. If the input hangs, the thread cannot be
    ended, but it can be abandoned.

    Args:
        batches: The iterator.
        timeout_s: The most seconds that one batch may take.
    """

    def __init__(self, batches: Iterator, timeout_s: float):
        self._timeout_s = timeout_s
        self._read = 0
        self._wanted: queue.SimpleQueue = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue = queue.SimpleQueue()
        self._over: BaseException | None = None
        thread = threading.Thread(
            target=_read_when_wanted,
            args=(batches, self._wanted, self._arrived),
            name="keras_tpu_dist input",
            daemon=True,
        )
        thread.start()
        weakref.finalize(self, self._wanted.put, False)

    def __iter__(self):
        return self

    def __next__(self):
        if self._over is not None:
            raise StopIteration
        self._wanted.put(True)
        try:
            batch = self._arrived.get(timeout=self._timeout_s)
        except queue.Empty:
            self._over = TimeoutError(self._stalled())
            raise self._over from None
        if isinstance(batch, _Ended):
            self._over = batch.error
            raise batch.error
        self._read += 1
        return batch

    def _stalled(self) -> str:
        return message(
            f"A batch of the input must arrive within {self._timeout_s:g} s (input_timeout_s).",
            received=f"none for step {self._read + 1} of this input after {self._timeout_s:g} s; "
            f"{self._read} batches had arrived.",
            fix="Find out what the input waits for, or give TPUStrategy(input_timeout_s=...) more "
            "time, or None for no limit.",
        )


def _read_when_wanted(batches: Iterator, wanted, arrived) -> None:
    while wanted.get():
        try:
            arrived.put(next(batches))
        except BaseException as error:
            arrived.put(_Ended(error))
            return


class InputReports:
    """The reports of a strategy about the input of its epochs."""

    def __init__(self):
        self.input_wait: InputWait | None = None

    def new_clock(self) -> InputClock:
        """A clock for the next epoch."""
        return InputClock(self._epoch_was_read)

    def _epoch_was_read(self, wait: InputWait) -> None:
        self.input_wait = wait
        if wait.waited > max(REPORTED_SECONDS, REPORTED_SHARE * wait.seconds):
            logger.warning(
                "%s: read faster with keras.utils.PyDataset(workers=...), tf.data or Grain, or "
                "prepare less on the host",
                wait,
            )
