"""Layouts as mesh axes, one entry per dimension: shards, spelling, text."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

_LOGICAL = "logical"
_SUB_AXIS = re.compile(r"logical_\d+")

# One entry for every dimension: not split, split over one mesh axis, or over several.
Axes = tuple[str | tuple[str, ...] | None, ...]


def split_ways(mesh: Mesh, axes: Axes) -> int:
    """The number of different shards of a tensor with a layout.

    Args:
        mesh: The mesh.
        axes: One entry per dimension; missing ones at the end split nothing.
    """
    return math.prod(axis_size(mesh, entry) for entry in axes)


def dividing_axes(size: int, names: Sequence[str], mesh: Mesh) -> str | tuple[str, ...] | None:
    """The entry that splits a dimension evenly into the most shards.

    Args:
        size: The dimension.
        names: The mesh axes that may split it.
        mesh: The mesh.

    Returns:
        An axis, a tuple of axes in mesh order, or `None` if none of them divides the dimension.
    """
    entries = splitting_entries(names, mesh)
    return next((e for e in entries if size and size % axis_size(mesh, e) == 0), None)


def splitting_entries(names: Sequence[str], mesh: Mesh) -> list[str | tuple[str, ...]]:
    """All entries that split a dimension over some axes, those into the most shards first.

    Args:
        names: The mesh axes that may split it.
        mesh: The mesh.
    """
    usable = [name for name in mesh.axis_names if name in names and mesh.shape[name] > 1]
    choices = [c for n in range(1, len(usable) + 1) for c in itertools.combinations(usable, n)]
    # For equal sizes, fewer axes first.
    choices.sort(key=lambda c: (-axis_size(mesh, c), len(c)))
    return [c[0] if len(c) == 1 else c for c in choices]


def axis_size(mesh: Mesh, entry: str | tuple[str, ...] | None) -> int:
    """The number of shards for one entry of a layout.

    Args:
        mesh: The mesh.
        entry: A mesh axis, a tuple of them, or `None`, which makes one shard.
    """
    names = spell_out((entry,), mesh.axis_names)
    return math.prod(mesh.shape[name] for name in names_in(names))


def named_sharding(mesh: Mesh, axes: Axes = ()) -> NamedSharding:
    """The sharding of a layout, written without trailing `None`s.

    JAX compares shardings by their text when it looks for a compiled program, so a layout must have
    only one spelling.

    Args:
        mesh: The mesh.
        axes: One entry per dimension; `()` means replicated.
    """
    entries = list(spell_out(axes, mesh.axis_names))
    while entries and entries[-1] in (None, ()):
        entries.pop()
    return NamedSharding(mesh, PartitionSpec(*entries))


def spell_out(axes: Axes, axis_names: Sequence[str]) -> Axes:
    """Replaces `"logical"` in a layout by all logical sub-axes of the mesh.

    Args:
        axes: One entry per dimension.
        axis_names: The mesh's axes.

    Example:

    >>> spell_out((None, "logical"), ("data", "logical_0", "logical_1"))
    (None, ('logical_0', 'logical_1'))
    """
    parts = tuple(name for name in axis_names if _SUB_AXIS.fullmatch(name))
    if not parts or _LOGICAL in axis_names or all(_LOGICAL not in entry_names(e) for e in axes):
        return axes
    spelled = []
    for entry in axes:
        names = [p for n in entry_names(entry) for p in (parts if n == _LOGICAL else (n,))]
        spelled.append(names[0] if len(names) == 1 else tuple(names) or None)
    return tuple(spelled)


def entry_names(entry: str | Iterable[str] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a layout.

    Args:
        entry: A mesh axis, several of them, or `None` for none.
    """
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def names_in(axes: Iterable) -> list[str]:
    """The mesh axes in all entries of a layout, in order.

    Args:
        axes: The entries.
    """
    return [name for entry in axes for name in entry_names(entry)]


def layout_text(axes: Axes, rank: int = 0) -> str:
    """A layout as in a rule or in `jax.P(...)`; `replicated` if nothing is split.

    Args:
        axes: One entry per dimension: `None`, a mesh axis, or a tuple of them.
        rank: The number of dimensions: missing entries at the end are written too.

    Example:

    >>> layout_text((None, "model")), layout_text((("data", "model"),), rank=2), layout_text(())
    ("(None, 'model')", "(('data', 'model'), None)", 'replicated')
    """
    if not any(axes):
        return "replicated"
    entries = [None if not e else e if isinstance(e, str) else tuple(e) for e in axes]
    return str((*entries, *[None] * (rank - len(entries))))
