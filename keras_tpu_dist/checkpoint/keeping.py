"""Chooses the checkpoints to keep, locks a directory, and changes its contents.

A checkpoint is only deleted after its successor is complete and was read back. A directory is
renamed before it is deleted, so a directory with the name of a step is always a complete
checkpoint.
"""

import contextlib
import datetime
import json
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_tpu_dist.checkpoint.manifest import CheckpointError
from keras_tpu_dist.common.errors import message

logger = logging.getLogger("keras_tpu_dist")

MANIFEST_FILE = ("manifest", "metadata")
_METRICS_FILE = ("metrics", "metrics")
_ENDED_FILE = ("metrics", "ended")
HALF = ".orbax-checkpoint-tmp"
_REMOVED, _REPLACED, _OTHER_RUNS = ".removed", ".replaced", "replaced_run"
_LOCK = ".in_use"
# The file with the id of the run, whose checkpoints may be on the hosts' own disks.
_RUN = "run_id"
_MOST_OF_A_RUN = 100


@dataclass(frozen=True)
class Known:
    """The facts that decide whether a checkpoint is kept.

    Attributes:
        whole: Whether its manifest can be read.
        finite: Whether all numbers of its weights are finite; unknown, and therefore true, for
            version 0.2 and before.
        metrics: Metrics to choose the best checkpoint by.
        at_s: The time of its writing, in seconds since 1970, if known.
    """

    whole: bool
    finite: bool = True
    metrics: Mapping[str, Any] = field(default_factory=dict)
    at_s: float | None = None


def written_at_s(written: Mapping[str, Any]) -> float | None:
    """The time of a checkpoint's writing, in seconds since 1970, or `None` if unknown.

    Args:
        written: The manifest's `written`.
    """
    try:
        return datetime.datetime.fromisoformat(str(written.get("at"))).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def staying(
    known: Mapping[int, Known],
    keep: int | None,
    best: tuple[str, str] | None,
    every_s: float | None = None,
) -> set[int]:
    """The steps of the checkpoints to keep.

    Args:
        known: The facts about all checkpoints.
        keep: The number of the newest complete checkpoints to keep; `None` for all.
        best: `(name, mode)` of a metric, to keep its best checkpoint, too; or `None`.
        every_s: An interval in seconds, to keep the first checkpoint and then one per interval,
            too; or `None`.

    Example:

    >>> known = {1: Known(True), 2: Known(True, finite=False), 3: Known(True, finite=False)}
    >>> staying(known, keep=2, best=None)
    {1, 2, 3}
    """
    whole = sorted(step for step, one in known.items() if one.whole)
    if keep is None or not whole:
        return set(known)
    stay = set(whole[-keep:])
    finite = [step for step in whole if known[step].finite]
    # Weights that are NaN stay NaN, so the last finite checkpoint is the one to go back to.
    stay |= set(finite[-1:])
    if best is not None:
        name, mode = best
        sign = -1 if mode == "min" else 1
        worths = {step: known[step].metrics.get(name) for step in whole}
        judged = [(sign * w, step) for step, w in worths.items() if isinstance(w, (int, float))]
        stay |= {step for _, step in sorted(judged)[-1:]}
    if every_s is not None:
        stay |= _spaced({step: known[step].at_s for step in whole}, every_s)
    # An unreadable checkpoint may be a temporary fault of the disk, so it stays until newer ones
    # replace it.
    return stay | {step for step in known if step > min(stay)} - set(whole)


def _spaced(at_s: Mapping[int, float | None], every_s: float) -> set[int]:
    # Counted from the first checkpoint, which stays, too. If we counted from the oldest existing
    # one, the choice would shift with every deletion.
    stay: set[int] = set()
    last_s = -float("inf")
    for step in sorted(at_s):
        now_s = at_s[step]
        if now_s is not None and now_s - last_s >= every_s:
            stay.add(step)
            last_s = now_s
    return stay


def whole_steps(root: Any, local: bool) -> list[int]:
    """The steps with a complete checkpoint, the newest last.

    Args:
        root: The directory.
        local: Whether it is a directory and not a bucket.
    """
    if local:
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        steps = [int(name) for name in names if name.isdigit() and str(int(name)) == name]
    else:
        import orbax.checkpoint as ocp

        steps = [found.step for found in ocp.path.step.standard_name_format().find_all(root)]
    return sorted(step for step in steps if has_parts(root / str(step)))


def has_parts(path: Any) -> bool:
    """Whether a checkpoint's directory has a manifest and arrays.

    Args:
        path: The directory of one checkpoint.
    """
    return path.joinpath(*MANIFEST_FILE).exists() and (path / "arrays").exists()


def metrics_of(path: Any, training: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a checkpoint: those in its manifest, and those added later.

    Args:
        path: The directory of one checkpoint.
        training: The manifest's `training`.
    """
    saved = training.get("metrics")
    later = path.joinpath(*_METRICS_FILE)
    noted = json.loads(later.read_text()) if later.exists() else {}
    return {
        **(saved if isinstance(saved, dict) else {}),
        **(noted if isinstance(noted, dict) else {}),
    }


def note_metrics(path: Any, metrics: Mapping[str, float]) -> None:
    """Adds metrics to a checkpoint.

    Args:
        path: The directory of one checkpoint.
        metrics: The numbers.
    """
    file = path.joinpath(*_METRICS_FILE)
    file.parent.mkdir(exist_ok=True)
    # Renamed when complete, because a process may be killed while it writes.
    half = file.parent / "half"
    half.write_text(json.dumps(dict(metrics)))
    half.replace(file)


def note_ended(path: Any) -> None:
    """Notes in a run's newest checkpoint that the run has ended.

    Args:
        path: The directory of one checkpoint.
    """
    file = path.joinpath(*_ENDED_FILE)
    file.parent.mkdir(exist_ok=True)
    file.write_text("")


def note_goes_on(path: Any) -> None:
    """Removes the note of `note_ended`.

    Args:
        path: The directory of one checkpoint.
    """
    path.joinpath(*_ENDED_FILE).unlink(missing_ok=True)


def has_ended(path: Any) -> bool:
    """Whether a checkpoint has the note of `note_ended`.

    Args:
        path: The directory of one checkpoint.
    """
    return path.joinpath(*_ENDED_FILE).exists()


def remove(path: Any) -> None:
    """Deletes a directory, after renaming it.

    Args:
        path: The directory.
    """
    gone = path.parent / f"{path.name}{_REMOVED}"
    if gone.exists():
        gone.rmtree()
    path.rename(gone)
    gone.rmtree()


def set_aside(path: Any) -> None:
    """Renames the checkpoint of a step that is about to be written again; see `settle`.

    Args:
        path: The directory of the old one.
    """
    aside = path.parent / f"{path.name}{_REPLACED}"
    if aside.exists():
        aside.rmtree()
    path.rename(aside)


def settle(root: Any) -> None:
    """Cleans up after a killed process.

    Partial directories are deleted; a checkpoint that was set aside gets its name back unless its
    successor is complete.

    Args:
        root: The directory of checkpoints.
    """
    for path in list(root.iterdir()):
        if path.name.endswith(_REPLACED):
            step = root / path.name.removesuffix(_REPLACED)
            if has_parts(step):
                remove(path)
            else:
                path.rename(step)
        elif path.name.endswith(_REMOVED) or HALF in path.name:
            path.rmtree()


def set_runs_aside(root: Any, steps: Iterable[int]) -> None:
    """Moves the checkpoints of another run into a subdirectory.

    Args:
        root: The directory of checkpoints.
        steps: Their steps.
    """
    (root / _RUN).unlink(missing_ok=True)
    aside = root / _OTHER_RUNS
    aside.mkdir(exist_ok=True)
    for step in steps:
        (root / str(step)).rename(aside / str(step))


def drop_other_runs(root: Any) -> None:
    """Deletes the checkpoints that `set_runs_aside` moved, after the new run has one.

    Args:
        root: The directory of checkpoints.
    """
    if (root / _OTHER_RUNS).exists():
        remove(root / _OTHER_RUNS)


def note_run(root: Any, run: str) -> None:
    """Notes the run's name in the directory, before it has a checkpoint.

    Args:
        root: The directory of checkpoints.
        run: The run's name.
    """
    if noted_run(root) != run:
        half = root / f"{_RUN}.half"
        half.write_text(run)
        half.replace(root / _RUN)


def noted_run(root: Any) -> str | None:
    """The run's name from `note_run`, or `None`.

    Args:
        root: The directory of checkpoints.
    """
    file = root / _RUN
    if not file.exists() or file.stat().length > _MOST_OF_A_RUN:
        return None
    return file.read_bytes().decode(errors="replace")


class Lock:
    """Makes this the only process that may write into a directory.

    Args:
        directory: The directory, which is local.

    Raises:
        CheckpointError: If another process writes there.
    """

    def __init__(self, directory: str):
        self._path = os.path.join(directory, _LOCK)
        self._file: int | None = None
        while self._file is None:
            self._file = self._locked()

    def release(self) -> None:
        """Lets other processes write."""
        if self._file is None:
            return
        # The user may have deleted the directory.
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._file)
        self._file = None

    def _locked(self) -> int | None:
        import fcntl

        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(file, 200).decode(errors="replace")
            os.close(file)
            raise CheckpointError(
                message(
                    "Only one fit at a time can write into a directory of checkpoints.",
                    received=f"{os.path.dirname(self._path)!r}, where {who or 'another'} writes.",
                    fix="Use a different directory for every run and every Checkpoint of a fit, or "
                    "wait for the other to end.",
                )
            ) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): if two runs write there at once, nothing reports it",
                self._path,
                error,
            )
            return file
        here = os.path.exists(self._path) and os.stat(self._path).st_ino == os.fstat(file).st_ino
        if not here:  # the other process has released the lock and deleted the file
            os.close(file)
            return None
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} of {socket.gethostname()}".encode())
        return file
