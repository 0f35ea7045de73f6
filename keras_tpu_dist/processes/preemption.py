"""SIGTERM, the signal of preemption: it is recorded, and handled between two launches."""

import itertools
import logging
import signal
import threading
import time
from typing import Any

import jax
from jax.experimental import multihost_utils

from keras_tpu_dist.common.launched import EXIT_TERMINATED

logger = logging.getLogger("keras_tpu_dist")

# The time from the first signal to the end on Google's preemptible machines and Kubernetes pods.
GRACE_S = 30.0
# JAX waits for the number after the largest one that any process has passed. So it counts calls and
# not steps: a launch may have several steps, and the next fit starts at the first step again.
_looks = itertools.count(1)


class Preemption:
    """Handles SIGTERM while a fit or a custom loop runs.

    In a single process, the signal is delayed until the launch has ended and its results are saved.
    Further signals, which schedulers send, are delayed too, for some seconds; a later one is not.
    With several processes, JAX's own service handles all signals, and gives all processes the step
    at which to stop.

    Args:
        grace_s: The seconds after the first signal in which further ones are delayed too.

    Attributes:
        noted: Whether the signal came, and was not passed on yet.
    """

    def __init__(self, grace_s: float = GRACE_S):
        self.noted = False
        self._grace_s = grace_s
        self._first_s, self._times = 0.0, 0
        self._looked_at_end = False
        self._before: Any = None

    def start(self) -> None:
        """Starts to listen."""
        self.noted = self._looked_at_end = False
        self._times = 0
        main = threading.current_thread() is threading.main_thread()
        if jax.process_count() == 1 and main:
            before = signal.signal(signal.SIGTERM, self._note)
            self._before = signal.SIG_DFL if before is None else before

    def stop(self) -> None:
        """Restores the previous handler, and passes recorded signals on to it."""
        # Compared by equality: a bound method is a new object every time.
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)
        if self.noted:
            # This comes first: a handler that raises ends the fit, which calls `stop` again.
            self.noted = False
            if jax.process_count() > 1:
                logger.warning(
                    "one of the processes got SIGTERM: all of them have saved, and end with exit "
                    "code %d",
                    EXIT_TERMINATED,
                )
                raise SystemExit(EXIT_TERMINATED)
            times, self._times = self._times, 0
            for _ in range(times):
                signal.raise_signal(signal.SIGTERM)

    def comes(self) -> bool:
        """Whether to end after this launch, the same in all processes."""
        if jax.process_count() > 1 and not self.noted:
            # JAX returns True only once.
            self.noted = multihost_utils.reached_preemption_sync_point(next(_looks))
        return self.noted

    def comes_at_end(self) -> None:
        """Looks for the signal after a fit; `stop` then handles it."""
        if not self._looked_at_end:
            self._looked_at_end = True
            self.comes()

    def end(self) -> None:
        """Ends the process, or continues to listen if the program's own handler returns."""
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
                "SIGTERM came %.0f s after the first, and is not delayed: training since the last "
                "checkpoint is not saved",
                now_s - self._first_s,
            )
            self._times = 1
            self.end()
            # If the handler returned, the first signal is still to be handled.
            self.noted, self._times, self._first_s = True, 1, now_s
