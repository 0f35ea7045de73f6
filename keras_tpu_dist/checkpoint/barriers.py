"""Processes that save and load together: if one fails, the others fail as well and do not hang.

In Orbax, every process waits for all others after it has written its arrays, and again until
process 0 has renamed the directory. If a process fails, it does not reach the barrier, and the
others wait for 20 minutes. After it has read arrays, every process waits for the others on its
devices, without a timeout; so a process reads without Orbax's barriers, and `in_all` compares the
outcomes.
"""

import collections
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint.manifest import CheckpointError
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.processes.channel import agree

# The number of Orbax's barriers per checkpoint, and their timeout.
_STAGES, _LONGEST_S = 2, 1200
_MOST_LETTERS = 300
FIX = "Load the same checkpoint in all processes."
# The outcomes of a process, and of all.
_DONE, _UNREADABLE, _FAILED, _DIFFERENT = "done", "unreadable", "failed", "different"

_Read = TypeVar("_Read")
_opened: collections.Counter[str] = collections.Counter()


class Barriers:
    """The barriers of one directory of checkpoints.

    Args:
        client: JAX's client of the coordination service.
        name: A name that is the same in all processes and different for every `Store` of a run.
    """

    def __init__(self, client: Any, name: str):
        self._client, self._name = client, name
        self._saves = 0
        self._stage = _STAGES

    def begin(self) -> None:
        """Begins the next checkpoint, in all processes."""
        self._saves += 1
        self._stage = 0

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes; Orbax calls it.

        Args:
            key: Orbax's name for the barrier; not used, because a failed process does not know it.
            timeout_ms: The longest time to wait, in milliseconds.

        Raises:
            OSError: If one of them has failed.
        """
        self._pass(timeout_ms)
        failed = self._client.key_value_dir_get(f"{self._key}/failed/")
        if failed:
            raise OSError(failed[0][1])

    def give_up(self, error: BaseException) -> None:
        """Passes the remaining barriers for the others, which then fail, too.

        Args:
            error: The error of this process.
        """
        if self._stage < _STAGES:
            process = jax.process_index()
            reason = f"process {process}: {type(error).__name__}: {error}"[:_MOST_LETTERS]
            self._client.key_value_set(
                f"{self._key}/failed/{process}", reason, allow_overwrite=True
            )
        while self._stage < _STAGES:
            self._pass(1000 * _LONGEST_S)

    @property
    def _key(self) -> str:
        return f"keras_tpu_dist/saving/{self._name}/{self._saves}"

    def _pass(self, timeout_ms: int) -> None:
        self._stage += 1
        self._client.wait_at_barrier(f"{self._key}/{self._stage}", timeout_ms)


def barriers_of(directory: str) -> Barriers | None:
    """The barriers for a directory that all processes open to write; `None` for one process.

    Args:
        directory: The directory.
    """
    client = _keras.coordination_client()
    if jax.process_count() == 1 or client is None:
        return None
    mark = hashlib.sha256(directory.encode()).hexdigest()[:16]
    _opened[mark] += 1
    return Barriers(client, f"{mark}/{_opened[mark]}")


def first_reason(reasons: list[str | None]) -> str | None:
    """The reason of the first failed process, with its number; `None` if none failed.

    Args:
        reasons: The reason of every process, `None` if it did not fail.

    Example:

    >>> first_reason([None, "OSError: no space"])
    'process 1: OSError: no space'
    """
    failed = [f"process {i}: {reason}" for i, reason in enumerate(reasons) if reason is not None]
    return failed[0] if failed else None


def in_all(
    what: str,
    read: Callable[[], _Read],
    mark: Callable[[_Read], str] = lambda _: "",
    *,
    alone: bool = False,
) -> _Read:
    """Reads in all processes. If one fails, all raise an error, so that they continue together.

    Args:
        what: The action, in the same words in all processes.
        read: A function that reads. A `CheckpointError` means that another checkpoint may do.
        mark: A text that must be the same in all processes for what was read.
        alone: Whether this process reads without the others.

    Raises:
        CheckpointError: If one of the processes raised it, and none another error.
        ValueError: If one of the processes raised another error, or has another mark.
    """
    if alone or jax.process_count() == 1:
        return read()
    result, error, here = None, None, [_DONE, ""]
    try:
        result = read()
        here = [_DONE, mark(result)]
    except Exception as caught:
        error = caught
        here = [_FAILED, f"{type(error).__name__}: {error}"[:_MOST_LETTERS]]
        if isinstance(error, CheckpointError):
            here = [_UNREADABLE, str(error)]
    outcome, reason = agree(what, FIX, here, reduce=_outcome)
    if outcome == _DONE:
        return result  # type: ignore[return-value]
    if error is not None and here[0] == outcome:
        raise error
    if outcome == _UNREADABLE:
        raise CheckpointError(f"In {reason}")
    fix = "Give a directory on storage that all processes share." if outcome == _DIFFERENT else FIX
    rule = "All processes must read the same checkpoint."
    raise value_error(rule, received=f"{reason} ({what}).", fix=fix) from error


def from_first(what: str, read: Callable[[], _Read], *, alone: bool = False) -> _Read:
    """What process 0 reads, for all: a process that looks a moment later may see something else.

    Args:
        what: See `in_all`.
        read: A function that returns plain data.
        alone: See `in_all`.

    Raises:
        CheckpointError: In all processes, if process 0 raised it.
        ValueError: In all processes, if process 0 raised another error.
    """
    if alone or jax.process_count() == 1:
        return read()
    data = in_all(what, lambda: read() if jax.process_index() == 0 else None)
    return agree(what, FIX, data, reduce=lambda of_all: of_all[0])


def _outcome(outcomes: list[list[str]]) -> list[str]:
    """The outcome for all processes, and its reason."""
    for kind in (_FAILED, _UNREADABLE):
        reasons = [reason if outcome == kind else None for outcome, reason in outcomes]
        if first := first_reason(reasons):
            return [kind, first]
    others = [i for i, (_, mark) in enumerate(outcomes) if mark != outcomes[0][1]]
    if others:
        process = others[0]
        marks = [f"{outcomes[i][1][:_MOST_LETTERS]} in process {i}" for i in (0, process)]
        return [_DIFFERENT, " and ".join(marks)]
    return [_DONE, ""]
