"""What is done otherwise than asked for is logged, once for each reason."""

import logging

_logger = logging.getLogger("keras_tpu_dist")
_said: set[str] = set()


def say_once(words: str, level: int = logging.INFO) -> None:
    """Logs what would be tedious at each call.

    Args:
        words: The message; the same words are logged only once in a process.
        level: The level of `logging` at which they are logged.
    """
    if words not in _said:
        _said.add(words)
        _logger.log(level, "%s", words)


def forget() -> None:
    """Says everything again."""
    _said.clear()
