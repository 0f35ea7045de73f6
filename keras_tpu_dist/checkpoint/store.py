"""Checkpoints on a file system, written by Orbax: one directory per step, complete or absent."""

import contextlib
import json
import logging
import os
import stat
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.checkpoint.barriers import barriers_of, first_reason, in_all
from keras_tpu_dist.checkpoint.fingerprint import fingerprints
from keras_tpu_dist.checkpoint.keeping import (
    ASIDE,
    HALF,
    MANIFEST_FILE,
    Known,
    Lock,
    drop_other_runs,
    in_order,
    is_there,
    metrics_of,
    note_ended,
    note_goes_on,
    note_metrics,
    of_other_runs,
    remove,
    replace_later,
    set_aside,
    set_runs_aside,
    settle,
    staying,
    whole_steps,
    written_after,
    written_at_s,
)
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Manifest, Saved, from_json
from keras_tpu_dist.checkpoint.names import named_state
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.paths import absolute_path
from keras_tpu_dist.processes.channel import agree

logger = logging.getLogger("keras_tpu_dist")

_ARRAYS, _MANIFEST = "arrays", "manifest"
_FIX = "Save the same checkpoints in all processes."
# Characters of an error's text: TensorStore's errors contain its whole specification.
_MOST_WORDS = 300
# If 1000 processes save 10,000 arrays, they write 20 MB.
_MOST_BYTES_OF_A_DESCRIPTION = 64 * 2**20
_LOOK = "Check its path, permissions and free space."
_OTHER = "Load another checkpoint: ktd.restore(model, directory, step=...)."


class Store:
    """The checkpoints of a directory.

    Args:
        directory: The directory; it is created unless `read_only`.
        keep: How many of the newest checkpoints to keep; `None` for all.
        best: `(name, mode)` of a metric, to keep its best checkpoint, too; or `None`.
        every_s: An interval in seconds, to keep one checkpoint per interval, too; or `None`.
        asynchronous: Whether `save` returns as soon as the values are copied from the devices.
        read_only: Whether to write nothing.
        alone: Whether this process reads without the others, if there are several.

    Attributes:
        directory: The directory's absolute path.
        alone: See above.

    Raises:
        ImportError: If Orbax is not installed.
        CheckpointError: If the directory cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int | None = None,
        best: tuple[str, str] | None = None,
        every_s: float | None = None,
        asynchronous: bool = False,
        read_only: bool = False,
        alone: bool = False,
    ):
        orbax()  # or an ImportError
        self.directory = absolute_path(directory)
        folder(self.directory)  # for its errors
        if _is_local(self.directory) and not os.path.isdir(self.directory):
            if read_only:
                raise CheckpointError(
                    message(
                        f"There is no directory {self.directory!r}.",
                        received={"directory": os.fspath(directory)},
                        fix="Pass the directory of callbacks.Checkpoint.",
                    )
                )
            with checkpoint_errors(self.directory, "opened"):
                # exist_ok: several processes create it at once.
                os.makedirs(self.directory, exist_ok=True)
        if not read_only and _is_local(self.directory):
            _check_path(self.directory)
        self._stored: dict[int, Mapping[str, Any]] = {}
        self._keep, self._best, self._every_s = keep, best, every_s
        self._asynchronous = asynchronous
        self.alone, self._saver, self._lock = alone, None, None
        self._completing: threading.Thread | None = None
        self._failed: BaseException | None = None
        # With what tells whether the manifest was written again.
        self._looked_at: dict[int, tuple[Any, Known]] = {}
        self._barriers = None if read_only else barriers_of(self.directory)
        if not read_only and self._is_first:
            with checkpoint_errors(self.directory, "opened"):
                self._lock_and_settle()

    # `KerasDirectory` has a different one, with Keras's names for slots.
    state_of = staticmethod(named_state)

    def _lock_and_settle(self) -> None:
        if _is_local(self.directory):
            self._lock = Lock(self.directory)
        try:
            if self._root.exists():
                settle(self._root, self._run_of)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    @property
    def _root(self) -> Any:
        return folder(self.directory)

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
                _ARRAYS: ocp.PyTreeCheckpointHandler(),
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

    @property
    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, the newest last."""
        return in_order(self._known)

    @property
    def steps_of_run(self) -> list[int]:
        """Those of the newest run, the newest last; the log names the others."""
        known = self._known
        others = of_other_runs(known)
        if others:
            log_once(
                f"{self.directory} has checkpoints of several runs: the newest run is used, not "
                f"steps {others} of {_runs_text(known, others)}",
                logging.WARNING,
            )
        return [step for step in in_order(known) if step not in others]

    @property
    def newest(self) -> tuple[float, int]:
        """When the newest checkpoint was written, in seconds since 1970, and its step; or -1."""
        known = self._known
        step = in_order(known)[-1] if known else -1
        return (known[step].at_s or 0.0, step) if known else (0.0, -1)

    @property
    def _known(self) -> dict[int, Known]:
        """The facts about all complete checkpoints."""
        with checkpoint_errors(self.directory, "read"):
            found = {}
            for step in whole_steps(self._root, _is_local(self.directory)):
                try:
                    *mark, written_s = _mark((self._root / str(step)).joinpath(*MANIFEST_FILE))
                except FileNotFoundError:
                    continue  # another process has deleted it just now
                if self._looked_at.get(step, (None,))[0] != [*mark, written_s]:
                    self._looked_at[step] = [*mark, written_s], self._look_at(step, written_s)
                found[step] = self._looked_at[step][1]
            return found

    def save(
        self, step: int, arrays: Mapping[str, jax.Array], manifest: Callable[[], Manifest]
    ) -> None:
        """Saves a checkpoint; see `asynchronous`.

        Args:
            step: Its number; an older checkpoint with this number is deleted when this one is
                complete.
            arrays: The arrays by key.
            manifest: A function that returns their description; called in the background.

        Raises:
            CheckpointError: If it could not be written; if one process fails, all raise it.
        """
        args = orbax().args
        try:
            self._join()
        except CheckpointError as error:
            logger.error("training continued without a checkpoint. %s", error)
        path, before = self._root / str(step), [0.0]
        if self._is_first:
            self._try(lambda: before.append(self._make_place(step)))
        self._agree(step)
        items = {
            # Orbax refuses arrays without elements, which have nothing to save.
            _ARRAYS: args.PyTreeSave({key: a for key, a in arrays.items() if a.size}),
            # A clock that was set back must not make this one older than its predecessors.
            _MANIFEST: args.JsonSave(
                _WhenWritten(lambda: _dated(manifest(), before[-1]).to_json())
            ),
        }
        if self._barriers is not None:
            self._barriers.begin()
        self._try(lambda: self._checkpointer.save(path, args=args.Composite(**items)))
        if self._failed is None:
            # A daemon, so that the process can end: at exit, Orbax's own thread finishes the
            # writing.
            self._completing = threading.Thread(
                target=self._try,
                args=(lambda: self._complete(step),),
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
        path, known = self._root / str(step), self._known
        if is_there(path):
            replace_later(path)
        if _is_local(self.directory) and self._barriers is not None:
            trial = path.parent / f"{path.name}{HALF}.trial"
            trial.mkdir()
            trial.rmdir()
        return max((one.at_s or 0.0 for one in known.values()), default=0.0)

    def _complete(self, step: int) -> None:
        """Waits until a checkpoint is complete, reads it back, and only then deletes others."""
        self._checkpointer.wait_until_finished()
        if self._is_first:
            self._looked_at.pop(step, None)
            self.manifest(step)
            self._delete_others()

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
        own, reason = self._failed, None
        if self._barriers is not None:
            what = f"writing checkpoint {step} of {self.directory}"
            own_reason = None if own is None else _reason(own)
            reason = agree(what, _FIX, own_reason, (None, str), reduce=first_reason)
        if own is not None:
            self._failed = None
            with checkpoint_errors(self.directory, "written", step):
                raise own
        if reason is not None:
            rule = f"Checkpoint {step} of {self.directory!r} cannot be written."
            raise CheckpointError(message(rule, received=f"{reason}.", fix=_LOOK))

    def _delete_others(self) -> None:
        """Deletes what is not to be kept, and sets other runs aside: this one has a checkpoint."""
        known = self._known
        for step, one in known.items():
            if not one.whole:
                log_once(f"checkpoint {step} is ignored. {one.problem}", logging.ERROR)
        others = of_other_runs(known)
        self._set_aside(known, others, "they are of another run")
        own = {step: one for step, one in known.items() if step not in others}
        stay = staying(own, self._keep, self._best, self._every_s)
        for step in in_order(own):
            if step not in stay:
                remove(self._root / str(step))
        drop_other_runs(self._root)
        settle(self._root, self._run_of)

    def _set_aside(self, known: Mapping[int, Known], steps: Sequence[int], why: str) -> None:
        if steps:
            logger.warning(
                "checkpoints %s of %s are set aside, because %s (%s): in %s, from where nothing "
                "deletes them",
                list(steps),
                self.directory,
                why,
                _runs_text(known, steps),
                self._root / ASIDE,
            )
        # The newest first, so that those that stay are always the beginning of the run.
        for step in reversed(steps):
            set_aside(self._root / str(step), step, known[step].run)

    def set_later_aside(self, step: int) -> None:
        """Sets aside what is newer than a checkpoint: the run returns to it.

        Args:
            step: The checkpoint.

        Raises:
            CheckpointError: If it cannot be done, in all processes.
        """

        def in_first() -> None:
            if self._is_first:
                with checkpoint_errors(self.directory, "written"):
                    known = self._known
                    order = in_order(known)
                    later = order[order.index(step) + 1 :]
                    self._set_aside(known, later, f"they are newer than {step}, which is restored")

        in_all(f"setting aside what is newer than checkpoint {step}", in_first)

    def _look_at(self, step: int, written_s: float) -> Known:
        try:
            manifest = self.manifest(step)
            metrics = metrics_of(self._root / str(step), manifest.training)
        except (CheckpointError, OSError, ValueError) as error:
            return Known(whole=False, at_s=written_s, problem=str(error))
        finite = manifest.written.get("finite") is not False
        return Known(True, finite, metrics, written_at_s(manifest.written), manifest.run)

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

        Raises:
            CheckpointError: If the checkpoint could not be written, or this cannot be added.
        """
        self._join()
        if self._is_first:
            with checkpoint_errors(self.directory, "written", step):
                note_metrics(self._root / str(step), metrics)
                self._looked_at.pop(step, None)
                self._delete_others()

    def replace_runs(self) -> None:
        """Moves existing checkpoints aside, until this run has a complete one.

        Raises:
            CheckpointError: If they cannot be moved.
        """
        if self._is_first:
            with checkpoint_errors(self.directory, "written"):
                set_runs_aside(self._root, self.steps)

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step's checkpoint.

        Args:
            step: The step.

        Raises:
            CheckpointError: If it cannot be read.
        """
        return self._manifest_in(str(step), step)

    def _manifest_in(self, name: str, step: int) -> Manifest:
        where = f"Checkpoint {step} of {self.directory!r}"
        with checkpoint_errors(self.directory, "read", step):
            check_files(self.directory, name)
            text = (self._root / name).joinpath(*MANIFEST_FILE).read_text()
            content = json.loads(text)
        return from_json(content, where, step)

    def _run_of(self, path: Any) -> str | None:
        with contextlib.suppress(CheckpointError):
            return self._manifest_in(path.name, int(path.name.partition(".")[0])).run
        return None

    def load(self, step: int, wanted: Sequence[tuple[Saved, Any, Any]]) -> list[jax.Array]:
        """Reads arrays directly into their shards, and checks their values.

        Args:
            step: The step.
            wanted: For every array its saved description, its new sharding (`None` for a host
                array), and its dtype.

        Raises:
            CheckpointError: In all processes, if one cannot read an array, or its values differ
                from the saved ones.
        """
        if not wanted:
            return []
        what = f"reading checkpoint {step} of {self.directory}"
        arrays = in_all(what, lambda: self._read(step, wanted), alone=self.alone)
        # The devices of all processes compute it, so all must have read their parts.
        saved = [saved for saved, _, _ in wanted]
        in_all(what, lambda: self._check(step, saved, arrays), alone=self.alone)
        return [array.astype(dtype) for array, (_, _, dtype) in zip(arrays, wanted)]

    def _read(self, step: int, wanted: Sequence[tuple[Saved, Any, Any]]) -> list[Any]:
        ocp = orbax()
        filled = [item for item in wanted if 0 not in item[0].entry.shape]
        read: dict[str, Any] = {}
        if filled:
            target, how = restore_request(filled)
            restored = ocp.args.PyTreeRestore(item=target, restore_args=how, partial_restore=True)
            handler, path = ocp.PyTreeCheckpointHandler(), self._root / str(step) / _ARRAYS
            with checkpoint_errors(self.directory, "read", step):
                if step not in self._stored:
                    self._stored[step] = handler.metadata(path).tree
                check_stored(self._stored[step], [saved for saved, _, _ in filled])
                # Without a `Checkpointer`, whose barrier would wait for processes that failed.
                read |= handler.restore(path, args=restored)
        read |= {saved.key: _empty(saved, s) for saved, s, _ in wanted if saved.key not in read}
        return [read[saved.key] for saved, _, _ in wanted]

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
            CheckpointError: If it could not be written.
        """
        self._join()

    @property
    def is_written_here(self) -> bool:
        """Whether the current thread is the one that completes a checkpoint."""
        return self._completing is threading.current_thread()

    def _join(self) -> None:
        if self._completing is not None:
            self._completing.join()
            self._completing = None
        failed, self._failed = self._failed, None
        if failed is not None:
            with checkpoint_errors(self.directory, "written"):
                raise failed

    def go_on(self) -> None:
        """Removes the note of `close` that the run has ended.

        Raises:
            CheckpointError: If it cannot be removed.
        """
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

        Raises:
            CheckpointError: If the last checkpoint could not be written.
        """
        try:
            self.wait()
            if run_has_ended and self._is_first:
                self._note_end()
        finally:
            if self._lock is not None:
                self._lock.release()
            if self._saver is not None:
                self._saver.close()

    def _note_end(self) -> None:
        try:
            steps = self.steps
            if steps:
                note_ended(self._root / str(steps[-1]))
        except (CheckpointError, OSError) as error:
            logger.error("programs that follow the run cannot see that it has ended. %s", error)

    def _check(self, step: int, saved: Sequence[Saved], arrays: list) -> None:
        found = fingerprints(arrays)
        wrong = [array.entry.path for array, n in zip(saved, found) if array.fingerprint != n]
        if wrong:
            raise CheckpointError(
                message(
                    f"Checkpoint {step} of {self.directory!r} is damaged.",
                    received="values that differ from the saved ones for "
                    f"{', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}.",
                    fix=_OTHER,
                )
            )


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    """Drops Orbax's log entry for a failure that it also raises."""
    return "Commit operations or the Commit callback" not in record.getMessage()


def _runs_text(known: Mapping[int, Known], steps: Sequence[int]) -> str:
    runs = list(dict.fromkeys(known[step].run or "unknown" for step in steps))
    return f"run {', '.join(runs)}"


def _mark(path: Any) -> tuple[int, int, float]:
    """What differs once a file was written again; its last part is the time of that."""
    if _is_local(os.fspath(path)):
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime
    found = path.stat()
    return 0, found.length, float(found.mtime)


def _dated(manifest: Manifest, after_s: float) -> Manifest:
    return replace(manifest, written=written_after(manifest.written, after_s))


class _WhenWritten(dict):
    """Plain data that is computed when Orbax turns it into JSON, in the background.

    So the background thread waits for the fingerprints, and not the train loop.
    """

    def __init__(self, make: Callable[[], dict[str, Any]]):
        super().__init__(computed="later")  # Orbax writes an empty dict without calling `items`
        self._make = make

    def items(self):
        return self._make().items()


@contextlib.contextmanager
def checkpoint_errors(directory: str, what: str, step: int | None = None) -> Iterator[None]:
    """A context in which any failure becomes a `CheckpointError` that names the checkpoint.

    Orbax and TensorStore raise a dozen kinds of errors for a full disk or a damaged file.

    Args:
        directory: The directory of checkpoints.
        what: The action, for the error: `"read"`, `"written"`, `"opened"`.
        step: The step of the checkpoint, if there is one.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, BaseExceptionGroup) as error:
        # It may be a group, because Orbax reads arrays concurrently; the first error has cancelled
        # the others.
        which = "A checkpoint" if step is None else f"Checkpoint {step}"
        raise CheckpointError(
            message(
                f"{which} of {directory!r} cannot be {what}.",
                received=f"{_reason(error)}.",
                fix=_OTHER if what == "read" else _LOOK,
            )
        ) from error


def new_run(fix: str) -> str:
    """A name for a run, the same in all processes.

    Args:
        fix: The fix for the error if the processes do not do the same.
    """
    return agree("naming the run", fix, uuid.uuid4().hex[:12], str)[0]


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


def none_in(directory: str) -> CheckpointError:
    """The error for a directory without checkpoints.

    Args:
        directory: The directory.
    """
    return CheckpointError(
        message(
            f"There is no checkpoint in {directory!r}.",
            received={"directory": directory},
            fix="Pass the directory of callbacks.Checkpoint.",
        )
    )


def check_stored(stored: Mapping[str, Any], wanted: Sequence[Saved]) -> None:
    """Checks that arrays are stored as the manifest says, so that reading allocates no more.

    Orbax allocates arrays with their shapes in the store, and TensorStore decompresses whole
    chunks, which may be larger than their arrays.

    Args:
        stored: Orbax's metadata by key.
        wanted: The arrays in the manifest.

    Raises:
        ValueError: If the store differs from the manifest.
    """
    for saved in wanted:
        found, entry = stored.get(saved.key), saved.entry
        shape = tuple(getattr(found, "shape", None) or ())
        chunk = tuple(getattr(getattr(found, "storage", None), "chunk_shape", None) or ())
        fits = all(0 < part <= size for part, size in zip(chunk, shape))
        if shape != entry.shape or str(getattr(found, "dtype", "")) != entry.dtype or not fits:
            raise ValueError(
                message(
                    "Arrays must be stored as in the manifest, in chunks no larger than the array.",
                    received={"path": entry.path, "manifest": entry.shape, "stored": shape}
                    | {"chunks": chunk, "dtype": str(getattr(found, "dtype", None))},
                    fix="Load another checkpoint.",
                )
            )


def check_files(directory: str, name: str) -> None:
    """Checks the sizes of files before they are read into memory: all except the arrays' values.

    Args:
        directory: The directory of checkpoints.
        name: The checkpoint's name.

    Raises:
        ValueError: If one is too large, or not a regular file.
    """
    if not _is_local(directory):
        return
    for path, folders, names in os.walk(os.path.join(directory, name)):
        # OCDBT keeps the chunks of arrays in directories called "d".
        folders[:] = [name for name in folders if name != "d"]
        for name in names:
            status = os.stat(os.path.join(path, name))
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES_OF_A_DESCRIPTION:
                raise ValueError(
                    message(
                        "The files that describe a checkpoint must have at most 64 MiB.",
                        received={"file": os.path.join(path, name), "bytes": status.st_size},
                        fix="Load another checkpoint.",
                    )
                )


def restore_request(
    wanted: Sequence[tuple[Saved, Any, Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Orbax's arguments for reading arrays: shapes and restore options by key.

    Args:
        wanted: See `Store.load`.
    """
    ocp = orbax()
    target = {
        saved.key: jax.ShapeDtypeStruct(saved.entry.shape, saved.entry.dtype, sharding=sharding)
        for saved, sharding, _ in wanted
    }
    how = {
        saved.key: ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is None
        else ocp.ArrayRestoreArgs(sharding=sharding)
        for saved, sharding, _ in wanted
    }
    return target, how


def _empty(saved: Saved, sharding: Any) -> Any:
    nothing = np.zeros(saved.entry.shape, saved.entry.dtype)
    return nothing if sharding is None else jax.device_put(nothing, sharding)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    words = " ".join(str(error).split())
    shown = words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]} ..."
    return f"{type(error).__name__}: {shown}"


def _check_path(directory: str) -> None:
    # Orbax finds the parts of a checkpoint by glob patterns, which would fail with such a path.
    found = sorted(set("[]*?") & set(directory))
    if found:
        raise CheckpointError(
            message(
                "The path of a checkpoint directory must not contain [ ] * ?: Orbax takes them for "
                "a pattern, and cannot read its own files there.",
                received={"directory": directory},
                fix="Use another name.",
            )
        )


def _is_local(directory: str) -> bool:
    return "://" not in directory


def folder(directory: str | os.PathLike) -> Any:
    """A directory as a path object that also works for a bucket.

    Args:
        directory: The directory.

    Raises:
        CheckpointError: If it is a link to nothing, or in storage of an unknown kind.
    """
    orbax()  # for its error: epath comes with Orbax
    from etils import epath

    where = absolute_path(directory)
    try:
        path = epath.Path(where)
    except KeyError:
        raise CheckpointError(
            message(
                "Checkpoints are in a folder, or in a bucket.",
                received={"directory": where},
                fix="Write a path, such as /runs/7 or ~/runs/7, or gs://bucket/runs/7.",
            )
        ) from None
    if os.path.islink(where) and not os.path.exists(where):
        raise CheckpointError(
            message(
                "A folder of checkpoints must not be a link to nothing.",
                received={"directory": where, "link to": os.readlink(where)},
                fix="Create the folder that the link names, or remove the link.",
            )
        )
    return path


def orbax() -> Any:
    """Orbax, imported on first use because it is optional."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            message(
                "Checkpoints need Orbax.",
                received=f"{error}.",
                fix='Install it: pip install "orbax-checkpoint>=0.11".',
            )
        ) from error
    return ocp
