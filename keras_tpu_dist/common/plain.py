"""Programs without kernels written for TPU."""

import contextlib
import contextvars
from collections.abc import Iterator

_plain = contextvars.ContextVar("plain", default=False)


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """Within it layers take XLA's operations, even where they were asked for a kernel.

    For programs that are lowered for another platform than the mesh's, where no kernel compiles.
    """
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def only_plain_operations() -> bool:
    """Whether what is traced now must do without kernels."""
    return _plain.get()
