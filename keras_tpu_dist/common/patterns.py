"""Patterns of paths, as `fnmatch` has them: `*` stands for anything, a slash included."""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from keras_tpu_dist.common.errors import message


def patterns_of(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; a text is one of them, not one for each letter.

    Args:
        patterns: One or several.

    Raises:
        ValueError: If one is no text.

    Example:

    >>> patterns_of("*/head/*")
    ('*/head/*',)
    """
    listed = isinstance(patterns, Iterable) and not isinstance(patterns, Mapping)
    found: tuple[Any, ...] = (patterns,) if isinstance(patterns, str) or not listed else ()
    found = found or tuple(patterns)
    if not all(isinstance(each, str) for each in found):
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
