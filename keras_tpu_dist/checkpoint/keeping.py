"""Chooses the newest checkpoint and those to keep, locks a directory, and changes its contents.

A directory holds the checkpoints of one run. The time of writing decides which one is the newest,
not the step: a run may return to an earlier step, and another one may count from 0. Checkpoints
that are newer than the one a run returns to, and those of another run, are set aside and not
deleted.

A checkpoint is only deleted after its successor is complete and was read back. A directory is
renamed before it is deleted, so a directory with the name of a step is always a complete
checkpoint.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_tpu_dist.checkpoint.manifest import checkpoint_error
from keras_tpu_dist.common.once import log_once

logger = logging.getLogger("keras_tpu_dist")

MANIFEST_FILE = ("manifest", "metadata")
_METRICS_FILE = ("metrics", "metrics")
_ENDED_FILE = ("metrics", "ended")
HALF = ".orbax-checkpoint-tmp"
_REMOVED, _REPLACED = ".removed", ".replaced"
# The directory for checkpoints that nothing deletes.
ASIDE = "set_aside"
_A_RUN = re.compile(r"[0-9A-Za-z_-]{1,100}")
_LOCK = ".in_use"


@dataclass(frozen=True)
class Known:
    """The facts that decide whether a checkpoint is kept.

    Attributes:
        at_s: The time of its writing, in seconds since 1970; that of its manifest's file if it
            cannot be read.
    """

    whole: bool
    finite: bool = True
    metrics: Mapping[str, Any] = field(default_factory=dict)
    at_s: float = 0.0
    run: str | None = None
    problem: str = ""


def in_order(checkpoints: Mapping[int, Known]) -> list[int]:
    """The steps by their time of writing, the newest last.

    Example:

    >>> in_order({1: Known(True, at_s=7.0), 2: Known(True, at_s=9.0), 3: Known(True, at_s=8.0)})
    [1, 3, 2]
    """
    return sorted(checkpoints, key=lambda step: (checkpoints[step].at_s, step))


def of_other_runs(checkpoints: Mapping[int, Known]) -> list[int]:
    """The steps that are not of the run of the newest checkpoint.

    Example:

    >>> of_other_runs({1: Known(True, at_s=9.0, run="b"), 2: Known(True, at_s=8.0, run="a")})
    [2]
    """
    order = in_order(checkpoints)
    run = next(
        (checkpoints[step].run for step in reversed(order) if checkpoints[step].run is not None),
        None,
    )
    return [step for step in order if checkpoints[step].run not in (None, run)]


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a run stay.

    Attributes:
        newest: The number of the newest complete checkpoints to keep; `None` for all.
        best: `(name, mode)` of a metric, to keep its best checkpoint, too; or `None`.
        every_s: An interval in seconds, to keep the first checkpoint and then one per interval,
            too; or `None`.
    """

    newest: int | None = None
    best: tuple[str, str] | None = None
    every_s: float | None = None


def staying(checkpoints: Mapping[int, Known], keep: Keep) -> set[int]:
    """The steps of the checkpoints to keep.

    Args:
        checkpoints: The facts about all checkpoints.
        keep: Which of them to keep.

    Example:

    >>> known = {1: Known(True), 2: Known(True, finite=False), 3: Known(True, finite=False)}
    >>> staying(known, Keep(2))
    {1, 2, 3}
    """
    order = in_order(checkpoints)
    whole = [step for step in order if checkpoints[step].whole]
    if keep.newest is None or not whole:
        return set(checkpoints)
    stay = set(whole[-keep.newest :])
    finite = [step for step in whole if checkpoints[step].finite]
    # Weights that are NaN stay NaN, so the last finite checkpoint is the one to go back to.
    stay |= set(finite[-1:])
    if keep.best is not None:
        name, mode = keep.best
        sign = -1 if mode == "min" else 1
        worths = {step: checkpoints[step].metrics.get(name) for step in whole}
        judged = [(sign * w, step) for step, w in worths.items() if isinstance(w, (int, float))]
        # Of equal ones the newest.
        stay |= {step for _, step in sorted(judged, key=lambda pair: pair[0])[-1:]}
    if keep.every_s is not None:
        # Counted from the first checkpoint, which stays, too. If we counted from the oldest
        # existing one, the choice would shift with every deletion.
        last_s = -float("inf")
        for step in whole:
            if checkpoints[step].at_s - last_s >= keep.every_s:
                stay.add(step)
                last_s = checkpoints[step].at_s
    # An unreadable checkpoint may be a temporary fault of the disk, so it stays until newer ones
    # replace it.
    oldest = min(map(order.index, stay))
    return stay | set(order[oldest:]) - set(whole)


def whole_steps(root: Any, local: bool) -> list[int]:
    """The steps with a complete checkpoint, in order of their numbers.

    A directory with the name of a step that is not complete is reported in the log.

    Args:
        root: The directory.
        local: Whether it is a directory and not a bucket.
    """
    if local:
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        steps = [int(name) for name in names if name.isdigit() and str(int(name)) == name]
    else:
        import orbax.checkpoint as ocp

        steps = [named.step for named in ocp.path.step.standard_name_format().find_all(root)]
    whole = []
    for step in sorted(steps):
        path = root / str(step)
        if has_parts(path):
            whole.append(step)
        # Another process may have deleted it just now.
        elif is_there(path):
            lacking = "arrays" if path.joinpath(*MANIFEST_FILE).exists() else "manifest"
            log_once(
                f"checkpoint {step} is skipped: {os.fspath(path)!r} has no {lacking}",
                logging.WARNING,
            )
    return whole


def is_there(path: Any) -> bool:
    """Whether a path exists, also as a link to nothing."""
    return path.exists() or os.path.islink(path)


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
    if is_there(gone):
        _delete(gone)
    path.rename(gone)
    _delete(gone)


def _delete(path: Any) -> None:
    if os.path.islink(path):
        # The user moved it elsewhere, to a larger disk for example. That is not ours to delete.
        logger.info("%s was a link: only the link is deleted", path)
        path.unlink()
    else:
        path.rmtree()


def replace_later(path: Any) -> None:
    """Renames the checkpoint of a step that is about to be written again; see `settle`."""
    aside = path.parent / f"{path.name}{_REPLACED}"
    if is_there(aside):
        _delete(aside)
    path.rename(aside)


def set_aside(path: Any, step: int, run: str | None) -> None:
    """Moves a checkpoint to a directory from which nothing deletes it.

    If the same run has set this step aside before, the newer one replaces it.

    Args:
        path: The directory of the old one.
        step: Its step.
        run: Its run, if known.
    """
    # The run comes from a file that anybody may have written.
    name = run or "unknown"
    if not _A_RUN.fullmatch(name):
        name = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:12]
    to = path.parent / ASIDE / name / str(step)
    to.parent.mkdir(parents=True, exist_ok=True)
    if is_there(to):
        remove(to)
    if os.path.islink(path):
        # It may be relative.
        os.symlink(os.path.realpath(path), to)
        path.unlink()
    else:
        path.rename(to)


def settle(root: Any, run_of: Callable[[Any], str | None], *, overwrites: bool = False) -> None:
    """Cleans up after a killed process.

    Partial directories are deleted; a checkpoint that was about to be replaced gets its name back
    unless its successor is complete. If that is of another run, the old one is set aside, unless
    that run overwrites it.

    Args:
        root: The directory of checkpoints.
        run_of: A function from a checkpoint's directory to its run, if known.
        overwrites: Whether checkpoints of other runs are deleted.
    """
    for path in list(root.iterdir()):
        if path.name.endswith(_REPLACED):
            step = root / path.name.removesuffix(_REPLACED)
            if not has_parts(step):
                path.rename(step)
            elif overwrites or run_of(path) in (None, run_of(step)):
                remove(path)
            else:
                logger.warning("%s was of another run, and is set aside: in %s", step, root / ASIDE)
                set_aside(path, int(step.name), run_of(path))
        elif path.name.endswith(_REMOVED) or HALF in path.name:
            _delete(path)


class Lock:
    """Makes this the only process that may write into a directory.

    Args:
        directory: The directory, which is local.

    Raises:
        CheckpointError: If another process writes there.
    """

    def __init__(self, directory: str):
        self._path = os.path.join(directory, _LOCK)
        file = None
        while file is None:
            file = self._locked()
        # At exit the system lets go of it.
        self._let_go = weakref.finalize(self, _let_go, self._path, file, os.getpid())
        self._let_go.atexit = False

    def release(self) -> None:
        """Lets others write; so does the end of this object."""
        self._let_go()

    def _locked(self) -> int | None:
        import fcntl

        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(file, 200).decode(errors="replace")
            os.close(file)
            fix = "or wait for the other to end."
            if who == _this_process():
                who = f"{who}, this process,"
                fix = "or end the other use first: a fit ends by itself, a LoopCheckpoint with its "
                fix += "`with` block or by close()."
            raise checkpoint_error(
                "Only one fit at a time can write into a directory of checkpoints.",
                received=f"{os.path.dirname(self._path)!r}, where {who or 'another'} writes.",
                fix="Use a different directory for every run and every Checkpoint of a fit, " + fix,
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
        os.write(file, _this_process().encode())
        return file


def _this_process() -> str:
    return f"process {os.getpid()} of {socket.gethostname()}"


def _let_go(path: str, file: int, process: int) -> None:
    # A fork has a copy of the object, and not the lock.
    if os.getpid() == process:
        # The user may have deleted the directory.
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(file)
