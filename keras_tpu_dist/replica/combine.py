"""Values of all replicas, reduced and gathered outside of their code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.processes.arrays import put
from keras_tpu_dist.replica.blocks import every_block
from keras_tpu_dist.replica.context import checked_axis
from keras_tpu_dist.replica.reductions import (
    check_not_empty,
    checked_reduction,
    dtypes_of,
    reduced,
)
from keras_tpu_dist.replica.values import PerReplica, check_owner
from keras_tpu_dist.training.strategy import Strategy


def reduce(op: Any, value: Any, axis: Any, strategy: Strategy) -> Any:
    """Combines values over replicas; see `TPUStrategy.reduce`.

    Args:
        op: The reduction, as `checked_reduction` takes it.
        value: A `PerReplica`, a value that all replicas share, or a structure of those.
        axis: The dimension, or several, of each replica's value to reduce as well, or `None`.
        strategy: The strategy that made the values.

    Raises:
        ValueError: For an unknown reduction or a dimension that is not there; for a sum of a value
            that all replicas share; for values of different sizes without the axis in which they
            differ; if a value belongs to another strategy.
    """
    op = checked_reduction(op)
    return jax.tree.map(lambda leaf: _reduce_leaf(op, leaf, axis, strategy), value)


def gather(value: Any, axis: int, strategy: Strategy) -> Any:
    """Joins values of replicas; see `TPUStrategy.gather`.

    Args:
        value: A `PerReplica` or a structure of them; other leaves are returned as they are.
        axis: The dimension of each replica's value along which to join.
        strategy: The strategy that made the values.

    Raises:
        ValueError: If a value is a scalar or lacks the dimension, or values differ in another
            dimension, or belong to another strategy.
    """
    return jax.tree.map(lambda leaf: _gather_leaf(leaf, axis, strategy), value)


def _reduce_leaf(op: str, value, axis, strategy):
    if not isinstance(value, PerReplica):
        return _reduce_common(op, value, axis, strategy)
    check_owner(value, strategy)
    axes = _checked_axes(axis, len(value.padded_shape))
    if value.padded:
        return _everywhere(_reduce_ragged(op, _every_value(value), axes), strategy)
    return _reduce_whole(
        value.array,
        op=op,
        axes=axes,
        at=value.axis,
        stacked=value.stacked,
        number=strategy.num_replicas_in_sync,
        sharding=strategy.placer.sharding(None),
    )


@functools.partial(jax.jit, static_argnames=("op", "axes", "at", "stacked", "number", "sharding"))
def _reduce_whole(array, *, op, axes, at, stacked, number, sharding):
    if not stacked:
        shape = array.shape
        array = array.reshape(*shape[:at], number, shape[at] // number, *shape[at + 1 :])
        array = jnp.moveaxis(array, at, 0)
    found = reduced(op, array, (0, *(a + 1 for a in axes)))
    return jax.lax.with_sharding_constraint(found, sharding)


def _reduce_ragged(op: str, parts: list, axes: tuple[int, ...]):
    left = {tuple(n for i, n in enumerate(part.shape) if i not in axes) for part in parts}
    if len(left) > 1:
        raise ValueError(
            message(
                "Values of different sizes can be reduced only along the dimension in which they "
                "differ.",
                received={"shapes": [part.shape for part in parts], "axis": axes or None},
                fix="Give that dimension, usually axis=0.",
            )
        )
    if op in ("max", "min"):
        filled = [part for part in parts if all(part.shape[a] for a in axes)]
        if not filled:
            check_not_empty(op, parts[0].shape, axes)
        return reduced(op, jnp.stack([reduced(op, part, axes) for part in filled]), (0,))
    # As a sum, or mean, over all of them at once has it: no part overflows.
    wide, result = dtypes_of(op, jnp.asarray(parts[0]).dtype)
    total = sum(jnp.sum(jnp.asarray(part), axis=axes, dtype=wide) for part in parts)
    if op == "mean":
        total /= sum(int(np.prod([part.shape[a] for a in axes], dtype=int)) for part in parts)
    return jnp.asarray(total, result)


def _reduce_common(op: str, value, axis, strategy):
    """A value that all replicas share, as `tf.distribute` reduces it."""
    single = strategy.num_replicas_in_sync == 1
    zero = not isinstance(value, jax.Array) and np.all(np.asarray(value) == 0)
    if op == "sum" and not single and not zero:
        raise ValueError(
            message(
                "A sum over replicas needs a value for each replica.",
                received=f"one {type(value).__name__} of shape {np.shape(value)} for "
                f"{strategy.num_replicas_in_sync} replicas.",
                fix="Reduce what strategy.run returned; for a value that is the same on all "
                "replicas multiply by strategy.num_replicas_in_sync.",
            )
        )
    axes = _checked_axes(axis, np.ndim(value))
    return value if axis is None else reduced(op, value, axes)


def _gather_leaf(value, axis, strategy):
    if not isinstance(value, PerReplica):
        return value
    check_owner(value, strategy)
    at = checked_axis("gather", axis, len(value.padded_shape))
    if value.padded:
        parts = _every_value(value)
        if any(_without(p.shape, at) != _without(parts[0].shape, at) for p in parts):
            raise ValueError(
                message(
                    "Values of different sizes can be gathered only along the dimension in which "
                    "they differ.",
                    received={"shapes": [part.shape for part in parts], "axis": axis},
                    fix="Give that dimension, usually axis=0.",
                )
            )
        return _everywhere(np.concatenate(parts, axis=at), strategy)
    return _gather_whole(
        value.array,
        at=at,
        split=value.axis,
        stacked=value.stacked,
        number=strategy.num_replicas_in_sync,
        sharding=strategy.placer.sharding(None),
    )


@functools.partial(jax.jit, static_argnames=("at", "split", "stacked", "number", "sharding"))
def _gather_whole(array, *, at, split, stacked, number, sharding):
    if not stacked:
        shape = array.shape
        array = array.reshape(*shape[:split], number, shape[split] // number, *shape[split + 1 :])
        array = jnp.moveaxis(array, split, 0)
    array = jnp.moveaxis(array, 0, at)
    shape = array.shape
    joined = array.reshape(*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    return jax.lax.with_sharding_constraint(joined, sharding)


def _every_value(value: PerReplica) -> list:
    """All replicas' values without padding, on the host."""
    blocks = every_block(value.array, value.axis, value.strategy)
    return [value.cut(replica, block) for replica, block in enumerate(blocks)]


def _everywhere(value: Any, strategy: Strategy) -> jax.Array:
    return put([value], [strategy.placer.sharding(None)])[0]


def _checked_axes(axis, rank: int) -> tuple[int, ...]:
    if axis is None:
        return ()
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    return tuple(sorted({checked_axis("reduce", a, rank) for a in given}))


def _without(shape: tuple, at: int) -> tuple:
    return (*shape[:at], *shape[at + 1 :])
