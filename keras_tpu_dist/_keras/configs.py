"""Layers made again from their configs in one process, where functions and classes are at hand."""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.saving import object_registration, serialization_lib

from keras_tpu_dist.common.setting import setting

# What the configs that this thread writes refer to, by the names there; `None` if they are Keras's.
_kept: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("kept", default=None)
# Whether this thread makes layers from such configs.
_making: contextvars.ContextVar[bool] = contextvars.ContextVar("making", default=False)


def remade(layer: Any) -> Any:
    """A new layer of the same class, from its config.

    Functions and classes that the config refers to are used as they are: a file could hold code in
    their place, so Keras reads a lambda from none, and looks up other names among those that are
    registered.

    Public replacement: a config that refers to the objects of its process.
    """
    kept: dict[str, Any] = {}
    with _replaced(), serialization_lib.ObjectSharingScope():
        with setting(_kept, kept):
            config = keras.saving.serialize_keras_object(layer.get_config())
        # What a layer's __init__ writes and reads for itself, as compile() of KerasHub's tasks
        # does, is Keras's again.
        with keras.saving.custom_object_scope(kept), setting(_making, True):
            return type(layer).from_config(config)


def _name_of(stock: Callable, obj: Any) -> str:
    kept = _kept.get()
    # Keras finds its own objects itself, and asks for the name of the class of functions.
    own = _is_of("keras", obj) or _is_of("builtins", obj)
    return stock(obj) if kept is None or own else _refer(kept, obj)


def _config_of(stock: Callable, obj: Any) -> Any:
    kept = _kept.get()
    if kept is None or not _is_code(obj):
        return stock(obj)
    name = _refer(kept, obj)
    return {"module": None, "class_name": "function", "config": name, "registered_name": name}


def _config_in_lambda(stock: Callable, layer: Any, function: Any) -> Any:
    of_code = _kept.get() is not None and _is_code(function)
    return keras.saving.serialize_keras_object(function) if of_code else stock(layer, function)


def _lambda_of(stock: Callable, kind: type, config: dict[str, Any], *args, **kwargs) -> Any:
    if _making.get():  # Keras restores the other functions, and not this one
        config["mask"] = keras.saving.deserialize_keras_object(config.get("mask"))
    return stock(kind, config, *args, **kwargs)


def _refer(kept: dict[str, Any], obj: Any) -> str:
    earlier = next((name for name, other in kept.items() if other is obj), None)
    # With a number, as a config may have the same word in another meaning.
    name = earlier or f"{getattr(obj, '__name__', type(obj).__name__)}#{len(kept)}"
    kept[name] = obj
    return name


def _is_code(obj: Any) -> bool:
    """Whether an object is a function, or the like, or a class: it has no config of its own."""
    if isinstance(obj, type):
        return True
    return callable(obj) and not hasattr(obj, "get_config") and not _is_of("keras", obj)


def _is_of(package: str, obj: Any) -> bool:
    return (getattr(obj, "__module__", None) or "").partition(".")[0] == package


# In place while a thread makes layers again; other threads have Keras's own.
_REPLACED = (
    (object_registration, "get_registered_name", _name_of),
    (serialization_lib, "serialize_keras_object", _config_of),
    (keras.saving, "serialize_keras_object", _config_of),
    (keras.layers.Lambda, "_serialize_function_to_config", _config_in_lambda),
    (keras.layers.Lambda, "from_config", _lambda_of),
)
_lock = threading.Lock()
_users: list[int] = []
_stock: list[Any] = []


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    """A context in which Keras's functions ask this thread's variables above."""
    with _lock:
        if not _users:
            _stock[:] = [vars(owner)[name] for owner, name, _ in _REPLACED]
            for (owner, name, by), stock in zip(_REPLACED, _stock, strict=True):
                setattr(owner, name, _calling(stock, by))
        _users.append(1)
    try:
        yield
    finally:
        with _lock:
            _users.pop()
            if not _users:
                for (owner, name, _), stock in zip(_REPLACED, _stock, strict=True):
                    setattr(owner, name, stock)


def _calling(stock: Any, by: Callable) -> Any:
    if isinstance(stock, classmethod):
        return classmethod(_calling(stock.__func__, by))

    @functools.wraps(stock)
    def call(*args, **kwargs):
        return by(stock, *args, **kwargs)

    return call
