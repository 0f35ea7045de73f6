"""Small arrays of a checkpoint in one array: Orbax takes half a millisecond for every array.

Their values are one after the other, as bytes. The manifest has the place of each.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from keras_tpu_dist.checkpoint.manifest import Saved
from keras_tpu_dist.checkpoint.names import Entry
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.sizes import bytes_of

# The key of the array.
PACKED = "small"
# The array is read whole, whatever of it is wanted.
MOST_BYTES = 2**26


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, tuple]]:
    """The arrays to store in place of small ones, and the place of each, by key."""
    starts, size = {}, 0
    for key, array in arrays.items():
        if array.size and size + array.nbytes <= MOST_BYTES:
            starts[key], size = size, size + array.nbytes
    stored = {key: array for key, array in arrays.items() if key not in starts}
    if starts:
        stored[PACKED] = np.empty(size, np.uint8)
    for key, start in starts.items():
        values = np.ascontiguousarray(arrays[key]).reshape(-1).view(np.uint8)
        stored[PACKED][start : start + len(values)] = values
    return stored, {key: (start, size) for key, start in starts.items()}


def described(saved: Saved) -> Saved:
    """The array that is stored for a saved one: the packed one, or itself."""
    if saved.packed is None:
        return saved
    return Saved(Entry(PACKED, (saved.packed[1],), "uint8"), PACKED, 0)


def check_places(wanted: Sequence[Saved]) -> None:
    """Raises a `ValueError` if a manifest has a place outside of the packed array."""
    inside = [(saved, *saved.packed) for saved in wanted if saved.packed is not None]
    least = min((size for _, _, size in inside), default=0)
    for saved, start, size in inside:
        if size != least or not start + bytes_of(saved.entry) <= size <= MOST_BYTES:
            raise value_error(
                f"Small arrays are within one array of at most {MOST_BYTES:,} bytes.",
                received={"path": saved.entry.path, "shape": saved.entry.shape}
                | {"from byte": start, "of": size},
                fix="Load another checkpoint.",
            )


def unpack(read: dict[str, np.ndarray], wanted: Sequence[Saved]) -> None:
    """Adds small arrays to those that were read, by key."""
    for saved in wanted:
        if saved.packed is not None:
            start, dtype = saved.packed[0], np.dtype(saved.entry.dtype)
            part = read[PACKED][start : start + bytes_of(saved.entry)]
            # A copy, at an address that suits its dtype.
            read[saved.key] = part.copy().view(dtype).reshape(saved.entry.shape)
