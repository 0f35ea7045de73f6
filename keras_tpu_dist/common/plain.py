"""Programs without kernels written for TPU."""

import contextlib
import contextvars
from collections.abc import Iterator

from keras_tpu_dist.common.setting import setting

_plain = contextvars.ContextVar("plain", default=False)


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """Within it layers take XLA's operations, even where they were asked for a kernel.

    For programs that are lowered for another platform than the mesh's, where no kernel compiles.
    """
    with setting(_plain, True):
        yield


def only_plain_operations() -> bool:
    """Whether what is traced now must do without kernels."""
    return _plain.get()
