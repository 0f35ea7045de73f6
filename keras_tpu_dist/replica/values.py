"""One value per replica: how it lies on the mesh, how it is read, reduced and gathered."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.replica.context import checked_axis, checked_reduction
from keras_tpu_dist.training.host_arrays import padded
from keras_tpu_dist.training.strategy import Strategy


class PerReplica:
    """One array for each replica, as `strategy.run` and distributed datasets give them.

    It cannot be computed with as a whole: pass it to `strategy.run`, read it with
    `strategy.local_results`, or combine it with `strategy.reduce` or `strategy.gather`.

    Args:
        array: All replicas' values in one array that is split over the strategy's data axes along
            `axis`.
        strategy: The strategy.
        axis: The split dimension.
        stacked: Whether the split dimension only counts replicas and is not part of the values.
        sizes: From a dimension of the values to each replica's true size in it, where the values
            are padded.

    Example:

    >>> import jax, numpy as np, keras_tpu_dist as ktd
    >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    >>> value = strategy.distribute_values_from_function(
    ...     lambda context: np.float32([3.0, 2.0])[context.replica_id_in_sync_group])
    >>> value
    PerReplica:{
      0: array(3., dtype=float32),
      1: array(2., dtype=float32)
    }
    >>> float(strategy.reduce("sum", value))
    5.0
    """

    def __init__(
        self,
        array: jax.Array,
        strategy: Strategy,
        *,
        axis: int = 0,
        stacked: bool = False,
        sizes: Mapping[int, tuple[int, ...]] | None = None,
    ):
        self.array = array
        self.strategy = strategy
        self.axis = axis
        self.stacked = stacked
        self.sizes = dict(sizes or {})

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.array.dtype

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of one replica's value, padding included."""
        shape = list(self.array.shape)
        if self.stacked:
            return tuple(shape[1:])
        shape[self.axis] //= self.strategy.num_replicas_in_sync
        return tuple(shape)

    @property
    def padded(self) -> bool:
        """Whether a value holds padding."""
        shape = self.padded_shape
        return any(set(true) != {shape[axis]} for axis, true in self.sizes.items())

    @property
    def values(self) -> tuple:
        """One array per replica of this process, without padding.

        Values of varying sizes are `numpy` arrays, others `jax` arrays on their devices.
        """
        blocks: dict[int, jax.Array] = {}
        block_size = self.array.shape[self.axis] // self.strategy.num_replicas_in_sync
        for shard in self.array.addressable_shards:
            start = shard.index[self.axis].start or 0
            blocks.setdefault(start // block_size if block_size else len(blocks), shard.data)
        return tuple(self._cut(replica, blocks[replica]) for replica in sorted(blocks))

    def block_until_ready(self) -> "PerReplica":
        """Waits for the computation that makes the values."""
        self.array.block_until_ready()
        return self

    def _cut(self, replica: int, block):
        if not self.sizes:
            return block[0] if self.stacked else block
        # On the host, where a slice of any length costs no compilation.
        host = np.asarray(block)[0] if self.stacked else np.asarray(block)
        cuts = [slice(None)] * host.ndim
        for axis, true in self.sizes.items():
            cuts[axis] = slice(true[replica])
        return host[tuple(cuts)]

    def __repr__(self):
        rows = [f"  {i}: {np.asarray(value)!r}" for i, value in enumerate(self.values)]
        return "PerReplica:{\n" + ",\n".join(rows) + "\n}"

    def _refuse(self, *_):
        raise TypeError(
            message(
                "A PerReplica holds a value for each replica, not one array.",
                received={"shape of each": self.padded_shape, "dtype": str(self.dtype)},
                fix="Combine it with strategy.reduce(...) or strategy.gather(...), read it with "
                "strategy.local_results(...), or pass it to strategy.run as an argument.",
            )
        )

    __array__ = __float__ = __int__ = __bool__ = __iter__ = __len__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __getitem__ = __rtruediv__ = __neg__ = __matmul__ = _refuse


def stack(parts: Sequence[Any], strategy: Strategy, name: str) -> PerReplica:
    """One host value per replica as a `PerReplica`, padded along the first dimension if need be.

    Args:
        parts: The values, one for each replica.
        strategy: The strategy.
        name: The function that gave them, for errors.

    Raises:
        ValueError: If they are no numbers, or differ in dtype or in more than the first dimension.
    """
    arrays = [np.asarray(part) for part in parts]
    first = arrays[0]
    if any(array.dtype.kind in "OSU" for array in arrays):
        raise ValueError(
            message(
                f"{name} must give numbers.",
                received={"types": [type(part).__name__ for part in parts]},
                fix="Return an array or a number, or a structure of them.",
            )
        )
    if any(a.dtype != first.dtype or a.shape[1:] != first.shape[1:] for a in arrays) or any(
        a.ndim != first.ndim for a in arrays
    ):
        raise ValueError(
            message(
                f"{name} must give all replicas one dtype and one shape behind the first "
                "dimension.",
                received={
                    "shapes": [a.shape for a in arrays],
                    "dtypes": [str(a.dtype) for a in arrays],
                },
                fix="Pad or cast the values.",
            )
        )
    sizes = {}
    if first.ndim and len({len(array) for array in arrays}) > 1:
        sizes[0] = tuple(len(array) for array in arrays)
        longest = max(sizes[0])
        arrays = [padded(array, 0, longest) for array in arrays]
    array = jax.device_put(np.stack(arrays), strategy.placer.sharding(0))
    return PerReplica(array, strategy, stacked=True, sizes=sizes)


def check_owner(value: PerReplica, strategy: Strategy) -> None:
    """Raises a `ValueError` if a value belongs to another strategy.

    Args:
        value: The value.
        strategy: The strategy that is to use it.
    """
    if value.strategy is not strategy:
        raise ValueError(
            message(
                "A per-replica value can be used by the strategy that made it.",
                received={"its strategy": value.strategy, "used with": strategy},
                fix="Make it with this strategy's run or distribute_*; or take the values out with "
                "local_results and distribute them again.",
            )
        )


def local_results(value: Any, strategy: Strategy) -> tuple:
    """A tuple with one structure per replica; see `TPUStrategy.local_results`.

    Args:
        value: A `PerReplica`, or a structure with some; its other leaves go to each replica.
        strategy: The strategy that made the values.

    Returns:
        The tuple; `(value,)` if there is no `PerReplica`.

    Raises:
        ValueError: If a value belongs to another strategy.
    """
    leaves, treedef = jax.tree.flatten(value)
    if not any(isinstance(leaf, PerReplica) for leaf in leaves):
        return (value,)
    columns = []
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            check_owner(leaf, strategy)
            columns.append(leaf.values)
    number = len(columns[0])
    remaining = iter(columns)
    spread = [
        next(remaining) if isinstance(leaf, PerReplica) else (leaf,) * number for leaf in leaves
    ]
    return tuple(jax.tree.unflatten(treedef, row) for row in zip(*spread))


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
        return _reduce_ragged(op, value, axes)
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
    reduced = _REDUCERS[op](array, axis=(0, *(a + 1 for a in axes)))
    return jax.lax.with_sharding_constraint(reduced, sharding)


def _reduce_ragged(op: str, value: PerReplica, axes: tuple[int, ...]):
    parts = value.values
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
        parts = [part for part in parts if part.size]
        reduced = [_REDUCERS[op](jnp.asarray(part), axis=axes) for part in parts]
        return _REDUCERS[op](jnp.stack(reduced), axis=0)
    total = sum(jnp.sum(jnp.asarray(part), axis=axes) for part in parts)
    if op == "sum":
        return total
    counts = [int(np.prod([part.shape[a] for a in axes], dtype=int)) for part in parts]
    return total / jnp.asarray(sum(counts), jnp.result_type(total, "float32"))


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
    return value if axis is None else _REDUCERS[op](jnp.asarray(value), axis=axes)


def _gather_leaf(value, axis, strategy):
    if not isinstance(value, PerReplica):
        return value
    check_owner(value, strategy)
    at = checked_axis("gather", axis, len(value.padded_shape))
    if value.padded:
        parts = value.values
        if any(_without(p.shape, at) != _without(parts[0].shape, at) for p in parts):
            raise ValueError(
                message(
                    "Values of different sizes can be gathered only along the dimension in which "
                    "they differ.",
                    received={"shapes": [part.shape for part in parts], "axis": axis},
                    fix="Give that dimension, usually axis=0.",
                )
            )
        joined = np.concatenate(parts, axis=at)
        return jax.device_put(joined, strategy.placer.sharding(None))
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


_REDUCERS: dict[str, Any] = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min}


def _checked_axes(axis, rank: int) -> tuple[int, ...]:
    if axis is None:
        return ()
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    return tuple(sorted({checked_axis("reduce", a, rank) for a in given}))


def _without(shape: tuple, at: int) -> tuple:
    return (*shape[:at], *shape[at + 1 :])
