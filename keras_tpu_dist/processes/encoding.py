"""Messages between processes as text: plain data of a limited size.

Without certificates, JAX's coordinator does not authenticate anybody, so anybody who can reach its
port can write there. Messages are only numbers, strings, lists and dicts, and no code.
"""

import contextlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.marked import NUMBERS

# Plain data takes up to about twenty times the bytes of its text. The largest text of this package,
# with the checksums of a model's weights, has about a hundredth of this.
MOST_BYTES = 16 * 2**20
# The largest part of an array that one process provides for a step; a larger one is from a
# stranger.
_MOST_BYTES_OF_AN_ARRAY, _MOST_DIMENSIONS = 2**36, 64
# Code that reads a message may call itself for each level.
_MOST_DEPTH = 32
_TEXTS = re.compile(r"object|[<>|=]?[OSU]\d{0,9}")
# What Python raises if plain data has another form than the one it is read as.
MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)


class PeerError(RuntimeError):
    """Another process failed, ended, or makes a different call."""


def encoded(value: Any) -> str:
    """Plain data as text: `None`, a bool, a number, a string, or lists and dicts of these.

    Args:
        value: `None`, a bool, a number, a string, or lists and dicts of these.
    """
    return json.dumps(value)


def decoded(text: str, *, where: str = "a message") -> Any:
    """Decodes plain data from a text.

    Args:
        text: The text of another process, or of a stranger.
        where: The source of the text, for errors.

    Raises:
        PeerError: If it is anything else.
    """
    if len(text) > MOST_BYTES:
        raise malformed(where, f"more than {MOST_BYTES} characters: {text[:80]!r}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise malformed(where, f"no JSON: {text[:80]!r}") from None
    if not _is_nested(value, _MOST_DEPTH):
        raise malformed(where, f"more than {_MOST_DEPTH} levels: {text[:80]!r}")
    return value


def _is_nested(value: Any, most: int) -> bool:
    """Whether plain data has at most so many levels of lists and dicts."""
    if not isinstance(value, (list, dict)):
        return True
    members = value.values() if isinstance(value, dict) else value
    return most > 0 and all(_is_nested(member, most - 1) for member in members)


def check_array(shape: Sequence[int], dtype: str, *, where: str) -> None:
    """Raises unless a process could have an array of this shape and dtype.

    Args:
        shape: Its shape, as the process described it.
        dtype: Its dtype, as the process described it.
        where: The array's name for errors.
    """
    with contextlib.suppress(*MALFORMED):
        plain = len(shape) <= _MOST_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
        if plain and (dtype in NUMBERS or _TEXTS.fullmatch(dtype)):
            item = np.dtype(dtype).itemsize if dtype in NUMBERS else 1
            if math.prod(shape) * item <= _MOST_BYTES_OF_AN_ARRAY:
                return
    raise malformed(where, f"an impossible array: {str([shape, dtype])[:80]}")


def malformed(where: str, what: str) -> PeerError:
    """The error for a message that no process of this run can have written."""
    return PeerError(
        message(
            "Messages between processes must be plain data of a known form.",
            received=f"{where} with {what}.",
            fix="Allow only the processes of this run to reach the coordinator's port: see "
            "SECURITY.md.",
        )
    )
