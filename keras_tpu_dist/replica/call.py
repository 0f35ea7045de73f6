"""One call of `strategy.run`: which of its arguments are split, shared or constant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_tpu_dist.common.errors import type_error, value_error
from keras_tpu_dist.processes.arrays import put, whole
from keras_tpu_dist.replica.advice import check_no_graph
from keras_tpu_dist.replica.iteration import DistributedIterator
from keras_tpu_dist.replica.run_options import RunOptions, exact, pad_host, pad_value, refilled
from keras_tpu_dist.replica.values import PerReplica, Steps, check_owner
from keras_tpu_dist.training.protocol import Strategy


@dataclass(frozen=True)
class Leaf:
    """One leaf of the arguments.

    Attributes:
        split: The dimension split over the replicas, or `None` if all replicas get the whole value.
        stacked: Whether the split dimension only counts replicas.
        constant: Whether it is not an array, and so part of the program's key.
        rows: The dimension of `value` that holds the replica's rows, with a dynamic batch.
        length: The dimension of `value` that is padded to a bucket.
        generator: The generator, if `value` is the data of a key of `jax.random`.
        layout: The layout of an array, of one step, that axes other than those of the rows split,
            such as a sequence's.
        steps: The `Steps` whose array is `value`, if there is a different array for every step.
    """

    value: Any
    split: int | None = None
    stacked: bool = False
    constant: bool = False
    rows: int | None = None
    length: int | None = None
    source: PerReplica | None = None
    generator: Any = None
    layout: NamedSharding | None = None
    steps: Steps | None = None

    @property
    def key(self) -> tuple:
        """The key of the compiled program."""
        if isinstance(self.value, keras.Variable):
            return ("variable", _Same(self.value))
        if self.constant:
            return ("constant", type(self.value), self.value)
        if isinstance(self.value, (int, float, complex)):
            return ("number", type(self.value))
        weak = bool(getattr(self.value, "weak_type", False))
        places = (self.split, self.stacked, self.rows, self.length, self.generator, self.layout)
        shape = self.value.shape if self.steps is None else self.value.shape[1:]
        return (tuple(shape), str(self.value.dtype), weak, *places)


class _Same:
    """A variable as part of a key. Keras compares variables by value; this compares by identity."""

    def __init__(self, variable: keras.Variable):
        self._variable = variable

    def __hash__(self):
        return id(self._variable)

    def __eq__(self, other):
        return isinstance(other, _Same) and self._variable is other._variable


@dataclass
class Call:
    """The arguments of one call, ready for a program.

    Attributes:
        rows: The true number of rows of every replica, with a dynamic batch.
    """

    treedef: Any
    leaves: list[Leaf]
    rows: tuple[int, ...] | None = None
    length: int | None = None
    check_padding: bool = True

    @property
    def key(self) -> tuple:
        """The key of the compiled program."""
        flags = (self.rows is None, self.length is None)
        return (self.treedef, tuple(leaf.key for leaf in self.leaves), flags)

    @property
    def arrays(self) -> list:
        """The arrays among the leaves."""
        return [leaf.value for leaf in self.leaves if not leaf.constant]

    @property
    def padded(self) -> bool:
        """Whether an array holds padding."""
        return any(
            self._short(leaf) if leaf.source is None else leaf.source.sizes and leaf.source.padded
            for leaf in self.leaves
        )

    @property
    def stepped(self) -> tuple[bool, ...]:
        """For every array, whether it holds one value per step."""
        return tuple(leaf.steps is not None for leaf in self.leaves if not leaf.constant)

    def of_first_step(self) -> "Call":
        """The call of the first of several steps."""
        if not any(self.stepped):
            return self
        leaves = [leaf if leaf.steps is None else _of_step(leaf, 0) for leaf in self.leaves]
        return replace(self, leaves=leaves)

    def with_other_padding(self) -> "Call":
        """The same call with ones in place of zeros where arrays are padded."""
        leaves = []
        for leaf in self.leaves:
            value = leaf.value
            if leaf.source is not None and leaf.source.sizes:
                value = refilled(leaf.source).array
            elif self._short(leaf):
                value = np.array(value)
                beyond = (slice(None),) * (leaf.length or 0) + (slice(self.length, None),)
                value[beyond] = 1
            leaves.append(replace(leaf, value=value))
        return Call(self.treedef, leaves, self.rows, self.length)

    def rebuild(self, arrays: Sequence[Any]) -> tuple[tuple, dict]:
        """`(args, kwargs)` with other arrays.

        Args:
            arrays: One for every leaf that is not constant, in the order of the leaves.
        """
        given = iter(arrays)
        leaves = [leaf.value if leaf.constant else next(given) for leaf in self.leaves]
        leaves = [
            value
            if leaf.generator is None
            else jax.random.wrap_key_data(value, impl=leaf.generator)
            for leaf, value in zip(self.leaves, leaves, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def _short(self, leaf: Leaf) -> bool:
        """Whether a whole array is padded to a bucket."""
        if leaf.source is not None or leaf.length is None:
            return False
        return leaf.value.shape[leaf.length] != self.length


def _of_step(leaf: Leaf, number: int) -> Leaf:
    value = leaf.steps[number] if leaf.steps is not None else leaf.value
    if isinstance(value, PerReplica):
        return replace(leaf, value=value.array, source=value, steps=None)
    return replace(leaf, value=value, steps=None)


def is_key(value: Any) -> bool:
    """Whether a value is a key of `jax.random`, or an array of keys, with a key dtype.

    Args:
        value: Anything.
    """
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def prepare(
    args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions, strategy: Strategy
) -> Call:
    """Sorts and pads the arguments of a call.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments, whose lengths are never padded to a bucket.
        options: The sizes that may vary, and are padded.
        strategy: The strategy that runs the call.
    """
    flat, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    axes: list[int | None] = []
    if options.buckets is not None:
        axes = options.axes(args, [_rank(leaf) for leaf in jax.tree.leaves(tuple(args))])
    axes += [None] * (len(flat) - len(axes))
    call = Call(treedef, [], check_padding=options.check_padding)
    for value, axis in zip(flat, axes, strict=True):
        if isinstance(value, Steps):
            call.leaves.append(_leaf_of_steps(value, options, strategy))
        elif isinstance(value, PerReplica):
            call.leaves.append(_split_leaf(value, axis, options, strategy))
        elif _is_constant(value):
            call.leaves.append(Leaf(_checked_constant(value), constant=True))
        else:
            call.leaves.append(_whole_leaf(value, axis, options, strategy))
    call.length = _common_length(flat, axes) if options.buckets is not None else None
    call.rows = _common_rows(call.leaves, strategy) if options.dynamic_batch else None
    return call


def _split_leaf(value: PerReplica, axis, options: RunOptions, strategy) -> Leaf:
    check_owner(value, strategy)
    if value.sizes:
        value = _without_other_padding(value, axis)
    if axis is not None:
        value = pad_value(value, axis, options)
    ragged = [a for a in value.sizes if a != axis]
    uneven = [a for a in ragged if len(set(value.sizes[a])) > 1]
    if uneven and not options.dynamic_batch:
        raise value_error(
            "All replicas must have equally many rows.",
            received={"rows of each replica": value.sizes[uneven[0]]},
            fix="Pass options=keras_tpu_dist.RunOptions(dynamic_batch=True), which pads the rows, "
            "or drop the remainder of the dataset.",
        )
    rows = None
    if options.dynamic_batch:
        rows = value.rows if value.stacked else value.axis
        rows = ragged[0] if ragged else rows
    return Leaf(
        value.array,
        split=value.axis,
        stacked=value.stacked,
        rows=None if rows is None else rows + value.stacked,
        length=None if axis is None else axis + value.stacked,
        source=value,
        layout=None if strategy.placer.sequence_axis is None else _layout_of(value.array),
    )


def _leaf_of_steps(steps: Steps, options: RunOptions, strategy) -> Leaf:
    described = steps.described
    if isinstance(described, PerReplica):
        leaf = _split_leaf(described, None, options, strategy)
        layout = None if strategy.placer.sequence_axis is None else _layout_of(steps.array)
        if layout is not None:
            layout = NamedSharding(layout.mesh, PartitionSpec(*layout.spec[1:]))
        return replace(leaf, value=steps.array, steps=steps, layout=layout)
    return Leaf(steps.array, steps=steps)


def _without_other_padding(value: PerReplica, axis) -> PerReplica:
    for other, true in list(value.sizes.items()):
        in_rows = not value.stacked and other == value.axis
        if other != axis and len(set(true)) == 1 and not in_rows:
            value = exact(value, other)
    return value


def _whole_leaf(value, axis, options: RunOptions, strategy) -> Leaf:
    if isinstance(value, jax.core.Tracer):
        raise type_error(
            "strategy.run compiles its function itself.",
            received=f"a traced array of shape {value.shape}.",
            fix="Call strategy.run outside of jax.jit, jax.grad and other transformations.",
        )
    if isinstance(value, (int, float, complex)):
        return Leaf(value)
    if type(value).__name__ == "SymbolicTensor":
        check_no_graph()
    if is_key(value):
        data = _whole_leaf(jax.random.key_data(value), None, options, strategy)
        return replace(data, generator=jax.random.key_impl(value))
    array: Any = value if isinstance(value, (np.ndarray, jax.Array)) else np.asarray(value)
    if np.dtype(array.dtype).kind in "OSU":
        raise type_error(
            "Arrays for strategy.run must be numeric.",
            received={"dtype": str(array.dtype)},
            fix="Encode text before, or pass a Python str, which becomes a constant.",
        )
    if axis is not None:
        host = whole(array) if isinstance(array, jax.Array) else array
        array = pad_host(host, axis, options, "an array")
    elif isinstance(array, jax.Array) and not _is_on(array, strategy):
        # It is on other devices, for example an array from `local_results`, which is on one.
        if array.weak_type and not array.ndim and not strategy.placer.is_local:
            return Leaf(array.item())
        array = put([array], [strategy.placer.sharding(None)])[0]
    return Leaf(array, length=axis, layout=_layout_of(array))


def _is_on(array: jax.Array, strategy: Strategy) -> bool:
    """Whether an array is on the strategy's devices, in their order, and split by its axes, if at
    all."""
    if array.sharding.device_set != strategy.placer.device_set:
        return False
    if not array.sharding.is_fully_replicated:
        return getattr(array.sharding, "mesh", None) == strategy.mesh
    mesh: Any = getattr(array.sharding, "mesh", None)
    return mesh is None or [*mesh.devices.flat] == [*strategy.mesh.devices.flat]


def _layout_of(array: Any) -> NamedSharding | None:
    """The layout of a split array, for the program's key: a program has one layout."""
    sharding = getattr(array, "sharding", None)
    split = isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated
    return sharding if split else None


def _is_constant(value) -> bool:
    if isinstance(value, (bool, str, bytes, keras.Variable)):
        return True
    return not isinstance(value, (int, float, complex)) and not hasattr(value, "__array__")


def _checked_constant(value):
    if isinstance(value, DistributedIterator):
        raise type_error(
            "An iterator over a distributed dataset must be an argument by itself.",
            received="an iterator within a list or a dict.",
            fix="Write strategy.run(fn, args=(iterator,)), and take the batch apart in fn.",
        )
    if isinstance(value, keras.Variable):
        return value
    try:
        hash(value)
    except TypeError as error:
        raise type_error(
            "An argument of strategy.run is an array, a number, a structure of them, or a "
            "constant that can be hashed.",
            received={"type": type(value).__name__},
            fix="Pass it as an array, or let the function use it from its closure.",
        ) from error
    return value


def _rank(value) -> int | None:
    if isinstance(value, PerReplica):
        return len(value.padded_shape)
    return None if _is_constant(value) or is_key(value) else np.ndim(value)


def _common_length(flat: list, axes: list) -> int:
    lengths = []
    for value, axis in zip(flat, axes, strict=True):
        if axis is None:
            continue
        if isinstance(value, PerReplica):
            padded = value.padded_shape[axis]
            lengths.append(value.sizes[axis][0] if axis in value.sizes else padded)
        else:
            lengths.append(np.shape(value)[axis])
    if len(set(lengths)) != 1:
        raise value_error(
            "All inputs that are padded to a bucket must have one length.",
            received={"lengths": lengths},
            fix="Set the dimension that varies for every argument: RunOptions(axis=(1, None)).",
        )
    return lengths[0]


def _common_rows(leaves: list[Leaf], strategy) -> tuple[int, ...] | None:
    rows_of_each = set()
    for leaf in leaves:
        if leaf.rows is not None and leaf.source is not None:
            axis = leaf.rows - leaf.stacked
            full = (leaf.source.padded_shape[axis],) * strategy.num_replicas_in_sync
            rows_of_each.add(leaf.source.sizes.get(axis, full))
    if len(rows_of_each) > 1:
        raise value_error(
            "All inputs of a dynamic batch must have the same number of rows on a replica.",
            received={"rows": sorted(rows_of_each)},
            fix="Distribute them together, as one dataset.",
        )
    return rows_of_each.pop() if rows_of_each else None
