"""Checkpoints on a file system, by Orbax: whole or not there, one directory for each step."""

import contextlib
import functools
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.checkpoint.fingerprint import fingerprints_of
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Manifest, Saved, from_json
from keras_tpu_dist.checkpoint.names import named_state
from keras_tpu_dist.common.errors import message

logger = logging.getLogger("keras_tpu_dist")

_ARRAYS, _MANIFEST = "arrays", "manifest"
# TensorStore's errors carry the whole specification of what it read.
_MOST_WORDS = 300
# 1000 processes that save 10,000 arrays write 20 MB.
_MOST_BYTES_OF_A_DESCRIPTION = 64 * 2**20
_OTHER = "Load another checkpoint: ktd.restore(model, directory, step=...)."


class Store:
    """The checkpoints of a directory.

    Args:
        directory: The directory; it is made when the first checkpoint is saved.
        keep: How many of the newest to keep; `None` for all.
        best: `(name, mode)` of a metric whose best checkpoint is kept as well, or `None`.
        asynchronous: Whether `save` returns once the values are copied from the devices.
        read_only: Whether nothing is written.
        alone: Whether this process, of several, reads without the others.

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
        asynchronous: bool = False,
        read_only: bool = False,
        alone: bool = False,
    ):
        ocp = orbax()
        self.directory = absolute(os.fspath(directory))
        if _is_local(self.directory) and not os.path.isdir(self.directory):
            if read_only:
                raise CheckpointError(
                    message(
                        f"There is no directory {self.directory!r}.",
                        received={"directory": os.fspath(directory)},
                        fix="Give the directory that callbacks.Checkpoint saved in.",
                    )
                )
            with told(self.directory, "opened"):
                # Several processes make it at once.
                os.makedirs(self.directory, exist_ok=True)
        self._stored: dict[int, Mapping[str, Any]] = {}
        processes = _processes(alone)
        options = ocp.CheckpointManagerOptions(
            multiprocessing_options=processes,
            enable_async_checkpointing=asynchronous and not read_only,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            preservation_policy=_preserved(keep, best),
            # Every save that is asked for is made.
            save_interval_steps=1,
        )
        with told(self.directory, "opened"):
            self._manager = _manager_class()(
                self.directory,
                options=options,
                item_names=(_ARRAYS, _MANIFEST),
                item_handlers={
                    _ARRAYS: ocp.PyTreeCheckpointHandler(multiprocessing_options=processes),
                    _MANIFEST: ocp.JsonCheckpointHandler(multiprocessing_options=processes),
                },
            )

    state_of = staticmethod(named_state)

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, the newest last."""
        with told(self.directory, "read"):
            self._manager.reload()
            return sorted(self._manager.all_steps())

    def save(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        manifest: Callable[[], Manifest],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Saves a checkpoint; see `asynchronous`.

        Args:
            step: Its number; an older one of this number is replaced.
            arrays: The arrays by key.
            manifest: Gives what they are; called where it is written, in the background.
            metrics: Numbers to tell the best checkpoint by.

        Raises:
            CheckpointError: If this one, or the one before, could not be written.
        """
        args = orbax().args
        items = {
            # Orbax refuses arrays without elements, which have nothing to save.
            _ARRAYS: args.PyTreeSave({key: a for key, a in arrays.items() if a.size}),
            _MANIFEST: args.JsonSave(_WhenWritten(lambda: manifest().to_json())),
        }
        with told(self.directory, "written"):
            if step in self._manager.all_steps():
                self._manager.delete(step)
            self._manager.save(step, args=args.Composite(**items), metrics=metrics, force=True)

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint of a step holds.

        Args:
            step: The step.

        Raises:
            CheckpointError: If it cannot be read.
        """
        where = f"Checkpoint {step} of {self.directory!r}"
        args = orbax().args
        with told(self.directory, "read", step):
            _check_files(self.directory, step)
            items = self._manager.restore(
                step, args=args.Composite(**{_MANIFEST: args.JsonRestore()})
            )
        return from_json(items[_MANIFEST], where)

    def load(self, step: int, wanted: Sequence[tuple[Saved, Any, Any]]) -> list[jax.Array]:
        """Reads arrays straight into their shards, and compares them with what was saved.

        Args:
            step: The step.
            wanted: For each array what was saved, the sharding it gets (`None` for an array of the
                host), and its dtype.

        Raises:
            CheckpointError: If one cannot be read, or has other values than were saved.
        """
        if not wanted:
            return []
        ocp = orbax()
        filled = [each for each in wanted if 0 not in each[0].entry.shape]
        read: dict[str, Any] = {}
        if filled:
            target, how = to_read(filled)
            restored = ocp.args.PyTreeRestore(item=target, restore_args=how, partial_restore=True)
            with told(self.directory, "read", step):
                if step not in self._stored:
                    path = folder(self.directory) / str(step) / _ARRAYS
                    self._stored[step] = ocp.PyTreeCheckpointHandler().metadata(path).tree
                check_stored(self._stored[step], [saved for saved, _, _ in filled])
                items = self._manager.restore(step, args=ocp.args.Composite(**{_ARRAYS: restored}))
            read |= items[_ARRAYS]
        read |= {saved.key: _empty(saved, s) for saved, s, _ in wanted if saved.key not in read}
        arrays = [read[saved.key] for saved, _, _ in wanted]
        self._check(step, [saved for saved, _, _ in wanted], arrays)
        return [array.astype(dtype) for array, (_, _, dtype) in zip(arrays, wanted)]

    def wait(self) -> None:
        """Waits until what was saved is on disk.

        Raises:
            CheckpointError: If it could not be written.
        """
        with told(self.directory, "written"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits, and lets go of the directory.

        Raises:
            CheckpointError: If the last checkpoint could not be written.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def _check(self, step: int, saved: Sequence[Saved], arrays: list) -> None:
        found = fingerprints_of(arrays)
        wrong = [each.entry.path for each, n in zip(saved, found) if each.fingerprint != n]
        if wrong:
            raise CheckpointError(
                message(
                    f"Checkpoint {step} of {self.directory!r} is damaged.",
                    received="other values than were saved for "
                    f"{', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}.",
                    fix=_OTHER,
                )
            )


class _WhenWritten(dict):
    """Plain data that is made when Orbax turns it into text, which it does in the background."""

    def __init__(self, make: Callable[[], dict[str, Any]]):
        super().__init__(made="later")  # an empty one would not be asked
        self._make = make

    def items(self):
        return self._make().items()


@contextlib.contextmanager
def told(directory: str, what: str, step: int | None = None) -> Iterator[None]:
    """Makes whatever fails one `CheckpointError` that says what could not be done.

    Args:
        directory: The directory of checkpoints.
        what: `"read"`, for example.
        step: The checkpoint, if it is one.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, BaseExceptionGroup) as error:
        # Orbax reads arrays at the same time: what the first failed of is cancelled too.
        which = "A checkpoint" if step is None else f"Checkpoint {step}"
        raise CheckpointError(
            message(
                f"{which} of {directory!r} cannot be {what}.",
                received=f"{_reason(error)}.",
                fix=_OTHER if what == "read" else "Look at its place, its rights and its space.",
            )
        ) from error


def none_in(directory: str) -> CheckpointError:
    """The error for a directory without checkpoints.

    Args:
        directory: The directory.
    """
    return CheckpointError(
        message(
            f"There is no checkpoint in {directory!r}.",
            received={"directory": directory},
            fix="Give the directory that callbacks.Checkpoint saved in.",
        )
    )


def check_stored(stored: Mapping[str, Any], wanted: Sequence[Saved]) -> None:
    """Checks that arrays are stored as the manifest says, so that reading takes no more memory.

    Orbax gives arrays the shape that they have in the store, and TensorStore decompresses whole
    chunks, which may be larger than what they are chunks of.

    Args:
        stored: Orbax's metadata by key.
        wanted: What the manifest says.

    Raises:
        ValueError: If an array is stored otherwise.
    """
    for saved in wanted:
        found, entry = stored.get(saved.key), saved.entry
        shape = tuple(getattr(found, "shape", None) or ())
        chunk = tuple(getattr(getattr(found, "storage", None), "chunk_shape", None) or ())
        fits = all(0 < part <= size for part, size in zip(chunk, shape))
        if shape != entry.shape or str(getattr(found, "dtype", "")) != entry.dtype or not fits:
            raise ValueError(
                message(
                    "An array is stored as the manifest says, in chunks no larger than itself.",
                    received={"path": entry.path, "manifest": entry.shape, "stored": shape}
                    | {"chunks": chunk, "dtype": str(getattr(found, "dtype", None))},
                    fix="Load another checkpoint.",
                )
            )


def _check_files(directory: str, step: int) -> None:
    """Checks the files that Orbax reads whole, before it does: all but arrays' own."""
    if not _is_local(directory):
        return
    for path, folders, names in os.walk(os.path.join(directory, str(step))):
        folders[:] = [name for name in folders if name != "d"]
        for name in names:
            status = os.stat(os.path.join(path, name))
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES_OF_A_DESCRIPTION:
                raise ValueError(
                    message(
                        "What describes a checkpoint is in files of at most 64 MiB.",
                        received={"file": os.path.join(path, name), "bytes": status.st_size},
                        fix="Load another checkpoint.",
                    )
                )


def to_read(wanted: Sequence[tuple[Saved, Any, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Orbax is asked for: the arrays by key, and how each is to be read.

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


def _is_local(directory: str) -> bool:
    return "://" not in directory


def absolute(directory: str) -> str:
    """A directory's path in full; that of a bucket is one.

    Args:
        directory: The path.
    """
    return os.path.abspath(directory) if _is_local(directory) else directory


def folder(directory: str | os.PathLike) -> Any:
    """A directory as a path that can be looked into, also in a bucket.

    Args:
        directory: The directory.
    """
    orbax()  # which brings epath
    from etils import epath

    return epath.Path(absolute(os.fspath(directory)))


def orbax() -> Any:
    """Orbax, which is imported when checkpoints are used."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            message(
                "Checkpoints are written by Orbax.",
                received=f"{error}.",
                fix='Install it: pip install "keras_tpu_dist[checkpoint]".',
            )
        ) from error
    return ocp


@functools.cache
def _manager_class() -> Any:
    class Manager(orbax().CheckpointManager):
        """Leaves JAX's count of looks for a preemption to `callbacks.preemption`.

        Orbax looks with the number of the step at each save, the older one again when that is
        written, so that JAX's agreement falls on a number that nobody looks with any more.
        """

        def reached_preemption(self, step: int) -> bool:
            del step
            return False

    return Manager


def _processes(alone: bool) -> Any:
    """Who waits for whom."""
    options = orbax().options.MultiprocessingOptions
    if not alone or jax.process_count() == 1:
        return options()
    own = jax.process_index()
    return options(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process_{own}"
    )


def _preserved(keep: int | None, best: tuple[str, str] | None) -> Any:
    if keep is None:
        return None
    from orbax.checkpoint import checkpoint_managers as managers

    newest = managers.LatestN(keep)
    if best is None:
        return newest
    name, mode = best
    by_metric = managers.BestN(
        get_metric_fn=lambda metrics: metrics[name],
        reverse=mode == "min",
        n=1,
        keep_checkpoints_without_metrics=False,
    )
    return managers.AnyPreservationPolicy([newest, by_metric])
