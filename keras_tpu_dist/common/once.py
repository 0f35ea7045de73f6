"""Messages that are logged only once in a process."""

import logging

_logger = logging.getLogger("keras_tpu_dist")
_logged: set[str] = set()


def log_once(text: str, level: int = logging.INFO) -> None:
    """Logs a message, unless it was already logged.

    Args:
        text: The message.
        level: Its level in `logging`.
    """
    if text not in _logged:
        _logged.add(text)
        _logger.log(level, "%s", text)


def forget() -> None:
    """Lets every message be logged again; for tests."""
    _logged.clear()
