"""Checkpoints on a file system, written by Orbax: one directory per step, complete or absent."""

import contextlib
import datetime
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from keras_tpu_dist.checkpoint.barriers import barriers_of, first_reason, in_all
from keras_tpu_dist.checkpoint.keeping import (
    ASIDE,
    HALF,
    Keep,
    Known,
    Lock,
    in_order,
    is_there,
    note_ended,
    note_goes_on,
    note_metrics,
    of_other_runs,
    remove,
    replace_later,
    set_aside,
    settle,
    staying,
)
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Manifest, checkpoint_error
from keras_tpu_dist.checkpoint.reader import (
    ARRAYS,
    CheckpointReader,
    checkpoint_errors,
    folder,
    is_local,
    orbax,
    reason_of,
    runs_text,
    where_to_look,
)
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.processes.channel import agree

logger = logging.getLogger("keras_tpu_dist")

_MANIFEST = "manifest"
_FIX = "Save the same checkpoints in all processes."
_ALL = Keep()


class Store(CheckpointReader):
    """The checkpoints of a directory, to read and write.

    Args:
        directory: The directory, which is created if it is missing.
        keep: Which checkpoints to keep.
        overwrites: Whether checkpoints of another run are deleted, and not set aside, once this run
            has a complete one.
        asynchronous: Whether `save` returns as soon as the values are copied from the devices.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: Keep = _ALL,
        overwrites: bool = False,
        asynchronous: bool = False,
    ):
        path = os.fspath(folder(directory))
        if is_local(path):
            with checkpoint_errors(path, "opened"):
                # exist_ok: several processes create it at once.
                os.makedirs(path, exist_ok=True)
            _check_path(path)
        super().__init__(directory)
        self._keep, self._asynchronous, self._overwrites = keep, asynchronous, overwrites
        self._saver, self._lock = None, None
        self._completing: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._barriers = barriers_of(self.directory)
        if self._is_first:
            with checkpoint_errors(self.directory, "opened"):
                self._lock_and_settle()

    def _lock_and_settle(self) -> None:
        if is_local(self.directory):
            self._lock = Lock(self.directory)
        try:
            if self._root.exists():
                settle(self._root, self._run_of)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    @property
    def _is_first(self) -> bool:
        """Whether this is the process that renames and deletes."""
        return jax.process_index() == 0

    @property
    def _checkpointer(self) -> Any:
        # Created on first use, and again after a failure, which leaves its state unknown.
        if self._saver is None:
            ocp = orbax()
            handlers = {
                ARRAYS: ocp.PyTreeCheckpointHandler(),
                _MANIFEST: ocp.JsonCheckpointHandler(),
            }
            handler = ocp.CompositeCheckpointHandler(**handlers)
            logging.getLogger("absl").addFilter(_is_not_raised_too)
            # If a directory cannot be created in the background, Orbax's threads wait ten minutes
            # for it, and the process with them.
            here = ocp.options.AsyncOptions(
                create_directories_asynchronously=False, barrier_sync_fn=self._barriers
            )
            self._saver = ocp.AsyncCheckpointer(handler, async_options=here)
        return self._saver

    def save(
        self, step: int, arrays: Mapping[str, jax.Array], manifest: Callable[[], Manifest]
    ) -> None:
        """Saves a checkpoint; see `asynchronous`.

        Args:
            step: Its number; an older checkpoint with this number is deleted when this one is
                complete.
            arrays: The arrays by key.
            manifest: A function that returns their description; called in the background.
        """
        args = orbax().args
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("training continued without a checkpoint. %s", error)
        path, before = self._root / str(step), [0.0]
        if self._is_first:
            self._try(lambda: before.append(self._make_place(step)))
        self._agree(step)
        items = {
            # Orbax refuses arrays without elements, which have nothing to save.
            ARRAYS: args.PyTreeSave({key: a for key, a in arrays.items() if a.size}),
            _MANIFEST: args.JsonSave(
                _WhenWritten(lambda: _dated(manifest(), before[-1]).to_json())
            ),
        }

        def complete() -> None:
            self._checkpointer.wait_until_finished()
            if self._is_first:
                self._looked_at.pop(step, None)
                saved = self._known.get(step)  # read back, and only then others are deleted
                if saved is None or not saved.whole:
                    self.manifest(step)  # says what is wrong with it
                self._delete_others()

        if self._barriers is not None:
            self._barriers.begin()
        self._try(lambda: self._checkpointer.save(path, args=args.Composite(**items)))
        if self._failed is None:
            # A daemon, so that the process can end: at exit, Orbax's own thread finishes the
            # writing.
            self._completing = threading.Thread(
                target=self._try,
                args=(complete,),
                name=f"checkpoint {step}",
                daemon=True,
            )
            self._completing.start()
        if not self._asynchronous and self._completing is not None:
            self._completing.join()
            self._completing = None
        self._agree(step)

    def _make_place(self, step: int) -> float:
        """Moves an older checkpoint of this step aside.

        In Orbax, the other processes wait, on their devices, until process 0 has created a
        directory. If that fails, they wait for ever, so it is tried before.

        Returns:
            When the newest checkpoint was written, in seconds since 1970.
        """
        path, checkpoints = self._root / str(step), self._known
        if is_there(path):
            replace_later(path)
        if is_local(self.directory) and self._barriers is not None:
            trial = path.parent / f"{path.name}{HALF}.trial"
            trial.mkdir()
            trial.rmdir()
        return max((checkpoint.at_s for checkpoint in checkpoints.values()), default=0.0)

    def _try(self, act: Callable[[], None]) -> None:
        """Does a part of saving. A failure is noted, and the other processes fail as well."""
        try:
            act()
        except BaseException as error:
            self._failed = error
            try:
                if self._barriers is not None:
                    self._barriers.give_up(error)
            finally:
                self._clear_up()

    def _agree(self, step: int) -> None:
        """Raises an error in all processes if one has failed, so that they continue together."""
        failed, reason = self._failed, None
        if self._barriers is not None:
            what = f"writing checkpoint {step} of {self.directory}"
            reason_here = None if failed is None else reason_of(failed)
            reason = agree(what, _FIX, reason_here, reduce=first_reason)
        if failed is not None:
            self._failed = None
            with checkpoint_errors(self.directory, "written", step):
                raise failed
        if reason is not None:
            rule = f"Checkpoint {step} of {self.directory!r} cannot be written."
            raise checkpoint_error(rule, received=f"{reason}.", fix=where_to_look(self.directory))

    def _delete_others(self) -> None:
        """Deletes what is not to be kept; other runs go, too, as this one has a checkpoint."""
        checkpoints = self._known
        for step, checkpoint in checkpoints.items():
            if not checkpoint.whole:
                log_once(f"checkpoint {step} is ignored. {checkpoint.problem}", logging.ERROR)
        others = of_other_runs(checkpoints)
        if self._overwrites:
            for step in reversed(others):
                remove(self._root / str(step))
        else:
            self._set_aside(checkpoints, others, "they are of another run")
        of_this_run = {
            step: checkpoint for step, checkpoint in checkpoints.items() if step not in others
        }
        stay = staying(of_this_run, self._keep)
        for step in in_order(of_this_run):
            if step not in stay:
                remove(self._root / str(step))
        settle(self._root, self._run_of, overwrites=self._overwrites)

    def _set_aside(self, checkpoints: Mapping[int, Known], steps: Sequence[int], why: str) -> None:
        if steps:
            logger.warning(
                "checkpoints %s of %s are set aside, because %s (%s): in %s, from where nothing "
                "deletes them",
                list(steps),
                self.directory,
                why,
                runs_text(checkpoints, steps),
                self._root / ASIDE,
            )
        # The newest first, so that those that stay are always the beginning of the run.
        for step in reversed(steps):
            set_aside(self._root / str(step), step, checkpoints[step].run)

    def set_later_aside(self, step: int) -> None:
        """Sets aside what is newer than a checkpoint: the run returns to it."""

        def in_first() -> None:
            if self._is_first:
                with checkpoint_errors(self.directory, "written"):
                    checkpoints = self._known
                    order = in_order(checkpoints)
                    later = order[order.index(step) + 1 :]
                    self._set_aside(
                        checkpoints, later, f"they are newer than {step}, which is restored"
                    )

        in_all(f"setting aside what is newer than checkpoint {step}", in_first)

    def _clear_up(self) -> None:
        """Deletes the parts of a checkpoint that could not be written."""
        self._saver = None
        if not self._is_first:
            return
        try:
            settle(self._root, self._run_of)
        except OSError as error:
            logger.warning("%s cannot be cleaned up: %s", self.directory, error)

    def judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to a checkpoint, to choose the best one by.

        They come later because validation may end after the checkpoint was written.

        Args:
            step: Its number.
            metrics: The numbers.
        """
        self.wait()
        if self._is_first:
            with checkpoint_errors(self.directory, "written", step):
                note_metrics(self._root / str(step), metrics)
                self._looked_at.pop(step, None)
                self._delete_others()

    def _run_of(self, path: Any) -> str | None:
        with contextlib.suppress(CheckpointError):
            return self.manifest(int(path.name.partition(".")[0]), path.name).run
        return None

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk."""
        if self._completing is not None:
            self._completing.join()
            self._completing = None
        failed, self._failed = self._failed, None
        if failed is not None:
            with checkpoint_errors(self.directory, "written"):
                raise failed

    @property
    def is_written_here(self) -> bool:
        """Whether the current thread is the one that completes a checkpoint."""
        return self._completing is threading.current_thread()

    def go_on(self) -> None:
        """Removes the note of `close` that the run has ended."""
        if not self._is_first:
            return
        for step in self.steps[-1:]:
            with checkpoint_errors(self.directory, "written", step):
                note_goes_on(self._root / str(step))

    def close(self, run_has_ended: bool = False) -> None:
        """Waits, and releases the directory.

        Args:
            run_has_ended: Whether to note that in the newest checkpoint, for programs that follow
                the run.
        """
        try:
            self.wait()
            if run_has_ended and self._is_first:
                try:
                    for step in self.steps[-1:]:
                        note_ended(self._root / str(step))
                except (CheckpointError, OSError) as error:
                    logger.error(
                        "programs that follow the run cannot see that it has ended. %s", error
                    )
        finally:
            if self._lock is not None:
                self._lock.release()
            if self._saver is not None:
                self._saver.close()


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    """Drops Orbax's log entry for a failure that it also raises."""
    return "Commit operations or the Commit callback" not in record.getMessage()


def _dated(manifest: Manifest, after_s: float) -> Manifest:
    # A clock that was set back must not make this one older than its predecessors.
    now = datetime.datetime.fromtimestamp(max(time.time(), after_s + 1e-6), datetime.UTC)
    at = now.isoformat(timespec="microseconds")
    return replace(manifest, written={**manifest.written, "at": at})


class _WhenWritten(dict):
    """Plain data that is computed when Orbax turns it into JSON, in the background.

    So the background thread waits for the fingerprints, and not the train loop.
    """

    def __init__(self, make: Callable[[], dict[str, Any]]):
        super().__init__(computed="later")  # Orbax writes an empty dict without calling `items`
        self._make = make

    def items(self):
        return self._make().items()


def new_run(fix: str) -> str:
    """A name for a run, the same in all processes."""
    return agree("naming the run", fix, uuid.uuid4().hex[:12])[0]


def logged(write: Callable[[], None]) -> bool:
    """Calls a function that writes, and logs a failure as an ERROR.

    Args:
        write: The function; it raises a `CheckpointError` if it fails.
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


def _check_path(directory: str) -> None:
    # Orbax finds the parts of a checkpoint by glob patterns, which would fail with such a path.
    letters = sorted(set("[]*?") & set(directory))
    if letters:
        raise checkpoint_error(
            "The path of a checkpoint directory must not contain [ ] * ?, which Orbax cannot read.",
            received={"directory": directory},
            fix="Use another name.",
        )
