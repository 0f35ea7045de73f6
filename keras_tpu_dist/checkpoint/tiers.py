"""The checkpoints of a run in two tiers: a directory that all hosts share, and their own disks."""

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from keras_tpu_dist.checkpoint.barriers import from_first
from keras_tpu_dist.checkpoint.keeping import written_at_s
from keras_tpu_dist.checkpoint.local import LocalTier
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Manifest
from keras_tpu_dist.checkpoint.store import Store
from keras_tpu_dist.common.paths import plain_path
from keras_tpu_dist.processes.channel import agree

logger = logging.getLogger("keras_tpu_dist")

_Loaded = TypeVar("_Loaded")


def is_on_this_host(path: Any) -> bool:
    """Whether an argument is a directory of this host and not a bucket.

    Args:
        path: The argument.

    Example:

    >>> [is_on_this_host(path) for path in ("/ssd/run7", "gs://bucket/run7", "", 3)]
    [True, False, False, False]
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    return isinstance(text, str) and text != "" and "://" not in plain_path(text)


class Tiers:
    """The two tiers of checkpoints that a fit or a loop saves to and resumes from.

    Args:
        store: The directory that all hosts share.
        local: A directory on this host's own disk, or `None`. If it cannot be used, `store` is
            closed.
        asynchronous: Whether training continues while a local checkpoint is written.
        fix: The fix for the error if the processes do not do the same.

    Attributes:
        store: The directory that all hosts share.
        local: The checkpoints on the hosts' own disks, or `None`.
        run: The name of the run, or `""` before it has one.

    Raises:
        CheckpointError: If `local` cannot be used.
    """

    def __init__(self, store: Store, local: str | os.PathLike | None, asynchronous: bool, fix: str):
        self.store, self.run, self._fix = store, "", fix
        self.local: LocalTier | None = None
        if local is not None:
            try:
                self.local = LocalTier(local, asynchronous)
            except BaseException:
                store.close()
                raise

    @property
    def found_locally(self) -> list[tuple[float, int]]:
        """When the local checkpoint to resume from was written and its step, if there is one."""
        if self.local is None or self.local.found is None:
            return []
        step = self.local.found.step
        return [(written_at_s(self.local.manifest(step).written) or 0.0, step)]

    def name_run(self) -> None:
        """Gives the run a new name, the same in all processes."""
        self.run = agree("naming the run", self._fix, uuid.uuid4().hex[:12], str)[0]

    def look_for_local(self) -> None:
        """Looks for newer checkpoints of the same run on the hosts' own disks."""
        if self.local is None:
            return
        what = f"looking for the run of {self.store.directory}"
        self.local.look_for(*from_first(what, self._newest, [(None, str), int, float]))

    def _newest(self) -> list[Any]:
        """The run, step and time of the newest shared checkpoint that can be read."""
        run, step, at_s = None, -1, 0.0
        steps = self.store.steps_of_run
        for step_here in reversed(steps):
            with contextlib.suppress(CheckpointError):
                manifest = self.store.manifest(step_here)
                run, step = manifest.training.get("run"), step_here
                at_s = written_at_s(manifest.written) or 0.0
                break
        if not steps:
            run = self.store.noted_run
        return [run if isinstance(run, str) else None, step, at_s]

    def load_local(self, load: Callable[[LocalTier, int], _Loaded]) -> _Loaded | None:
        """Loads the local checkpoint to resume from, or the next one if it cannot be read.

        Args:
            load: A function that loads the checkpoint of a step, or raises a `CheckpointError` in
                all processes.

        Returns:
            The result of `load`; `None` if there is no checkpoint.
        """
        while self.local is not None and self.local.found is not None:
            try:
                result = load(self.local, self.local.found.step)
            except CheckpointError as error:
                logger.warning("%s Trying the next one.", error)
                self.look_for_local()
                continue
            self.local.goes_on()
            return result
        return None

    def return_to(self, step: int) -> None:
        """Sets aside what is newer than a shared checkpoint, in all processes.

        Args:
            step: The checkpoint.

        Raises:
            CheckpointError: If it cannot be done.
        """
        if self.local is not None:
            self.local.set_later_aside(step)
        self.store.set_later_aside(step)

    @property
    def standing(self) -> str:
        """The state of this process's newest local checkpoint, to send to the others."""
        return "" if self.local is None else self.local.standing

    def hear(self, standings: Sequence[str]) -> None:
        """Notes the states of all processes' newest local checkpoints.

        Args:
            standings: The state of every process.
        """
        if self.local is not None:
            self.local.hear(standings)

    def save_locally(
        self, step: int, arrays: Mapping[str, Any], manifest: Callable[[], Manifest]
    ) -> None:
        """Saves on the hosts' own disks. A failure in one process is only logged.

        Args:
            step: The checkpoint's number.
            arrays: The arrays by key.
            manifest: A function that returns their description; called in the background.
        """
        tier = self.local
        assert tier is not None
        # Without this note, a checkpoint on a host's own disk could belong to another run.
        logged(lambda: self.store.note_run(self.run))
        logged(lambda: tier.save(step, arrays, manifest))

    def wait(self) -> None:
        """Waits for the newest checkpoint of both tiers.

        Raises:
            CheckpointError: If the shared checkpoint could not be written.
        """
        self.wait_locally()
        self.store.wait()

    def wait_locally(self) -> None:
        """Waits for the newest local checkpoint."""
        if self.local is not None:
            finish(self.local.wait)

    def close(self, run_has_ended: bool = False) -> None:
        """Waits for the last checkpoints, and lets other processes write.

        Args:
            run_has_ended: See `Store.close`.

        Raises:
            CheckpointError: If the last shared checkpoint could not be written.
        """
        if self.local is not None:
            finish(self.local.close)
        self.store.close(run_has_ended)


def logged(write: Callable[[], None]) -> bool:
    """Calls a function that writes, and logs a failure as an ERROR.

    Args:
        write: The function; it raises a `CheckpointError` if it fails.

    Returns:
        Whether it was written.
    """
    try:
        write()
    except CheckpointError as error:
        logger.error("training goes on without this checkpoint. %s", error)
        return False
    return True


def finish(write: Callable[[], None]) -> None:
    """Like `logged`, for the last checkpoint.

    Args:
        write: The function; it raises a `CheckpointError` if it fails.
    """
    try:
        write()
    except CheckpointError as error:
        logger.error("the last checkpoint is missing. %s", error)
