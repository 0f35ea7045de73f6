"""What a call of `fit` spends its time on: training, waiting for input, and everything else.

The code that compiles, saves or validates announces it here. Without a recorder nothing
happens.
"""

import contextlib
import contextvars
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

# The phase is TRAIN within an epoch of `fit`, and OTHER before, between and after epochs.
TRAIN, INPUT, OTHER = "train", "input", "other"


class Timeline:
    """Adds up the seconds of every phase of one thread.

    A phase within another counts alone: compiling in a step is not training.
    """

    def __init__(self):
        self._stack = [OTHER]
        self._since = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        # Another thread may read.
        self._lock = threading.Lock()

    def enter(self, phase: str) -> None:
        """Begins a phase within the current one.

        Args:
            phase: Its name.
        """
        with self._lock:
            self._count()
            self._stack.append(phase)

    def leave(self) -> None:
        """Returns to the outer phase."""
        with self._lock:
            self._count()
            if len(self._stack) > 1:
                self._stack.pop()

    def turn(self, phase: str) -> None:
        """Replaces the current phase.

        Args:
            phase: Its name.
        """
        if self._stack[-1] != phase:
            with self._lock:
                self._count()
                self._stack[-1] = phase

    def waited(self, seconds: float) -> None:
        """Counts the last seconds of training as waiting for input.

        Args:
            seconds: The number of seconds.
        """
        with self._lock:
            self._count()
            if self._stack[-1] == TRAIN:
                self._seconds[TRAIN] -= seconds
                self._seconds[INPUT] += seconds

    def read(self) -> dict[str, float]:
        """The seconds of every phase until now."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    def _count(self) -> None:
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now


# Threads that were started separately have none.
_timelines: contextvars.ContextVar[tuple[Timeline, ...]] = contextvars.ContextVar(
    "timelines", default=()
)


def count(timeline: Timeline) -> None:
    """Lets a timeline record the phases of this thread.

    Args:
        timeline: The timeline.
    """
    _timelines.set((*_timelines.get(), timeline))


def stop(timeline: Timeline) -> None:
    """Ends the recording of a timeline.

    Args:
        timeline: The timeline.
    """
    _timelines.set(tuple(one for one in _timelines.get() if one is not timeline))


def is_counted() -> bool:
    """Whether a timeline records the phases of this thread."""
    return bool(_timelines.get())


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """The context of one phase.

    Args:
        name: Its name.
    """
    counting = _timelines.get()
    for timeline in counting:
        timeline.enter(name)
    try:
        yield
    finally:
        for timeline in counting:
            timeline.leave()


def turn(name: str) -> None:
    """Replaces the current phase of this thread.

    Args:
        name: Its name.
    """
    for timeline in _timelines.get():
        timeline.turn(name)


def waited_for_input(seconds: float) -> None:
    """Counts the last seconds of training as waiting for input.

    Args:
        seconds: The number of seconds.
    """
    for timeline in _timelines.get():
        timeline.waited(seconds)
