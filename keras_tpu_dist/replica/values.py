"""One value per replica: its layout on the mesh, and reading it."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.replica.blocks import own_blocks, own_replicas
from keras_tpu_dist.training.protocol import Strategy


class PerReplica:
    """One array for each replica, from `strategy.run` or a distributed dataset.

    It is not an array itself: pass it to `strategy.run`, read it with `strategy.local_results`, or
    combine it with `strategy.reduce` or `strategy.gather`.

    If several processes run the replicas, every process reads the values of its own replicas:
    those that have a device there. `strategy.reduce` and `strategy.gather` give all processes the
    same.

    Args:
        array: All replicas' values in one array that is split over the strategy's data axes along
            `axis`.
        strategy: The strategy.
        axis: The split dimension.
        stacked: Whether the split dimension only counts replicas and is not part of the values.
        sizes: From a dimension of the values to each replica's true size in it, where the values
            are padded.
        rows: The dimension of the values that holds the rows of a dynamic batch they were made of.

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
        rows: int | None = None,
    ):
        self.array = array
        self.strategy = strategy
        self.axis = axis
        self.stacked = stacked
        self.sizes = dict(sizes or {})
        self.rows = rows

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

        Values of varying sizes are `numpy` arrays, others `jax` arrays on their devices. Each is
        this process's own array, which it may read and compute with alone.
        """
        blocks = own_blocks(self.array, self.axis, self.strategy)
        return tuple(self.cut(replica, block) for replica, block in blocks.items())

    @property
    def replica_ids(self) -> tuple[int, ...]:
        """The numbers of the replicas in `values`, in its order."""
        return own_replicas(self.strategy)

    def replaced(self, array: jax.Array, sizes: Mapping[int, tuple[int, ...]]) -> "PerReplica":
        """Another array with the layout of this one.

        Args:
            array: The array.
            sizes: As for a new value.
        """
        kept = {"axis": self.axis, "stacked": self.stacked, "rows": self.rows}
        return PerReplica(array, self.strategy, sizes=sizes, **kept)

    def block_until_ready(self) -> "PerReplica":
        """Waits for the computation that makes the values."""
        self.array.block_until_ready()
        return self

    def cut(self, replica: int, block: Any) -> Any:
        """A replica's value, without padding.

        Args:
            replica: The replica's number.
            block: Its part of `array`.
        """
        if not self.sizes:
            return block[0] if self.stacked else block
        # On the host: on a device, a slice of every new length would be compiled.
        host = np.asarray(block)[0] if self.stacked else np.asarray(block)
        cuts = [slice(None)] * host.ndim
        for axis, true in self.sizes.items():
            cuts[axis] = slice(true[replica])
        return host[tuple(cuts)]

    def __repr__(self):
        own = zip(self.replica_ids, self.values, strict=True)
        rows = [f"  {i}: {np.asarray(value)!r}" for i, value in own]
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
    return tuple(jax.tree.unflatten(treedef, row) for row in zip(*spread, strict=True))
