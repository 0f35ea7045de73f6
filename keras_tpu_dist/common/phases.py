"""Phases of a process (compiling, saving, ...) and its steps, for those who record time.

The code that compiles, saves or validates announces it here. Without a recorder, nothing happens.
"""

import contextlib
import contextvars
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

# The phases. Within a call of `fit` the phase is BUILD until the first epoch begins, TRAIN or
# REPLAY within an epoch, OTHER between epochs.
START, BUILD, RESTORE, TRAIN, REPLAY = "start", "build", "restore", "train", "replay"
INPUT, SAVE, VALIDATE, OTHER = "input", "save", "validate", "other"


class Timeline:
    """Adds up the seconds of every phase of one thread.

    A phase within another counts alone: compiling in a validation is not validation.

    Attributes:
        training: The phase that training counts as: TRAIN, or REPLAY.
    """

    def __init__(self, phase: str, began: float | None = None):
        self.training = TRAIN
        self._stack = [phase]
        self._since = time.perf_counter() if began is None else began
        self._seconds: defaultdict[str, float] = defaultdict(float)
        # Another thread may read.
        self._lock = threading.Lock()

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._stack[-1]

    def enter(self, phase: str) -> None:
        """Begins a phase within the current one."""
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
        """Replaces the current phase."""
        new = self.training if phase == TRAIN else phase
        if self._stack[-1] != new:
            with self._lock:
                self._count()
                self._stack[-1] = new

    def train_as(self, phase: str) -> None:
        """Sets the phase that training counts as."""
        self.training = phase
        if self.phase in (TRAIN, REPLAY):
            self.turn(TRAIN)

    def waited(self, seconds: float) -> None:
        """Counts the last seconds of training as waiting for input."""
        with self._lock:
            self._count()
            if self.phase in (TRAIN, REPLAY):
                self._seconds[self.phase] -= seconds
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
step_listeners: list[Callable[[int], None]] = []


def count(timeline: Timeline) -> None:
    """Lets a timeline record the phases of this thread."""
    _timelines.set((*_timelines.get(), timeline))


def stop(timeline: Timeline) -> None:
    """Ends the recording of a timeline."""
    _timelines.set(tuple(one for one in _timelines.get() if one is not timeline))


def is_counted() -> bool:
    """Whether a timeline records the phases of this thread."""
    return bool(_timelines.get())


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """The context of one phase."""
    counting = _timelines.get()
    for timeline in counting:
        timeline.enter(name)
    try:
        yield
    finally:
        for timeline in counting:
            timeline.leave()


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """The context of a call of `fit`."""
    turn(OTHER, of=START)
    with phase(BUILD):
        yield


def turn(name: str, of: str | None = None) -> None:
    """Replaces the current phase of this thread."""
    for timeline in _timelines.get():
        if of in (None, timeline.phase):
            timeline.turn(name)


def waited_for_input(seconds: float) -> None:
    """Counts the last seconds of training as waiting for input."""
    for timeline in _timelines.get():
        timeline.waited(seconds)


def on_step(listener: Callable[[int], None]) -> None:
    """Sets a function that is called after every launch of a fit, and before its first."""
    step_listeners.append(listener)


def at_step(step: int) -> None:
    """Announces the current step."""
    for listener in step_listeners:
        listener(step)
