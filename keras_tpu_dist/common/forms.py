"""The form of plain data that a stranger may have written."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ListOf:
    """A list of any length, with the form of its elements."""

    form: Any


@dataclass(frozen=True)
class DictOf:
    """A dict with any strings as keys, with the form of its values."""

    form: Any


@dataclass(frozen=True)
class Maybe:
    """An entry of a dict that may be missing, with its form."""

    form: Any


def fits(value: Any, form: Any) -> bool:
    """Whether plain data has a form.

    Args:
        value: A result of `json.loads`.
        form: A type, `None`, a function that returns whether a value is right, a tuple of
            alternatives, a list of as many forms, a dict of keys that must be there (others may be,
            too), `ListOf(form)` or `DictOf(form)`.
    """
    if isinstance(form, tuple):
        return any(fits(value, choice) for choice in form)
    if isinstance(form, ListOf):
        return type(value) is list and all(fits(item, form.form) for item in value)
    if isinstance(form, DictOf):
        return type(value) is dict and all(fits(item, form.form) for item in value.values())
    if isinstance(form, list):
        same = type(value) is list and len(value) == len(form)
        return same and all(map(fits, value, form))
    if isinstance(form, dict):
        return type(value) is dict and all(
            fits(value[name], inner.form if isinstance(inner, Maybe) else inner)
            if name in value
            else isinstance(inner, Maybe)
            for name, inner in form.items()
        )
    if form is None or isinstance(form, type):
        return value is None if form is None else type(value) is form
    return bool(form(value))
