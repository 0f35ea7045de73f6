"""The first table: what the package replaces in Keras, once the first object needs it.

Such an object is a strategy, `remat`, `scan_blocks`, or a callback that sees a whole `fit`. Names
that are read or written, but not replaced, are in a second table (`names`). Both are checked
together.
"""

import functools
import importlib
import inspect
import logging
import os
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import keras

from keras_tpu_dist._keras.callers import new_callers
from keras_tpu_dist.common.once import log_once

# The whole test suite ran with these releases. A nightly build is none of them: it is checked like
# a release that is not in this list.
TESTED_KERAS = ("3.15.0", "3.15.1")
# The test of the seam ran with sources of these too, before their release.
_FIRST_KERAS, _FIRST_UNKNOWN_KERAS = (3, 15), (3, 17)
_ANY_KERAS = "KTD_ANY_KERAS"
# Names that Keras 3.16 has moved, since its backends can be plugged in.
_MOVED = {
    "keras.src.backend.jax.trainer:JAXTrainer": "keras.src.backend.jax.trainer:Trainer",
    "keras.src.trainers.trainer:Trainer": "keras.src.trainers.trainer:BaseTrainer",
    "keras.src.backend.jax.nn": "keras.src.backend.jax.ops.nn",
}


class Reached(Protocol):
    """A name of one of the tables."""

    def fault(self) -> str | None:
        """What this Keras lacks for it, or `None`."""


@dataclass(frozen=True)
class Replacement:
    """A name of Keras that is replaced, and why.

    Attributes:
        owner: Where it is: `"module"`, or `"module:Class"`.
        by: Called as `by(stock, ...)`; with `whole`, it replaces the function as it is.
        why: What a strategy cannot use in Keras's own function.
        hook: The public hook of Keras that would make the replacement unnecessary.
        parameters: Names of parameters that `by` relies on.
        whole: Whether `by` works without the stock function.
        on_instances: Whether the name is an attribute that a class sets on its instances.
        inside: Whether a function of a module is replaced in itself, as other modules have it too.
    """

    owner: str
    name: str
    by: Any
    why: str
    hook: str
    parameters: tuple[str, ...] = ()
    whole: bool = False
    on_instances: bool = False
    inside: bool = False

    def __str__(self):
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def holder(self) -> Any:
        """The module or class that has the name. See `at`."""
        return at(self.owner)

    def fault(self) -> str | None:
        """What this Keras lacks for the replacement, or `None`."""
        try:
            if self.on_instances:
                named = self.name in self.holder().__init__.__code__.co_names
                return None if named else fault_of(self)
            stock = getattr(self.holder(), self.name)
        except (ImportError, AttributeError, TypeError):
            return fault_of(self)
        found = inspect.signature(stock).parameters if self.parameters else {}
        lacking = [name for name in self.parameters if name not in found]
        return f"{self} has no parameter {', '.join(lacking)}" if lacking else None


def fault_of(name: Reached) -> str:
    """The message for a missing name.

    Args:
        name: The name.
    """
    return f"{name} is missing"


def at(owner: str) -> Any:
    """A module or class of Keras or JAX by its name in Keras 3.15, even if Keras 3.16 has moved it.

    Args:
        owner: `"module"` or `"module:Class"`, as Keras 3.15 has it.

    Raises:
        ImportError: If there is no such module.
        AttributeError: If there is no such class.
    """
    try:
        return _found(owner)
    except (ImportError, AttributeError):
        if owner not in _MOVED:
            raise
        return _found(_MOVED[owner])


def _found(owner: str) -> Any:
    module, _, attribute = owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


_declared: list[Replacement] = []
_read: list[Reached] = []
_installed: dict[tuple[str, str], tuple[Replacement, Any]] = {}
_lock = threading.Lock()


def declare(*replacements: Replacement) -> None:
    """Adds to the table; Keras does not change until `install`.

    Args:
        replacements: What to replace.
    """
    _declared.extend(replacements)


def declare_read(*names: Reached) -> None:
    """Adds names that are read or written, but not replaced.

    Args:
        names: Names to check together with the replacements.
    """
    _read.extend(names)


def table() -> tuple[Replacement, ...]:
    """Everything that `install` replaces."""
    return tuple(_declared)


def stock(owner: str, name: str) -> Any:
    """Keras's own version of a replaced name.

    Args:
        owner: As in `Replacement`.
        name: See `Replacement`.
    """
    return _installed[owner, name][1]


def install() -> None:
    """Replaces the declared names, every one once; all of them or none.

    Raises:
        ImportError: If this Keras is of an unknown version, or lacks a name or a parameter.
    """
    missing = [entry for entry in _declared if (entry.owner, entry.name) not in _installed]
    if not missing:
        return
    with _lock:
        check_keras(missing)
        if keras.__version__ not in TESTED_KERAS and (new := new_callers()):
            log_once(
                f"keras_tpu_dist was not tested with keras {keras.__version__}, in which "
                f"{'; '.join(new)}: names that a strategy replaces, and relies on who calls them. "
                f"Versions that were tested: {', '.join(TESTED_KERAS)}.",
                logging.WARNING,
                "callers in Keras",
            )
        for entry in missing:
            if (entry.owner, entry.name) not in _installed:
                _installed[entry.owner, entry.name] = entry, _put_in_place(entry)


def check_keras(replacements: Any = None) -> None:
    """Raises an `ImportError` with everything that this Keras lacks for both tables.

    Args:
        replacements: An iterable of `Replacement`, or `None` for all that are declared.
    """
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    known = _FIRST_KERAS <= version < _FIRST_UNKNOWN_KERAS
    if not known and not os.environ.get(_ANY_KERAS):
        raise ImportError(
            "keras_tpu_dist works with Keras 3.15 and 3.16. "
            f"Received: keras=={keras.__version__}. Install 'keras>=3.15,<3.17', or set "
            f"{_ANY_KERAS}=1 to try this one; tests/_keras/test_seam.py then shows what works."
        )
    raise_faults([*(_declared if replacements is None else replacements), *_read])


def raise_faults(names: Iterable[Reached]) -> None:
    """Raises an `ImportError` with all names that this Keras lacks.

    Args:
        names: The names.
    """
    faults = [name.fault() for name in names]
    if any(faults):
        raise ImportError(
            "keras_tpu_dist uses names of Keras that this version does not have. "
            f"Received: keras=={keras.__version__}: {'; '.join(filter(None, faults))}. "
            f"Install a tested version: keras=={' or =='.join(TESTED_KERAS)}."
        )


def in_front_of(stock: Any, ours: Any, kind: Any) -> type:
    """A class with ours before Keras's in the method resolution order, like a replaced method.

    Overrides in a user's class come before both.

    Args:
        stock: Keras's class.
        ours: A subclass of it.
        kind: Keras's class, or a user's subclass of it.
    """
    if kind is stock or issubclass(kind, ours):
        return ours if kind is stock else kind
    return _joined(kind, ours)


@functools.cache
def _joined(kind: Any, ours: Any) -> type:
    return type(kind.__name__, (kind, ours), {"__module__": kind.__module__})


def _put_in_place(replacement: Replacement) -> Any:
    holder = replacement.holder()
    stock = getattr(holder, replacement.name, None)
    if replacement.whole:
        setattr(holder, replacement.name, replacement.by)
    elif replacement.inside or (
        isinstance(holder, type) and _is_function(vars(holder).get(replacement.name))
    ):
        return _within(stock, replacement.by)
    else:
        setattr(holder, replacement.name, _calling(stock, replacement.by))
    return stock


def _is_function(method: Any) -> bool:
    return inspect.isfunction(method) and len(method.__code__.co_freevars) < len(_CALLS)


def _within(method: Any, by: Callable) -> Any:
    """Replaces what a method does, in the function itself; returns one that does what it did.

    Others may have looked the method up before: `mlflow.autolog` puts a function in front of
    `keras.Model.fit`, and calls the one that it found there. Python itself looks up `model.fit`
    before the callbacks among its arguments are made.
    """
    stock = types.FunctionType(
        method.__code__,
        method.__globals__,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    functools.update_wrapper(stock, method)
    stock.__kwdefaults__ = method.__kwdefaults__
    stock.__dict__.pop("__wrapped__")
    stock.__dict__.update(vars(method))
    method.__signature__ = inspect.signature(stock)
    method.__code__ = _CALLS[len(method.__code__.co_freevars)].__code__
    method.__defaults__, method.__kwdefaults__ = (
        None,
        {"_keras_tpu_dist_by": by, "_keras_tpu_dist_stock": stock},
    )
    return stock


def _calls() -> list[Any]:
    """Functions that call the replacement: one, and one that names a variable from around it.

    A function that a decorator made has such a variable, and takes only code that has as many.
    """
    variable = None

    def of_none(*args, _keras_tpu_dist_by, _keras_tpu_dist_stock, **kwargs):
        return _keras_tpu_dist_by(_keras_tpu_dist_stock, *args, **kwargs)

    def of_one(*args, _keras_tpu_dist_by, _keras_tpu_dist_stock, **kwargs):
        return _keras_tpu_dist_by(_keras_tpu_dist_stock, *args, **kwargs)
        return variable

    return [of_none, of_one]


_CALLS = _calls()


def _calling(stock: Any, by: Callable) -> Any:
    @functools.wraps(stock)
    def replaced(*args, **kwargs):
        return by(stock, *args, **kwargs)

    return replaced
