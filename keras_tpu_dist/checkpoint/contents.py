"""The contents of a directory of checkpoints, for the shell's command."""

import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from keras_tpu_dist.checkpoint.manifest import CheckpointError
from keras_tpu_dist.checkpoint.names import (
    OPTIMIZER,
    SLOTS,
    WEIGHTS,
)
from keras_tpu_dist.checkpoint.reader import CheckpointReader
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.common.sizes import bytes_of
from keras_tpu_dist.show.text import size_text, text_table


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint.

    Attributes:
        epoch: The epoch in which training resumes, from 1.
        bytes: The bytes of the weights and the optimizer's state that it has.
        left_out: The bytes of the weights that it leaves out; see `Checkpoint(only="trained")`.
        base: What the user called the base that has them.
        written: The time, program versions and mesh of its writing.
    """

    step: int
    epoch: int = 0
    batches: int = 0
    parameters: int = 0
    bytes: int = 0
    written: tuple[tuple[str, Any], ...] = ()
    problem: str = ""
    left_out: int = 0
    base: str | None = None


@dataclass(frozen=True, repr=False)
class Contents(Printed):
    """The contents of a directory of checkpoints."""

    directory: str
    rows: tuple[CheckpointRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)

    def __str__(self):
        if not self.rows:
            return f"{self.directory}: no checkpoint"
        header = ("step", "epoch", "batches", "parameters", "size", "mesh", "processes", "written")
        cells = [_cells(row) for row in self.rows]
        if any(row.left_out for row in self.rows):
            header += ("left out", "base")
            cells = [
                (*of_row, size_text(row.left_out), row.base or "")
                for of_row, row in zip(cells, self.rows, strict=True)
            ]
        return f"{self.directory}\n{text_table(header, cells)}"


def contents(directory: str | os.PathLike) -> Contents:
    """Lists the contents of a directory of checkpoints, without reading values.

    Args:
        directory: The directory.
    """
    reader = CheckpointReader(directory)
    return Contents(reader.directory, tuple(_row(reader, step) for step in reader.steps))


def _row(reader: CheckpointReader, step: int) -> CheckpointRow:
    try:
        manifest = reader.manifest(step)
    except CheckpointError as error:
        return CheckpointRow(step, problem=str(error))
    size = sum(
        bytes_of(entry) for kind in (WEIGHTS, SLOTS, OPTIMIZER) for entry in manifest.entries(kind)
    )
    left_out = sum(bytes_of(saved.entry) for saved in manifest.left_out)
    return CheckpointRow(
        step,
        manifest.training.get("epoch", 0) + 1,
        manifest.training.get("done", 0),
        sum(int(np.prod(entry.shape)) for entry in manifest.entries(WEIGHTS)),
        size - left_out,
        tuple(manifest.written.items()),
        left_out=left_out,
        base=manifest.base,
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
