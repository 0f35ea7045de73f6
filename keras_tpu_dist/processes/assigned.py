"""Counts assignments outside of a step, which one process might make alone.

After that, processes would compute different numbers without an error. A launch does not call
`assign`, so the counted assignments are those of the user's program and callbacks.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_tpu_dist import _keras

# On a variable: the number of assignments since processes were compared.
_count = _keras.Mark("_keras_tpu_dist_assigned")
# If a part is larger, so many elements are read, spread evenly over it.
_MOST_ELEMENTS = 2**22
# The key for the checksum of the numbers of assignments, next to the keys of parts.
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
    """Resets the counts: the variables are now equal in all processes.

    Args:
        variables: The variables.
    """
    for variable in variables:
        if _count.of(variable, 0):
            _count.write(variable, 0)


def assignments(variables: Sequence[Any]) -> dict[str, int]:
    """Checksums of assigned values: equal in processes that assigned the same.

    There is one checksum for all variables with a part at the same place, so that the message is
    short for a model with thousands of weights.

    Args:
        variables: The variables, the same in all processes.

    Returns:
        Empty if nothing was assigned. Otherwise, under `TIMES`, a checksum of the numbers of
        assignments, and one of the values for every place of a part on this process's devices.
    """
    checksums: dict[str, int] = {}
    for index, (variable, times) in enumerate(zip(variables, times_of(variables), strict=True)):
        if times:
            counted = f"{index} {times} ".encode()
            checksums[TIMES] = zlib.crc32(counted, checksums.get(TIMES, 0))
            for name, part in _parts(variable.value):
                checksums[name] = zlib.crc32(sampled_bytes(part), checksums.get(name, 0))
    return checksums


def differ(answers: Sequence[dict[str, int]]) -> bool:
    """Whether processes assigned different values.

    Args:
        answers: The result of `assignments` in every process.
    """
    if len({answer.get(TIMES) for answer in answers}) > 1:
        return True
    return parts_differ(answers)


def parts_differ(answers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether processes with a part of the same name have different checksums for it.

    Args:
        answers: For every process, its checksums by the parts' names.
    """
    first: dict[str, Any] = {}
    return any(first.setdefault(name, m) != m for answer in answers for name, m in answer.items())


def sampled_bytes(array: Any) -> bytes:
    """The bytes of a host array; for a large one, those of elements spread evenly over it.

    Args:
        array: The array.
    """
    flat = np.asarray(array).ravel()
    return flat[:: max(1, flat.size // _MOST_ELEMENTS)].tobytes()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The distinct parts of an array on this process's devices, by name.

    Arrays with the same shape and layout have the same names: if a process has a part of one of
    them, it has the same part of the others.
    """
    if value.is_fully_replicated:
        yield "whole", value
        return
    layout = f"{value.shape} {getattr(value.sharding, 'spec', None)}"
    shards = {str(shard.index): shard.data for shard in value.addressable_shards}
    for place, data in shards.items():
        yield f"{layout} {place}", data
