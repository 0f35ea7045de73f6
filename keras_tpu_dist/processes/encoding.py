"""Messages between processes as text: plain data of a known form and a limited size.

Without certificates, JAX's coordinator does not authenticate anybody, so anybody who can reach its
port can write there. Messages are only numbers, strings, lists and dicts, and no code.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from keras_tpu_dist.common.errors import message

# Plain data takes up to about twenty times the bytes of its text. The largest text of this package,
# with the checksums of a model's weights, has about a hundredth of this.
MOST_BYTES = 16 * 2**20
_MOST_DEPTH = 32
# The largest part of an array that one process provides for a step; a larger one is from a
# stranger.
_MOST_BYTES_OF_AN_ARRAY, _MOST_DIMENSIONS = 2**36, 64
_NUMBERS = frozenset(
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
_TEXTS = re.compile(r"object|[<>|=]?[OSU]\d{0,9}")


class PeerError(RuntimeError):
    """Another process failed, ended, or makes a different call."""


@dataclass(frozen=True)
class ListOf:
    """The form of a list of any length, with the form of its elements."""

    form: Any


@dataclass(frozen=True)
class DictOf:
    """The form of a dict with any strings as keys, with the form of its values."""

    form: Any


class _Anything:
    """The form of all plain data."""


ANYTHING = _Anything()


def encoded(value: Any) -> str:
    """Plain data as text.

    Args:
        value: `None`, a bool, a number, a string, or lists and dicts of these.
    """
    return json.dumps(value)


def decoded(text: str, form: Any = ANYTHING, *, where: str = "a message") -> Any:
    """Decodes plain data from a text.

    Args:
        form: The required form: a type (`int`, `str`, ...), `None`, a tuple of alternatives, a list
            of as many forms, a dict of exactly these keys, `ListOf(form)` or `DictOf(form)`.

    Raises:
        PeerError: If it is anything else.
    """
    if len(text) > MOST_BYTES:
        raise _malformed(where, text, f"more than {MOST_BYTES} characters")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _malformed(where, text, "no JSON") from None
    check_form(value, form, where=where)
    return value


def check_form(value: Any, form: Any, *, where: str) -> None:
    """Raises unless plain data has a form.

    Raises:
        PeerError: If it has another form.
    """
    if not fits(value, form):
        raise _malformed(where, encoded(value), "an invalid value")


def check_array(shape: Sequence[int], dtype: str, *, where: str) -> None:
    """Raises unless a process could have an array of this shape and dtype.

    Raises:
        PeerError: If not.
    """
    sizes = list(shape)
    if dtype in _NUMBERS or _TEXTS.fullmatch(dtype):
        plain = len(sizes) <= _MOST_DIMENSIONS and all(size >= 0 for size in sizes)
        each = np.dtype(dtype).itemsize if dtype in _NUMBERS else 1
        if plain and math.prod(sizes) * each <= _MOST_BYTES_OF_AN_ARRAY:
            return
    raise _malformed(where, encoded([sizes, dtype]), "an impossible array")


def fits(value: Any, form: Any, depth: int = 0) -> bool:
    """Whether plain data has a form.

    Args:
        value: A result of `json.loads`.
        form: See `decoded`.
    """
    if depth > _MOST_DEPTH:
        return False
    if isinstance(form, tuple):
        return any(fits(value, choice, depth) for choice in form)
    if isinstance(form, _Anything):
        form = (
            ListOf(form) if type(value) is list else DictOf(form) if type(value) is dict else object
        )
    if isinstance(form, ListOf):
        return type(value) is list and all(fits(item, form.form, depth + 1) for item in value)
    if isinstance(form, DictOf):
        values = value.values() if type(value) is dict else [None]
        return type(value) is dict and all(fits(item, form.form, depth + 1) for item in values)
    if isinstance(form, list):
        same = type(value) is list and len(value) == len(form)
        return same and all(fits(a, b, depth + 1) for a, b in zip(value, form, strict=True))
    if isinstance(form, dict):
        same = type(value) is dict and value.keys() == form.keys()
        return same and all(fits(value[key], form[key], depth + 1) for key in form)
    return value is None if form is None else form is object or type(value) is form


def _malformed(where: str, text: str, what: str) -> PeerError:
    return PeerError(
        message(
            "Messages between processes must be plain data of a known form.",
            received=f"{what} in {where}: {text[:80]!r}.",
            fix="Allow only the processes of this run to reach the coordinator's port: see "
            "SECURITY.md.",
        )
    )
