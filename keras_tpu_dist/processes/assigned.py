"""Variables that were assigned outside of a step, which one process may have done alone.

From then on processes compute different numbers, and nothing fails. Launches write variables in
another way; so what is noted here is what programs and callbacks assign.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_COUNT = "_keras_tpu_dist_assigned"
# A larger part of a variable is marked by elements spread evenly over it.
_MOST_ELEMENTS = 2**22
# The mark of how often each variable was assigned, beside those of values.
TIMES = "times"


def note(variable: Any) -> None:
    """Notes that a variable was assigned.

    Args:
        variable: A `keras.Variable`.
    """
    setattr(variable, _COUNT, getattr(variable, _COUNT, 0) + 1)


def times_of(variables: Sequence[Any]) -> list[int]:
    """How often each variable was assigned since all were compared.

    Args:
        variables: The variables.
    """
    return [getattr(variable, _COUNT, 0) for variable in variables]


def forget(variables: Sequence[Any]) -> None:
    """Takes variables for equal in all processes from here on.

    Args:
        variables: The variables.
    """
    for variable in variables:
        if getattr(variable, _COUNT, 0):
            setattr(variable, _COUNT, 0)


def changes(variables: Sequence[Any]) -> dict[str, int]:
    """Marks of what was assigned: equal in processes that did the same.

    Args:
        variables: The variables, the same in all processes.

    Returns:
        How often each was assigned, under `TIMES`; under the name of each part of the assigned
        variables that lies here a mark of the values of all variables that have such a part. Empty
        if none was assigned.
    """
    marks: dict[str, int] = {}
    for index, (variable, times) in enumerate(zip(variables, times_of(variables))):
        if times:
            marks[TIMES] = zlib.crc32(f"{index} {times} ".encode(), marks.get(TIMES, 0))
            for name, part in _parts(variable.value):
                marks[name] = zlib.crc32(whole_bytes(part), marks.get(name, 0))
    return marks


def differ(told: Sequence[dict[str, int]]) -> bool:
    """Whether processes did different things.

    Args:
        told: What `changes` gave in each of them.
    """
    if len({each.get(TIMES) for each in told}) > 1:
        return True
    first: dict[str, int] = {}
    return any(first.setdefault(name, m) != m for each in told for name, m in each.items())


def whole_bytes(array: Any) -> bytes:
    """What a mark is made of: all elements of a host array, of a large one some everywhere.

    Args:
        array: The array.
    """
    flat = np.asarray(array).ravel()
    spread = flat[:: max(1, flat.size // _MOST_ELEMENTS)]
    return spread.tobytes()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The different parts of an array that lie here, each with a name that is its own.

    Arrays of one shape and layout have equal names: a process that has a part of one of them has
    the same part of the others.
    """
    if value.is_fully_replicated:
        yield "whole", value
        return
    layout = f"{value.shape} {getattr(value.sharding, 'spec', None)}"
    shards = {str(shard.index): shard.data for shard in value.addressable_shards}
    for place, data in shards.items():
        yield f"{layout} {place}", data
