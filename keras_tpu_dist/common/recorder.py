"""Records how this process spends its time, every second at first, later less often."""

import atexit
import logging
import os
import threading
import time
from pathlib import Path

from keras_tpu_dist.common import phases, records
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.paths import absolute_path
from keras_tpu_dist.common.phases import REPLAY, START, TRAIN, Timeline

logger = logging.getLogger("keras_tpu_dist")

# In the first hour there is a line every second; later the interval is this share of the run's age.
# A month has some 30,000 lines, a year some 40,000.
_LEAST_S, _SHARE = 1.0, 1 / 3600


class GoodputRecorder:
    """Measures the phases of this thread, and writes them from another thread."""

    def __init__(self, path: str, since: float):
        self.path = absolute_path(path)
        before = self._before()
        self._reached = records.reached(before)
        now = time.time()
        self._first = min([record["at"] for record in before], default=now)
        self._timeline = Timeline(START, time.perf_counter() - max(0.0, now - since))
        self._timeline.training = REPLAY if self._reached else TRAIN
        self._step: int | None = None
        self._written: dict[str, float] = {}
        self._ends = threading.Event()
        self._lock = threading.Lock()
        if not records.append(self.path, records.START, since=round(since, 3)):
            self._ends.set()

    def _before(self) -> list[dict]:
        if not os.path.exists(self.path):
            return []
        found, others = records.read(self.path)
        if others:
            logger.warning("%s has %d invalid line(s), which are ignored", self.path, others)
        return found

    def start(self) -> None:
        """Starts to measure."""
        phases.count(self._timeline)
        phases.on_step(self._at_step)
        threading.Thread(target=self._run, name="ktd-goodput", daemon=True).start()
        atexit.register(self.write)

    def write(self) -> None:
        """Writes the seconds since the last write."""
        with self._lock:
            seconds = self._timeline.read()
            new = {
                name: round(value - self._written.get(name, 0.0), 4)
                for name, value in seconds.items()
            }
            spent = {name: value for name, value in new.items() if value}
            now, step = self._timeline.phase, self._step
            if records.try_append(self.path, records.SPENT, seconds=spent, now=now, step=step):
                for name, value in new.items():
                    self._written[name] = self._written.get(name, 0.0) + value
            else:
                self._ends.set()

    def _at_step(self, step: int) -> None:
        self._step = step
        if self._reached:
            self._timeline.train_as(REPLAY if step < self._reached else TRAIN)

    def _run(self) -> None:
        while not self._ends.wait(max(_LEAST_S, _SHARE * (time.time() - self._first))):
            self.write()


_recorder: GoodputRecorder | None = None


def begin(path: str) -> None:
    """Starts the recorder of this process, unless it has started.

    Raises:
        OSError: If the file cannot be written.
    """
    global _recorder
    if _recorder is None:
        _recorder = GoodputRecorder(path, process_began())
        _recorder.start()
    elif _recorder.path != absolute_path(path):
        raise value_error(
            "A run has only one goodput file.",
            received={"path": path, "the run's": _recorder.path},
            fix="Use the same path, or leave the callback out with `launch --goodput`.",
        )


def write_rest() -> None:
    """Writes the rest, before a process ends without Python's exit handlers."""
    if _recorder is not None:
        _recorder.write()


def process_began() -> float:
    """The start of this process, in seconds since 1970; without /proc, the current time."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (age - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()
