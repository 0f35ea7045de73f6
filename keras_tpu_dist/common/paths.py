"""Paths as users write them."""

import os
from urllib.parse import unquote


def plain_path(path: str | os.PathLike) -> str:
    """A path without `~` or `file://`; one in a bucket stays as it is.

    Example:

    >>> [plain_path(path) for path in ("runs/7", "file:///ssd/run%207", "gs://bucket/~/7")]
    ['runs/7', '/ssd/run 7', 'gs://bucket/~/7']
    """
    text = os.fspath(path)
    if text.startswith("file:///"):
        return unquote(text.removeprefix("file://"))
    return text if "://" in text else os.path.expanduser(text)


def absolute_path(path: str | os.PathLike) -> str:
    """The absolute path; one in a bucket is absolute already."""
    plain = plain_path(path)
    return plain if "://" in plain else os.path.abspath(plain)
