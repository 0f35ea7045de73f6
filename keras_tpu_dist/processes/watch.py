"""Watches the other processes, and ends this one with the reason if one failed or is silent.

A launched collective that another process never joins cannot be interrupted. So the process itself
ends. Before that, it logs an error with the other process, its position, and its own last error.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from keras_tpu_dist.common import launched as launchers
from keras_tpu_dist.common.launched import EXIT_PEER as EXIT_PEER
from keras_tpu_dist.processes.channel import (
    ENDED,
    FAILED,
    LEFT,
    SILENT,
    STUCK,
    Absence,
    Channel,
)

logger = logging.getLogger("keras_tpu_dist")

_BEAT_S = 1.0
# Seconds in which the program may end by its own exception before the watch ends it.
_GRACE_S = 3.0
# For all processes together, because one coordinator serves them.
_MOST_BEATS_PER_SECOND = 64
# For a process that may start its watch later than this one; JAX's heartbeats notice if it is dead.
_LONGEST_UNHEARD_S = 300.0
# How deep a process is: between calls, in a call that all make, or in a launch that all make. If
# another process is gone, this one ends
#   FAILED, SILENT: at once;
#   ENDED:          if it is in a call or a launch, `peer_timeout_s` later: it waits in vain;
#   LEFT:           the same, but in a launch soon: the other was in the same call, and never comes.
# A live process is waited for, unless it is STUCK in a place that this one is not at (`why_not`).
OUTSIDE, INSIDE, LAUNCH = 0, 1, 2
# How many ended processes process 0 reports; the first ones are the cause for the others.
_MOST_REPORTED = 8
# Characters of an error's text; the process's own output has all of it.
_MOST_WORDS = 4000


class Watch:
    """Writes that this process is alive, and checks that the others are.

    Process 0 reads all entries and reports who is gone; the others read its report. So a round of
    beats needs three requests per process. Once process 0 is gone, every process reads all entries.

    Args:
        channel: The host channel.
        process_id: This process.
        num_processes: The number of processes.
        peer_timeout_s: Seconds of silence after which a process counts as dead.
        together: Whether all processes start their watch at the same time. If not, one that has not
            written yet may still come.
    """

    def __init__(
        self,
        channel: Channel,
        process_id: int,
        num_processes: int,
        peer_timeout_s: float,
        *,
        together: bool = True,
    ):
        self._together = together
        self._channel = channel
        self._process_id = process_id
        self._num_processes = num_processes
        self._peer_timeout_s = peer_timeout_s
        self._beats = 0
        self._where = "before its first call"
        self._depth = OUTSIDE
        # Whether the program was ended, by `sys.exit`, within a call that all make.
        self.leaves = False
        self._output: Any = None
        self._heard: dict[int, tuple[int, float]] = {}
        self._unheard = set(range(num_processes)) - {process_id}
        self._gone: dict[int, Absence] = {}
        self._reported: dict[int, Absence] = {}
        self._beat_s = max(_BEAT_S, num_processes / _MOST_BEATS_PER_SECOND)
        self._gone_since: dict[int, float] = {}
        self._positions: dict[int, tuple[str, int]] = {}
        self._ends = threading.Event()
        # Set if there is an entry to write before the next beat.
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ktd-watch", daemon=True)

    def start(self) -> None:
        """Starts to watch, and to write how this process ends."""
        stock = sys.excepthook

        def report(kind, error, trace):
            stock(kind, error, trace)
            if issubclass(kind, jax.errors.JaxRuntimeError):
                self._log_who_is_gone()
            self.failed("".join(traceback.format_exception_only(kind, error)).strip())

        sys.excepthook = report
        # Exit functions run in reverse order: this one before JAX's, which waits for the others.
        atexit.register(self.ended)
        self._thread.start()

    def at(self, where: str, inside: int) -> tuple[str, int]:
        """Records the position of this process, for the others' errors; returns the previous one.

        Args:
            where: The position, in words.
            inside: Whether it may be waiting for others there: `OUTSIDE`, `INSIDE` a call that all
                make, at `LAUNCH` of a program that all run.
        """
        before = self._where, self._depth
        self.leaves = False
        self._where, self._depth = where, inside
        # Entering and leaving the same call, as in a custom loop, is not worth a message.
        if _call(where) != _call(before[0]):
            self._news.set()
        return before

    def launched(self, output: jax.Array | None) -> None:
        """Records a launch: until its output is ready, this process may wait for the others'
        launches.

        Args:
            output: An output of the program, small because it is kept until the next launch; `None`
                if there is none.
        """
        self._output = output

    @property
    def _level(self) -> int:
        """How deep inside this process is: see `at`."""
        output = self._output
        done = output is None or output.is_deleted() or output.is_ready()
        return self._depth if done else LAUNCH

    def why_not(self, missing: list[int], waited_s: float) -> Absence | None:
        """The reason why some of the processes will not come, or `None`.

        A live process that is on its way is waited for, however long that takes. A process is not
        on its way if it is still inside a call that all had begun, or in a launch that this process
        did not make.

        Args:
            missing: The numbers of the missing processes.
            waited_s: The seconds waited so far.
        """
        gone = {**self._read_ends(), **self._gone}
        reason = next((gone[i] for i in missing if i in gone), None)
        if waited_s > _LONGEST_UNHEARD_S and any(i in self._unheard for i in missing):
            words = f"not heard from within {_LONGEST_UNHEARD_S:g} s"
            reason = reason or Absence(SILENT, words)
        own = self._level
        stuck = {OUTSIDE: False, INSIDE: own >= INSIDE, LAUNCH: own != LAUNCH}
        places = [self._positions.get(i, ("", OUTSIDE)) for i in missing]
        waiting = [where for where, level in places if stuck[level]]
        if reason or waited_s < self._peer_timeout_s or not waiting:
            return reason
        return Absence(STUCK, f"still {waiting[0]} after {self._peer_timeout_s:g} s")

    def failed(self, error: str) -> None:
        """Writes for the others that this process ends by an error, and ends it.

        Args:
            error: The error's text.
        """
        self._end_watch()
        self._write_end(Absence(FAILED, f"failed {self._where} with {error[:_MOST_WORDS]}"))
        self._wait_for_readers(self._num_processes - 1)
        _exit(1)

    def ended(self) -> None:
        """Writes for the others that this program reached its normal end."""
        if not self._ends.is_set():
            self._end_watch()
            words = f"has ended its program {self._where}"
            launchers.report_end(words, leaves=self.leaves)
            self._write_end(Absence(LEFT if self.leaves else ENDED, words))

    def _write_end(self, end: Absence) -> None:
        self._channel.write("gone", end)
        if not self._process_id:
            self._gone[0] = end
            self._write_board()

    def _wait_for_readers(self, others: int) -> None:
        """Waits until so many processes have read how this one, or another, ended."""
        # If this is process 0, the coordinator ends with it, and unread entries are lost.
        end = time.monotonic() + 3 * self._beat_s + _GRACE_S
        while time.monotonic() < end and len(self._channel.read_valid("read", list)) < others:
            time.sleep(0.05)
        if not self._process_id:
            # Without the coordinator, JAX would abort the others before they end by themselves.
            time.sleep(_GRACE_S + _BEAT_S)

    def _end_watch(self) -> None:
        self._ends.set()
        self._news.set()

    def _log_who_is_gone(self) -> None:
        """Logs processes that are gone: they may be the reason for a failed collective."""
        end = time.monotonic() + self._peer_timeout_s + 2 * _BEAT_S
        while time.monotonic() < end and not self._gone:
            time.sleep(_BEAT_S / 4)
        for i, end in sorted(self._gone.items()):
            logger.critical("process %d %s", i, end.words)

    def _run(self) -> None:
        while True:
            self._news.wait(self._beat_s)
            self._news.clear()
            if self._ends.is_set():
                return
            try:
                self._look()
            except jax.errors.JaxRuntimeError as error:
                # JAX itself ends the process, too, if the coordinator does not come back.
                logger.critical("process 0, which runs the coordinator, is gone: %s", error)
                return

    def _look(self) -> None:
        self._beats += 1
        if self._process_id:
            self._channel.write("alive", [self._beats, self._where, self._level])
        if self._reads_all:
            # Process 0 has an entry of its own.
            others = [i for i in range(1, self._num_processes) if i != self._process_id]
            self._listen(self._channel.read_valid("alive", _alive), others)
        else:
            self._listen(*self._board())
        self._gone.update(self._read_ends() if self._reads_all else self._ends_of_others())
        for i in launchers.ended() - set(self._gone) - {self._process_id}:
            where, _ = self._positions.get(i, ("before its first call", OUTSIDE))
            self._gone[i] = Absence(LEFT, f"has ended with exit code 0, last heard {where}")
        now = time.monotonic()
        for i in self._gone:
            self._gone_since.setdefault(i, now)
        if not self._process_id:
            self._write_board()
        fatal = {i: end.words for i, end in self._gone.items() if self._is_fatal(i, now)}
        if fatal:
            self._end(fatal)

    def _write_board(self) -> None:
        # Processes that have reached their normal end are not a reason yet.
        gone = sorted(self._gone.items(), key=lambda item: item[1].kind == ENDED)
        ends = {str(i): end for i, end in gone[:_MOST_REPORTED]}
        self._channel.write("board", [self._beats, self._where, self._level, ends])

    @property
    def _reads_all(self) -> bool:
        return not self._process_id or 0 in self._gone

    def _board(self) -> tuple[dict[int, Any], list[int]]:
        """The last entry of process 0 about itself; also records the ends of other processes."""
        board = self._channel.read_valid("board", _board)
        alive, ends = board.get(0, ((0, "", OUTSIDE), {}))
        numbers = {str(i): i for i in range(self._num_processes)}
        self._reported = {numbers[i]: end for i, end in ends.items() if i in numbers}
        return {i: alive for i in board if i == 0}, [0]

    def _read_ends(self) -> dict[int, Absence]:
        """How processes ended: by their own entries, or by the report of process 0."""
        if not self._reads_all:
            self._board()
            return self._ends_of_others()
        gone = self._channel.read_valid("gone", _absence)
        return {i: end for i, end in gone.items() if i != self._process_id}

    def _ends_of_others(self) -> dict[int, Absence]:
        return {i: end for i, end in self._reported.items() if i != self._process_id}

    def _listen(self, alive: dict[int, Any], of: Iterable[int]) -> None:
        """Records the entries of processes, and which of them are silent."""
        now = time.monotonic()
        for i in of:
            beats, where, inside = alive.get(i, (0, "before its first call", OUTSIDE))
            if i in alive:
                self._unheard.discard(i)
            elif not self._together:
                continue
            if self._heard.get(i, (-1, now))[0] != beats:
                self._heard[i] = beats, now
                self._positions[i] = where, inside
            elif now - self._heard[i][1] > self._peer_timeout_s:
                words = f"silent for {self._peer_timeout_s:g} s, last heard {where}"
                self._gone[i] = Absence(SILENT, words)

    def _is_fatal(self, number: int, now: float) -> bool:
        kind, level, gone_s = self._gone[number].kind, self._level, now - self._gone_since[number]
        if kind not in (ENDED, LEFT):
            return True
        # It came to an end without an error: only processes that still wait for it in a collective
        # are lost. One that it left within a call is not waited for in a launch.
        return bool(level) and gone_s > (
            _GRACE_S if kind == LEFT and level == LAUNCH else self._peer_timeout_s
        )

    def _end(self, fatal: dict[int, str]) -> None:
        """Ends this process, unless it ends by itself within a few seconds."""
        self._channel.write("read", sorted(fatal))
        words = "; ".join(f"process {i} {end}" for i, end in sorted(fatal.items()))
        logger.critical("process %d ends (%s): %s", self._process_id, self._where, words)
        # Processes that read it from process 0 end a beat later; its coordinator must live until
        # then.
        later_s = 0.0 if self._process_id else 2 * self._beat_s
        if not self._ends.wait(_GRACE_S + later_s):
            _exit(EXIT_PEER)


def _alive(entry: Any) -> tuple[int, str, int]:
    """An entry of a process: the number of its entries, its position, and how deep it is."""
    beats, where, level = entry
    return int(beats), str(where), int(level)


def _absence(entry: Any) -> Absence:
    kind, words = entry
    return Absence(str(kind), str(words))


def _board(entry: Any) -> tuple[tuple[int, str, int], dict[str, Absence]]:
    """The entry of process 0 with the ends of others, by their numbers."""
    *alive, ends = entry
    return _alive(alive), {i: _absence(end) for i, end in ends.items()}


def _call(where: str) -> str:
    """The call of "in fit of model 'm'" and "after fit of model 'm'"."""
    return where.partition(" ")[2]


def _exit(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_watch: Watch | None = None


def start(
    channel: Channel,
    process_id: int,
    num_processes: int,
    peer_timeout_s: float,
    *,
    together: bool = True,
) -> Watch:
    """Starts the watch of this process. See `Watch`."""
    global _watch
    _watch = Watch(channel, process_id, num_processes, peer_timeout_s, together=together)
    _watch.start()
    return _watch


def at(where: str, inside: int) -> tuple[str, int] | None:
    """Records the position of this process, if it is one of several. See `Watch.at`."""
    return None if _watch is None else _watch.at(where, inside)


def launched(outputs: Any) -> None:
    """Records a launch, if this process is one of several. See `Watch.launched`.

    Args:
        outputs: A structure of the program's outputs.
    """
    if _watch is None:
        return
    arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
    if arrays:
        _watch.launched(min(arrays, key=lambda array: array.nbytes))


@contextlib.contextmanager
def during(what: str, inside: int) -> Iterator[None]:
    """The context of a call that all processes make, for the others' errors.

    Args:
        what: The call, in words that are the same everywhere.
        inside: See `Watch.at`.
    """
    outer = at(f"in {what}", inside)
    try:
        yield
    except BaseException as error:
        at(f"in {what}", OUTSIDE)
        if _watch is not None:
            _watch.leaves = isinstance(error, SystemExit)
        raise
    if outer is not None and outer[1]:
        at(*outer)
    else:
        at(f"after {what}", OUTSIDE)
