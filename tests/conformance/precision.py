"""Programs in float64, where rounding is gone and a fault is not."""

import contextlib
from collections.abc import Iterator

import jax
import keras
from keras.src.backend.common import dtypes


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Keras, on JAX, makes float32 of float64 wherever it promotes dtypes; within it does not.

    For all threads: one that writes a checkpoint must see the same numbers.
    """
    shorter, dtype = dtypes.BIT64_TO_BIT32_DTYPE["float64"], keras.config.floatx()
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = shorter
        keras.config.set_floatx(dtype)
