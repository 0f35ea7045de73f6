"""Options of `strategy.run`, and the padding of uneven batches and varying lengths."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.checks import (
    PositiveInt,
    checked_arguments,
    checked_constructor,
    is_count,
)
from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.common.tensorflow_names import TensorFlowNames
from keras_tpu_dist.input.host_arrays import padded
from keras_tpu_dist.replica.blocks import from_blocks, own_blocks
from keras_tpu_dist.replica.values import PerReplica

logger = logging.getLogger("keras_tpu_dist")

# Length 1 uses the program of length 2.
_SMALLEST_BUCKET = 2
_NOT_PADDED = -1


@checked_constructor
@dataclass(frozen=True)
class RunOptions(TensorFlowNames):
    """How `strategy.run` treats inputs of varying sizes.

    A compiled program has fixed shapes. If sizes vary, inputs are padded with zeros. The function
    reads the true sizes from the replica context (`batch_size`, `batch_mask`, `length`,
    `length_mask`) and must not let padding into its results: mask before you reduce. Padded
    dimensions of results are cut back to the true size. At the first padded call of every program,
    a second run with ones as padding checks whether padding changes a result or an updated
    variable. If it does, an error is raised and nothing is assigned.

    Args:
        dynamic_batch: Whether replicas may have different numbers of rows, as in the last batch of
            a dataset: they are padded to the largest number. Without it such a batch is an error.
        buckets: `"power_of_two"`: lengths are padded to the next power of two (at least 2), so that
            lengths 1 to 100 need 7 programs; or the sorted lengths to pad to. `None`: one program
            for every length.
        axis: The dimension of a replica's value whose length varies: an integer for all arrays that
            have it, or a structure of integers and `None` (do not pad) that is a prefix of `args`;
            an entry applies to the arrays below it that have this dimension.
        check_padding: Whether to check the effect of padding.

    Raises:
        ValueError: If an option is malformed.

    Example:

    >>> import jax, jax.numpy as jnp, numpy as np, keras_tpu_dist as ktd
    >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    >>> def mean(x):
    ...     context = ktd.get_replica_context()
    ...     return jnp.where(context.length_mask, x, 0).sum() / context.length
    >>> options = ktd.RunOptions(buckets="power_of_two", axis=0)
    >>> strategy.run(mean, (np.float32([1, 2, 6]),), options=options)
    PerReplica:{
      0: array(3., dtype=float32),
      1: array(3., dtype=float32)
    }
    """

    dynamic_batch: bool = False
    buckets: str | Sequence[int] | None = None
    axis: Any = 1
    check_padding: bool = True

    def __post_init__(self):
        for axis in jax.tree.leaves(self.axis):
            if not is_count(axis, 0):
                raise value_error(
                    "RunOptions.axis is a dimension, None, or a structure of those.",
                    received={"axis": self.axis},
                    fix="Count dimensions from the front, as in axis=1.",
                )
        buckets: Any = self.buckets
        several = isinstance(buckets, Iterable) and not isinstance(buckets, str)
        if not several and buckets in (None, "power_of_two"):
            return
        listed = tuple(buckets) if several else ()
        counted = all(is_count(b, 1) for b in listed)
        if not listed or not counted or list(listed) != sorted(set(listed)):
            raise value_error(
                'Buckets are "power_of_two", growing lengths, or None.',
                received={"buckets": buckets},
                fix="Write for example buckets=(32, 64, 128).",
                name=buckets if isinstance(buckets, str) else None,
                choices=("power_of_two",),
            )
        object.__setattr__(self, "buckets", listed)

    @checked_arguments
    def bucket(self, length: PositiveInt) -> int:
        """The length to which `length` is padded.

        Args:
            length: The true length, at least 1.

        Raises:
            ValueError: If it is longer than the largest bucket, or there are no buckets.
        """
        if self.buckets == "power_of_two":
            return max(_SMALLEST_BUCKET, 1 << (int(length) - 1).bit_length())
        for size in self.buckets or ():
            if length <= size:  # pyright: ignore[reportOperatorIssue]
                return int(size)
        raise value_error(
            "A length must not exceed the largest bucket.",
            received={"length": length, "buckets": self.buckets},
            fix='Add a larger bucket, or use buckets="power_of_two".',
        )

    def axes(self, args: Sequence[Any], ranks: Sequence[int | None]) -> list[int | None]:
        """The varying dimension of every leaf of `args`, or `None`.

        Args:
            args: The positional arguments of a call.
            ranks: For every leaf of them, the rank of one replica's value, `None` for a constant.

        Raises:
            ValueError: If the structure of `axis` is not a prefix of `args`.
        """
        if self.buckets is None:
            return [None] * len(ranks)
        if is_count(self.axis):
            return [self.axis if r is not None and r > self.axis else None for r in ranks]
        prefix = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        # For JAX, None is a node without leaves. That is right in `args`, but in `axis` it marks an
        # array that is not padded.
        prefix = jax.tree.map(
            lambda axis: _NOT_PADDED if axis is None else axis,
            prefix,
            is_leaf=lambda node: node is None,
        )
        try:
            spread = jax.tree.broadcast(prefix, tuple(args))
        except ValueError as error:
            raise value_error(
                "The structure of RunOptions.axis must be a prefix of args.",
                received={"axis": self.axis},
                fix="Give one entry for every argument: axis=(1, None).",
            ) from error
        axes = jax.tree.leaves(spread)
        return [
            None if axis == _NOT_PADDED or rank is None or rank <= axis else axis
            for axis, rank in zip(axes, ranks, strict=True)
        ]


def pad_host(array: np.ndarray, axis: int, options: RunOptions, name: str) -> np.ndarray:
    """A host array padded to its bucket.

    Args:
        array: The array.
        axis: The dimension whose length varies.
        options: The options, which have the buckets.
        name: The input's name, for the error.
    """
    _check_length(array.shape[axis], name)
    return padded(array, axis, options.bucket(array.shape[axis]))


def pad_value(value: PerReplica, axis: int, options: RunOptions) -> PerReplica:
    """A per-replica value padded to its bucket along a dimension of the replica's value.

    Args:
        value: The value, padded or not.
        axis: The dimension, whose true length is the same on all replicas.
        options: The options, which have the buckets.
    """
    check_no_rows(axis, None if value.stacked else value.axis, value.array.shape)
    if axis in value.sizes:
        true, *others = value.sizes[axis]
        if any(other != true for other in others):
            raise value_error(
                "A length that is padded to a bucket must be the same on all replicas.",
                received={"lengths": value.sizes[axis], "axis": axis},
                fix="For different numbers of rows, pass RunOptions(dynamic_batch=True).",
            )
        if value.padded_shape[axis] == options.bucket(true):
            return value
        value = exact(value, axis)
    length = value.padded_shape[axis]
    _check_length(length, "a per-replica value")
    bucket = options.bucket(length)
    sizes = {**value.sizes, axis: (length,) * value.strategy.num_replicas_in_sync}
    array = value.array
    if bucket != length:
        logger.debug("padded on the host; distribute_dataset(..., options) pads before transfer")
        array = _changed(value, lambda _, block: padded(block, axis + value.stacked, bucket))
    return value.replaced(array, sizes)


def check_no_rows(axis: int, rows: int | None, shape: tuple[int, ...]) -> None:
    """Raises a `ValueError` if the dimension to pad to a bucket is that of the rows.

    Args:
        axis: The dimension to pad.
        rows: The dimension that is split over the replicas, if it is one of the values'.
        shape: The shape on all replicas.
    """
    if axis == rows:
        raise value_error(
            "The rows of a replica cannot be padded to buckets.",
            received={"axis": axis, "shape on all replicas": shape},
            fix="Let RunOptions.axis name another dimension, or None for this argument.",
        )


def exact(value: PerReplica, axis: int) -> PerReplica:
    """The value with the padding of a dimension, equal on all replicas, cut off.

    Args:
        value: The value.
        axis: The dimension of one replica's value, a key of `value.sizes`.
    """
    length = value.sizes[axis][0]
    array = jax.lax.slice_in_dim(value.array, 0, length, axis=axis + value.stacked)
    sizes = {a: true for a, true in value.sizes.items() if a != axis}
    return value.replaced(array, sizes)


def refilled(value: PerReplica) -> PerReplica:
    """The value with ones in place of its padding.

    Args:
        value: The value, which does not change.
    """

    def with_ones(replica: int, block: np.ndarray) -> np.ndarray:
        block = block.copy()
        for axis, true in value.sizes.items():
            beyond = (slice(None),) * (axis + value.stacked) + (slice(true[replica], None),)
            block[beyond] = 1
        return block

    # With the same layout, also for split sequences: another layout would be another program with
    # different rounding.
    return value.replaced(_as_laid_out(value, with_ones), value.sizes)


def _changed(value: PerReplica, change: Callable[[int, np.ndarray], np.ndarray]) -> jax.Array:
    """The array with every replica's part changed, on the host."""
    blocks = own_blocks(value.array, value.axis, value.strategy).items()
    changed = {replica: change(replica, np.asarray(block)) for replica, block in blocks}
    return from_blocks(changed, value.axis, value.strategy)


def _as_laid_out(value: PerReplica, change: Callable[[int, np.ndarray], np.ndarray]) -> jax.Array:
    """Like `_changed`, for a change that keeps the shape and therefore the layout."""
    array, axis, strategy = value.array, value.axis, value.strategy
    blocks = own_blocks(array, axis, strategy).items()
    changed = {replica: change(replica, np.asarray(block)) for replica, block in blocks}
    pieces = []
    for shard in array.addressable_shards:
        # A shard has all rows of its replica's part, and maybe only a piece of other dimensions.
        piece = (*shard.index[:axis], slice(None), *shard.index[axis + 1 :])
        block = changed[strategy.placer.own_parts[shard.device]]
        pieces.append(jax.device_put(block[piece], shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def _check_length(length: int, name: str) -> None:
    if not length:
        raise value_error(
            "A length to pad is at least 1.",
            received={"input": name, "length": length},
            fix="Leave empty inputs out.",
        )
