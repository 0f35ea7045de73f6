"""Patterns of paths in the syntax of `fnmatch`: `*` matches anything, slashes too."""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from keras_tpu_dist.common.errors import message


def patterns_of(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; a single `str` is one pattern.

    Args:
        patterns: One or several.

    Raises:
        ValueError: If one is not a `str`.

    Example:

    >>> patterns_of("*/head/*")
    ('*/head/*',)
    """
    listed = isinstance(patterns, Iterable) and not isinstance(patterns, Mapping)
    one = isinstance(patterns, str) or not listed
    found: tuple[Any, ...] = (patterns,) if one else tuple(patterns)
    if not all(isinstance(pattern, str) for pattern in found):
        raise ValueError(
            message(
                "Patterns of paths are a text, or a list of them.",
                received={"patterns": patterns},
                fix='Write for example "*/head/*".',
            )
        )
    return found


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of several patterns matches a path.

    Args:
        path: A variable's path, or that of a layer.
        patterns: The patterns.

    Example:

    >>> matches("mlp/head/kernel", ["*/head/*"])
    True
    """
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
