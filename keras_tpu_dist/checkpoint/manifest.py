"""The manifest of a checkpoint: its arrays by path, and the state of training."""

import datetime
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_tpu_dist.checkpoint.compiled import is_saved
from keras_tpu_dist.checkpoint.names import Entry
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.input.position import is_position

# Version 2 packs small arrays into one: programs that know version 1 refuse it by its number.
VERSION = 2
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
    """

    entry: Entry
    key: str
    fingerprint: int
    axes: tuple = ()
    packed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        arrays: The arrays, by kind: `"weights"`, `"slots"`, `"optimizer"`, `"metrics"`, `"beside"`
            (what layers keep beside their variables), `"extra"`.
        training: The state of training: epoch, batches, history, callbacks, random numbers.
        written: The versions and the mesh of the program that wrote it.
        automatic: The names in paths that Keras gave; `None` if a callback of Keras saved. See
            `keras_tpu_dist.checkpoint.names.automatic_names`.
    """

    arrays: dict[str, tuple[Saved, ...]]
    training: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    automatic: frozenset[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a checksum."""
        content = {
            "version": VERSION,
            "written": self.written,
            "training": self.training,
            "arrays": {kind: [_row(row) for row in rows] for kind, rows in self.arrays.items()},
            "automatic": sorted(self.automatic or ()),
        }
        return {"crc32": _crc32(content), **content}

    def entries(self, kind: str) -> list[Entry]:
        """The entries of a kind, in their order."""
        return [saved.entry for saved in self.arrays.get(kind, ())]

    @property
    def run(self) -> str:
        """The id of the run."""
        return self.training["run"]

    @property
    def at_s(self) -> float:
        """The time of its writing, in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.written["at"]).timestamp()

    def objects(self, kind: str) -> list[tuple[str, int]]:
        """The names of the objects of a loop and the numbers of their arrays, in their order.

        Returns:
            A list; empty if unknown.
        """
        return [(name, count) for name, count in self.training.get("objects", {}).get(kind, ())]


def from_json(data: Any, where: str, step: int | None = None) -> Manifest:
    """Restores a manifest from plain data.

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
    except (_InvalidError, RecursionError, OverflowError) as error:
        raise checkpoint_error(
            f"{where} is damaged: its manifest is invalid.",
            received=f"{error}.",
            fix=_OTHER,
        ) from error
    own = data["training"].get("step", step)
    if step is not None and own != step:
        raise checkpoint_error(
            f"{where} is that of another step: its directory was renamed.",
            received={"name": step, "step in the manifest": own},
            fix=f"Rename it to {own}.",
        )
    arrays = {kind: tuple(_saved(row) for row in rows) for kind, rows in data["arrays"].items()}
    return Manifest(arrays, data["training"], data["written"], frozenset(data["automatic"]))


def _check_version(data: Mapping, where: str) -> None:
    version = data.get("version", 0)
    _expect(_is_count(version), "version", version)
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
    return row


def _saved(row: Mapping[str, Any]) -> Saved:
    entry = Entry(row["path"], tuple(row["shape"]), row["dtype"], row["slot"], row["nth"])
    packed = row.get("packed")
    packed = None if packed is None else (packed[0], packed[1])
    return Saved(entry, row["key"], row["fingerprint"], tuple(row["axes"]), packed)


class _InvalidError(ValueError):
    """A manifest has an invalid value."""


def _expect(right: bool, what: str, value: Any) -> None:
    if not right:
        raise _InvalidError(f"{what}={value!r:.80}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


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


def _check(data: Mapping) -> None:
    """Checks everything that is used later: a stranger may have written the file."""
    for name in ("arrays", "training", "written"):
        _expect(isinstance(data.get(name), dict), name, data.get(name))
    for kind, rows in data["arrays"].items():
        _expect(isinstance(rows, list), f"arrays.{kind}", rows)
        for row in rows:
            _check_row(row)
    automatic = data.get("automatic")
    _expect(isinstance(automatic, list) and all(map(_is_name, automatic)), "automatic", automatic)
    written = data["written"]
    mesh = written.get("mesh", {})
    _expect(isinstance(mesh, dict) and all(map(_is_count, mesh.values())), "written.mesh", mesh)
    _expect(_is_count(written.get("processes", 1)), "written.processes", written.get("processes"))
    _expect(_is_time(written.get("at")), "written.at", written.get("at"))
    _check_training(data["training"])
    _check_objects(data["training"].get("objects", {}), data["arrays"])


def _is_time(text: Any) -> bool:
    try:
        datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return False
    return True


def _check_objects(objects: Any, arrays: Mapping) -> None:
    _expect(isinstance(objects, dict), "training.objects", objects)
    for kind, named in objects.items():
        where = f"training.objects.{kind}"
        _expect(isinstance(named, list), where, named)
        for item in named:
            pair = isinstance(item, list) and len(item) == 2
            _expect(pair and _is_name(item[0]) and _is_count(item[1]), where, item)
        _expect(sum(count for _, count in named) == len(arrays.get(kind, ())), where, named)


def _check_row(row: Any) -> None:
    _expect(isinstance(row, dict), "arrays", row)
    for name in ("path", "dtype", "slot", "key"):
        _expect(_is_name(row.get(name)), name, row.get(name))
    for name in ("nth", "fingerprint"):
        _expect(_is_count(row.get(name)), name, row.get(name))
    shape, axes = row.get("shape"), row.get("axes")
    sized = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    _expect(sized and all(map(_is_count, shape)), "shape", shape)
    _expect(math.prod(shape or ()) <= _MOST, "shape", shape)
    _expect(isinstance(axes, list), "axes", axes)
    packed = row.get("packed")
    pair = isinstance(packed, list) and len(packed) == 2 and all(map(_is_count, packed))
    _expect(packed is None or pair, "packed", packed)
    _expect(_is_dtype_of_numbers(row["dtype"]), "dtype", row["dtype"])


def _is_dtype_of_numbers(name: str) -> bool:
    if not _DTYPE.fullmatch(name):
        return False
    try:
        # NumPy knows bfloat16 and the like once JAX is imported; their kind there is "V".
        return name != "void" and np.dtype(name).kind in "biufcV"
    except TypeError:
        return False


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("epoch", "done", "step"), _is_count),
    "stopped": lambda value: isinstance(value, bool),
    "run": _is_name,
    "compiled": is_saved,
    "reached": lambda value: value is None or _is_count(value),
    "global_seed": lambda value: (
        value is None
        or (isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)))
    ),
}


def _check_training(training: Mapping) -> None:
    """Checks the entries that exist: a `LoopCheckpoint` writes fewer of them."""
    for name, right in _KINDS.items():
        if name in training or name == "run":
            _expect(right(training.get(name)), f"training.{name}", training.get(name))
    for state in _listed(training, "callbacks"):
        _expect(isinstance(state, dict) and _is_name(state.get("class")), "callbacks", state)
        attributes = state.get("attributes", {})
        _expect(isinstance(attributes, dict), "callbacks.attributes", attributes)
    _expect(training.get("positions") != [], "training.positions", [])
    for position in _listed(training, "positions"):
        _expect(position is None or is_position(position), "training.positions", position)
    for name in ("history", "history_at_end"):
        history = training.get(name, {"epoch": [], "logs": {}})
        _expect(isinstance(history, dict), "training.history", history)
        epochs, logs = history.get("epoch"), history.get("logs")
        _expect(isinstance(epochs, list) and all(map(_is_count, epochs)), "history.epoch", epochs)
        lists = isinstance(logs, dict) and all(isinstance(values, list) for values in logs.values())
        _expect(lists, "history.logs", logs)


def _listed(training: Mapping, name: str) -> Iterator[Any]:
    found = training.get(name, [])
    _expect(isinstance(found, list), f"training.{name}", found)
    yield from found


def _crc32(content: Mapping) -> int:
    # Converted to JSON and back, because JSON turns tuples into lists and keys into strings: so the
    # content has the same checksum before it is written and after it is read.
    text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return zlib.crc32(text.encode())
