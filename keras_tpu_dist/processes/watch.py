"""Notices that another process failed or is silent, and ends this one with the reason.

A launched collective that another process never joins cannot be interrupted, so the process itself
ends, after an error in the log that names the other process, where it was, and its own last error.
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

from keras_tpu_dist.goodput import recorder
from keras_tpu_dist.launcher.names import EXIT_PEER as EXIT_PEER
from keras_tpu_dist.processes.channel import Channel
from keras_tpu_dist.processes.encoding import DictOf, ListOf

logger = logging.getLogger("keras_tpu_dist")

_BEAT_S = 1.0
# Seconds in which the program may end by its own exception before the watch ends it.
_GRACE_S = 3.0
# Of all processes together, since one coordinator serves them.
_MOST_BEATS_PER_SECOND = 64
# For a process that may start to watch later than this one; JAX's heartbeats notice if it is dead.
_LONGEST_UNHEARD_S = 300.0
_ENDED = "has ended its program"
OUTSIDE, INSIDE, LAUNCH = 0, 1, 2
# The form of what a process writes: [how often it wrote, where it is, at which level]; how it
# ended; the numbers of the processes whose end it has read. Process 0 adds who is gone.
_ALIVE, _GONE, _READ = [int, str, (int, bool)], str, ListOf(int)
_BOARD = [*_ALIVE, DictOf(str)]
# Processes that are gone and that process 0 tells of; the first ones are why the others follow.
_MOST_TOLD = 8
# Characters of an error's text; the process's own output has all of it.
_MOST_WORDS = 4000


class Watch:
    """Writes that this process is alive, and checks that the others are.

    Process 0 reads what all write, and tells who is gone; the others read that. So one round of
    beats takes three requests of each process. Once process 0 is gone, each reads all.

    Args:
        channel: The host channel.
        process_id: This process.
        num_processes: How many there are.
        peer_timeout_s: Seconds of silence after which a process is taken for dead.
        together: Whether all processes start to watch at the same time. If not, one that has
            written nothing yet may be on its way.
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
        self._inside = OUTSIDE
        self._output: Any = None
        self._heard: dict[int, tuple[int, float]] = {}
        self._unheard = set(range(num_processes)) - {process_id}
        self._gone: dict[int, str] = {}
        self._told: dict[int, str] = {}
        self._beat_s = max(_BEAT_S, num_processes / _MOST_BEATS_PER_SECOND)
        self._gone_since: dict[int, float] = {}
        self._positions: dict[int, tuple[str, int]] = {}
        self._ends = threading.Event()
        # Set if there is something to write before the next beat.
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ktd-watch", daemon=True)

    def start(self) -> None:
        """Starts to watch, and to write for the others how this process ends."""
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
        """Notes where this process is, for the others' errors; returns where it was.

        Args:
            where: In words.
            inside: Whether it may be waiting for others there: `OUTSIDE`, `INSIDE` a call that
                all make, at `LAUNCH` of a program that all run.
        """
        before = self._where, self._inside
        self._where, self._inside = where, inside
        # Into and out of the same call, as in a loop of one's own, is not worth a message.
        if _call(where) != _call(before[0]):
            self._news.set()
        return before

    def launched(self, output: jax.Array | None) -> None:
        """Notes a launch: until its output is there this process may wait for the others'.

        Args:
            output: An array that the program makes, small since it is kept until the next launch;
                `None` if it makes none.
        """
        self._output = output

    @property
    def _level(self) -> int:
        """How deep inside this process is: see `at`."""
        output = self._output
        done = output is None or output.is_deleted() or output.is_ready()
        return self._inside if done else LAUNCH

    def why_not(self, missing: list[int], waited_s: float) -> str | None:
        """Why some of the processes will not come, or `None`.

        One that lives and is on its way is waited for, however long that takes. One that is still
        inside of a call that all had begun is not on its way, nor is one whose launch this one
        did not make.

        Args:
            missing: The numbers of those that are waited for.
            waited_s: For how many seconds.
        """
        gone = {**self._read_ends(), **self._gone}
        reason = next((gone[i] for i in missing if i in gone), None)
        if waited_s > _LONGEST_UNHEARD_S and any(i in self._unheard for i in missing):
            reason = reason or f"not heard from within {_LONGEST_UNHEARD_S:g} s"
        own = self._level
        stuck = {OUTSIDE: False, INSIDE: own >= INSIDE, LAUNCH: own != LAUNCH}
        places = [self._positions.get(i, ("", OUTSIDE)) for i in missing]
        waiting = [where for where, level in places if stuck[level]]
        if reason or waited_s < self._peer_timeout_s or not waiting:
            return reason
        return f"still {waiting[0]} after {self._peer_timeout_s:g} s"

    def failed(self, error: str) -> None:
        """Writes for the others that this process ends by an error, and ends it.

        Args:
            error: The error's text.
        """
        self._end_watch()
        self._write_end(f"failed {self._where} with {error[:_MOST_WORDS]}")
        self._wait_for_readers(self._num_processes - 1)
        _exit(1)

    def ended(self) -> None:
        """Writes for the others that this program came to its end."""
        if not self._ends.is_set():
            self._end_watch()
            self._write_end(f"{_ENDED} {self._where}")

    def _write_end(self, how: str) -> None:
        self._channel.write("gone", how)
        if not self._process_id:
            self._gone[0] = how
            self._write_board()

    def _wait_for_readers(self, others: int) -> None:
        """Waits until so many processes have read how this one, or another, ended."""
        # If this is process 0, the coordinator ends with it, and what nobody has read is lost.
        end = time.monotonic() + 3 * self._beat_s + _GRACE_S
        while time.monotonic() < end and len(self._channel.read_valid("read", _READ)) < others:
            time.sleep(0.05)
        if not self._process_id:
            # With the coordinator gone, JAX would abort the others before they end by themselves.
            time.sleep(_GRACE_S + _BEAT_S)

    def _end_watch(self) -> None:
        self._ends.set()
        self._news.set()

    def _log_who_is_gone(self) -> None:
        """Logs processes that are gone: they may be why a collective failed here."""
        end = time.monotonic() + self._peer_timeout_s + 2 * _BEAT_S
        while time.monotonic() < end and not self._gone:
            time.sleep(_BEAT_S / 4)
        for i, why in sorted(self._gone.items()):
            logger.critical("process %d %s", i, why)

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
            self._listen(self._channel.read_valid("alive", _ALIVE), self._others)
        else:
            self._listen(*self._board())
        self._gone.update(self._read_ends() if self._reads_all else self._told_of_others())
        now = time.monotonic()
        for i in self._gone:
            self._gone_since.setdefault(i, now)
        if not self._process_id:
            self._write_board()
        fatal = {i: why for i, why in self._gone.items() if self._is_fatal(i, now)}
        if fatal:
            self._end(fatal)

    def _write_board(self) -> None:
        # Those that came to their end are no reason yet.
        gone = sorted(self._gone.items(), key=lambda item: item[1].startswith(_ENDED))
        told = {str(i): why for i, why in gone[:_MOST_TOLD]}
        self._channel.write("board", [self._beats, self._where, self._level, told])

    @property
    def _reads_all(self) -> bool:
        return not self._process_id or 0 in self._gone

    @property
    def _others(self) -> list[int]:
        """Those that write for this process: all but process 0, which has a board of its own."""
        return [i for i in range(1, self._num_processes) if i != self._process_id]

    def _board(self) -> tuple[dict[int, Any], list[int]]:
        """What process 0 wrote last about itself; who is gone is noted."""
        board = self._channel.read_valid("board", _BOARD)
        entry = board.get(0, [0, "", OUTSIDE, {}])
        numbers = {str(i): i for i in range(self._num_processes)}
        self._told = {numbers[i]: why for i, why in entry[3].items() if i in numbers}
        return {i: entry[:3] for i in board if i == 0}, [0]

    def _read_ends(self) -> dict[int, str]:
        """How processes ended: as they wrote it, or as process 0 tells."""
        if not self._reads_all:
            self._board()
            return self._told_of_others()
        gone = self._channel.read_valid("gone", _GONE)
        gone.pop(self._process_id, None)
        return gone

    def _told_of_others(self) -> dict[int, str]:
        return {i: why for i, why in self._told.items() if i != self._process_id}

    def _listen(self, alive: dict[int, Any], of: Iterable[int]) -> None:
        """Notes what processes wrote, and which of them are silent."""
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
                self._gone[i] = f"silent for {self._peer_timeout_s:g} s, last heard {where}"

    def _is_fatal(self, number: int, now: float) -> bool:
        if not self._gone[number].startswith(_ENDED):
            return True
        # It came to its end: only who still waits for it in a collective is lost.
        return bool(self._level) and now - self._gone_since[number] > self._peer_timeout_s

    def _end(self, fatal: dict[int, str]) -> None:
        """Ends this process, unless it does so itself within a few seconds."""
        self._channel.write("read", sorted(fatal))
        words = "; ".join(f"process {i} {why}" for i, why in sorted(fatal.items()))
        logger.critical("process %d ends (%s): %s", self._process_id, self._where, words)
        # Those that read it from process 0 end a beat later; its coordinator must live until then.
        later_s = 0.0 if self._process_id else 2 * self._beat_s
        if not self._ends.wait(_GRACE_S + later_s):
            _exit(EXIT_PEER)


def _call(where: str) -> str:
    """The call of "in fit of model 'm'" and "after fit of model 'm'"."""
    return where.partition(" ")[2]


def _exit(code: int) -> None:
    recorder.write_rest()
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
    """Notes where this process is, if it is one of several. See `Watch.at`."""
    return None if _watch is None else _watch.at(where, inside)


def launched(outputs: Any) -> None:
    """Notes a launch, if this process is one of several. See `Watch.launched`.

    Args:
        outputs: A structure of what the program makes.
    """
    arrays: list[Any] = jax.tree.leaves(outputs)
    if _watch is not None and arrays:
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
    except BaseException:
        at(f"in {what}", OUTSIDE)
        raise
    if outer is not None and outer[1]:
        at(*outer)
    else:
        at(f"after {what}", OUTSIDE)
