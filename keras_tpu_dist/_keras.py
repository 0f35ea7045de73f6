"""The one module that touches private names of Keras and JAX: the seam."""

import os
import sys

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from jax._src import xla_bridge
from keras.src.backend.common.variables import AutocastScope

# Public replacement: none; `keras.Model` is what its constructor returns for functional models too.
from keras.src.models.functional import Functional as Functional

if keras.config.backend() != "jax":
    raise ImportError(
        "keras_tpu_dist needs Keras on the JAX backend. Received: "
        f"keras.config.backend()={keras.config.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=jax before keras is imported, or import keras_tpu_dist before keras."
    )


def jax_backend_started() -> bool:
    """Whether JAX has already created its devices, after which they cannot be changed.

    Public replacement: none; `jax.config` refuses some updates after start-up, silently not
    others.
    """
    return xla_bridge.backends_are_initialized()


def full_precision(variable):
    """A variable's value in its own dtype, also inside a layer whose policy casts it.

    Gradients that are accumulated in float32 should not be rounded to bfloat16 on their way to a
    float32 variable. Public replacement: none; `Variable.value` always casts inside a layer call.
    """
    with AutocastScope(None):
        return variable.value
