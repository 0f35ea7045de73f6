"""Several processes that run one replica function: the same arguments, the same variables."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.processes.agreement import compare_variables
from keras_tpu_dist.processes.arrays import checksum
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.encoding import ListOf
from keras_tpu_dist.replica.call import Call, Leaf
from keras_tpu_dist.replica.padding import same_numbers
from keras_tpu_dist.training.protocol import Strategy

# On a variable: that all processes were found to hold the same values.
_compared = _keras.Mark("_keras_tpu_dist_compared")
_FIX = "Call strategy.run in all processes, with the same function and arguments."


def name_of(function: Callable) -> str:
    """What errors call a replica function.

    Args:
        function: The function.
    """
    return f"strategy.run of {getattr(function, '__name__', type(function).__name__)!r}"


def check_call(what: str, call: Call, strategy: Strategy) -> None:
    """Raises if other processes run something else, or give what all replicas share another value.

    It is done once for each program: what is said costs as much as a small step.

    Args:
        what: The run, as `name_of` has it.
        call: The arguments.
        strategy: The strategy.

    Raises:
        PeerError: On all processes, if they do not run the same function.
        ValueError: On all processes, if its arguments differ.
    """
    if strategy.placer.is_local:
        return
    told = agree(what, _FIX, [_described(leaf) for leaf in call.leaves], ListOf(str))
    mine = told[jax.process_index()]
    for i, theirs in enumerate(told):
        if theirs != mine:
            pairs = zip([*mine, "nothing"], [*theirs, "nothing"], strict=False)
            number, (here, there) = next((n, p) for n, p in enumerate(pairs) if p[0] != p[1])
            raise ValueError(
                message(
                    "All processes run a function with the same arguments.",
                    received=f"{what}: leaf {number} of (args, kwargs) is {here} in process "
                    f"{jax.process_index()} and {there} in process {i}.",
                    fix="Give what differs to the replicas as a per-replica value: "
                    "strategy.distribute_values_from_function or a distributed dataset.",
                )
            )


def check_variables(what: str, variables: list, strategy: Strategy) -> None:
    """Raises if processes hold different values of variables that a replica function uses.

    Args:
        what: The run, as `name_of` has it.
        variables: The variables; each is compared once.
        strategy: The strategy.

    Raises:
        ValueError: On all processes.
    """
    new = [v for v in variables if not _compared.of(v)]
    if strategy.placer.is_local or not new:
        return
    compare_variables(what, new)
    for variable in new:
        _compared.write(variable, True)


def all_the_same(what: str, pairs: list[tuple[Any, Any]], strategy: Strategy) -> bool:
    """Whether the arrays of each pair are equal but for rounding, in all processes.

    Args:
        what: Whose arrays they are, in words that are the same everywhere.
        pairs: Arrays of one shape and layout.
        strategy: The strategy.
    """
    same = all(
        same_numbers(*each) for pair in pairs for each in zip(*map(_parts, pair), strict=True)
    )
    if strategy.placer.is_local:
        return same
    return all(agree(f"the padding of {what}", _FIX, same, bool))


def _parts(array: Any) -> list:
    """What of an array lies here."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return [array]
    return [shard.data for shard in array.addressable_shards]


def _described(leaf: Leaf) -> str:
    value = leaf.value
    if leaf.constant:
        plain = isinstance(value, (bool, str, bytes))
        return repr(value) if plain else f"a {type(value).__name__}"
    if leaf.source is not None:
        return f"a PerReplica of {tuple(value.shape)}, {value.dtype}, rows {leaf.source.sizes}"
    if isinstance(value, (int, float, complex)):
        return repr(value)
    readable = not isinstance(value, jax.Array) or value.is_fully_replicated
    words = f"an array of {tuple(value.shape)}, {value.dtype}"
    return f"{words}, values {checksum(np.asarray(value)):08x}" if readable else words
