"""Host values, one per replica, stacked into arrays on the mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.input.host_arrays import padded
from keras_tpu_dist.processes.arrays import checksum
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.encoding import ListOf, check_array
from keras_tpu_dist.replica.blocks import from_blocks
from keras_tpu_dist.replica.values import PerReplica
from keras_tpu_dist.training.protocol import Strategy

# The form of a process's answer: for every replica its number, its structure, and its arrays.
_VALUES = ListOf([int, str, ListOf([str, ListOf(int), str, int])])


@dataclass(frozen=True)
class DescribedValue:
    """The description of one replica's value that all processes get.

    Attributes:
        kind: The name of its type.
        shape: Its shape.
        dtype: Its dtype.
        checksum: Of its elements; `0` if no other process has this replica.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int = 0

    @classmethod
    def of(cls, value: Any, with_checksum: bool = False) -> "DescribedValue":
        """The description of a host value.

        Args:
            value: A number or an array.
            with_checksum: Whether other processes have this replica too.
        """
        array = np.asarray(value)
        number = checksum(array) if with_checksum and array.dtype.kind not in "OSU" else 0
        return cls(type(value).__name__, array.shape, str(array.dtype), number)


def stack(
    own: Mapping[int, Any], every: Sequence[DescribedValue], strategy: Strategy, name: str
) -> PerReplica:
    """One host value per replica as a `PerReplica`, padded along the first dimension if need be.

    Args:
        own: The values by the number of their replica, at least those of this process's replicas.
        every: Those of all replicas.
        strategy: The strategy.
        name: The function that gave them, for errors.

    Raises:
        ValueError: If they are no numbers, or differ in dtype or in more than the first dimension.
    """
    _check_fit(every, name)
    lengths = [each.shape[0] for each in every if each.shape]
    sizes, arrays = {}, {replica: np.asarray(value) for replica, value in own.items()}
    if len(set(lengths)) > 1:
        sizes[0] = tuple(lengths)
        arrays = {i: padded(array, 0, max(lengths)) for i, array in arrays.items()}
    blocks = {replica: array[None] for replica, array in arrays.items()}
    return PerReplica(from_blocks(blocks, 0, strategy), strategy, stacked=True, sizes=sizes)


def stacked(own: Mapping[int, Any], strategy: Strategy, name: str) -> Any:
    """A structure of host values per replica as one structure of `PerReplica`.

    Args:
        own: The structures by the number of their replica, those of this process's replicas.
        strategy: The strategy.
        name: The function that gave them, for errors.

    Raises:
        ValueError: On all processes, if the replicas' values do not fit together.
        PeerError: If not all processes give theirs.
    """
    flat = {replica: jax.tree.flatten(value) for replica, value in own.items()}
    structures, described = _described(flat, strategy, name)
    if len(structures) > 1:
        raise ValueError(
            message(
                f"{name} must return the same structure for all replicas.",
                received={"structures": sorted(structures)},
                fix="Return the same keys and lengths for each replica.",
            )
        )
    leaves = [
        stack({i: leaves[n] for i, (leaves, _) in flat.items()}, column, strategy, name)
        for n, column in enumerate(zip(*described, strict=True))
    ]
    return jax.tree.unflatten(next(iter(flat.values()))[1], leaves)


def _described(flat: Mapping[int, tuple], strategy: Strategy, name: str) -> tuple[set, list]:
    """The different structures of the replicas' values, and every replica's descriptions."""
    several = not strategy.placer.is_local
    mine = [
        [i, str(treedef), [_plain(DescribedValue.of(leaf, several)) for leaf in leaves]]
        for i, (leaves, treedef) in flat.items()
    ]
    fix = f"Call it in all processes: each calls {name} for its own replicas."
    what = f"making a value per replica by {name}"
    answers = agree(what, fix, mine, _VALUES) if several else [mine]
    found: dict[int, tuple] = {}
    for process, values in enumerate(answers):
        for replica, structure, plain in values:
            for _, shape, dtype, _ in plain:
                check_array(shape, dtype, where=f"the value of replica {replica}")
            here = (structure, [DescribedValue(k, tuple(s), d, n) for k, s, d, n in plain])
            if found.setdefault(replica, here) != here:
                raise ValueError(
                    message(
                        "Processes that share a replica, because a model axis crosses hosts, give "
                        "it the same value.",
                        received=f"another value of replica {replica} in process {process}.",
                        fix=f"Let {name} depend on the replica's number, not on the process.",
                    )
                )
    return {structure for structure, _ in found.values()}, [
        found[replica][1] for replica in sorted(found)
    ]


def _plain(value: DescribedValue) -> list:
    return [value.kind, list(value.shape), value.dtype, value.checksum]


def _check_fit(every: Sequence[DescribedValue], name: str) -> None:
    first = every[0]
    if any(np.dtype(each.dtype).kind in "OSU" for each in every):
        raise ValueError(
            message(
                f"{name} must give numbers.",
                received={"types": [each.kind for each in every]},
                fix="Return an array or a number, or a structure of them.",
            )
        )
    if any(
        each.dtype != first.dtype
        or each.shape[1:] != first.shape[1:]
        or len(each.shape) != len(first.shape)
        for each in every
    ):
        raise ValueError(
            message(
                f"{name} must give all replicas one dtype and one shape behind the first "
                "dimension.",
                received={
                    "shapes": [each.shape for each in every],
                    "dtypes": [each.dtype for each in every],
                },
                fix="Pad or cast the values.",
            )
        )
