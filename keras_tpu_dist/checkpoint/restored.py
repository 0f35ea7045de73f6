"""Shared by all kinds of files: the report of loading, arrays in groups."""

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from keras_tpu_dist.checkpoint.fingerprint import is_small
from keras_tpu_dist.checkpoint.manifest import CheckpointError, Saved, checkpoint_error
from keras_tpu_dist.checkpoint.names import dtype_of
from keras_tpu_dist.checkpoint.reader import CheckpointReader
from keras_tpu_dist.common.printed import Printed
from keras_tpu_dist.show.progress import stages

# A state that fills the memory leaves no space for a second one.
GROUP_BYTES = 64 * 2**20
# Up to this size, a state is read and compared before anything changes. A larger one may not fit in
# memory next to the current state, so it is read in groups.
_AT_ONCE_BYTES = 128 * 2**20

_Item = TypeVar("_Item")


@dataclass(frozen=True, repr=False)
class Restored(Printed):
    """The report of `restore`.

    Attributes:
        directory: The directory of the checkpoint.
        step: Its step.
        loaded: Paths of the variables that were loaded.
        kept: Paths of the unchanged variables: excluded, or not in the checkpoint.
        unused: Paths in the checkpoint without a variable.
        renamed: A dict from a saved path to the model's path, if they differ.
        optimizer: Whether the optimizer's state was loaded, too.
        base: Paths of the variables that the checkpoint leaves out, and that the model has as the
            run's base had them.
    """

    directory: str
    step: int
    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    unused: tuple[str, ...]
    renamed: dict[str, str]
    optimizer: bool
    base: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The attributes by name."""
        return asdict(self)

    def __str__(self):
        lines = [f"step {self.step} of {self.directory}: {len(self.loaded)} variables loaded"]
        if self.base:
            lines.append(f"  left out, and equal to the base: {len(self.base)} variables")
        lines += [f"  kept   {path}" for path in self.kept]
        lines += [f"  unused {path}" for path in self.unused]
        lines += [f"  {old} -> {new}" for old, new in self.renamed.items()]
        lines.append(f"  optimizer state {'loaded' if self.optimizer else 'left as it is'}")
        return "\n".join(lines)


def grouped(
    items: Iterable[_Item], size_of: Callable[[_Item], int], most: int
) -> Iterator[list[_Item]]:
    """Groups of items, each of at most a size, or of one item.

    Args:
        items: The items.
        size_of: Returns the size of an item.
        most: The largest size of a group.

    Example:

    >>> list(grouped([3, 4, 2, 9, 1], lambda size: size, 7))
    [[3, 4], [2], [9], [1]]
    """
    group: list[_Item] = []
    size = 0
    for item in items:
        if group and size + size_of(item) > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += size_of(item)
    if group:
        yield group


def assign_saved(
    reader: CheckpointReader, step: int, chosen: list[tuple[Saved, Any]], trained: bool
) -> None:
    """Loads arrays in groups. See `assign_in_groups`.

    Args:
        reader: The checkpoints.
        step: The checkpoint's step.
        chosen: Saved arrays, with the variables that they are for.
        trained: Whether the model has trained, so that all is read once before anything changes.
    """

    def size_of(pair: tuple[Saved, Any]) -> int:
        return math.prod(pair[0].entry.shape) * dtype_of(pair[1]).itemsize

    def read(group: list) -> list:
        # Not the value's dtype: an initializer may give a narrower one than the variable declares.
        return reader.load(step, [(saved, v.value.sharding, dtype_of(v)) for saved, v in group])

    # The small ones first, which are read together.
    chosen = sorted(chosen, key=lambda pair: not is_small(pair[0].entry))
    at_once = sum(map(size_of, chosen)) <= _AT_ONCE_BYTES
    groups = grouped(chosen, size_of, _AT_ONCE_BYTES if at_once else GROUP_BYTES)
    assign_in_groups(list(groups), read, trained)


def assign_in_groups(
    groups: list[list[tuple[Any, Any]]], read: Callable[[list], list[Any]], trained: bool
) -> None:
    """Reads groups, one after the other, and assigns them.

    Args:
        trained: Whether the state here is more than initial values. Then all groups are read once
            before one is assigned, so that a checkpoint that cannot be read changes nothing.
    """
    done, number = 0, sum(map(len, groups))
    checked = groups if trained and len(groups) > 1 else []
    with stages("restoring", len(checked) + len(groups)) as begin:
        for group in checked:
            begin("reading all of it once")
            read(group)
            _return_freed_memory()
        for group in groups:
            begin(f"{done} of {number} variables loaded")
            try:
                values = read(group)
            except CheckpointError as error:
                if not done:
                    raise
                raise checkpoint_error(
                    "A large state is loaded in groups, and one of them failed.",
                    received=f"{error!s} {done} of {number} variables were loaded before.",
                    fix="Load another checkpoint before you use the model.",
                ) from error
            for (_, variable), value in zip(group, values, strict=True):
                variable.assign(value)
            done += len(group)
            # Free both these arrays and the replaced ones before the next group is read.
            del values
            if done < number:
                _return_freed_memory()


def _return_freed_memory() -> None:
    """Makes glibc return freed memory: Orbax reads in many threads, each with a malloc arena."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    # musl has none.
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
