"""The replica context: the replica's number, sizes and collectives in `strategy.run`."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.checks import checked_arguments, is_count
from keras_tpu_dist.common.errors import runtime_error, value_error
from keras_tpu_dist.common.tensorflow_names import TensorFlowNames
from keras_tpu_dist.replica.reductions import checked_reduction, reduced
from keras_tpu_dist.training.protocol import Strategy

# The odd number nearest 2**32 / golden ratio: seeds of neighbouring replicas are far apart, and
# replica 0 has the same seed as a program on one device.
_SEED_STRIDE = 0x9E3779B9


class ReplicaContext(TensorFlowNames):
    """A replica's number, its true sizes, and its collectives, for a function of `strategy.run`.

    Get it with `get_replica_context()` inside the function.

    Args:
        strategy: The strategy.
        replica_id: The replica's number, a traced integer.
        axes: The mesh axes of the replicas; `()` for one replica.
        batch_size: With `RunOptions(dynamic_batch=True)`, the replica's true number of rows.
        batch_rows: The number of rows including padding.
        length: With `RunOptions(buckets=...)`, the true length.
        bucket: The length including padding.

    Example:

    >>> import jax, keras_tpu_dist as ktd
    >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    >>> def step():
    ...     context = ktd.get_replica_context()
    ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 1)
    >>> strategy.run(step)
    PerReplica:{
      0: array(3, dtype=int32),
      1: array(3, dtype=int32)
    }
    """

    def __init__(
        self,
        strategy: Strategy,
        replica_id: Any,
        axes: tuple[str, ...],
        batch_size: Any = None,
        batch_rows: int | None = None,
        length: Any = None,
        bucket: int | None = None,
    ):
        self._strategy = strategy
        self._replica_id = replica_id
        self._axes = axes
        self._batch_size = batch_size
        self._batch_rows = batch_rows
        self._length = length
        self._bucket = bucket
        # Results of sums and means, by `id`: with the reduction and this replica's operand.
        self._reduced: dict[int, tuple[Any, str, Any]] = {}

    @property
    def strategy(self) -> Any:
        """The `TPUStrategy` that runs the function."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """The replica's number, from 0: a traced `int32`, so you cannot use it in Python's `if`."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._strategy.num_replicas_in_sync

    @property
    def batch_size(self) -> jax.Array:
        """The replica's true number of rows, traced; rows beyond it are padding.

        Raises:
            RuntimeError: Without `RunOptions(dynamic_batch=True)`.
        """
        return _given(self._batch_size, "batch_size", "dynamic_batch=True")

    @property
    def batch_mask(self) -> jax.Array:
        """True for the true rows, shape `(rows,)`.

        Raises:
            RuntimeError: Without `RunOptions(dynamic_batch=True)`.
        """
        size = _given(self._batch_size, "batch_mask", "dynamic_batch=True")
        return jnp.arange(self._batch_rows) < size

    @property
    def length(self) -> jax.Array:
        """The true length, traced; positions beyond it are padding.

        Raises:
            RuntimeError: Without `RunOptions(buckets=...)`.
        """
        return _given(self._length, "length", 'buckets="power_of_two"')

    @property
    def length_mask(self) -> jax.Array:
        """True for the true positions, shape `(bucket,)`.

        Raises:
            RuntimeError: Without `RunOptions(buckets=...)`.
        """
        length = _given(self._length, "length_mask", 'buckets="power_of_two"')
        return jnp.arange(self._bucket) < length

    @checked_arguments
    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Reduces arrays over the replicas, and returns the result on all of them.

        As in `tf.distribute`, the gradient of an all-reduced sum (mean) is the all-reduced sum
        (mean) of the gradients.

        Dtypes are those of `strategy.reduce`: a sum of integers or of `bool` has at least 32 bits,
        their mean is a floating-point number, everything else keeps its dtype. Numbers with fewer
        than 32 bits are sent and added up in float32.

        Args:
            reduce_op: `"sum"`, `"mean"`, `"max"` or `"min"`, in any case, or an enum with one of
                these names.
            value: A structure of arrays, equal in structure and shapes on all replicas.

        Returns:
            The structure of reduced arrays.

        Raises:
            ValueError: If the reduction is unknown, or for the maximum or minimum of complex
                numbers.
        """
        op = checked_reduction(reduce_op)

        def reduce(leaf):
            leaf = _array(leaf)
            result = reduced(op, leaf, replicas=self._axes)
            if op in ("sum", "mean"):
                self._reduced[id(result)] = result, op, leaf
            return result

        return jax.tree.map(reduce, value)

    @checked_arguments
    def all_gather(self, value: Any, axis: int) -> Any:
        """Joins the arrays of all replicas along a dimension, and returns the result on all of
        them.

        Args:
            value: A structure of arrays of at least one dimension.
            axis: The dimension.

        Returns:
            The structure of joined arrays.

        Raises:
            ValueError: If an array does not have the dimension.
        """

        def gather(leaf):
            leaf = _array(leaf)
            at = checked_axis("all_gather", axis, leaf.ndim)
            if not self._axes:
                return leaf
            if not leaf.size:
                # XLA does not compile a gather of empty arrays.
                number = self.num_replicas_in_sync
                shape = [n * number if i == at else n for i, n in enumerate(leaf.shape)]
                return jnp.zeros(shape, leaf.dtype)
            return jax.lax.all_gather(leaf, self._axes, axis=at, tiled=True)

        return jax.tree.map(gather, value)

    def _own_part(self, value: Any) -> Any:
        """What this replica adds to the result of a sum or a mean; `None` for other values."""
        result, op, own = self._reduced.get(id(value), (None, "", None))
        if result is not value or not self._axes:
            return None
        return own / self.num_replicas_in_sync if op == "mean" else own

    def _of_first_replica(self, leaf: jax.Array) -> jax.Array:
        if not self._axes:
            return leaf
        # A sum to which the other replicas add zeros; in int8 for bool, which `psum` does not
        # accept.
        first = jnp.where(self._replica_id == 0, leaf, jnp.zeros_like(leaf))
        total = jax.lax.psum(first.astype(jnp.result_type(first, "int8")), self._axes)
        return total.astype(leaf.dtype)

    def _own_seed(self, seed: jax.Array) -> jax.Array:
        if not self._axes:
            return seed
        # Keras's seed is (seed, counter): another stream for every replica, with the same counter.
        stride = jnp.asarray(_SEED_STRIDE, "uint32").astype(seed.dtype)
        return seed.at[0].add(self._replica_id.astype(seed.dtype) * stride)


class _Running(threading.local):
    def __init__(self):
        self.context: ReplicaContext | None = None
        self.recorder: Any = None


_running = _Running()


def get_replica_context() -> ReplicaContext:
    """Returns the context of the replica whose code is running.

    Returns:
        The `ReplicaContext`.

    Raises:
        RuntimeError: Outside of a function run by `strategy.run`.

    Example:

    >>> import jax, keras_tpu_dist as ktd
    >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
    >>> strategy.run(lambda: ktd.get_replica_context().replica_id_in_sync_group)
    PerReplica:{
      0: array(0, dtype=int32),
      1: array(1, dtype=int32)
    }
    """
    if _running.context is None:
        raise runtime_error(
            "There is a replica context only inside a function run by strategy.run.",
            received="a call to get_replica_context() outside of it.",
            fix="Outside, use strategy.num_replicas_in_sync, strategy.reduce, strategy.gather.",
        )
    return _running.context


def running_context() -> ReplicaContext | None:
    """The context of the replica whose code is running, or `None`."""
    return _running.context


def running_recorder() -> Any:
    """The recorder of the variables that running replica code uses, or `None`."""
    return _running.recorder


def in_replica_context() -> bool:
    """Whether code is running inside of `strategy.run`."""
    return _running.context is not None


@contextlib.contextmanager
def entered(context: ReplicaContext, recorder: Any) -> Iterator[None]:
    """Sets the context of a replica while its function is traced."""
    _running.context, _running.recorder = context, recorder
    try:
        with recorder:
            yield
    finally:
        _running.context = _running.recorder = None


@contextlib.contextmanager
def left() -> Iterator[None]:
    """Leaves the replica within its function: what runs here is no replica code."""
    context, recorder = _running.context, _running.recorder
    _running.context = _running.recorder = None
    try:
        yield
    finally:
        _running.context, _running.recorder = context, recorder


def _numbers() -> tuple | None:
    """The traced values in the context of the running replica."""
    context = _running.context
    return context and (context._replica_id, context._batch_size, context._length)


@contextlib.contextmanager
def _with_numbers(numbers: tuple | None) -> Iterator[None]:
    context, before = _running.context, _numbers()
    if context is None or numbers is None or before is None:
        yield
        return
    context._replica_id, context._batch_size, context._length = numbers
    try:
        yield
    finally:
        context._replica_id, context._batch_size, context._length = before


# An assigned layer is a separate function that must not use traced values from outside, so it gets
# these as arguments.
_keras.give_to_calls(_numbers, _with_numbers)


def checked_axis(name: str, axis: Any, rank: int) -> int:
    """A dimension of an array, counted from the front.

    Args:
        name: The method that got the dimension, for the error.
        axis: The dimension; a negative one counts from the end.
        rank: The array's number of dimensions.
    """
    if not is_count(axis, -rank) or axis >= rank:
        raise value_error(
            f"{name} joins or reduces along a dimension of a replica's value.",
            received={"axis": axis, "rank": rank},
            fix="Give an integer below the rank; a scalar needs x[None] first.",
        )
    return axis % rank


def _array(leaf):
    return jnp.asarray(leaf.value if isinstance(leaf, keras.Variable) else leaf)


def _given(value, name: str, option: str):
    if value is None:
        raise runtime_error(
            f"context.{name} is only known if inputs are padded.",
            received="a run without that option.",
            fix=f"Write strategy.run(fn, args, options=RunOptions({option})).",
        )
    return value
