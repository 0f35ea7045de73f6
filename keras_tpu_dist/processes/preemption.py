"""SIGTERM, as a preempted machine gets it: noted, and acted on between two launches."""

import itertools
import logging
import signal
import threading
import time
from typing import Any

import jax
from jax.experimental import multihost_utils

from keras_tpu_dist.launcher.names import EXIT_TERMINATED

logger = logging.getLogger("keras_tpu_dist")

# What Google's preemptible machines have from the first signal to the end, and Kubernetes's pods.
GRACE_S = 30.0
# JAX waits for the number after the largest that any process has asked with, so that it counts
# looks and not steps: a launch may make several, and the next fit begins with the first again.
_looks = itertools.count(1)


class Preemption:
    """Notices SIGTERM while a fit runs, or a loop of one's own.

    In one process it is held back until the launch has ended and what it made is saved, and so are
    the ones that schedulers send after it, for some seconds; a later one is not. Of several
    processes JAX's own service takes all of them, and tells all processes a step at which to stop.

    Args:
        listens: Whether it does; who does not leaves SIGTERM to others.
        grace_s: The seconds after the first signal in which further ones are held back too.

    Attributes:
        listens: As given.
        noted: Whether it came, and was not passed on yet.
    """

    def __init__(self, listens: bool = True, grace_s: float = GRACE_S):
        self.listens = listens
        self.noted = False
        self._grace_s = grace_s
        self._first_s, self._times = 0.0, 0
        self._looked_at_end = False
        self._before: Any = None

    def start(self) -> None:
        """Begins to listen."""
        self.noted = self._looked_at_end = False
        self._times = 0
        main = threading.current_thread() is threading.main_thread()
        if self.listens and jax.process_count() == 1 and main:
            before = signal.signal(signal.SIGTERM, self._note)
            self._before = signal.SIG_DFL if before is None else before

    def stop(self) -> None:
        """Gives the signal back to whoever had it, and passes on those that were noted."""
        # Compared by equality: a bound method is a new object each time.
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)
        if self.noted:
            # First: a handler that raises ends the fit, which stops once more.
            self.noted = False
            if jax.process_count() > 1:
                logger.warning(
                    "SIGTERM came to one of the processes: all of them have saved, and end with "
                    "exit code %d",
                    EXIT_TERMINATED,
                )
                raise SystemExit(EXIT_TERMINATED)
            times, self._times = self._times, 0
            for _ in range(times):
                signal.raise_signal(signal.SIGTERM)

    def comes(self) -> bool:
        """Whether this is the launch after which to end, the same in all processes."""
        if jax.process_count() > 1 and self.listens and not self.noted:
            # JAX says so once.
            self.noted = multihost_utils.reached_preemption_sync_point(next(_looks))
        return self.noted

    def comes_at_end(self) -> bool:
        """Whether this is the fit after which to end: noted, for `stop` to act on."""
        if not self._looked_at_end:
            self._looked_at_end = True
            self.comes()
        return self.noted

    def end(self) -> None:
        """Ends the process, or listens on where the handler that the program had returns."""
        self.noted = True
        self.stop()
        self.start()

    def _note(self, number, frame):
        now_s = time.monotonic()
        if not self.noted:
            self._first_s = now_s
        self.noted, self._times = True, self._times + 1
        if now_s - self._first_s > self._grace_s:
            logger.error(
                "SIGTERM came %.0f s after the first, and is not held back: what was trained since "
                "the last checkpoint is not saved",
                now_s - self._first_s,
            )
            self._times = 1
            self.end()
            # Where the handler returned: the first is still to be acted on.
            self.noted, self._times, self._first_s = True, 1, now_s
