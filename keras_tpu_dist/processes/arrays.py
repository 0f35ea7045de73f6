"""Transfers arrays between the host and devices of several processes."""

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.own_mesh import in_own_mesh
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.encoding import check_array

# The number of elements to compare: another seed or order already shows in the first ones.
_SAMPLE = 4096


def checksum(array: Any) -> int:
    """A number that differs if the first elements of two host arrays do.

    Args:
        array: The array.
    """
    first = np.asarray(array).ravel()[:_SAMPLE]
    return zlib.crc32(np.ascontiguousarray(first).tobytes())


def put(arrays: Sequence[Any], shardings: Sequence[Any]) -> list:
    """Transfers host arrays to the devices; every process transfers the parts of its own devices.

    All processes must have the same arrays. `jax.device_put` would compare them with a collective
    for every array; this function does not check.

    Args:
        arrays: The arrays.
        shardings: The sharding of every array.
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(list(arrays), list(shardings))
    return [
        # A sparse array is a structure of several arrays.
        jax.tree.map(functools.partial(_own_parts, sharding=sharding), array)
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def whole(array: jax.Array) -> np.ndarray:
    """An array's values, even if parts of it are on the devices of other processes.

    Args:
        array: The array.

    Raises:
        PeerError: If not all processes read it.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    agree(
        f"reading an array of shape {array.shape} on several hosts",
        fix="Read weights, save and predict in all processes, not in one of them alone; then "
        "print or write the result under `if jax.process_index() == 0`.",
    )
    return np.asarray(_to_everywhere(array.sharding)(array))


def on_every_host(arrays: Any) -> Any:
    """Gathers arrays with a part on other hosts; others are returned unchanged.

    All processes must call it at the same place in the same code; there is no check.

    Args:
        arrays: A structure of arrays.
    """

    def gathered(array: Any) -> Any:
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return array
        return array if array.is_fully_replicated else _to_everywhere(array.sharding)(array)

    return jax.tree.map(gathered, arrays)


def joined_rows(array: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Joins the rows of host arrays of several processes, unchanged, in all of them.

    Args:
        array: This process's array; the others may have different numbers of rows.
        groups: Processes with the same rows, in the order in which the rows are joined.
    """
    fix = "Use arrays of the same shape and dtype in all processes."
    mine = [list(array.shape), str(array.dtype)]
    answers = agree("joining the rows of all processes", fix, mine)
    for i, (shape, dtype) in enumerate(answers):
        check_array(shape, dtype, where=f"the rows of process {i}")
    alike = [mine[1], array.ndim, mine[0][1:]]
    if any([dtype, len(shape), shape[1:]] != alike for shape, dtype in answers):
        raise value_error(
            "Rows to join must have the same shape and dtype.",
            received="; ".join(
                f"{tuple(answer)} in process {i}" for i, answer in enumerate(answers)
            )
            + ".",
            fix=fix,
        )
    longest = max(shape[0] for shape, _ in answers)
    raw = np.zeros((longest, *array.shape[1:]), array.dtype)
    raw[: len(array)] = array
    # As bytes: JAX would convert 64-bit numbers to 32 bits.
    flat = np.frombuffer(raw.tobytes(), np.uint8)
    every = multihost_utils.process_allgather(flat) if flat.size else [flat] * len(answers)
    first = [group[0] for group in groups]
    parts = [np.frombuffer(np.asarray(every[i]).tobytes(), array.dtype) for i in first]
    return np.concatenate(
        [part.reshape(raw.shape)[: answers[i][0][0]] for i, part in zip(first, parts, strict=True)]
    )


def _own_parts(array: Any, sharding: Any) -> jax.Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


# One jitted function for every layout: a new one would be compiled at every call.
@functools.lru_cache(maxsize=256)
def _to_everywhere(sharding: NamedSharding) -> Any:
    return in_own_mesh(jax.jit(_same, out_shardings=NamedSharding(sharding.mesh, PartitionSpec())))


def _same(array: jax.Array) -> jax.Array:
    return array
