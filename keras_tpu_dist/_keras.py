"""The one module that touches private names of Keras and JAX: the seam."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

import jax.export
import keras
from jax._src import xla_bridge

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


# --- dry runs -------------------------------------------------------------------------------


@contextlib.contextmanager
def abstract_variables() -> Iterator[None]:
    """Keras variables made inside have a shape, a dtype and a layout, but no value.

    Models of any size can be built this way without memory. Assigning to such a variable does
    nothing; reading it while layers are built or traced gives its initializer's value, as Keras
    does for any variable that is not initialized yet.

    Public replacement: none; `keras.StatelessScope(initialize_variables=False)` comes near, but
    in it no optimizer can be constructed, and the variables are left in a global list that the
    next scope initializes.
    """

    def initialize_with_initializer(self, initializer):
        self._initialize_layout()
        self._initializer = initializer
        self._value = None

    def deferred_initialize(self):
        self._initialize_layout()

    def initialize(self, value):
        # scalars such as an optimizer's step count: in memory already, and read while compiling
        self._shape = self._validate_shape(value.shape)
        self._initialize_layout()
        self._value = value

    def direct_assign(self, value):
        if self._value is not None:
            self._value = value

    replaced = {
        "_initialize_with_initializer": initialize_with_initializer,
        "_deferred_initialize": deferred_initialize,
        "_initialize": initialize,
        "_direct_assign": direct_assign,
    }
    kept = {name: vars(keras.Variable).get(name) for name in replaced}
    for name, function in replaced.items():
        setattr(keras.Variable, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            if function is None:
                delattr(keras.Variable, name)
            else:
                setattr(keras.Variable, name, function)


def symbolic_build(model: keras.Model, batch: object) -> None:
    """Builds model, metrics, loss and optimizer from a batch of `keras.KerasTensor`, as fit does.

    Public replacement: none; `model.build` builds neither metrics nor the optimizer.
    """
    model._symbolic_build(data_batch=batch)


def set_layout(variable: keras.Variable, layout: object) -> object:
    """Sets a variable's layout, which the optimizer slots made from it inherit.

    Returns:
        The layout it had.

    Public replacement: none; `keras.Variable(layout=...)` sets it only at construction.
    """
    before, variable._layout = variable._layout, layout
    return before


def layout_of(variable: keras.Variable) -> object:
    """The layout a variable was made with: a `jax.sharding.Sharding`, or `None`.

    Public replacement: none; `variable.value.sharding` needs a value.
    """
    layout = variable._layout
    return getattr(layout, "backend_layout", layout)


def without_vjp(exported: jax.export.Exported) -> jax.export.Exported:
    """An exported program that can be pickled: all of it but its gradient's closure.

    Public replacement: `Exported.serialize`, which needs the package flatbuffers.
    """
    return dataclasses.replace(exported, _get_vjp=None)
