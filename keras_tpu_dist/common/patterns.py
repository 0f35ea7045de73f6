"""Patterns of paths, as `fnmatch` has them: `*` stands for anything, a slash included."""

import fnmatch
from collections.abc import Iterable


def patterns_of(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; a text is one of them, not one for each letter.

    Args:
        patterns: One or several.

    Example:

    >>> patterns_of("*/head/*")
    ('*/head/*',)
    """
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


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
