"""The arrays of a host batch: checks, their number of rows, padding."""

import numbers
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.input.batch_axis import flatten

# Types that need no conversion.
ARRAYS = (np.ndarray, jax.Array, JAXSparse)


def as_array(leaf: Any) -> Any:
    """A leaf of a batch as a NumPy or JAX array, dense or sparse.

    Args:
        leaf: The leaf.
    """
    return leaf if isinstance(leaf, ARRAYS) else np.asarray(leaf)


def copied(batch: Any) -> Any:
    """A copy of a batch, for sources that write the next batch into the same arrays.

    Args:
        batch: A structure of arrays.
    """
    leaves, treedef = flatten(batch)
    copies = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    return jax.tree.unflatten(treedef, copies)


class Copies:
    """An iterator over copies of batches, with the states of its source, such as Grain's."""

    def __init__(self, batches: Iterator):
        self._batches = batches

    def __iter__(self):
        return self

    def __next__(self):
        return copied(next(self._batches))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def checked_rows(name: str, axis: int, leaf: Any, empty: bool = False) -> int:
    """The number of rows of an array of a batch.

    Args:
        name: Its name for errors.
        axis: Its batch dimension.
        leaf: The array.
        empty: Whether it may have no rows.
    """
    check_numbers(name, leaf)
    received = {"element": name, "shape": tuple(leaf.shape), "dtype": str(leaf.dtype)}
    if axis >= leaf.ndim:
        raise value_error(
            f"Every array of a batch must have its batch axis: dimension {axis}.",
            received=received,
            fix="Correct batch_axis=..., with None for an element that has no batch axis.",
        )
    if leaf.shape[axis] == 0 and not empty:
        raise value_error(
            "A batch needs at least one row.",
            received=received,
            fix="Leave empty batches out of the input.",
        )
    return leaf.shape[axis]


def check_numbers(name: str, leaf: Any) -> None:
    """Raises a `ValueError` if an array of a batch has text, or rows of different lengths.

    Args:
        name: Its name for errors.
        leaf: The array, as NumPy converted it.
    """
    if np.dtype(leaf.dtype).kind not in "OSU":
        return
    received = {"element": name, "shape": tuple(leaf.shape), "dtype": str(leaf.dtype)}
    first = leaf.flat[0] if leaf.dtype == object and leaf.size else ""
    if isinstance(first, (numbers.Number, np.generic)):
        raise value_error(
            "A batch must be numeric.",
            received={**received, "of": type(first).__name__},
            fix='Give them a dtype: x.astype("float32").',
        )
    if not isinstance(first, (str, bytes)):
        raise value_error(
            "The rows of an array must have the same length; those of a ragged one differ.",
            received={**received, "of": type(first).__name__},
            fix="Pad them in the input pipeline: dataset.map(lambda x: x.to_tensor()).",
        )
    raise value_error(
        "A batch must be numeric.",
        received=received,
        fix="Encode text with keras.layers.StringLookup or TextVectorization in the "
        "input pipeline.",
    )


def check_same_rows(first: tuple[str, int], name: str, rows: int, leaf: Any) -> None:
    """Raises if two arrays of a batch have different numbers of rows.

    Args:
        first: The name of one of them, and its rows.
        name: The name of the other.
        rows: The rows of the other.
        leaf: The other array.
    """
    if rows == first[1]:
        return
    raise value_error(
        "All arrays of a batch must have the same number of rows.",
        received=f"{first[0]} with {first[1]} rows and {name} with {rows} "
        f"(shape {tuple(leaf.shape)}).",
        fix="Make them equal, or declare an element that has no batch axis: "
        "TPUStrategy(batch_axis=...) with None in its place.",
    )


def padded(leaf: Any, axis: int, size: int) -> np.ndarray:
    """A host array with zeros added at the end of a dimension, up to a size.

    Args:
        leaf: An array, or an object that NumPy can convert to one.
        axis: The dimension to extend.
        size: The new length of this dimension, at least its old one.
    """
    host = np.asarray(leaf)
    if host.shape[axis] == size:
        return host
    longer = np.zeros((*host.shape[:axis], size, *host.shape[axis + 1 :]), host.dtype)
    longer[(slice(None),) * axis + (slice(host.shape[axis]),)] = host
    return longer
