"""Variables that a strategy places: of a class of ours, as Keras tells nobody of their values."""

import contextvars
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, SingleDeviceSharding
from keras.src.backend.common import global_state

from keras_tpu_dist._keras.seam import in_front_of

# Whether this thread builds models without values; see `building.abstract_variables`.
abstract: contextvars.ContextVar[bool] = contextvars.ContextVar("abstract", default=False)

# Marks on a variable the object to ask before its value is handed out; see `set_owner`.
OWNER = "_keras_tpu_dist_owner"

# Marks on a variable the layout that it is used in; see `set_use`.
USE = "_keras_tpu_dist_use"

_served: dict[str, Callable] = {}


def serve_variables(read: Callable[..., Any], assign: Callable[..., None]) -> None:
    """Says how values of claimed variables leave and enter them.

    Args:
        read: Called as `read(stock, variable, dtype, copy)` for an array of NumPy.
        assign: Called as `assign(stock, variable, value)`.
    """
    _served.update(read=read, assign=assign)


def serve_additions(add: Callable[..., Any]) -> None:
    """Says what `assign_add` and `assign_sub` of claimed variables do.

    Args:
        add: Called as `add(sign, stock, variable, value)`, where `sign` is 1 or -1.
    """
    _served.update(add=add)


def serve_uses(pinned: Callable[[Any], None], laid: Callable[[Any, Any], Any]) -> None:
    """Says what the value of a variable is for code that uses it in a layout of its own.

    Args:
        pinned: Called with a variable before it is read.
        laid: Called as `laid(value, axes)`. See `set_use`.
    """
    _served.update(pinned=pinned, laid=laid)


class _Claimed(keras.Variable):
    """A variable on a strategy's mesh. Where nothing is asked of it, it is Keras's own."""

    @property
    def value(self):
        # An array that somebody holds must not be donated.
        owner, use = self.__dict__.get(OWNER), self.__dict__.get(USE)
        if use is not None:
            _served["pinned"](self)
        value = _stock_value(self) if owner is None else owner.hand_out(self, _stock_value)
        return value if use is None else _served["laid"](value, use)

    def __array__(self, dtype=None, copy=None):
        # What lies on several hosts cannot be read as it is: get_weights, save, callbacks.
        return _served["read"](_stock_array, self, dtype, copy)

    def _direct_assign(self, value):
        # Processes that build different models would meet in different collectives.
        if abstract.get():
            super()._direct_assign(value)
        else:
            _served["assign"](_stock_assign, self, value)

    # What replicas add is summed, and what they assign must agree: an assignment alone does not
    # show which it was.

    def assign_add(self, value):
        return _served["add"](1, _stock_add, self, value)

    def assign_sub(self, value):
        return _served["add"](-1, _stock_sub, self, value)


def _stock_value(variable: Any) -> Any:
    return super(_Claimed, variable).value


def _stock_array(variable: Any, dtype: Any) -> Any:
    return super(_Claimed, variable).__array__(dtype)


def _stock_assign(variable: Any, value: Any) -> None:
    super(_Claimed, variable)._direct_assign(value)
    # On a mesh of one device Keras keeps an array that is there already, whose sharding names no
    # mesh, and warns of the mix when it makes a step function.
    held, layout = variable._value, variable._layout
    is_array = isinstance(held, jax.Array) and not isinstance(held, jax.core.Tracer)
    if is_array and (type(held.sharding), type(layout)) == (SingleDeviceSharding, NamedSharding):
        variable._value = jax.device_put(held, layout)


def _stock_add(variable: Any, value: Any) -> Any:
    return super(_Claimed, variable).assign_add(value)


def _stock_sub(variable: Any, value: Any) -> Any:
    return super(_Claimed, variable).assign_sub(value)


def claim(variable: Any) -> None:
    """Makes a variable one whose values a strategy hands out, reads and places.

    Args:
        variable: A `keras.Variable`.
    """
    if not isinstance(variable, _Claimed):
        variable.__class__ = in_front_of(keras.Variable, _Claimed, type(variable))


def set_owner(variables: list, owner: Any) -> None:
    """Has an object asked before the values of variables are handed out.

    Args:
        variables: The variables.
        owner: Its `hand_out(variable, stock)` is called where `variable.value` is read, and gives
            what `stock(variable)` does. One whose variables are copied or pickled goes along.
    """
    for variable in variables:
        claim(variable)
        variable.__dict__[OWNER] = owner


def owner_of(variable: Any) -> Any:
    """The object that was given to `set_owner`, or `None`.

    Args:
        variable: A `keras.Variable`.
    """
    return variable.__dict__.get(OWNER)


def set_use(variable: Any, axes: Any) -> None:
    """Has `variable.value` lie in a layout of its own where compiled code uses it.

    Args:
        variable: A `keras.Variable`.
        axes: The layout; where it is empty, the value lies as the variable does.
    """
    if axes:
        claim(variable)
        variable.__dict__[USE] = axes
    else:
        variable.__dict__.pop(USE, None)


def replace_in_scope(variable: Any, replaced: Callable[[Any], Any]) -> None:
    """Replaces what a variable holds in the stateless scope that is entered, once for each scope.

    All that reads it there reads the same, so that their gradients meet before they leave it.

    Args:
        variable: A `keras.Variable`.
        replaced: From the value to what takes its place.
    """
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
    # What is made in the program of a loop, a branch or a call must not be read outside of it.
    if getattr(made, "_trace", None) is getattr(value, "_trace", None):
        known.add(key)
        scope.state_mapping[key] = made
