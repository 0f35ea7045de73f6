"""Context variables that hold a value for a `with` block."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def setting(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """A context in which a context variable has a value, in this thread only.

    Args:
        variable: The variable.
        value: Its value within.
    """
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
