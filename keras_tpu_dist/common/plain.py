"""Programs without TPU kernels."""

import contextlib
import contextvars
from collections.abc import Iterator

from keras_tpu_dist.common.setting import setting

_plain = contextvars.ContextVar("plain", default=False)
# The scope, in such a program, of attention of which a query sees only the keys up to its own.
CAUSAL = "causal_attention"


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """A context in which layers use XLA's operations, even if a kernel was requested.

    It is for programs that are lowered for another platform than the mesh's, on which no kernel
    compiles.
    """
    with setting(_plain, True):
        yield


def only_plain_operations() -> bool:
    """Whether the current trace must not use kernels."""
    return _plain.get()
