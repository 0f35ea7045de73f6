"""The context of `strategy.scope()`."""

from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import runtime_error
from keras_tpu_dist.common.own_mesh import own_mesh
from keras_tpu_dist.training.protocol import Strategy


class Scope:
    """The context of `strategy.scope()`. Scopes nest; an object can be entered once at a time."""

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self._entered = False
        self._outer: Any = None
        self._mesh: Any = None

    def __enter__(self):
        if self._entered:
            raise runtime_error(
                "A scope object can be entered only once.",
                received=f"a second entry into a scope of {self._strategy!r}.",
                fix="Write `with strategy.scope():` every time; scopes may nest.",
            )
        self._entered = True
        self._outer = _keras.active_distribution()
        keras.distribution.set_distribution(self._strategy)
        if not jax.sharding.get_abstract_mesh().empty:
            self._mesh = own_mesh(self._own_mesh)
        return self._strategy

    def __exit__(self, *exception):
        keras.distribution.set_distribution(self._outer)
        if self._mesh is not None:
            self._mesh.__exit__(*exception)
            self._mesh = None

    @property
    def _own_mesh(self) -> jax.sharding.Mesh | None:
        return self._strategy.mesh


class DescribedScope(Scope):
    """The scope on a slice that is not attached: variables created in it get no value."""

    def __enter__(self):
        strategy = super().__enter__()
        self._abstract = _keras.abstract_variables()
        self._abstract.__enter__()
        return strategy

    def __exit__(self, *exception):
        self._abstract.__exit__(*exception)
        super().__exit__(*exception)

    @property
    def _own_mesh(self) -> None:
        return None  # JAX would compute on devices that are not attached.
