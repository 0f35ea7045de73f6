"""Patterns of paths in the syntax of `fnmatch`: `*` matches anything, slashes too."""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from keras_tpu_dist.common.errors import did_you_mean, value_error


def patterns_of(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; a single `str` is one pattern.

    Args:
        patterns: One or several.

    Example:

    >>> patterns_of("*/head/*")
    ('*/head/*',)
    """
    listed = isinstance(patterns, Iterable) and not isinstance(patterns, Mapping)
    one = isinstance(patterns, str) or not listed
    found: tuple[Any, ...] = (patterns,) if one else tuple(patterns)
    if not all(isinstance(pattern, str) for pattern in found):
        raise value_error(
            "Patterns of paths are a text, or a list of them.",
            received={"patterns": patterns},
            fix='Write for example "*/head/*".',
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


def check_matched(patterns: Iterable[str], names: Iterable[str], rule: str) -> None:
    """Raises a `ValueError` with the patterns that match nothing.

    Args:
        patterns: The patterns.
        names: The paths that they may match, of weights or of layers.
        rule: The error's first sentence, about what patterns match.
    """
    names = list(names)
    lost = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in names)]
    if lost:
        raise value_error(
            rule,
            received="; ".join(
                f"{pattern!r}, which matches nothing{'.' * bool(hint)}{hint}"
                for pattern in lost
                for hint in [did_you_mean(pattern.strip("*/"), names)]
            )
            + ".",
            fix="See the paths with [weight.path for weight in model.weights].",
        )
