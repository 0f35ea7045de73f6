"""Assignments outside of a step, which one process may make alone.

From then on processes compute different numbers, and nothing fails. A launch does not call
`assign`, so what is counted here is what the user's program and callbacks assign.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_tpu_dist import _keras

# On a variable: how often it was assigned since processes were compared.
_count = _keras.Mark("_keras_tpu_dist_assigned")
# Of a larger part, so many elements are read, spread evenly over it.
_MOST_ELEMENTS = 2**22
# The key of the checksum over how often variables were assigned, beside the keys of their parts.
TIMES = "times"


def note(variable: Any) -> None:
    """Counts an assignment.

    Args:
        variable: A `keras.Variable`.
    """
    _count.write(variable, _count.of(variable, 0) + 1)


def times_of(variables: Sequence[Any]) -> list[int]:
    """How often every variable was assigned since the processes compared them.

    Args:
        variables: The variables.
    """
    return [_count.of(variable, 0) for variable in variables]


def forget(variables: Sequence[Any]) -> None:
    """Counts anew: the variables are equal in all processes now.

    Args:
        variables: The variables.
    """
    for variable in variables:
        if _count.of(variable, 0):
            _count.write(variable, 0)


def assignments(variables: Sequence[Any]) -> dict[str, int]:
    """Checksums of what was assigned: equal in processes that assigned the same.

    One checksum for all variables with a part at the same place, so that the message stays short
    for a model of thousands of weights.

    Args:
        variables: The variables, the same in all processes.

    Returns:
        Empty if nothing was assigned. Else, under `TIMES`, a checksum of how often variables were
        assigned, and for every place of a part on this process's devices one of its values.
    """
    checksums: dict[str, int] = {}
    for index, (variable, times) in enumerate(zip(variables, times_of(variables))):
        if times:
            counted = f"{index} {times} ".encode()
            checksums[TIMES] = zlib.crc32(counted, checksums.get(TIMES, 0))
            for name, part in _parts(variable.value):
                checksums[name] = zlib.crc32(sampled_bytes(part), checksums.get(name, 0))
    return checksums


def differ(answers: Sequence[dict[str, int]]) -> bool:
    """Whether processes assigned different values.

    Args:
        answers: What `assignments` returned in every process.
    """
    if len({answer.get(TIMES) for answer in answers}) > 1:
        return True
    return parts_differ(answers)


def parts_differ(answers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether processes that have a part under one name have different marks of it.

    Args:
        answers: For each process its marks by the parts' names.
    """
    first: dict[str, Any] = {}
    return any(first.setdefault(name, m) != m for answer in answers for name, m in answer.items())


def sampled_bytes(array: Any) -> bytes:
    """The elements of a host array as bytes; of a large one, some spread evenly over it.

    Args:
        array: The array.
    """
    flat = np.asarray(array).ravel()
    return flat[:: max(1, flat.size // _MOST_ELEMENTS)].tobytes()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The distinct parts of an array on this process's devices, by name.

    Arrays of one shape and layout have the same names: a process that has a part of one of them
    has the same part of the others.
    """
    if value.is_fully_replicated:
        yield "whole", value
        return
    layout = f"{value.shape} {getattr(value.sharding, 'spec', None)}"
    shards = {str(shard.index): shard.data for shard in value.addressable_shards}
    for place, data in shards.items():
        yield f"{layout} {place}", data
