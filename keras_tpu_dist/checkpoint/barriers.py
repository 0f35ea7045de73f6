"""Barriers for a checkpoint that several processes write: if one fails, the others do not hang.

In Orbax, every process waits for all others after it has written its arrays, and again until
process 0 has renamed the directory. If a process fails, it does not reach the barrier, and the
others wait for 20 minutes.
"""

import collections
import hashlib
from typing import Any

import jax

from keras_tpu_dist import _keras

# The number of Orbax's barriers per checkpoint, and their timeout.
_STAGES, _LONGEST_S = 2, 1200
_MOST_LETTERS = 300
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
            own = jax.process_index()
            reason = f"process {own}: {type(error).__name__}: {error}"[:_MOST_LETTERS]
            self._client.key_value_set(f"{self._key}/failed/{own}", reason, allow_overwrite=True)
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
