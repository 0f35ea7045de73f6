"""What a checkpoint holds, readable: its arrays by path, and where training stood."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from keras_tpu_dist.checkpoint.names import Entry

VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read, or is not whole.

    Example:

    >>> import keras, keras_tpu_dist as ktd, tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         ktd.restore(model, folder)
    ...     except ktd.CheckpointError as error:
    ...         print(str(error).replace(folder, "FOLDER"))
    There is no checkpoint in 'FOLDER'.
    """


@dataclass(frozen=True)
class Saved:
    """One array of a checkpoint.

    Attributes:
        entry: What it is.
        key: Its name in the store.
        fingerprint: That of its values. See `keras_tpu_dist.checkpoint.fingerprint`.
        axes: The mesh axes that split each dimension where it was written.
    """

    entry: Entry
    key: str
    fingerprint: int
    axes: tuple = ()


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        arrays: The arrays, by kind: `"weights"`, `"slots"`, `"optimizer"`, `"metrics"`, `"extra"`.
        training: Where training stood: epoch, batches, history, callbacks, random numbers.
        written: By what, and on which mesh.
    """

    arrays: dict[str, tuple[Saved, ...]]
    training: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a checksum."""
        content = {
            "version": VERSION,
            "written": self.written,
            "training": self.training,
            "arrays": {kind: [_row(each) for each in rows] for kind, rows in self.arrays.items()},
        }
        return {"crc32": _crc32(content), **content}

    def entries(self, kind: str) -> list[Entry]:
        """The entries of a kind, in their order.

        Args:
            kind: `"weights"`, for example.
        """
        return [each.entry for each in self.arrays.get(kind, ())]


def from_json(data: Any, where: str) -> Manifest:
    """The manifest of plain data.

    Args:
        data: What `Manifest.to_json` gave.
        where: The checkpoint, for errors.

    Raises:
        CheckpointError: If it is of a newer version, or was changed since.
    """
    if not isinstance(data, Mapping) or "arrays" not in data:
        raise CheckpointError(f"{where} has no manifest of keras_tpu_dist.")
    content = {key: value for key, value in data.items() if key != "crc32"}
    if data.get("version", 0) > VERSION:
        raise CheckpointError(
            f"{where} was written by a newer keras_tpu_dist "
            f"({data.get('written', {}).get('keras_tpu_dist')}). Update this one to read it."
        )
    if data.get("crc32") != _crc32(content):
        raise CheckpointError(f"{where} is damaged: its manifest was changed since it was written.")
    arrays = {kind: tuple(_saved(row) for row in rows) for kind, rows in data["arrays"].items()}
    return Manifest(arrays, data["training"], data["written"])


def _row(saved: Saved) -> dict[str, Any]:
    row = asdict(saved)
    return {**row.pop("entry"), **row}


def _saved(row: Mapping[str, Any]) -> Saved:
    own = row["path"], tuple(row["shape"]), row["dtype"], row["slot"]
    entry = Entry(*own, row.get("nth", 0))
    return Saved(entry, row["key"], row["fingerprint"], tuple(row["axes"]))


def _crc32(content: Mapping) -> int:
    # Once through JSON, so that it is the same before it is written and after it is read.
    text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return zlib.crc32(text.encode())
