"""The manifest of a checkpoint: its arrays by path, and the state of training."""

import datetime
import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_tpu_dist.checkpoint.compiled import COMPILED
from keras_tpu_dist.checkpoint.names import WEIGHTS, Entry
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.forms import DictOf, ListOf, Maybe, fits
from keras_tpu_dist.input.position import POSITION

# Version 2 packs small arrays into one, version 3 leaves weights out: programs that know a smaller
# version refuse it by its number.
_WITHOUT_BASE, VERSION = 2, 3
_OTHER = "Load another checkpoint: ktd.restore(model, directory, step=...)."
# The largest integer that JSON readers of all languages keep exactly.
_MOST = 2**53
_LONGEST_NAME = 2**12
_MOST_DIMENSIONS = 64
_DTYPE = re.compile(r"[a-z][a-z0-9_]{2,30}")
# The entries that `callbacks.Checkpoint` needs to resume.
OF_FIT = (
    "epoch",
    "done",
    "step",
    "stopped",
    "positions",
    "callbacks",
    "history",
    "global_seed",
    "compiled",
    "reached",
)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read, or is not complete.

    Example:

    >>> import keras, keras_tpu_dist as ktd, tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         ktd.restore(model, folder)
    ...     except ktd.CheckpointError as error:
    ...         print(str(error).replace(folder, "FOLDER").partition(" Received")[0])
    There is no checkpoint in 'FOLDER'.
    """


def checkpoint_error(
    rule: str, *, received: Mapping[str, object] | str, fix: str
) -> CheckpointError:
    """A `CheckpointError` to raise. See `common.errors.message`."""
    return CheckpointError(message(rule, received=received, fix=fix))


@dataclass(frozen=True)
class Saved:
    """One array of a checkpoint.

    Attributes:
        fingerprint: The fingerprint of its values. See `keras_tpu_dist.checkpoint.fingerprint`.
        axes: For every dimension, the mesh axes that split it when it was written.
        packed: If it is a part of the array of small arrays: where it begins, and the size of that
            array, in bytes.
        left_out: Whether the checkpoint has no values of it, because the run's base has them. Its
            fingerprint is then that of `keras_tpu_dist.checkpoint.fingerprint.identities`.
    """

    entry: Entry
    key: str
    fingerprint: int
    axes: tuple = ()
    packed: tuple[int, int] | None = None
    left_out: bool = False


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        arrays: The arrays, by kind: `"weights"`, `"slots"`, `"optimizer"`, `"metrics"`, `"beside"`
            (what layers keep beside their variables), `"extra"`.
        automatic: The names in paths that Keras gave. See
            `keras_tpu_dist.checkpoint.names.automatic_names`.
    """

    arrays: dict[str, tuple[Saved, ...]]
    training: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    automatic: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a checksum."""
        content = {
            "version": VERSION if self.left_out else _WITHOUT_BASE,
            "written": self.written,
            "training": self.training,
            "arrays": {kind: [_row(row) for row in rows] for kind, rows in self.arrays.items()},
            "automatic": sorted(self.automatic),
        }
        return {"crc32": _crc32(content), **content}

    def entries(self, kind: str) -> list[Entry]:
        """The entries of a kind, in their order.

        Args:
            kind: `"weights"`, for example.
        """
        return [saved.entry for saved in self.arrays.get(kind, ())]

    @property
    def left_out(self) -> list[Saved]:
        """The weights that it leaves out."""
        return [saved for saved in self.arrays.get(WEIGHTS, ()) if saved.left_out]

    @property
    def base(self) -> str | None:
        """What the user called the base that has what is left out, if known."""
        return self.written.get("base")

    @property
    def run(self) -> str:
        """The id of the run."""
        return self.training["run"]

    @property
    def at_s(self) -> float:
        """The time of its writing, in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.written["at"]).timestamp()

    @property
    def optimizers(self) -> dict[str, str]:
        """The classes of the optimizers that were saved, by their places, as far as is known."""
        kind = self.written.get("optimizer")
        return self.written.get("optimizers", {"": kind} if isinstance(kind, str) else {})

    def objects(self, kind: str) -> list[tuple[str, int]]:
        """The names of the objects of a loop and the numbers of their arrays, in their order."""
        return [(name, count) for name, count in self.training.get("objects", {}).get(kind, ())]


def from_json(data: Any, where: str, step: int | None = None) -> Manifest:
    """Restores a manifest from plain data.

    Args:
        data: The result of `Manifest.to_json`.
        where: The checkpoint, for errors.
        step: The step that its directory is named for; `None` if it has no such name.

    Raises:
        CheckpointError: If it has a newer version, was changed since it was written, or is that of
            another step.
    """
    if not isinstance(data, Mapping) or "arrays" not in data:
        raise checkpoint_error(
            f"{where} has no manifest of keras_tpu_dist.",
            received={"manifest": type(data).__name__},
            fix=_OTHER,
        )
    try:
        _check_version(data, where)
        _check(data)
    except (ValueError, RecursionError, OverflowError) as error:
        raise checkpoint_error(
            f"{where} is damaged: its manifest is invalid.",
            received=f"{error}.",
            fix=_OTHER,
        ) from error
    saved_step = data["training"].get("step", step)
    if step is not None and saved_step != step:
        raise checkpoint_error(
            f"{where} is that of another step: its directory was renamed.",
            received={"name": step, "step in the manifest": saved_step},
            fix=f"Rename it to {saved_step}.",
        )
    arrays = {kind: tuple(_saved(row) for row in rows) for kind, rows in data["arrays"].items()}
    return Manifest(arrays, data["training"], data["written"], frozenset(data["automatic"]))


def _check_version(data: Mapping, where: str) -> None:
    version = data.get("version", 0)
    if not _is_count(version):
        raise ValueError(f"version={version!r:.80}")
    if version > VERSION:
        written = data.get("written")
        by = written.get("keras_tpu_dist") if isinstance(written, Mapping) else None
        raise checkpoint_error(
            f"{where} was written by a newer keras_tpu_dist.",
            received={"written by": by, "version": version, "known up to": VERSION},
            fix="Update keras_tpu_dist to read it.",
        )
    if data.get("crc32") != _crc32({key: value for key, value in data.items() if key != "crc32"}):
        raise checkpoint_error(
            f"{where} is damaged: its manifest was changed since it was written.",
            received={"crc32": data.get("crc32")},
            fix=_OTHER,
        )


def _row(saved: Saved) -> dict[str, Any]:
    # `asdict` copies each of the values: a tenth of the time of a save of many small arrays.
    row = {**vars(saved.entry), **vars(saved)}
    del row["entry"]
    for name in ("optimizer", "left_out"):
        if not row[name]:
            del row[name]
    return row


def _saved(row: Mapping[str, Any]) -> Saved:
    shape, optimizer = tuple(row["shape"]), row.get("optimizer", "")
    entry = Entry(row["path"], shape, row["dtype"], row["slot"], row["nth"], optimizer)
    packed = row.get("packed")
    packed = None if packed is None else (packed[0], packed[1])
    left_out = row.get("left_out", False)
    return Saved(entry, row["key"], row["fingerprint"], tuple(row["axes"]), packed, left_out)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def check_name(path: str) -> None:
    """Raises a `CheckpointError` for a path that could not be read back."""
    if not _is_name(path):
        raise checkpoint_error(
            f"A path in a checkpoint has at most {_LONGEST_NAME:,} characters.",
            received={"path": f"{path[:60]}...", "characters": len(path)},
            fix="Give the model and its layers shorter names.",
        )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME


def _is_time(text: Any) -> bool:
    try:
        datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return False
    return True


def _is_shape(value: Any) -> bool:
    sized = fits(value, ListOf(_is_count)) and len(value) <= _MOST_DIMENSIONS
    return sized and math.prod(value) <= _MOST


def _is_dtype_of_numbers(name: Any) -> bool:
    if not (isinstance(name, str) and _DTYPE.fullmatch(name)):
        return False
    try:
        # NumPy knows bfloat16 and the like once JAX is imported; their kind there is "V".
        return name != "void" and np.dtype(name).kind in "biufcV"
    except TypeError:
        return False


_ROW = {
    **dict.fromkeys(("path", "slot", "key"), _is_name),
    **dict.fromkeys(("nth", "fingerprint"), _is_count),
    "shape": _is_shape,
    "dtype": _is_dtype_of_numbers,
    "axes": list,
    "packed": Maybe((None, [_is_count, _is_count])),
    "optimizer": Maybe(_is_name),
    "left_out": Maybe(bool),
}
_HISTORY = Maybe({"epoch": ListOf(_is_count), "logs": DictOf(list)})
_CALLBACK = {
    "class": _is_name,
    "attributes": Maybe(dict),
    "monitor": Maybe((None, _is_name)),
    "config": Maybe(DictOf(_is_name)),
}
# Of everything that is used later: a stranger may have written the file. A `LoopCheckpoint` writes
# fewer entries of "training".
_FORM = {
    "arrays": DictOf(ListOf(_ROW)),
    "automatic": ListOf(_is_name),
    "written": {
        "at": _is_time,
        "mesh": Maybe(DictOf(_is_count)),
        "processes": Maybe(_is_count),
        "optimizers": Maybe(DictOf(_is_name)),
        "base": Maybe((None, _is_name)),
    },
    "training": {
        "run": _is_name,
        **dict.fromkeys(("epoch", "done", "step"), Maybe(_is_count)),
        "stopped": Maybe(bool),
        "compiled": Maybe(COMPILED),
        "reached": Maybe((None, _is_count)),
        "global_seed": Maybe((None, [_is_count, _is_count])),
        "callbacks": Maybe(ListOf(_CALLBACK)),
        "positions": Maybe(lambda found: found != [] and fits(found, ListOf((None, POSITION)))),
        "history": _HISTORY,
        "history_at_end": _HISTORY,
        "objects": Maybe(DictOf(ListOf([_is_name, _is_count]))),
    },
}


def _check(data: Mapping) -> None:
    for name, form in _FORM.items():
        if not fits(data.get(name), form):
            raise ValueError(f"{name}={data.get(name)!r:.80}")
    for kind, named in data["training"].get("objects", {}).items():
        if sum(count for _, count in named) != len(data["arrays"].get(kind, ())):
            raise ValueError(f"objects={named!r:.80}")
    for kind, rows in data["arrays"].items():
        if kind != WEIGHTS and any(row.get("left_out") for row in rows):
            raise ValueError(f"left_out of {kind!r:.80}")


def _crc32(content: Mapping) -> int:
    # Converted to JSON and back, because JSON turns tuples into lists and keys into strings: so the
    # content has the same checksum before it is written and after it is read.
    text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return zlib.crc32(text.encode())
