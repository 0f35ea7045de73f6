"""The text of every error: the rule broken, what was received, the fix."""

import difflib
from collections.abc import Iterable, Mapping

# Names are shorter; `difflib` takes the square of the length.
_LONGEST_NAME = 400


def did_you_mean(name: str, choices: Iterable[object], likeness: float = 0.5) -> str:
    """A sentence that names the nearest valid spelling, or nothing.

    Args:
        name: The name that the user wrote.
        choices: The valid names.
        likeness: How alike the nearest must be, from 0 to 1; see `difflib.get_close_matches`.

    Returns:
        `" Did you mean 'data'?"`, with a leading space, or `""` if nothing is near.
    """
    if len(str(name)) > _LONGEST_NAME:
        return ""
    lowered = {str(choice).lower(): str(choice) for choice in choices}
    near = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=likeness)
    return f" Did you mean {lowered[near[0]]!r}?" if near else ""


def message(
    rule: str,
    *,
    received: Mapping[str, object] | str,
    fix: str,
    name: str | None = None,
    choices: Iterable[object] = (),
) -> str:
    """Builds one error message in the form every error of this package has.

    Args:
        rule: The rule that was broken, as a sentence.
        received: The arguments, as a mapping of names to values (rendered `name=value`), or a
            sentence.
        fix: The correction, as a sentence.
        name: A name that may be mistyped; with `choices`, adds a did-you-mean.
        choices: The valid spellings of `name`.

    Example:

    >>> print(message(
    ...     "The axis must be one of the mesh's axes.",
    ...     received={"axis": "dta", "mesh": {"data": 8}},
    ...     fix="Use one of: data.",
    ...     name="dta",
    ...     choices=["data"],
    ... ))
    The axis must be one of the mesh's axes. Received: axis='dta', mesh={'data': 8}. Use one of: \
data. Did you mean 'data'?
    """
    if not isinstance(received, str):
        received = ", ".join(f"{key}={value!r}" for key, value in received.items()) + "."
    hint = did_you_mean(name, choices) if name is not None else ""
    return f"{rule} Received: {received} {fix}{hint}"


def value_error(
    rule: str,
    *,
    received: Mapping[str, object] | str,
    fix: str,
    name: str | None = None,
    choices: Iterable[object] = (),
) -> ValueError:
    """A `ValueError` to raise. See `message`."""
    return ValueError(message(rule, received=received, fix=fix, name=name, choices=choices))


def type_error(rule: str, *, received: Mapping[str, object] | str, fix: str) -> TypeError:
    """A `TypeError` to raise. See `message`."""
    return TypeError(message(rule, received=received, fix=fix))


def runtime_error(rule: str, *, received: Mapping[str, object] | str, fix: str) -> RuntimeError:
    """A `RuntimeError` to raise. See `message`."""
    return RuntimeError(message(rule, received=received, fix=fix))
