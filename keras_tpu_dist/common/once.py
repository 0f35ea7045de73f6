"""Messages that are logged only once in a process."""

import contextlib
import logging
from collections.abc import Iterator

_logger = logging.getLogger("keras_tpu_dist")
_logged: set[str] = set()


def log_once(text: str, level: int = logging.INFO, about: str = "") -> None:
    """Logs a message, unless it was already logged.

    Args:
        text: The message.
        level: Its level in `logging`.
        about: Its subject, if one message about it is enough, whatever the text.
    """
    if (about or text) not in _logged:
        _logged.add(about or text)
        _logger.log(level, "%s", text)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """What is logged within may be logged once more behind it."""
    before = set(_logged)
    try:
        yield
    finally:
        _logged.intersection_update(before)


def forget() -> None:
    """Lets every message be logged again; for tests."""
    _logged.clear()
