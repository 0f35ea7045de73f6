"""Values of a user's code as JSON in which types are marked, so that they come back as they were.

JSON alone has no tuples, no keys but texts, no arrays, and Python's encoder fails on what it does
not know: in a thread that writes, long after the value was given.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

# The dtypes of numbers of NumPy and JAX, by name.
NUMBERS = frozenset(
    str(np.dtype(kind))
    for kind in (
        np.bool_,
        np.int8,
        np.int16,
        np.int32,
        np.int64,
        np.float16,
        np.float32,
        np.float64,
        np.uint8,
        np.uint16,
        np.uint32,
        np.uint64,
        np.complex64,
        np.complex128,
        *(k for k in vars(ml_dtypes).values() if isinstance(k, type) and issubclass(k, np.generic)),
    )
)
WHAT = (
    "None, bools, numbers, texts, bytes, NumPy and JAX arrays of numbers, and lists, tuples, sets "
    "and dicts of these"
)
# A dict with this key stands for something else than a dict.
_MARK = "keras_tpu_dist type"
# Code that reads it calls itself for each level.
_MOST_DEPTH = 32
# Python refuses to write and read longer ones.
_MOST_BITS = 2**13
# A larger array goes to the other arrays, if there is a place for them.
_INLINE_BYTES = 2**10
# What most values are, first.
_SHORT = 2**63
_AS_IT_IS = frozenset({type(None), bool, float, str})


class UnmarkableError(ValueError):
    """A value has a part that cannot be saved.

    Attributes:
        place: Its place, such as `"['best'][0]"`.
        reason: Its type, or why it cannot be saved.
    """

    def __init__(self, place: str, reason: str):
        super().__init__(f"{place} {reason}")
        self.place, self.reason = place, reason


def marked(value: Any, arrays: list[np.ndarray] | None = None) -> Any:
    """A value as data for JSON; plain data stands for itself. See `WHAT`.

    Subclasses come back as the type that they are derived from.

    Args:
        arrays: Gets the bytes of arrays that are not small; if it is `None`, all are in the data.

    Raises:
        UnmarkableError: If a part of it is of another type.

    Example:

    >>> unmarked(marked({1: (np.float32(0.5), None)}))
    {1: (np.float32(0.5), None)}
    """
    return _marked(value, arrays, 0)


def _marked(value: Any, arrays: list[np.ndarray] | None, depth: int) -> Any:
    kind = type(value)
    if kind in _AS_IT_IS or (kind is int and -_SHORT < value < _SHORT):
        return value
    if isinstance(value, (np.str_, np.bytes_)):
        value = value.item()
    if isinstance(value, np.generic):
        return _number(value)
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise UnmarkableError("", f"is an integer of {value.bit_length():,} bits")
        return int(value)
    for plain in (str, float):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, complex):
        return {_MARK: "complex", "of": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {_MARK: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, jax.Array)):
        return _array(value, arrays)
    if depth == _MOST_DEPTH:
        raise UnmarkableError("", f"is more than {_MOST_DEPTH} levels deep")
    if isinstance(value, (list, tuple)):
        items = [_part(v, arrays, depth, i) for i, v in enumerate(value)]
        return {_MARK: "tuple", "of": items} if isinstance(value, tuple) else items
    if isinstance(value, (set, frozenset)):
        # Within a set nothing has a place.
        return {_MARK: "set", "of": sorted((_marked(v, None, depth + 1) for v in value), key=repr)}
    if isinstance(value, (dict, Mapping)):
        if all(isinstance(key, str) and key != _MARK for key in value):
            return {str(key): _part(item, arrays, depth, key) for key, item in value.items()}
        pairs = [
            [_part(key, None, depth, key), _part(item, arrays, depth, key)]
            for key, item in value.items()
        ]
        return {_MARK: "dict", "of": pairs}
    raise UnmarkableError("", f"is of type {kind.__name__}")


def _part(value: Any, arrays: list[np.ndarray] | None, depth: int, key: Any) -> Any:
    """A part of a value, whose errors say where it is."""
    try:
        return _marked(value, arrays, depth + 1)
    except UnmarkableError as error:
        raise UnmarkableError(f"[{key!r:.40}]{error.place}", error.reason) from None


def _number(value: np.generic) -> dict[str, Any]:
    if str(value.dtype) not in NUMBERS:
        raise UnmarkableError("", f"is a NumPy scalar of dtype {value.dtype}")
    # `item` of a number that NumPy lacks, such as bfloat16, may be that number.
    plain: Any = value.item()
    if "complex" in str(value.dtype):
        plain = [complex(plain).real, complex(plain).imag]
    elif not isinstance(plain, (bool, int, float)):
        plain = float(plain)
    return {_MARK: "number", "dtype": str(value.dtype), "of": plain}


def _array(value: Any, arrays: list[np.ndarray] | None) -> dict[str, Any]:
    if str(value.dtype) not in NUMBERS:
        raise UnmarkableError("", f"is an array of dtype {value.dtype}")
    try:
        # A copy: the owner may write into it before it is saved.
        host = np.array(value, order="C")
    except RuntimeError as error:  # its memory was donated, or is in another process
        raise UnmarkableError("", f"is an array that cannot be read: {error}") from error
    found = {_MARK: "array", "dtype": str(host.dtype), "shape": list(host.shape)}
    found["jax"] = isinstance(value, jax.Array)
    if arrays is None or host.nbytes <= _INLINE_BYTES:
        return {**found, "of": base64.b64encode(host.tobytes()).decode()}
    arrays.append(host.reshape(-1).view(np.uint8))
    return {**found, "of": len(arrays) - 1}


def unmarked(data: Any, arrays: Sequence[np.ndarray] = ()) -> Any:
    """The value that `marked` was called with, from data that anybody may have written.

    It takes no more memory than the data and the arrays: each of these is used once.

    Args:
        arrays: Those that `marked` put aside, in their order.

    Raises:
        ValueError: If it has another form.
    """
    left = dict(enumerate(arrays))
    try:
        return _unmarked(data, left)
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _unmarked(data: Any, left: dict[int, np.ndarray]) -> Any:
    if isinstance(data, list):
        return [_unmarked(item, left) for item in data]
    if not isinstance(data, dict):
        return data
    if _MARK not in data:
        return {key: _unmarked(item, left) for key, item in data.items()}
    return _READ[data[_MARK]](data, left)


def _read_number(data: dict[str, Any], left: dict[int, np.ndarray]) -> np.generic:
    kind, value = _dtype(data).type, data["of"]
    if isinstance(value, list):
        value = complex(*map(_checked, value))
    return kind(_checked(value))


def _read_array(data: dict[str, Any], left: dict[int, np.ndarray]) -> Any:
    dtype, shape, at = _dtype(data), data["shape"], data["of"]
    raw = left.pop(at) if isinstance(at, int) else base64.b64decode(at, validate=True)
    if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 32:
        raise ValueError(f"a shape of {shape!r:.40}")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes for {dtype} of shape {shape!r:.40}")
    array = np.frombuffer(bytearray(raw), dtype).reshape(shape)
    # Without 64 bits, JAX would make numbers of 64 bits narrower.
    here = data["jax"] is True and jax.dtypes.canonicalize_dtype(dtype) == dtype
    return jnp.asarray(array) if here else array


def _dtype(data: dict[str, Any]) -> np.dtype:
    if data["dtype"] not in NUMBERS:
        raise ValueError(f"a dtype of {data['dtype']!r:.40}")
    return np.dtype(data["dtype"])


def _checked(value: Any) -> Any:
    if not isinstance(value, (bool, int, float, complex)):
        raise ValueError(f"a number of {value!r:.40}")
    return value


def _items(data: dict[str, Any], left: dict[int, np.ndarray]) -> list:
    if not isinstance(data["of"], list):
        raise ValueError(f"items of {data['of']!r:.40}")
    return [_unmarked(item, left) for item in data["of"]]


_READ: dict[str, Callable[[dict[str, Any], dict[int, np.ndarray]], Any]] = {
    "number": _read_number,
    "array": _read_array,
    "complex": lambda data, left: complex(*map(_checked, data["of"])),
    "bytes": lambda data, left: base64.b64decode(data["of"], validate=True),
    "tuple": lambda data, left: tuple(_items(data, left)),
    "set": lambda data, left: set(_items(data, left)),
    "dict": lambda data, left: dict(_items(data, left)),
}
