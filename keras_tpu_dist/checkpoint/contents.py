"""The contents of a directory of checkpoints, for the shell's command."""

import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from keras_tpu_dist.checkpoint.manifest import CheckpointError, Saved
from keras_tpu_dist.checkpoint.names import (
    METRICS,
    OPTIMIZER,
    SLOTS,
    WEIGHTS,
    without_numbers,
)
from keras_tpu_dist.checkpoint.reader import CheckpointReader, none_in
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.show.text import size_text, text_table


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint.

    Attributes:
        epoch: The epoch in which training resumes, from 1.
        bytes: The bytes of the weights and the optimizer's state.
        written: The time, program versions and mesh of its writing.
        problem: Why it cannot be read, or `""`.
    """

    step: int
    epoch: int = 0
    batches: int = 0
    parameters: int = 0
    bytes: int = 0
    written: tuple[tuple[str, Any], ...] = ()
    problem: str = ""


@dataclass(frozen=True, repr=False)
class Contents(Printed):
    """The contents of a directory of checkpoints.

    Attributes:
        rows: One row per checkpoint, the newest last.
    """

    directory: str
    rows: tuple[CheckpointRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)

    def __str__(self):
        if not self.rows:
            return f"{self.directory}: no checkpoint"
        header = ("step", "epoch", "batches", "parameters", "size", "mesh", "processes", "written")
        return f"{self.directory}\n{text_table(header, [_cells(row) for row in self.rows])}"


@dataclass(frozen=True, repr=False)
class Difference(Printed):
    """How two checkpoints differ.

    Attributes:
        only_first: Paths that are missing in the second checkpoint.
        only_second: Paths that are missing in the first checkpoint.
        changed: Paths of arrays that differ, with the difference.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[tuple[str, str], ...]
    same: int

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)

    def __str__(self):
        lines = [f"{self.same} arrays are equal, {len(self.changed)} differ"]
        lines += [f"  {path}: {how}" for path, how in self.changed]
        lines += [f"  only in the first: {path}" for path in self.only_first]
        lines += [f"  only in the second: {path}" for path in self.only_second]
        return "\n".join(lines)


def contents(directory: str | os.PathLike) -> Contents:
    """Lists the contents of a directory of checkpoints, without reading values.

    Raises:
        CheckpointError: If it does not exist.
    """
    reader = CheckpointReader(directory)
    return Contents(reader.directory, tuple(_row(reader, step) for step in reader.steps))


def difference(first: str | os.PathLike, second: str | os.PathLike) -> Difference:
    """Compares the newest checkpoints of two directories by their manifests.

    Raises:
        CheckpointError: If one of them has no readable checkpoint.
    """
    one, other = _arrays(first), _arrays(second)
    both = [name for name in one if name in other]
    changed = [(name, _change(one[name], other[name])) for name in both]
    return Difference(
        tuple(name for name in one if name not in other),
        tuple(name for name in other if name not in one),
        tuple((name, how) for name, how in changed if how),
        sum(not how for _, how in changed),
    )


def _row(reader: CheckpointReader, step: int) -> CheckpointRow:
    try:
        manifest = reader.manifest(step)
    except CheckpointError as error:
        return CheckpointRow(step, problem=str(error))
    # NumPy knows bfloat16 and similar dtypes after JAX is imported.
    size = sum(
        int(np.prod(entry.shape)) * np.dtype(entry.dtype).itemsize
        for kind in (WEIGHTS, SLOTS, OPTIMIZER)
        for entry in manifest.entries(kind)
    )
    return CheckpointRow(
        step,
        manifest.training.get("epoch", 0) + 1,
        manifest.training.get("done", 0),
        sum(int(np.prod(entry.shape)) for entry in manifest.entries(WEIGHTS)),
        size,
        tuple(manifest.written.items()),
    )


def _cells(row: CheckpointRow) -> tuple[str, ...]:
    if row.problem:
        return (str(row.step), f"cannot be read: {row.problem}", *([""] * 6))
    written = dict(row.written)
    mesh = " x ".join(f"{n} {size}" for n, size in written.get("mesh", {}).items()) or "one device"
    numbers = (row.step, row.epoch, row.batches, f"{row.parameters:,}")
    return (
        *map(str, numbers),
        size_text(row.bytes),
        mesh,
        str(written.get("processes", "")),
        str(written.get("at", "")).partition(".")[0],  # to seconds
    )


def _arrays(directory: str | os.PathLike) -> dict[str, Saved]:
    reader = CheckpointReader(directory)
    steps = reader.steps_of_run
    if not steps:
        raise none_in(reader.directory)
    manifest = reader.manifest(steps[-1])
    found: dict[str, Saved] = {}
    seen: Counter[str] = Counter()
    for kind in (WEIGHTS, SLOTS, OPTIMIZER, METRICS):
        for saved in manifest.arrays.get(kind, ()):
            # Without Keras's numbers, which differ between processes; equal names get a number.
            path = without_numbers(saved.entry.path, manifest.automatic or ())
            name = "/".join(filter(None, (kind, saved.entry.slot, path)))
            seen[name] += 1
            found[f"{name} ({seen[name]})" if seen[name] > 1 else name] = saved
    return found


def _change(one: Saved, other: Saved) -> str:
    a, b = one.entry, other.entry
    if a.shape != b.shape:
        return f"shape {a.shape} and {b.shape}"
    if a.dtype != b.dtype:
        return f"{a.dtype} and {b.dtype}"
    return "" if one.fingerprint == other.fingerprint else "different values"
