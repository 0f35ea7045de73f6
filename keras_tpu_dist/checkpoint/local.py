"""Checkpoints on the hosts' own disks: every process writes the parts that it holds.

Every process has its own directory, in which a checkpoint is complete or absent, as in a `Store`.
To resume, the processes agree on the newest checkpoint for which they can read all parts together:
a process reads the parts on its host, and sends them to processes that lack them.

Orbax cannot do this. Its emergency manager needs two slices that are replicas of one another, and
its handlers write host arrays only in process 0. So all parts are in one file, which the manifest
describes.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.checkpoint.barriers import first_reason
from keras_tpu_dist.checkpoint.fingerprint import fingerprints
from keras_tpu_dist.checkpoint.keeping import (
    HALF,
    MANIFEST_FILE,
    Known,
    Lock,
    remove,
    replace_later,
    set_aside,
    settle,
    staying,
    whole_steps,
    written_at_s,
)
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Manifest, Saved, from_json
from keras_tpu_dist.checkpoint.names import named_state
from keras_tpu_dist.checkpoint.parts import (
    Layout,
    Parts,
    bounds,
    indices_by_process,
    layout_of,
    own_shards,
    parts_of,
)
from keras_tpu_dist.checkpoint.store import check_files, checkpoint_errors, folder
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.paths import absolute_path
from keras_tpu_dist.processes.arrays import sent
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.encoding import ListOf, check_form

logger = logging.getLogger("keras_tpu_dist")

_FIX = "Pass the same Checkpoint callback to fit in all processes."
_OTHER = "The next one is tried."
_OF_PROCESS = re.compile(r"process_(0|[1-9]\d{0,9})")
# This file may be large, and `store.check_files` skips directories called "d".
_PARTS_FILE = ("arrays", "d", "parts")
# The states of a process's newest checkpoint.
NONE, BUSY, FAILED, WHOLE = "none", "busy", "failed", "whole"
# The largest number of checkpoints that a process reports.
_MOST_REPORTED = 16
_MOST_BYTES_OF_A_MANIFEST = 64 * 2**20


@dataclass(frozen=True)
class Copy:
    """The parts of a checkpoint that one process wrote.

    Attributes:
        directory: The process's directory.
        manifest: Its manifest.
        parts: The description of its parts.
    """

    directory: str
    manifest: Manifest
    parts: Parts

    def read(self, step: int, saved: Saved, cell: int) -> np.ndarray:
        """Reads a part of an array.

        Args:
            step: The checkpoint.
            saved: The array.
            cell: The part; see `parts.Layout`.

        Raises:
            ValueError: If its values differ from the saved ones.
            OSError: If it cannot be read.
        """
        layout, dtype = self.parts.layout(saved.key), np.dtype(saved.entry.dtype)
        number = self.parts.own_cells(saved.key)[cell]
        shape = [stop - start for start, stop in layout.index(cell, saved.entry.shape)]
        size = math.prod(shape) * dtype.itemsize
        flat = np.empty(size, np.uint8)
        with open(os.path.join(self.directory, str(step), *_PARTS_FILE), "rb") as file:
            file.seek(self._offsets[saved.key] + number * size)
            done = file.readinto(flat.data) if size else 0
        if done != size or zlib.crc32(flat.data) != self.parts.crc32[saved.key][number]:
            raise ValueError(f"values that differ from the saved ones for {saved.entry.path}")
        return flat.view(dtype).reshape(shape)

    @functools.cached_property
    def _offsets(self) -> dict[str, int]:
        """The offsets of the arrays' parts in the file, and the end of all parts under ""."""
        found, total = {}, 0
        for saved in _in_order(self.manifest):
            found[saved.key] = total
            size = math.prod(saved.entry.shape) * np.dtype(saved.entry.dtype).itemsize
            cells = len(self.parts.layout(saved.key).holders)
            total += size // cells * len(self.parts.own_cells(saved.key))
        return found | {"": total}

    @property
    def size(self) -> int:
        """The bytes of all parts."""
        return self._offsets[""]


@dataclass(frozen=True)
class Found:
    """A checkpoint for which the processes can read all parts together.

    Attributes:
        step: Its step.
        mark: The mark that its copies have in common.
        writers: For every process, the writers whose parts it can read.
    """

    step: int
    mark: str
    writers: tuple[tuple[int, ...], ...]


class LocalTier:
    """The checkpoints of a fit on the disks of its hosts.

    Args:
        directory: A directory on this host's disk; every process has a subdirectory.
        asynchronous: Whether `save` returns as soon as the values are copied from the devices.

    Attributes:
        directory: The absolute path of the directory.
        found: The checkpoint to resume from, or `None`.
        saved_step: The step of the newest checkpoint of this fit, also if it could not be written.
        is_busy: Whether a process was still writing a checkpoint when `hear` was called.

    Raises:
        CheckpointError: If the directory cannot be used.
    """

    # The same as in `Store`, because `restore.load` reads from both.
    state_of = staticmethod(named_state)

    def __init__(self, directory: str | os.PathLike, asynchronous: bool):
        self.directory = absolute_path(directory)
        self.found: Found | None = None
        self.saved_step: int | None = None
        self._own = os.path.join(self.directory, f"process_{jax.process_index()}")
        self._asynchronous = asynchronous
        self._writing: threading.Thread | None = None
        self._failed: BaseException | None = None
        # The newest checkpoint, until all processes know that it is complete everywhere.
        self._pending: int | None = None
        self._is_finite = True
        # The checkpoints that are complete in all processes.
        self._known: dict[int, Known] = {}
        self.is_busy, self._is_confirmed = False, False
        self._copies: dict[int, Copy] = {}
        self._manifest: Manifest | None = None
        self._parts: Parts | None = None
        # Damaged copies: step, mark, writer.
        self._bad: set[tuple[int, str, int]] = set()
        with checkpoint_errors(self._own, "opened"):
            os.makedirs(self._own, exist_ok=True)
            self._lock = Lock(self._own)
            try:
                settle(self._root)
            except BaseException:
                self._lock.release()
                raise

    @property
    def _root(self) -> Any:
        return folder(self._own)

    # Saving.

    @property
    def standing(self) -> str:
        """The state of this process's newest checkpoint, to send to the others."""
        if self._writing is not None and self._writing.is_alive():
            return BUSY
        if self._pending is None:
            return NONE
        return WHOLE if self._failed is None else FAILED

    def hear(self, standings: Sequence[str]) -> None:
        """Notes the states of all processes: a checkpoint that is complete everywhere replaces
        older ones.

        Args:
            standings: The state of every process.
        """
        self.is_busy = BUSY in standings
        if set(standings) == {WHOLE} and self._pending is not None:
            self._known = {**self._known, self._pending: Known(True, self._is_finite)}
            self._pending, self._is_confirmed = None, True

    def save(self, step: int, arrays: Mapping[str, Any], manifest: Callable[[], Manifest]) -> None:
        """Saves the parts of a checkpoint that this process holds; see `asynchronous`.

        Args:
            step: Its number.
            arrays: The arrays by key.
            manifest: A function that returns their description; called in the background.

        Raises:
            CheckpointError: If it could not be written.
        """
        # Equal in all processes, even if saving fails, because their next common action depends on
        # it.
        self.saved_step = step
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("training continued without a local checkpoint. %s", error)
        self._pending = None
        with checkpoint_errors(self._own, "written", step):
            layouts = {key: layout_of(array) for key, array in arrays.items()}
            shards = {key: own_shards(array, layouts[key]) for key, array in arrays.items()}
            cells = _on_host(shards)
        self._pending = step
        self._writing = threading.Thread(
            target=self._write,
            args=(step, layouts, cells, manifest),
            name=f"local checkpoint {step}",
            # At exit, the process waits for this thread, as for Orbax's.
            daemon=False,
        )
        self._writing.start()
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
            CheckpointError: If it could not be written.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        failed, self._failed = self._failed, None
        if failed is not None:
            self._pending = None
            with checkpoint_errors(self._own, "written"):
                raise failed

    def _write(
        self,
        step: int,
        layouts: Mapping[str, Layout],
        cells: dict[str, list[np.ndarray]],
        manifest: Callable[[], Manifest],
    ) -> None:
        try:
            self._delete_older(step)
            half = os.path.join(self._own, f"{step}{HALF}")
            path = os.path.join(half, *_PARTS_FILE)
            os.makedirs(os.path.dirname(path))
            described = manifest()
            self._is_finite = described.written.get("finite") is not False
            with open(path, "wb") as file:
                order = [each.key for each in _in_order(described)]
                crc32 = {key: _written(file, cells.pop(key)) for key in order}
                _flush(file)
            distinct = list(dict.fromkeys(layouts.values()))
            parts = Parts(
                process=jax.process_index(),
                processes=jax.process_count(),
                layouts=tuple(distinct),
                of={key: distinct.index(layout) for key, layout in layouts.items()},
                crc32=crc32,
            )
            path = os.path.join(half, *MANIFEST_FILE)
            os.makedirs(os.path.dirname(path))
            with open(path, "w", encoding="utf-8") as file:
                json.dump(replace(described, parts=parts.to_json()).to_json(), file)
                _flush(file)
            done = self._root / str(step)
            if done.exists():
                replace_later(done)
            os.rename(half, done)
            _copy(self._own, step)  # read back
            settle(self._root)
        except BaseException as error:
            self._failed = error
            try:
                settle(self._root)
            except OSError as another:
                logger.warning("%s cannot be cleaned up: %s", self._own, another)

    def _delete_older(self, step: int) -> None:
        """Deletes checkpoints older than the newest one that is complete in all processes."""
        if not self._known:
            return
        stay = staying(self._known, keep=1, best=None) | {step}
        for other in whole_steps(self._root, local=True):
            if other not in stay:
                remove(self._root / str(other))
        self._known = {other: known for other, known in self._known.items() if other in stay}
        if self._is_confirmed:
            self._delete_of_others()

    def _delete_of_others(self) -> None:
        """Deletes the directories on this disk of processes that are gone."""
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            if not _OF_PROCESS.fullmatch(name) or path == self._own:
                continue
            # A running process holds the lock.
            with contextlib.suppress(CheckpointError, OSError):
                lock = Lock(path)
                try:
                    remove(folder(path))
                finally:
                    lock.release()

    def close(self) -> None:
        """Waits for the last checkpoint, and lets other processes write.

        Raises:
            CheckpointError: If the last checkpoint could not be written.
        """
        try:
            self.wait()
        finally:
            self._lock.release()

    # Resuming.

    def look_for(self, run: str | None, step: int, at_s: float) -> None:
        """Agrees on a run's newest checkpoint for which all parts can be read.

        Args:
            run: The run, or `None`.
            step: Only checkpoints with a larger step count.
            at_s: Only checkpoints that are not older count, in seconds since 1970.
        """
        self.found = None
        here = {}
        if run is not None:
            try:
                here = self._copies_of(run)
            except (OSError, CheckpointError) as error:
                logger.warning("no local checkpoint of this host is used: %s", error)
        reported = [
            [number, max(map(_written_at_s, copies.values())), mark, sorted(copies)]
            for (number, mark), copies in here.items()
        ]
        what = "looking for local checkpoints"
        form = ListOf([int, float, str, ListOf(int)])
        found = agree(what, _FIX, reported[-_MOST_REPORTED:], form, reduce=_candidates)
        check_form(found, ListOf([int, float, str, ListOf(ListOf(int))]), where=what)
        newer = [
            Found(number, mark, _expanded(writers))
            for number, at, mark, writers in found
            if number > step and at >= at_s
        ]
        if not newer:
            return
        whole = [_is_whole(each, here.get((each.step, each.mark), {})) for each in newer]
        covered = agree(what, _FIX, whole, ListOf((None, bool)), reduce=_any_of_each)
        check_form(covered, [bool] * len(newer), where=what)
        self.found = next((each for each, is_whole in zip(newer, covered) if is_whole), None)
        if self.found is not None:
            self._copies = here.get((self.found.step, self.found.mark), {})
            self._share_manifest(self.found)

    def _copies_of(self, run: str) -> dict[tuple[int, str], dict[int, Copy]]:
        """The copies of a run on this disk, by step and mark and then by writer, oldest first."""
        found: dict[tuple[int, str], dict[int, Copy]] = {}
        for name in sorted(os.listdir(self.directory)):
            directory = os.path.join(self.directory, name)
            if not _OF_PROCESS.fullmatch(name) or not os.path.isdir(directory):
                continue
            for step in whole_steps(folder(directory), local=True):
                try:
                    copy = _copy(directory, step)
                except CheckpointError as error:
                    logger.warning("local checkpoint %d is ignored. %s", step, error)
                    continue
                mark, writer = _mark(copy), copy.parts.process
                if copy.manifest.training.get("run") != run:
                    continue
                if (step, mark, writer) not in self._bad:
                    found.setdefault((step, mark), {}).setdefault(writer, copy)
        return dict(sorted(found.items()))

    def _share_manifest(self, found: Found) -> None:
        """Sends the manifest to processes without a copy."""
        have = [process for process, writers in enumerate(found.writers) if writers]
        mine = next(iter(self._copies.values()), None)
        if len(have) == len(found.writers):
            assert mine is not None
            self._manifest, self._parts = mine.manifest, mine.parts
            return
        is_source = jax.process_index() == have[0]
        text = json.dumps(mine.manifest.to_json()).encode() if is_source and mine else b""
        what = f"sending the manifest of local checkpoint {found.step}"
        size = agree(what, _FIX, len(text), int, reduce=max)
        check_form(size, int, where=what)
        if not 0 < size <= _MOST_BYTES_OF_A_MANIFEST:
            raise _damaged(found.step, self.directory, f"a manifest of {size} bytes")
        flat = sent(have[0], size, np.frombuffer(text, np.uint8) if is_source else None)
        where = f"Local checkpoint {found.step}"
        with checkpoint_errors(self.directory, "read", found.step):
            self._manifest = from_json(json.loads(flat.tobytes()), where)
            self._parts = parts_of(self._manifest)

    def manifest(self, step: int) -> Manifest:
        """The manifest of the checkpoint in `found`.

        Args:
            step: Its step.
        """
        assert self._manifest is not None, step
        return self._manifest

    def set_later_aside(self, step: int) -> None:
        """Sets aside this process's checkpoints with a larger step: the run returns to an earlier.

        Args:
            step: The step that it returns to.

        Raises:
            CheckpointError: If it cannot be done.
        """
        self.found, self._known = None, {}
        with checkpoint_errors(self._own, "written"):
            for later in whole_steps(self._root, local=True):
                if later > step:
                    set_aside(self._root / str(later), later, _read_manifest(self._own, later).run)

    def goes_on(self) -> None:
        """Notes that the fit resumes from `found`: it stays until a newer one is complete."""
        assert self.found is not None
        assert self._manifest is not None
        finite = self._manifest.written.get("finite") is not False
        self._known = {self.found.step: Known(True, finite)}
        self.saved_step = self.found.step

    def load(self, step: int, wanted: Sequence[tuple[Saved, Any, Any]]) -> list[Any]:
        """Reads arrays, every part from a host that has it, and checks their values.

        Args:
            step: The step of `found`.
            wanted: See `Store.load`.

        Raises:
            CheckpointError: In all processes, if one cannot read its parts, or values differ from
                the saved ones. The next `look_for` leaves damaged copies out.
        """
        if not wanted:
            return []
        plans = [self._plan(saved, sharding) for saved, sharding, _ in wanted]
        cells: dict[tuple[int, int], np.ndarray] = {}
        error = None
        for number, (plan, (saved, _, _)) in enumerate(zip(plans, wanted)):
            for cell in plan.read if error is None else ():
                try:
                    cells[number, cell] = self._read(step, saved, cell)
                except (OSError, ValueError) as caught:
                    error = caught
        reason = None if error is None else f"{type(error).__name__}: {error}"[:300]
        what = f"reading local checkpoint {step}"
        failed = agree(what, _FIX, reason, (None, str), reduce=first_reason)
        if failed is not None:
            raise _damaged(step, self.directory, str(failed))
        self._exchange(wanted, plans, cells)
        arrays = [
            self._assembled(saved, sharding, {c: cells[i, c] for c in plans[i].needed})
            for i, (saved, sharding, _) in enumerate(wanted)
        ]
        numbers = fingerprints(arrays)
        wrong = [each.entry.path for (each, *_), n in zip(wanted, numbers) if each.fingerprint != n]
        if wrong:
            self._leave_out(step, range(self._whole_parts.processes))
            received = f"values that differ from the saved ones for {wrong[0]}"
            raise _damaged(step, self.directory, received)
        return [array.astype(dtype) for array, (_, _, dtype) in zip(arrays, wanted)]

    @property
    def _whole_parts(self) -> Parts:
        assert self._parts is not None
        return self._parts

    def _read(self, step: int, saved: Saved, cell: int) -> np.ndarray:
        """Reads a part from any undamaged copy on this disk."""
        holders = self._whole_parts.layout(saved.key).holders[cell]
        error: Exception = ValueError(f"no copy of {saved.entry.path}")
        for writer in [each for each in holders if each in self._copies]:
            try:
                return self._copies[writer].read(step, saved, cell)
            except (OSError, ValueError) as caught:
                error = caught
                self._leave_out(step, [writer])
        raise error

    def _leave_out(self, step: int, writers: Iterable[int]) -> None:
        assert self.found is not None
        self._bad |= {(step, self.found.mark, writer) for writer in writers}

    def _plan(self, saved: Saved, sharding: Any) -> "_Plan":
        assert self.found is not None
        layout = self._whole_parts.layout(saved.key)
        return _plan_of(layout, saved.entry.shape, sharding, self.found.writers)

    def _exchange(
        self,
        wanted: Sequence[tuple[Saved, Any, Any]],
        plans: Sequence["_Plan"],
        cells: dict[tuple[int, int], np.ndarray],
    ) -> None:
        """Sends parts to processes that need them and do not have them."""
        moved: dict[int, list[tuple[int, int]]] = {}
        for number, plan in enumerate(plans):
            for cell, source in plan.moved:
                moved.setdefault(source, []).append((number, cell))
        for source, those in sorted(moved.items()):
            described = [self._described(wanted[number][0], cell) for number, cell in those]
            sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in described]
            flat = None
            if source == jax.process_index():
                flat = np.concatenate([_bytes_of(cells[each]) for each in those])
            flat = sent(source, sum(sizes), flat)
            ends = np.cumsum(sizes)
            for each, (shape, dtype), end, size in zip(those, described, ends, sizes):
                if each not in cells and each[1] in plans[each[0]].needed:
                    part = flat[end - size : end].copy()
                    cells[each] = part.view(dtype).reshape(shape)

    def _described(self, saved: Saved, cell: int) -> tuple[list[int], np.dtype]:
        index = self._whole_parts.layout(saved.key).index(cell, saved.entry.shape)
        return [stop - start for start, stop in index], np.dtype(saved.entry.dtype)

    def _assembled(self, saved: Saved, sharding: Any, cells: dict[int, np.ndarray]) -> Any:
        layout, shape = self._whole_parts.layout(saved.key), saved.entry.shape

        def part(index: Any) -> np.ndarray:
            box = bounds(index, shape)
            inside = layout.cells_in(box, shape)
            if len(inside) == 1 and layout.index(inside[0], shape) == box:
                return cells[inside[0]]
            result = np.empty([stop - start for start, stop in box], saved.entry.dtype)
            for cell in inside:
                _paste(result, box, cells[cell], layout.index(cell, shape))
            return result

        if sharding is None:
            return part(tuple(slice(0, size) for size in shape))
        return jax.make_array_from_callback(shape, sharding, part)


@dataclass(frozen=True)
class _Plan:
    """The transfers of an array's parts.

    Attributes:
        needed: The parts that this process needs.
        read: The parts that it reads from its disk.
        moved: The parts that are sent to all, with the process that sends them.
    """

    needed: frozenset[int]
    read: tuple[int, ...]
    moved: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4096)
def _plan_of(
    layout: Layout,
    shape: tuple[int, ...],
    sharding: Any,
    writers: tuple[tuple[int, ...], ...],
) -> _Plan:
    """The plan for an array; only `needed` and `read` differ between processes."""
    readers: dict[int, list[int]] = {}
    for process, those in enumerate(writers):
        for writer in those:
            readers.setdefault(writer, []).append(process)
    needs = _needs(layout, shape, sharding, len(writers))
    needed_by: dict[int, set[int]] = {}
    for process, cells in needs.items():
        for cell in cells:
            needed_by.setdefault(cell, set()).add(process)
    here, own, moved = jax.process_index(), [], []
    for cell, holders in enumerate(layout.holders):
        have = {process for writer in holders for process in readers.get(writer, ())}
        lacks = not have.issuperset(needed_by.get(cell, ()))
        # The processes that have parts take turns at sending.
        source = sorted(have)[cell % len(have)] if lacks else -1
        if lacks:
            moved.append((cell, source))
        if here in have and (cell in needs[here] or source == here):
            own.append(cell)
    return _Plan(needs[here], tuple(own), tuple(moved))


def _needs(
    layout: Layout, shape: tuple[int, ...], sharding: Any, processes: int
) -> dict[int, frozenset[int]]:
    """The parts that every process needs."""
    if sharding is None or sharding.is_fully_addressable:
        return dict.fromkeys(range(processes), frozenset(range(len(layout.holders))))
    places = indices_by_process(sharding, shape)
    return {
        process: frozenset(
            cell for index in places.get(process, ()) for cell in layout.cells_in(index, shape)
        )
        for process in range(processes)
    }


def _paste(result: np.ndarray, box: Any, part: np.ndarray, place: Any) -> None:
    to, of = [], []
    for (low, high), (start, stop) in zip(box, place):
        first, last = max(low, start), min(high, stop)
        to.append(slice(first - low, last - low))
        of.append(slice(first - start, last - start))
    result[tuple(to)] = part[tuple(of)]


def _on_host(shards: Mapping[str, Sequence[Any]]) -> dict[str, list[np.ndarray]]:
    """Copies arrays to host memory; it starts all transfers before it waits for one."""
    for each in shards.values():
        for shard in each:
            if isinstance(shard, jax.Array):
                shard.copy_to_host_async()
    # Copies, because on CPU devices NumPy would share memory that the next step overwrites.
    return {key: [np.array(shard) for shard in each] for key, each in shards.items()}


def _in_order(manifest: Manifest) -> list[Saved]:
    return [saved for kind in manifest.arrays.values() for saved in kind]


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _written(file: Any, cells: Sequence[np.ndarray]) -> list[int]:
    found = []
    for cell in cells:
        flat = _bytes_of(cell).data
        file.write(flat)
        found.append(zlib.crc32(flat))
    return found


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _read_manifest(directory: str, step: int) -> Manifest:
    with checkpoint_errors(directory, "read", step):
        check_files(directory, str(step))
        with open(os.path.join(directory, str(step), *MANIFEST_FILE), encoding="utf-8") as file:
            content = json.load(file)
    return from_json(content, f"Checkpoint {step} of {directory!r}", step)


def _copy(directory: str, step: int) -> Copy:
    """The parts of a checkpoint that a process wrote.

    Raises:
        CheckpointError: If they are incomplete.
    """
    manifest = _read_manifest(directory, step)
    with checkpoint_errors(directory, "read", step):
        found = Copy(directory, manifest, parts_of(manifest))
        status = os.stat(os.path.join(directory, str(step), *_PARTS_FILE))
        if not stat.S_ISREG(status.st_mode) or status.st_size != found.size:
            raise ValueError(f"its parts have {status.st_size} bytes, not {found.size}")
    return found


def _mark(copy: Copy) -> str:
    """A checksum that is equal for the copies of one checkpoint."""
    training, parts = copy.manifest.training, copy.parts.to_json()
    content = [
        [asdict(saved) for saved in _in_order(copy.manifest)],
        [training.get(name) for name in ("run", "step", "epoch", "done", "stopped")],
        [parts[name] for name in ("processes", "sets", "layouts", "of")],
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _written_at_s(copy: Copy) -> float:
    return written_at_s(copy.manifest.written) or 0.0


def _candidates(reported: list[list[list[Any]]]) -> list[list[Any]]:
    """The checkpoints with copies, the newest first, with the writers that every process can read.

    Args:
        reported: For every process, the step, time, mark and writers of the copies it can read.
    """
    found: dict[tuple[int, str], list[list[int]]] = {}
    times: dict[tuple[int, str], float] = {}
    for process, copies in enumerate(reported):
        for step, at, mark, writers in copies:
            key = step, mark
            found.setdefault(key, [[] for _ in reported])[process] = writers
            times[key] = max(at, times.get(key, at))
    newest = sorted(found, key=lambda key: (key[0], times[key]), reverse=True)[:_MOST_REPORTED]
    return [[step, times[step, mark], mark, _short(found[step, mark])] for step, mark in newest]


def _short(writers: list[list[int]]) -> list[list[int]]:
    """The writers by process, without processes that read only their own copy, as is usual."""
    return [[process, *each] for process, each in enumerate(writers) if each != [process]]


def _expanded(short: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    others = {each[0]: tuple(each[1:]) for each in short if each}
    return tuple(others.get(process, (process,)) for process in range(jax.process_count()))


def _is_whole(found: Found, copies: Mapping[int, Copy]) -> bool | None:
    """Whether all parts exist; `None` if this process has no copy to find out from."""
    here = {writer for writers in found.writers for writer in writers}
    for copy in copies.values():
        return copy.parts.covered_without(set(range(copy.parts.processes)) - here)
    return None


def _any_of_each(reported: list[list[bool | None]]) -> list[bool]:
    return [any(each) for each in zip(*reported)]


def _damaged(step: int, directory: str, received: str) -> CheckpointError:
    rule = f"Local checkpoint {step} of {directory!r} cannot be read."
    return CheckpointError(message(rule, received=f"{received}.", fix=_OTHER))
