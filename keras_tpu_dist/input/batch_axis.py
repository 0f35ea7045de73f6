"""The batch dimension of every array of a batch."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental.sparse import JAXSparse

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message, value_error

_ELEMENTS = ("x", "y", "sample_weight")

_without_sparse_arrays: set[Any] = set()


def checked_batch_axis(batch_axis: Any) -> Any:
    """Checks the user's `batch_axis`: a structure of dimensions, `None`s, tuples, lists, dicts.

    Args:
        batch_axis: The structure, as `TPUStrategy` takes it.
    """
    if isinstance(batch_axis, Mapping):
        return {name: checked_batch_axis(axis) for name, axis in batch_axis.items()}
    if isinstance(batch_axis, (tuple, list)):
        return tuple(checked_batch_axis(axis) for axis in batch_axis)
    if batch_axis is not None and not is_count(batch_axis, 0):
        raise value_error(
            "A batch axis is a dimension, None (there is no batch), or a structure of these.",
            received={"batch_axis": batch_axis},
            fix="Write for example batch_axis=(1, 0) for time-major x and batch-major y.",
        )
    return batch_axis


def _is_leaf(node) -> bool:
    return isinstance(node, JAXSparse)


def flatten(batch: Any) -> tuple[list, Any]:
    """A batch's arrays and its structure; a sparse array is a single leaf.

    Args:
        batch: A structure (tuple, list, dict, `None`) of arrays.
    """
    leaves, structure = jax.tree.flatten(batch)
    if structure in _without_sparse_arrays:
        return leaves, structure
    # A function in Python would be called for every node: too slow for every step.
    flattened = jax.tree.flatten(batch, is_leaf=_is_leaf)
    if flattened[1] == structure:
        _without_sparse_arrays.add(structure)
    return flattened


def element_names(batch: Any) -> list[str]:
    """Names of a batch's arrays for errors: `x['image']`, `y`, `sample_weight`.

    Args:
        batch: The batch: `(x, y, sample_weight)`, the first of these, or `x` alone.
    """
    parts = [("x", batch)]
    if isinstance(batch, (tuple, list)):
        parts = [
            (_ELEMENTS[i] if i < len(_ELEMENTS) else f"x[{i}]", part)
            for i, part in enumerate(batch)
        ]
    return [
        name + jax.tree_util.keystr(path)
        for name, part in parts
        for path, _ in jax.tree_util.tree_flatten_with_path(part, is_leaf=_is_leaf)[0]
    ]


def axes_by_array(batch_axis: Any, batch: Any) -> list[int | None]:
    """The batch axis of every array of a batch, in flattening order.

    Args:
        batch_axis: The result of `checked_batch_axis`: an entry for all arrays, or a structure of
            entries; arrays missing in a dict or the tuple `(x, y, sample_weight)` have batch axis
            0.
        batch: The batch: `(x, y, sample_weight)`, the first of these, or `x` alone.
    """
    top = isinstance(batch, (tuple, list)) and len(batch) <= len(_ELEMENTS)
    if isinstance(batch_axis, Mapping):
        batch_axis = (batch_axis,)
    if isinstance(batch_axis, tuple):
        if not top:
            batch_axis = batch_axis[0] if batch_axis else 0
        else:
            given = batch_axis[: len(batch)]
            batch_axis = given + (0,) * (len(batch) - len(given))
    axes: list[int | None] = []
    _spread_into(axes, batch_axis, batch, "batch")
    return axes


def _spread_into(axes: list, axis, node, name: str) -> None:
    if not isinstance(axis, (tuple, Mapping)):
        axes.extend([axis] * len(flatten(node)[0]))
        return
    if node is None:
        return
    same_kind = isinstance(node, Mapping) == isinstance(axis, Mapping)
    if not same_kind or not isinstance(node, (Mapping, tuple, list)):
        raise ValueError(_structure_message(name, axis, node))
    if isinstance(axis, Mapping):
        for key in axis:
            if key not in node:
                raise ValueError(_structure_message(name, axis, node, key))
        # JAX flattens a dict in sorted order of its keys, and an ordered dict in its own order.
        for key in node if isinstance(node, OrderedDict) else sorted(node):
            _spread_into(axes, axis.get(key, 0), node[key], f"{name}[{key!r}]")
        return
    if len(axis) != len(node):
        raise ValueError(_structure_message(name, axis, node))
    for i, (entry, child) in enumerate(zip(axis, node, strict=True)):
        _spread_into(axes, entry, child, f"{name}[{i}]")


def _structure_message(name, axis, node, key=None) -> str:
    form = sorted(node) if isinstance(node, Mapping) else type(node).__name__
    return message(
        "The structure of batch_axis must be a prefix of the batch's.",
        received={"at": name, "batch_axis": axis, "batch": form},
        fix="Give one entry for every element, or one integer for all of them.",
        name=key,
        choices=node if key is not None else (),
    )
