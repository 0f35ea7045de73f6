"""The class of variables that a strategy places; Keras has no hook for reads of their values."""

import contextlib
import contextvars
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding
from keras.src.backend.common import global_state

from keras_tpu_dist._keras.seam import in_front_of

# Whether this thread builds models without values; see `building.abstract_variables`.
abstract: contextvars.ContextVar[bool] = contextvars.ContextVar("abstract", default=False)

# The attribute for the object to ask before a variable's value is handed out; see `set_owner`.
OWNER = "_keras_tpu_dist_owner"

# The attribute for the layout in which a variable is used; see `set_use`.
USE = "_keras_tpu_dist_use"

# Larger arrays of the host are on the devices when `assign` returns.
_MOST_BYTES_IN_FLIGHT = 2**20

_served: dict[str, Callable] = {}


def serve_variables(read: Callable[..., Any], assign: Callable[..., None]) -> None:
    """Sets the functions that convert values of claimed variables to NumPy, and assign them.

    Args:
        read: Called as `read(stock, variable, dtype, copy)` for a NumPy array.
        assign: Called as `assign(stock, variable, value)`.
    """
    _served.update(read=read, assign=assign)


def serve_additions(add: Callable[..., Any]) -> None:
    """Sets the function for `assign_add` and `assign_sub` of claimed variables.

    Args:
        add: Called as `add(sign, stock, variable, value)`, where `sign` is 1 or -1.
    """
    _served.update(add=add)


def serve_uses(pinned: Callable[[Any], None], laid: Callable[[Any, Any], Any]) -> None:
    """Sets the functions for values of variables that code uses in another layout.

    Args:
        pinned: Called with a variable before it is read.
        laid: Called as `laid(value, axes)`. See `set_use`.
    """
    _served.update(pinned=pinned, laid=laid)


def serve_pickles(portable: Callable[[NamedSharding], Any]) -> None:
    """Sets the function for the layouts of claimed variables that are copied or pickled.

    Args:
        portable: Returns an object that can be pickled; its attribute `layout` is the layout.
    """
    _served.update(portable=portable)


class _Claimed(keras.Variable):
    """A variable on a strategy's mesh. Without marks, it behaves like Keras's own."""

    @property
    def value(self):
        # An array that somebody has read must not be donated.
        owner, use = self.__dict__.get(OWNER), self.__dict__.get(USE)
        if use is not None:
            _served["pinned"](self)
        value = _stock_value(self) if owner is None else owner.hand_out(self, _stock_value)
        return value if use is None else _served["laid"](value, use)

    def __array__(self, dtype=None, copy=None):
        # get_weights, save and callbacks cannot read arrays on several hosts directly.
        return _served["read"](_stock_array, self, dtype, copy)

    def _convert_to_tensor(self, value, dtype=None):
        # Keras would put an array of the host, such as one that is loaded, whole on one device
        # before it is placed.
        if (
            self._layout is None
            or global_state.get_global_attribute("stateless_scope") is not None
            or not _is_of_host(value)
        ):
            return super()._convert_to_tensor(value, dtype=dtype)
        return np.asarray(value, dtype)

    def assign(self, value):
        assigned = super().assign(value)
        if not isinstance(assigned, np.ndarray):
            return assigned
        if assigned.nbytes > _MOST_BYTES_IN_FLIGHT:
            # Else the host holds it while the next ones of a file are read: JAX lets go of an array
            # that it has transferred when Python collects garbage.
            jax.block_until_ready(self._value)
            gc.collect(0)
        # Keras returns an array of JAX, which code may go on with.
        return self._value

    def _direct_assign(self, value):
        # If processes build different models, they would run different collectives.
        if abstract.get():
            super()._direct_assign(value)
        else:
            _served["assign"](_stock_assign, self, value)

    # Layouts have devices, which cannot be pickled. A mark may be the same object as the layout.

    def __getstate__(self):
        layouts = [v for v in self.__dict__.values() if isinstance(v, NamedSharding)]
        portable = {id(layout): _served["portable"](layout) for layout in layouts}
        state = {name: portable.get(id(v), v) for name, v in self.__dict__.items()}
        return state, list(portable.values())

    def __setstate__(self, state):
        state, portable = state
        layouts = {id(one): one.layout for one in portable}
        self.__dict__.update({name: layouts.get(id(v), v) for name, v in state.items()})
        if self._layout is not None and self._value is not None:
            self._direct_assign(self._value)

    # Additions of replicas are summed, and their assignments must agree. An assignment alone does
    # not show which of the two it was.

    def assign_add(self, value):
        return _served["add"](1, _stock_add, self, value)

    def assign_sub(self, value):
        return _served["add"](-1, _stock_sub, self, value)


def _is_of_host(value: Any) -> bool:
    """Whether a value is an array of NumPy, or one in a file."""
    is_array = isinstance(value, np.ndarray) or type(value).__module__.partition(".")[0] == "h5py"
    return is_array and value.dtype.kind != "O"


def _stock_value(variable: Any) -> Any:
    return super(_Claimed, variable).value


def _stock_array(variable: Any, dtype: Any) -> Any:
    return super(_Claimed, variable).__array__(dtype)


def _stock_assign(variable: Any, value: Any) -> None:
    super(_Claimed, variable)._direct_assign(value)
    # Keras keeps an array that is already where it should be, though its sharding may name no mesh
    # (on a mesh with one device), or the one that the user has set with `jax.set_mesh`.
    held, layout = variable._value, variable._layout
    is_array = isinstance(held, jax.Array) and not isinstance(held, jax.core.Tracer)
    placed = not is_array or getattr(held.sharding, "mesh", None) is getattr(layout, "mesh", None)
    if not placed and isinstance(layout, NamedSharding):
        variable._value = jax.device_put(held, layout)


def _stock_add(variable: Any, value: Any) -> Any:
    return super(_Claimed, variable).assign_add(value)


def _stock_sub(variable: Any, value: Any) -> Any:
    return super(_Claimed, variable).assign_sub(value)


def claim(variable: Any) -> None:
    """Lets a strategy hand out, read and place the values of a variable.

    Args:
        variable: A `keras.Variable`.
    """
    if not isinstance(variable, _Claimed):
        variable.__class__ = in_front_of(keras.Variable, _Claimed, type(variable))


def set_owner(variables: list, owner: Any) -> None:
    """Sets an object to ask before the values of variables are handed out.

    Args:
        variables: The variables.
        owner: Its `hand_out(variable, stock)` is called when `variable.value` is read, and returns
            the same as `stock(variable)`. If variables are copied or pickled, it is copied along.
    """
    for variable in variables:
        claim(variable)
        variable.__dict__[OWNER] = owner


def owner_of(variable: Any) -> Any:
    """The object that `set_owner` set, or `None`.

    Args:
        variable: A `keras.Variable`.
    """
    return variable.__dict__.get(OWNER)


def set_use(variable: Any, axes: Any) -> None:
    """Makes compiled code use `variable.value` in another layout.

    Args:
        variable: A `keras.Variable`.
        axes: The layout; if it is empty, the value has the variable's own layout.
    """
    if axes:
        claim(variable)
        variable.__dict__[USE] = axes
    else:
        variable.__dict__.pop(USE, None)


def replace_in_scope(variable: Any, replaced: Callable[[Any], Any]) -> None:
    """Replaces a variable's value in the current stateless scope, once per scope.

    All reads in the scope get the same value, so their gradients are added before they leave it.

    Args:
        variable: A `keras.Variable`.
        replaced: Returns the replacement for the value.
    """
    # Up to the scope that holds the value: it is replaced, and marked, where all reads find it.
    scope, key = global_state.get_global_attribute("stateless_scope"), id(variable)
    while scope is not None and key not in scope.state_mapping:
        scope = getattr(scope, "_around", None)
    if scope is None:
        return
    known = scope.__dict__.setdefault("_keras_tpu_dist_replaced", set())
    if key in known:
        return
    value = scope.state_mapping[key]
    made = replaced(value)
    # A value from the program of a loop, a branch or a call must not be read outside of it.
    if getattr(made, "_trace", None) is getattr(value, "_trace", None):
        known.add(key)
        scope.state_mapping[key] = made


class _Hidden:
    """In place of a variable's value, to raise when it is used."""

    def __init__(self, used: Callable[[], None]):
        self.__dict__["used"] = used

    def __getattr__(self, name: str):
        return self.used()


@contextlib.contextmanager
def values_hidden(variables: Iterable[Any], read: Callable[[Any], None]) -> Iterator[None]:
    """A context in which variables have no values.

    Args:
        read: Called with a variable whose value is used; raises.
    """
    hidden = [(variable, variable._value) for variable in variables]
    for variable, _ in hidden:
        variable._value = _Hidden(functools.partial(read, variable))
    try:
        yield
    finally:
        for variable, value in hidden:
            variable._value = value
