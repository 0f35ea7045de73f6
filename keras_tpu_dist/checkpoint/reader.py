"""Reads the checkpoints of a directory, the same ones in all processes."""

import contextlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from keras_tpu_dist.checkpoint.barriers import from_first, in_all
from keras_tpu_dist.checkpoint.fingerprint import (
    fingerprints,
    is_fingerprint_of_32_bits,
    is_small,
)
from keras_tpu_dist.checkpoint.keeping import (
    MANIFEST_FILE,
    Known,
    in_order,
    metrics_of,
    of_other_runs,
    whole_steps,
)
from keras_tpu_dist.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    Saved,
    checkpoint_error,
    from_json,
)
from keras_tpu_dist.checkpoint.packed import PACKED, check_places, described, unpack
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.common.paths import absolute_path
from keras_tpu_dist.processes.arrays import put

logger = logging.getLogger("keras_tpu_dist")

ARRAYS = "arrays"
# Characters of an error's text: TensorStore's errors contain its whole specification.
_MOST_WORDS = 300
# If 1000 processes save 10,000 arrays, they write 20 MB.
_MOST_BYTES_OF_A_DESCRIPTION = 64 * 2**20
_LOOK = "Check its path, permissions and free space."
_BUCKET = (
    "Check the bucket's name, and the roles of this machine's account: roles/storage.objectAdmin "
    "and roles/storage.legacyBucketReader."
)
_OTHER = "Load another checkpoint: ktd.restore(model, directory, step=...)."

_Loaded = TypeVar("_Loaded")


class CheckpointReader:
    """The checkpoints of a directory, to read.

    Args:
        alone: Whether this process reads without the others, if there are several.
    """

    def __init__(self, directory: str | os.PathLike, *, alone: bool = False):
        self._root = folder(directory)
        self.directory, self.alone = absolute_path(directory), alone
        if is_local(self.directory) and not os.path.isdir(self.directory):
            raise checkpoint_error(
                f"There is no directory {self.directory!r}.",
                received={"directory": os.fspath(directory)},
                fix="Pass the directory of callbacks.Checkpoint.",
            )
        # With what tells whether the manifest was written again.
        self._looked_at: dict[int, tuple[Any, Known]] = {}
        self._stored: dict[int, Mapping[str, Any]] = {}

    @property
    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, the newest last."""
        return in_order(self._known)

    @property
    def steps_of_run(self) -> list[int]:
        """Those of the newest run, the newest last; the log names the others."""
        checkpoints = self._known
        others = of_other_runs(checkpoints)
        if others:
            log_once(
                f"{self.directory} has checkpoints of several runs: the newest run is used, not "
                f"steps {others} of {runs_text(checkpoints, others)}",
                logging.WARNING,
            )
        return [step for step in in_order(checkpoints) if step not in others]

    @property
    def newest(self) -> tuple[float, int]:
        """When the newest checkpoint was written, in seconds since 1970, and its step; or -1."""
        checkpoints = self._known
        step = in_order(checkpoints)[-1] if checkpoints else -1
        return (checkpoints[step].at_s, step) if checkpoints else (0.0, -1)

    @property
    def _known(self) -> dict[int, Known]:
        """The facts about all complete checkpoints."""
        with checkpoint_errors(self.directory, "read"):
            checkpoints = {}
            for step in whole_steps(self._root, is_local(self.directory)):
                try:
                    *mark, written_s = _mark((self._root / str(step)).joinpath(*MANIFEST_FILE))
                except FileNotFoundError:
                    continue  # another process has deleted it just now
                if self._looked_at.get(step, (None,))[0] != [*mark, written_s]:
                    self._looked_at[step] = [*mark, written_s], self._look_at(step, written_s)
                checkpoints[step] = self._looked_at[step][1]
            return checkpoints

    def _look_at(self, step: int, written_s: float) -> Known:
        try:
            manifest = self.manifest(step)
            metrics = metrics_of(self._root / str(step), manifest.training)
        except (CheckpointError, OSError, ValueError) as error:
            return Known(whole=False, at_s=written_s, problem=str(error))
        finite = manifest.written.get("finite") is not False
        return Known(True, finite, metrics, manifest.at_s, manifest.run)

    def load_newest(
        self, load: Callable[[int], _Loaded], step: int | None = None
    ) -> _Loaded | None:
        """Loads the newest checkpoint of the newest run, or the one before if it cannot be read.

        Args:
            load: A function that loads the checkpoint of a step, or raises a `CheckpointError` in
                all processes.

        Returns:
            The result of `load`; `None` if there is no checkpoint.

        Raises:
            CheckpointError: In all processes, if none can be read, or there is none of `step`.
        """
        errors = []
        for candidate in reversed(self.agreed_steps(step)):
            try:
                return load(candidate)
            except CheckpointError as error:
                errors.append(str(error))
                if step is None:
                    logger.warning("%s Trying the previous checkpoint.", error)
        if errors:
            raise CheckpointError(" ".join(errors))
        return None

    def agreed_steps(self, step: int | None = None) -> list[int]:
        """The steps of the newest run, the newest last; for all processes what process 0 sees."""
        what = f"looking for checkpoints in {self.directory}"

        def read() -> list[int]:
            return self.steps_of_run if step is None else self.steps

        steps = list(map(int, from_first(what, read, alone=self.alone)))
        if step is None or step in steps:
            return steps if step is None else [int(step)]
        raise checkpoint_error(
            f"There is no checkpoint {step} in {self.directory!r}.",
            received={"step": step},
            fix=f"There are: {steps}.",
        )

    def agreed_manifest(self, step: int) -> Manifest:
        """The manifest of a step's checkpoint, the same in all processes."""
        return in_all(
            f"reading the manifest of checkpoint {step} of {self.directory}",
            lambda: self.manifest(step),
            lambda manifest: f"crc32 {manifest.to_json()['crc32']}",
            alone=self.alone,
        )

    def manifest(self, step: int, name: str = "") -> Manifest:
        """The manifest of a step's checkpoint."""
        where, name = f"Checkpoint {step} of {self.directory!r}", name or str(step)
        with checkpoint_errors(self.directory, "read", step):
            check_files(self.directory, name)
            text = (self._root / name).joinpath(*MANIFEST_FILE).read_text()
            content = json.loads(text)
        return from_json(content, where, step)

    def load(self, step: int, wanted: Sequence[tuple[Saved, Any, Any]]) -> list[jax.Array]:
        """Reads arrays directly into their shards, and checks their values.

        Args:
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
        small = [i for i, (_, sharding, _) in enumerate(wanted) if sharding is not None]
        small = [i for i in small if isinstance(arrays[i], np.ndarray)]
        placed = put([arrays[i] for i in small], [wanted[i][1] for i in small])
        for i, array in zip(small, placed, strict=True):
            arrays[i] = array
        return [array.astype(dtype) for array, (_, _, dtype) in zip(arrays, wanted, strict=True)]

    def _read(self, step: int, wanted: Sequence[tuple[Saved, Any, Any]]) -> list[Any]:
        ocp = orbax()
        filled = [item for item in wanted if 0 not in item[0].entry.shape]
        read: dict[str, Any] = {}
        if filled:
            asked = {described(saved).key: (described(saved), *rest) for saved, *rest in filled}
            target, how = _request(list(asked.values()))
            restored = ocp.args.PyTreeRestore(
                item=_nested(target), restore_args=_nested(how), partial_restore=True
            )
            handler, path = ocp.PyTreeCheckpointHandler(), self._root / str(step) / ARRAYS
            with checkpoint_errors(self.directory, "read", step):
                check_places([saved for saved, _, _ in filled])
                if step not in self._stored:
                    self._stored[step] = dict(flat(handler.metadata(path).tree))
                _check_stored(self._stored[step], [saved for saved, _, _ in asked.values()])
                # Without a `Checkpointer`, whose barrier would wait for processes that failed.
                read |= flat(handler.restore(path, args=restored))
                unpack(read, [saved for saved, _, _ in filled])
        for saved, _, _ in wanted:
            if 0 in saved.entry.shape:  # Orbax has not saved it
                read[saved.key] = np.zeros(saved.entry.shape, saved.entry.dtype)
        return [read[saved.key] for saved, _, _ in wanted]

    def _check(self, step: int, saved: Sequence[Saved], arrays: list) -> None:
        numbers = fingerprints(arrays)
        wrong = [
            array.entry.path
            for array, n, value in zip(saved, numbers, arrays, strict=True)
            if array.fingerprint != n and not is_fingerprint_of_32_bits(array.fingerprint, value)
        ]
        if wrong:
            raise checkpoint_error(
                f"Checkpoint {step} of {self.directory!r} is damaged.",
                received="values that differ from the saved ones for "
                f"{', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}.",
                fix=_OTHER,
            )


def runs_text(checkpoints: Mapping[int, Known], steps: Sequence[int]) -> str:
    """The runs of checkpoints, for the log."""
    runs = list(dict.fromkeys(checkpoints[step].run or "unknown" for step in steps))
    return f"run {', '.join(runs)}"


def _mark(path: Any) -> tuple[int, int, float]:
    """What differs once a file was written again; its last part is the time of that."""
    if is_local(os.fspath(path)):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime
    status = path.stat()
    return 0, status.length, float(status.mtime)


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
        raise checkpoint_error(
            f"{which} of {directory!r} cannot be {what}.",
            received=f"{reason_of(error)}.",
            fix=_OTHER if what == "read" else where_to_look(directory),
        ) from error


def where_to_look(directory: str) -> str:
    """What to check if a directory cannot be written.

    Args:
        directory: The directory.
    """
    return _BUCKET if directory.startswith("gs://") else _LOOK


def none_in(directory: str) -> CheckpointError:
    """The error for a directory without checkpoints.

    Args:
        directory: The directory.
    """
    return checkpoint_error(
        f"There is no checkpoint in {directory!r}.",
        received={"directory": directory},
        fix="Pass the directory of callbacks.Checkpoint.",
    )


def _check_stored(stored: Mapping[str, Any], wanted: Sequence[Saved]) -> None:
    """Checks that arrays are stored as the manifest says, so that reading allocates no more.

    Orbax allocates arrays with their shapes in the store, and TensorStore decompresses whole
    chunks, which may be larger than their arrays.
    """
    for saved in wanted:
        array, entry = stored.get(saved.key), saved.entry
        shape = tuple(getattr(array, "shape", None) or ())
        chunk = tuple(getattr(getattr(array, "storage", None), "chunk_shape", None) or ())
        # No chunk is known of an array that is not stored, or in another way.
        fits = not chunk or len(chunk) == len(shape)
        fits = fits and all(0 < part <= size for part, size in zip(chunk, shape, strict=False))
        if shape != entry.shape or str(getattr(array, "dtype", "")) != entry.dtype or not fits:
            raise value_error(
                "Arrays must be stored as in the manifest, in chunks no larger than the array.",
                received={"path": entry.path, "manifest": entry.shape, "stored": shape}
                | {"chunks": chunk, "dtype": str(getattr(array, "dtype", None))},
                fix="Load another checkpoint.",
            )


def check_files(directory: str, name: str) -> None:
    """Checks the sizes of files before they are read into memory: all except the arrays' values.

    Args:
        directory: The directory of checkpoints.
        name: The name of one checkpoint's directory in it, or of a part of one.
    """
    if not is_local(directory):
        return
    for path, folders, names in os.walk(os.path.join(directory, name)):
        # OCDBT keeps the chunks of arrays in directories called "d".
        folders[:] = [name for name in folders if name != "d"]
        for name in names:
            status = os.stat(os.path.join(path, name))
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES_OF_A_DESCRIPTION:
                raise value_error(
                    "The files that describe a checkpoint must have at most 64 MiB.",
                    received={"file": os.path.join(path, name), "bytes": status.st_size},
                    fix="Load another checkpoint.",
                )


def _request(
    wanted: Sequence[tuple[Saved, Any, Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Orbax's arguments for reading arrays: shapes and restore options by key.

    Small arrays are read into host memory, from where all of them go to the devices together.
    """
    ocp = orbax()
    target = {
        saved.key: jax.ShapeDtypeStruct(saved.entry.shape, saved.entry.dtype, sharding=sharding)
        for saved, sharding, _ in wanted
    }
    how = {
        saved.key: ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is None or is_small(saved.entry) or saved.key == PACKED
        else ocp.ArrayRestoreArgs(sharding=sharding)
        for saved, sharding, _ in wanted
    }
    return target, how


def reason_of(error: BaseException) -> str:
    """The class of an error and its text, in one line that is not too long."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    words = " ".join(str(error).split())
    shown = words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]} ..."
    return f"{type(error).__name__}: {shown}"


def is_local(directory: str) -> bool:
    """Whether a directory is not a bucket."""
    return "://" not in directory


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, with their keys joined by `/`.

    Example:

    >>> dict(flat({"dense": {"kernel": 1, "bias": 2}, "seed": 3}))
    {'dense/kernel': 1, 'dense/bias': 2, 'seed': 3}
    """
    for name, node in tree.items():
        if isinstance(node, Mapping):
            yield from flat(node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", node


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parts, last = path.split("/")
        inner = tree
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = leaf
    return tree


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
        raise checkpoint_error(
            "Checkpoints are in a folder, or in a bucket.",
            received={"directory": where},
            fix="Write a path, such as /runs/7 or ~/runs/7, or gs://bucket/runs/7.",
        ) from None
    if os.path.islink(where) and not os.path.exists(where):
        raise checkpoint_error(
            "A folder of checkpoints must not be a link to nothing.",
            received={"directory": where, "link to": os.readlink(where)},
            fix="Create the folder that the link names, or remove the link.",
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
                fix='Install it: pip install "orbax-checkpoint>=0.11.32".',
            )
        ) from error
    return ocp
