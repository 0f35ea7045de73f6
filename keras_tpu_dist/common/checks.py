"""Checks of arguments from users."""

import functools
import inspect
import math
import operator
import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeGuard, TypeVar, Union, get_args, get_origin

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
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        return False
    try:
        number = operator.index(value)
    except TypeError:
        return False  # an array of several numbers
    return (least is None or number >= least) and abs(number) <= _MOST


@dataclass(frozen=True)
class Requirement:
    """What an argument must be: `Annotated[int, whole(1)]` of a parameter, for `checked_arguments`.

    Attributes:
        choices: All values, if they are few; the error names the nearest.
    """

    words: str
    holds: Callable[[Any], bool]
    example: str
    choices: tuple = ()

    def check(self, caller: str, name: str, value: Any, or_none: bool) -> None:
        """Raises a `ValueError` for an argument that is wrong. See `require`."""
        if self.holds(value) or (or_none and value is None):
            return
        raise value_error(
            f"{name} of {caller} is {self.words}{', or None' if or_none else ''}.",
            received={name: value},
            fix=f"Write for example {name}={self.example}.",
            name=value if self.choices and isinstance(value, str) else None,
            choices=[choice for choice in self.choices if isinstance(choice, str)],
        )


FLAG = Requirement("True or False", lambda value: isinstance(value, (bool, np.bool_)), "True")
NAME = Requirement("a text", lambda value: isinstance(value, str) and value != "", '"..."')
TEXT = Requirement("a text", lambda value: isinstance(value, str), '"..."')
FUNCTION = Requirement("a function", callable, "function")


def whole(least: int = 1, most: int = _MOST) -> Requirement:
    """A whole number."""
    at_most = "" if most == _MOST else f" and at most {most}"
    return Requirement(
        f"a whole number of at least {least}{at_most}",
        lambda value: is_count(value, least) and value <= most,
        str(max(least, 2)),
    )


def above_zero(unit: str, example: str, below: float = math.inf) -> Requirement:
    """A finite number above 0."""

    def holds(value: Any) -> bool:
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        return number and bool(0 < value < below)

    return Requirement(f"a number of {unit} above 0", holds, example)


def one_of(*choices: Any) -> Requirement:
    """One of a few values."""
    texts = [f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices]
    words = f"{', '.join(texts[:-1])} or {texts[-1]}"

    def holds(value: Any) -> bool:
        # By type, because 1 == True, and arrays compare by element.
        return any(type(value) is type(choice) and value == choice for choice in choices)

    return Requirement(words, holds, texts[0], choices)


SECONDS = above_zero("seconds", "600.0", below=threading.TIMEOUT_MAX)
PositiveInt = Annotated[int, whole(1)]
NaturalInt = Annotated[int, whole(0)]
Seconds = Annotated[float, SECONDS]
# Our arguments, and what others call them.
_OTHER_WORDS = {
    "layout": ("plan", "rules", "layout_map", "sharding", "partition"),
    "mesh": ("device_mesh", "axes", "shape", "mesh_shape"),
    "topology": ("slice", "slice_type", "accelerator", "accelerator_type"),
}
# These types declare their check.
_OF_TYPES: dict[Any, Requirement] = {bool: FLAG, str: TEXT}


def require(caller: str, what: Requirement, or_none: bool = False, /, **values: Any) -> None:
    """Raises a `ValueError` for arguments that are wrong."""
    for name, value in values.items():
        what.check(caller, name, value, or_none)


def _declared(annotation: Any) -> tuple[Requirement, bool] | None:
    """The check that an annotation declares, and whether `None` is right too."""
    options = [annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        options = [arg for arg in get_args(annotation) if arg is not types.NoneType]
    if len(options) != 1:
        return None  # values of several types
    kind = get_origin(options[0])
    requirements = [arg for arg in get_args(options[0]) if isinstance(arg, Requirement)]
    if kind is not Annotated:
        requirements = [FUNCTION] if kind is Callable else [_OF_TYPES.get(options[0])]
    return (
        None
        if not requirements or requirements[0] is None
        else (requirements[0], options != [annotation])
    )


def checked_path(caller: str, fix: str, **paths: Any) -> str:
    """A path as text, without `~` and `file://`.

    Args:
        caller: The function or class that got it, for the error.
        fix: The error's last sentence.
        paths: The arguments, by name.
    """
    [(name, value)] = paths.items()
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(path, str) and path:
        return plain_path(path)
    raise value_error(f"{name} of {caller} is a path.", received={name: value}, fix=fix)


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that its arguments are checked as their annotations declare.

    `bool`, `str` and `Callable` declare themselves; `Annotated[int, whole(1)]` declares more. The
    error for an unknown keyword says what to write: for a TensorFlow keyword the entry of
    `tensorflow_names`, otherwise the nearest of ours.

    Args:
        function: The function.
    """
    owner = function.__qualname__.removesuffix(".__init__")
    caller = owner.removeprefix("TPUStrategy.")
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.name not in ("self", "cls")]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    declared = {parameter.name: _declared(parameter.annotation) for parameter in parameters}
    checks = {name: found for name, found in declared.items() if found is not None}
    takes_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    most = sys.maxsize if takes_more else len(positional)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in named]
    needed = [name for name in needed if name in names]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise TypeError(_unknown_word(owner, name, kwargs[name], names))
        if len(args) > most:
            raise TypeError(_too_many(owner, args[most:], names))
        given = dict(zip(positional, args, strict=False)) | kwargs
        missing = [name for name in needed if name not in given]
        if missing:
            raise TypeError(_missing(owner, missing, [name for name in names if name in given]))
        for name, (what, or_none) in checks.items():
            if name in given:
                what.check(caller, name, given[name], or_none)
        return function(*args, **kwargs)

    return checked


def checked_constructor(kind: type[T]) -> type[T]:
    """Decorates a class so that its constructor behaves as with `checked_arguments`.

    Args:
        kind: The class, whose own `__init__` is replaced.
    """
    kind.__init__ = checked_arguments(kind.__init__)
    return kind


def _unknown_word(owner: str, name: str, value: Any, names: list[str]) -> str:
    instead = tensorflow_names.of_argument(owner, name)
    if instead is not None:
        return message(
            f"{name}= is TensorFlow's, and {owner} has none.", received={name: value}, fix=instead
        )
    ours = next((ours for ours, others in _OTHER_WORDS.items() if name in others), None)
    use = f"Use {', '.join(names)}."
    return message(
        f"{owner} does not have this argument.",
        received={name: value},
        fix=f"Did you mean {ours}={value!r}? {use}" if ours in names else use,
        name=None if ours in names else name,
        choices=names,
    )


def _missing(owner: str, missing: list[str], given: list[str]) -> str:
    call = ", ".join(f"{name}=..." for name in [*missing, *given])
    return message(
        f"{owner} needs {' and '.join(missing)}.",
        received=f"{', '.join(given) or 'nothing'}.",
        fix=f"Write {owner}({call}).",
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
    if not hasattr(type(model), "trainable_variables"):
        raise value_error(
            f"{caller} needs a model.",
            received={"model": model},
            fix="Pass a keras.Model.",
        )
