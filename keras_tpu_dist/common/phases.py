"""What a process spends its time on, and how many steps it made, for those who count that.

The code that compiles, saves or validates says so here; nothing happens unless somebody counts.
"""

import contextlib
import contextvars
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

# What time goes to. Within a call of `fit` it is BUILD until the first epoch begins, TRAIN or
# REPLAY within an epoch, OTHER between epochs.
START, BUILD, RESTORE, TRAIN, REPLAY = "start", "build", "restore", "train", "replay"
INPUT, SAVE, VALIDATE, OTHER = "input", "save", "validate", "other"


class Timeline:
    """Adds up the seconds of each phase of one thread.

    A phase within another counts alone: what is compiled in a validation is no validation.

    Args:
        phase: The one that it begins with.
        began: When that began, in seconds of `time.perf_counter()`.

    Attributes:
        training: What training counts as: TRAIN, or REPLAY.
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
        """The phase now."""
        return self._stack[-1]

    def enter(self, phase: str) -> None:
        """Begins a phase within the one that runs.

        Args:
            phase: Its name.
        """
        with self._lock:
            self._count()
            self._stack.append(phase)

    def leave(self) -> None:
        """Goes back to the phase around."""
        with self._lock:
            self._count()
            if len(self._stack) > 1:
                self._stack.pop()

    def turn(self, phase: str) -> None:
        """Makes the phase that runs another.

        Args:
            phase: Its name.
        """
        new = self.training if phase == TRAIN else phase
        if self._stack[-1] != new:
            with self._lock:
                self._count()
                self._stack[-1] = new

    def train_as(self, phase: str) -> None:
        """Says what training counts as from now on.

        Args:
            phase: TRAIN or REPLAY.
        """
        self.training = phase
        if self.phase in (TRAIN, REPLAY):
            self.turn(TRAIN)

    def waited(self, seconds: float) -> None:
        """Counts the last seconds of training as waiting for input.

        Args:
            seconds: How many.
        """
        with self._lock:
            self._count()
            if self.phase in (TRAIN, REPLAY):
                self._seconds[self.phase] -= seconds
                self._seconds[INPUT] += seconds

    def read(self) -> dict[str, float]:
        """The seconds of each phase until now."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    def _count(self) -> None:
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now


# Threads that were started beside have none.
_timelines: contextvars.ContextVar[tuple[Timeline, ...]] = contextvars.ContextVar(
    "timelines", default=()
)
_listeners: list[Callable[[int], None]] = []


def count(timeline: Timeline) -> None:
    """Has a timeline count the phases of this thread.

    Args:
        timeline: It.
    """
    _timelines.set((*_timelines.get(), timeline))


def stop(timeline: Timeline) -> None:
    """Ends what `count` began.

    Args:
        timeline: The same.
    """
    _timelines.set(tuple(each for each in _timelines.get() if each is not timeline))


def is_counted() -> bool:
    """Whether somebody counts the phases of this thread."""
    return bool(_timelines.get())


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """The context of one phase.

    Args:
        name: Its name.
    """
    counting = _timelines.get()
    for each in counting:
        each.enter(name)
    try:
        yield
    finally:
        for each in counting:
            each.leave()


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """The context of a call of `fit`."""
    turn(OTHER, of=START)
    with phase(BUILD):
        yield


def turn(name: str, of: str | None = None) -> None:
    """Makes the phase that runs in this thread another.

    Args:
        name: Its name.
        of: The one that is changed; by default any.
    """
    for each in _timelines.get():
        if of in (None, each.phase):
            each.turn(name)


def waited_for_input(seconds: float) -> None:
    """Counts the last seconds of training as waiting for input.

    Args:
        seconds: How many.
    """
    for each in _timelines.get():
        each.waited(seconds)


def tell_of_steps(listener: Callable[[int], None]) -> None:
    """Has a function called after each launch of a fit, and before its first.

    Args:
        listener: Called with the train steps of the model's life.
    """
    _listeners.append(listener)


def steps_are_told() -> bool:
    """Whether somebody wants to know of steps."""
    return bool(_listeners)


def at_step(step: int) -> None:
    """Says where training stands.

    Args:
        step: The train steps of the model's life.
    """
    for listener in _listeners:
        listener(step)
