"""Which arrays a launch of replica code may consume: the outputs of earlier launches."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from keras_tpu_dist.training.buffers import Owner


class ReplicaBuffers(Owner):
    """The owner of variables that a strategy's replica code updates in place."""

    def __init__(self):
        super().__init__()
        self._thread: threading.Thread | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether another thread launched last, and its launch still runs."""
        thread = self._thread
        return thread not in (None, threading.current_thread()) and thread.is_alive()

    @contextmanager
    def launching(self, variables: list) -> Iterator[list[jax.Array]]:
        """The context of a launch: the values of variables, which it may consume.

        Args:
            variables: The variables that the launch consumes. `made` is called with their new
                values.

        Raises:
            Exception: The exception of the launch, with a note if it has already consumed values.
        """
        with self.lock:
            self._thread = threading.current_thread()
            values = self.to_consume(variables)
            try:
                yield values
            except Exception as error:
                _note_what_is_lost(error, variables, values)
                raise
            # A strategy outlives its models.
            self.rest()


def _note_what_is_lost(error: Exception, variables: list, values: list[jax.Array]) -> None:
    lost = [v.path for v, value in zip(variables, values, strict=True) if value.is_deleted()]
    if lost:
        error.add_note(
            f"The launch had consumed the values of {len(lost)} variable(s), such as "
            f"{lost[0]!r}, before it failed; they are lost. Restore a checkpoint, or build the "
            "model again. TPUStrategy(donate_state=False) keeps old values until a launch is made."
        )
