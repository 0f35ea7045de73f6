"""Figures of a report that are left out, with their reason, if code that counts them fails."""

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_MOST_LETTERS = 300


def counted(figure: str, count: Callable[[], _T], otherwise: _T, say: Callable[[str], Any]) -> _T:
    """A figure that a report only shows; nothing else stops for it.

    Args:
        figure: Its name, as the report has it.
        count: Counts it. It may run code of the user's model.
        otherwise: What stands for it if it is left out.
        say: Gets the sentence that says why it is left out.

    Returns:
        What `count` returns, or `otherwise`.
    """
    try:
        return count()
    except Exception as error:  # from a user's layers: anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if len(reason) > _MOST_LETTERS:
            reason = f"{reason[:_MOST_LETTERS]}..."
        say(f"{figure}: not counted, because of {reason}")
        return otherwise
