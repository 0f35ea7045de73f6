"""The first table: what the package replaces in Keras, once the first object needs it.

Such an object is a strategy, `remat`, `scan_blocks`, or a callback that sees a whole `fit`. Names
that are read or written, but not replaced, are in a second table (`names`). Both are checked
together.
"""

import functools
import importlib
import inspect
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import keras

# The whole test suite ran with these versions.
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
    """

    owner: str
    name: str
    by: Any
    why: str
    hook: str
    parameters: tuple[str, ...] = ()
    whole: bool = False
    on_instances: bool = False

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
    """The message for a missing name."""
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
    """Adds to the table; Keras does not change until `install`."""
    _declared.extend(replacements)


def declare_read(*names: Reached) -> None:
    """Adds names that are read or written, but not replaced."""
    _read.extend(names)


def table() -> tuple[Replacement, ...]:
    """Everything that `install` replaces."""
    return tuple(_declared)


def stock(owner: str, name: str) -> Any:
    """Keras's own version of a replaced name."""
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
    """Raises an `ImportError` with all names that this Keras lacks."""
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
    by = replacement.by if replacement.whole else _calling(stock, replacement.by)
    setattr(holder, replacement.name, by)
    return stock


def _calling(stock: Any, by: Callable) -> Any:
    @functools.wraps(stock)
    def replaced(*args, **kwargs):
        return by(stock, *args, **kwargs)

    return replaced
