"""Checks of arguments from users."""

import functools
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeGuard, TypeVar

import numpy as np

from keras_tpu_dist.common import tensorflow_names
from keras_tpu_dist.common.errors import message, value_error
from keras_tpu_dist.common.paths import plain_path

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
# The largest 64-bit integer: NumPy and XLA count no further.
_MOST = 2**63 - 1


def is_count(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Whether something is a whole number, of Python or NumPy, and not a bool.

    Args:
        value: Anything.
        least: The smallest allowed value, if there is one.

    Example:

    >>> import numpy as np
    >>> [is_count(value, 1) for value in (1, np.int32(3), 0, True, 2.0, "2")]
    [True, True, False, False, False, False]
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    try:
        number = operator.index(value)
    except TypeError:
        return False  # an array of several numbers
    return (least is None or number >= least) and abs(number) <= _MOST


def check_flags(caller: str, **flags: Any) -> None:
    """Raises a `ValueError` for flags that are neither `True` nor `False`.

    Args:
        caller: The function or class that got them, for the error.
        **flags: The arguments, by name.
    """
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise value_error(
                f"{name} of {caller} is True or False.",
                received={name: value},
                fix=f"Write {name}=True, or {name}=False.",
            )


def check_counts(caller: str, least: int = 1, **counts: Any) -> None:
    """Raises a `ValueError` for counts that are not integers or too small.

    Args:
        caller: The function or class that got them, for the error.
        least: The smallest allowed value.
        **counts: The arguments, by name.
    """
    for name, value in counts.items():
        if not is_count(value, least):
            raise value_error(
                f"{name} of {caller} is a whole number of at least {least}.",
                received={name: value},
                fix=f"Write for example {name}={max(least, 2)}.",
            )


def check_seconds(caller: str, unit: str = "seconds", **times: Any) -> None:
    """Raises a `ValueError` for times that are not finite numbers above 0.

    Args:
        caller: The function or class that got it, for the error.
        unit: What they count.
        **times: The arguments, by name.
    """
    for name, value in times.items():
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise value_error(
                f"{name} of {caller} is a number of {unit} above 0.",
                received={name: value},
                fix=f"Write for example {name}={600.0 if unit == 'seconds' else 6}.",
            )


def check_callable(caller: str, **functions: Any) -> None:
    """Raises a `ValueError` for arguments that cannot be called.

    Args:
        caller: The function or class that got it, for the error.
        **functions: The arguments, by name.
    """
    for name, value in functions.items():
        if not callable(value):
            raise value_error(
                f"{name} of {caller} is a function.",
                received={name: value},
                fix="Pass the function itself.",
            )


def check_text(caller: str, **texts: Any) -> None:
    """Raises a `ValueError` for arguments that are not a `str`.

    Args:
        caller: The function or class that got it, for the error.
        **texts: The arguments, by name.
    """
    for name, value in texts.items():
        if not isinstance(value, str):
            raise value_error(
                f"{name} of {caller} is a text.",
                received={name: value},
                fix="Give it as a str.",
            )


def checked_path(caller: str, fix: str, **paths: Any) -> str:
    """A path as text, without `~` and `file://`.

    Args:
        caller: The function or class that got it, for the error.
        fix: The error's last sentence.
        **paths: The arguments, by name.

    Raises:
        ValueError: If it is none, or empty.
    """
    [(name, value)] = paths.items()
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(path, str) and path:
        return plain_path(path)
    raise value_error(f"{name} of {caller} is a path.", received={name: value}, fix=fix)


def known_words(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that its error for an unknown keyword says what to write.

    For a TensorFlow keyword it gives the entry of `tensorflow_names`, otherwise the nearest of
    ours.

    Args:
        function: The function.
    """
    owner = function.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.name not in ("self", "cls")]
    most = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        most = sys.maxsize

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise TypeError(_unknown_word(owner, name, kwargs[name], names))
        if len(args) > most:
            raise TypeError(_too_many(owner, args[most:], names))
        return function(*args, **kwargs)

    return checked


def knows_words(kind: type[T]) -> type[T]:
    """Decorates a class so that its constructor behaves as with `known_words`.

    Args:
        kind: The class, whose own `__init__` is replaced.
    """
    kind.__init__ = known_words(kind.__init__)
    return kind


def _unknown_word(owner: str, name: str, value: Any, names: list[str]) -> str:
    if owner in ("Checkpoint", "LoopCheckpoint") and name in ("local", "local_every_steps"):
        return message(
            f"{name}= of {owner} was removed: checkpoints are in one directory for all processes.",
            received={name: value},
            fix=f"Use two {owner}s of different rhythm, with two directories.",
        )
    instead = tensorflow_names.of_argument(owner, name)
    if instead is not None:
        return message(
            f"{name}= is TensorFlow's, and {owner} has none.", received={name: value}, fix=instead
        )
    return message(
        f"{owner} does not have this argument.",
        received={name: value},
        fix=f"Use {', '.join(names)}.",
        name=name,
        choices=names,
    )


def _too_many(owner: str, surplus: tuple, names: list[str]) -> str:
    instead = set(tensorflow_names.arguments_of(owner).values())
    use = f"Use {', '.join(names)}."
    return message(
        f"{owner} does not have so many arguments.",
        received=f"{', '.join(map(repr, surplus))} beyond them.",
        fix=instead.pop() if len(instead) == 1 else use,
    )


def check_model(model: Any, caller: str) -> None:
    """Raises a `ValueError` if an argument is not a model.

    Args:
        model: The argument.
        caller: The function that got it, for the error.
    """
    if not hasattr(model, "trainable_variables") or isinstance(model, type):
        raise value_error(
            f"{caller} needs a model.",
            received={"model": model},
            fix="Pass a keras.Model.",
        )
