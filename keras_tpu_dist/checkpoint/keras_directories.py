"""Directories of `keras.callbacks.OrbaxCheckpoint`, read as our own are."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from keras_tpu_dist.checkpoint.manifest import Manifest, Saved
from keras_tpu_dist.checkpoint.names import (
    METRICS,
    OPTIMIZER,
    SLOTS,
    WEIGHTS,
    Entry,
    in_order_of_numbers,
    named_state,
)
from keras_tpu_dist.checkpoint.store import check_stored, folder, orbax, to_read, told

_ARRAYS = "pytree"
# As Keras's `get_state_tree` names them. What is frozen now may have trained when it was saved.
_KINDS = {
    "trainable_variables": WEIGHTS,
    "non_trainable_variables": WEIGHTS,
    "optimizer_variables": OPTIMIZER,
    "metrics_variables": METRICS,
}


def is_directory_of_keras(directory: str | os.PathLike) -> bool:
    """Whether Keras's callback wrote a directory of checkpoints, or one of the checkpoints in it.

    Args:
        directory: The path.
    """
    path = folder(directory)
    if not path.is_dir():
        return False
    return (path / _ARRAYS).is_dir() or any(
        (each / _ARRAYS).is_dir() for each in path.iterdir() if each.name.isdigit()
    )


class KerasDirectory:
    """The checkpoints that `keras.callbacks.OrbaxCheckpoint` wrote; see `Store`.

    Keras saves arrays by the paths of variables and nothing else that would tell whether they are
    whole, so damage within an array is not found.

    Args:
        directory: That of the callback, or one of the checkpoints in it.
    """

    def __init__(self, directory: str | os.PathLike):
        self._path = folder(directory)
        self.directory = os.fspath(self._path)

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, the newest last."""
        if self._is_one:
            return [int(self._path.name) if self._path.name.isdigit() else 0]
        with told(self.directory, "read"):
            return sorted(orbax().utils.checkpoint_steps(self._path))

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint of a step holds.

        Args:
            step: The step.

        Raises:
            CheckpointError: If it cannot be read.
        """
        with told(self.directory, "read", step):
            tree = orbax().PyTreeCheckpointHandler().metadata(self._arrays(step)).tree
        arrays: dict[str, list[Saved]] = {kind: [] for kind in (WEIGHTS, SLOTS, OPTIMIZER, METRICS)}
        for group, kind in _KINDS.items():
            for path, leaf in _flat(tree.get(group) or {}):
                entry = Entry(path, tuple(leaf.shape), str(leaf.dtype))
                arrays[kind].append(Saved(entry, f"{group}/{path}", 0))
        arrays |= _slots_apart(arrays)
        optimizer = next((each.entry.path for each in arrays[OPTIMIZER]), "")
        return Manifest(
            {kind: tuple(in_order_of_numbers(each, _path_of)) for kind, each in arrays.items()},
            written={"optimizer": optimizer.partition("/")[0]},
        )

    def load(self, step: int, wanted: Sequence[tuple[Saved, Any, Any]]) -> list[Any]:
        """Reads arrays straight into their shards.

        Args:
            step: The step.
            wanted: See `Store.load`.

        Raises:
            CheckpointError: If one cannot be read.
        """
        if not wanted:
            return []
        ocp = orbax()
        target, how = to_read(wanted)
        restored = ocp.args.PyTreeRestore(
            item=_nested(target), restore_args=_nested(how), partial_restore=True
        )
        with told(self.directory, "read", step):
            tree = ocp.PyTreeCheckpointHandler().metadata(self._arrays(step)).tree
            check_stored(dict(_flat(tree)), [saved for saved, _, _ in wanted])
            reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
            found = dict(_flat(reader.restore(self._arrays(step), args=restored)))
        return [found[saved.key].astype(dtype) for saved, _, dtype in wanted]

    def close(self) -> None:
        """There is nothing to close."""

    @staticmethod
    def state_of(model: Any) -> dict[str, list[tuple[Entry, Any]]]:
        """The model's state with slots under the names that Keras saves, in the manifest's order.

        Args:
            model: The model.
        """
        state = named_state(model)
        state[SLOTS] = [
            (replace(each, slot=_after(each.path, variable.path)), variable)
            for each, variable in state[SLOTS]
        ]
        return {
            kind: in_order_of_numbers(pairs, lambda pair: pair[0].path)
            for kind, pairs in state.items()
        }

    @property
    def _is_one(self) -> bool:
        return (self._path / _ARRAYS).is_dir()

    def _arrays(self, step: int) -> Any:
        return (self._path if self._is_one else self._path / str(step)) / _ARRAYS


def _slots_apart(arrays: Mapping[str, list[Saved]]) -> dict[str, list[Saved]]:
    """Keras names a slot by its weight's path, joined with underscores, and by its own name."""
    by_name = {each.entry.path.replace("/", "_"): each.entry.path for each in arrays[WEIGHTS]}
    slots, rest = [], []
    for each in arrays[OPTIMIZER]:
        last = each.entry.path.rpartition("/")[2]
        names = [name for name in by_name if last.startswith(f"{name}_")]
        if not names:
            rest.append(each)
            continue
        path = by_name[max(names, key=len)]
        entry = Entry(path, each.entry.shape, each.entry.dtype, _after(path, each.entry.path))
        slots.append(Saved(entry, each.key, each.fingerprint))
    return {SLOTS: slots, OPTIMIZER: rest}


def _after(weight: str, slot: str) -> str:
    return slot.rpartition("/")[2].removeprefix(weight.replace("/", "_") + "_")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in tree.items():
        if isinstance(each, Mapping):
            yield from _flat(each, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", each


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, each in flat.items():
        *parts, last = path.split("/")
        inner = tree
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = each
    return tree


def _path_of(saved: Saved) -> str:
    return saved.entry.path
