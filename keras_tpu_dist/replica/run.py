"""The methods of `TPUStrategy` for custom loops: run, loop, local_results, reduce, gather."""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_tpu_dist.common.checks import is_count
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.own_mesh import in_own_mesh
from keras_tpu_dist.common.tensorflow_names import of_value
from keras_tpu_dist.processes.arrays import put
from keras_tpu_dist.replica import hooks as hooks  # registers its replacements in Keras
from keras_tpu_dist.replica import values
from keras_tpu_dist.replica.blocks import every_block
from keras_tpu_dist.replica.buffers import ReplicaBuffers
from keras_tpu_dist.replica.call import prepare
from keras_tpu_dist.replica.context import checked_axis, in_replica_context
from keras_tpu_dist.replica.datasets import (
    DistributedDataset,
    DistributedInput,
    DistributedIterator,
    check_attached,
)
from keras_tpu_dist.replica.loop import (
    Launch,
    Launches,
    alike_under,
    check_steps,
    iterator_among,
    iterator_over,
    joined,
    several,
)
from keras_tpu_dist.replica.program import ReplicaProgram
from keras_tpu_dist.replica.reductions import (
    check_not_empty,
    checked_reduction,
    dtypes_of,
    reduced,
)
from keras_tpu_dist.replica.run_options import RunOptions
from keras_tpu_dist.replica.state import copies_of, is_own
from keras_tpu_dist.replica.values import PerReplica, check_owner
from keras_tpu_dist.training import membership
from keras_tpu_dist.training.protocol import Strategy

logger = logging.getLogger("keras_tpu_dist")

# With so many function objects of the same code, the function is probably defined in a loop.
_FUNCTIONS_OF_ONE_CODE = 3
_NOTHING_VARIES = RunOptions()


class ReplicaCode(DistributedInput):
    """The part of `TPUStrategy` that runs custom code once per replica."""

    def run(
        self,
        fn: Callable,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *,
        steps: int = 1,
        outputs: str = "last",
    ) -> Any:
        """Runs a function once per replica, as one compiled program.

        Every replica gets its own part of per-replica arguments (from `distribute_dataset`,
        `distribute_values_from_function` or an earlier `run`), and all other arrays and numbers
        whole. `True`, strings and other objects are constants of the program. Within the function,
        `get_replica_context()` has the replica's number and the collectives.

        With `steps=N` the function runs N times in one launch. If an argument is an iterator over a
        distributed dataset, the steps use its next N batches; otherwise they use the same
        arguments. Variables, seeds and metrics go from step to step, so the results are those of N
        calls. Batches are transferred together, and the next N while the devices work. If fewer
        batches are left, or they differ in shape, they are launched one by one, as are those with
        `RunOptions(buckets=...)`. `strategy.loop` does the same for a whole dataset.

        The function can read and update Keras variables, layers, models, optimizers and metrics
        from its closure or its arguments. An update is combined by the variable's `aggregation`:
        `"mean"`, `"sum"`, `"only_first_replica"`. With `"none"`, Keras's default, an update that is
        the same on all replicas is assigned as it is, a floating-point update that differs (moving
        statistics) is averaged, and it is an error if a trainable weight would differ: reduce the
        gradients first. Metrics (`synchronization="on_read"`) have a separate value on every
        replica, which are combined when you read them outside. Seed generators draw different
        numbers on every replica and advance once a step. If anything raises before the program is
        launched, no variable is assigned. The strategy's `donate_state` decides, as in `fit`,
        whether a launch overwrites updated variables, or keeps the old values and needs memory for
        both. Arrays that you keep, such as `variable.value`, are never overwritten. Within the
        function a variable is not split over the data axes, even under "fsdp"; splits over other
        axes remain.

        The function is traced at its first call and for new shapes, and not called again, so pass
        the same function object every time. A lambda written in the loop is a new function every
        time, and is traced and compiled again, with a warning.

        If the mesh spans several processes, all of them call `run` with the same function and the
        same arguments; pass values that differ as per-replica values. This is checked at the first
        call of every program, as are the values of the variables.

        Args:
            fn: The function. It returns arrays, numbers, `None` or a structure of them.
            args: Its positional arguments: arrays, `keras.Variable`s, structures of them, and
                constants; or an iterator over a distributed dataset, which every step replaces by
                the next batch.
            kwargs: Its keyword arguments.
            options: `RunOptions` for inputs of varying sizes.
            steps: The number of steps in the launch; fewer if the iterator has fewer batches left.
            outputs: Which results of several steps to return: `"last"`, or `"all"`, with the steps
                along a new first dimension of every replica's values.

        Returns:
            The structure that `fn` returned, with a `PerReplica` instead of every array.

        Raises:
            ValueError: If `fn` returns something else, a per-replica argument belongs to another
                strategy or is uneven, or an update cannot be combined; on all processes, if their
                arguments or variables differ; if `outputs="all"` and steps have results of
                different shapes.
            StopIteration: If the iterator among the arguments has no batch left.
            PeerError: If other processes run something else.
            RuntimeError: Inside another `run`.
            TypeError: If an argument has the wrong type.
            NotImplementedError: If `fn` calls `merge_call`.

        Example:

        >>> import jax, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
        >>> strategy.run(lambda x: x * 2.0, args=(3.0,))
        PerReplica:{
          0: array(6., dtype=float32),
          1: array(6., dtype=float32)
        }
        >>> import numpy as np
        >>> batches = iter(strategy.distribute_dataset(np.arange(6), batch_size=2))
        >>> strategy.run(lambda x: x[0], args=(batches,), steps=2, outputs="all")
        PerReplica:{
          0: array([0, 2], dtype=int32),
          1: array([1, 3], dtype=int32)
        }
        """
        self._check_run(fn, args, kwargs, options)
        check_steps("run", outputs, steps=steps)
        launch, every = self._launch_of(fn, options), outputs == "all"
        iterator = iterator_among(args, kwargs or {})
        if iterator is not None:
            alike = alike_under(options)
            return several(launch, iterator, args, kwargs or {}, steps, alike, every)
        results = launch(tuple(args), kwargs or {}, steps, every)
        return joined([(results, steps)]) if every else results

    def loop(
        self,
        fn: Callable,
        dataset: DistributedDataset | DistributedIterator,
        steps_per_launch: int = 32,
        *,
        args: Sequence[Any] = (),
        options: RunOptions | None = None,
        outputs: str = "last",
    ) -> Launches:
        """Runs a function for every batch of a dataset, many in one launch.

        It is `strategy.run(fn, (batch, *args))` for one batch after the other, with the same
        numbers, at the speed of `fit` with `steps_per_execution`. `steps_per_launch` batches of one
        shape are one program with a loop on the devices, while the next ones are read and
        transferred. Remaining batches at the end, and batches of another shape, are launched one by
        one.

        Steps run while you iterate, so between two launches you can print, save, evaluate or leave
        the loop. You can use `keras.utils.Progbar` and Keras's callbacks there.

        Args:
            fn: The function of a batch. See `run`.
            dataset: The result of `distribute_dataset` or `distribute_datasets_from_function`, or
                an iterator over it, which continues.
            steps_per_launch: The number of steps in a launch.
            args: More arguments after the batch, the same in all steps.
            options: `RunOptions` for batches of varying sizes.
            outputs: Which results to return: `"last"`, those of a launch's last step; or `"all"`,
                with the steps along a new first dimension of every replica's values.

        Returns:
            An iterator. It runs the next launch, and yields the number of steps so far and the
            results: the structure that `fn` returned, with a `PerReplica` for every array.

        Raises:
            ValueError: If `run` raises it.
            TypeError: If `dataset` is neither, or an argument has the wrong type.

        Example:

        >>> import jax, numpy as np, keras_tpu_dist as ktd
        >>> strategy = ktd.TPUStrategy(devices=jax.devices()[:2])
        >>> dataset = strategy.distribute_dataset(np.arange(10.0), batch_size=2)
        >>> def step(x):
        ...     return ktd.get_replica_context().all_reduce("sum", x[0])
        >>> for step, sums in strategy.loop(step, dataset, steps_per_launch=2, outputs="all"):
        ...     print(step, strategy.local_results(sums)[0])
        2 [1. 5.]
        4 [ 9. 13.]
        5 [17.]
        """
        self._check_run(fn, args, None, options)
        check_steps("loop", outputs, steps_per_launch=steps_per_launch)
        return Launches(
            self._launch_of(fn, options),
            iterator_over(dataset),
            steps_per_launch,
            tuple(args),
            alike=alike_under(options),
            every=outputs == "all",
        )

    def local_results(self, value: Any) -> tuple:
        """The values of all replicas of this process.

        With several processes, every process gets the values of its own replicas, as in
        `tf.distribute`: of the replicas that have a device there (`PerReplica.replica_ids`). A
        replica that spans processes is in all of them. The values are local arrays of this process.

        Args:
            value: A result of `run` or a batch of a distributed dataset: a `PerReplica` or a
                structure with some; or an `"on_read"` variable, for the separate values of the
                replicas.

        Returns:
            A tuple with one structure per replica; `(value,)` for anything without a `PerReplica`.

        Raises:
            ValueError: If a value belongs to another strategy.
        """
        if isinstance(value, keras.Variable) and is_own(value):
            (copies,) = copies_of([value], self)
            value = values.PerReplica(copies, self, stacked=True)
        return values.local_results(value, self)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Combines values over replicas, and optionally over a dimension of the values.

        Args:
            reduce_op: `"sum"`, `"mean"`, `"max"`, `"min"`, in any case, or an enum with such names.
            value: A `PerReplica` or a structure of them. The mean, maximum and minimum of a value
                that all replicas share is the value itself.
            axis: The dimension of the replicas' values, or several, to reduce as well, usually 0,
                the batch; `None`: only over replicas. A mean over uneven batches counts rows, not
                replicas.

        A sum of integers or of `bool` has at least 32 bits, their mean is a floating-point number,
        everything else keeps its dtype; numbers with fewer than 32 bits are added up in float32.
        `all_reduce` of the replica context does the same.

        Returns:
            Arrays, the same on all devices and in all processes. All processes must call it.

        Raises:
            ValueError: For a sum of a value that all replicas share; for values of different sizes
                without the axis in which they differ; for the maximum or minimum of no values or of
                complex numbers; if a value belongs to another strategy.
        """
        self._check_outside("reduce", "get_replica_context().all_reduce")
        return _reduce(reduce_op, value, axis, self)

    def gather(self, value: Any, axis: int) -> Any:
        """Joins values of all replicas along a dimension.

        Args:
            value: A `PerReplica` or a structure of them; others are returned as they are.
            axis: The dimension.

        Returns:
            Arrays, the same on all devices and in all processes. All processes must call it.

        Raises:
            ValueError: If a value is a scalar or lacks the dimension, or values differ in another
                dimension, or belong to another strategy.
        """
        if not is_count(axis):
            raise ValueError(
                message(
                    "Values are gathered along a dimension.",
                    received={"axis": axis},
                    fix="Write for example axis=0.",
                )
            )
        self._check_outside("gather", "get_replica_context().all_gather")
        return _gather(value, axis, self)

    experimental_local_results = local_results

    def _launch_of(self, fn: Callable, options: RunOptions | None) -> Launch:
        """Runs the function with arguments and a number of steps; returns the last results or
        all."""
        fn = _without_jit(fn)

        def launch(args: tuple, kwargs: Mapping, steps: int, every: bool) -> Any:
            with membership.Scope(self):
                call = prepare(args, kwargs, options or _NOTHING_VARIES, self)
                programs, key = self._programs_of(fn), call.key
                # One for every way in which layers were frozen, as when two networks take turns.
                known = programs.get(key, ())
                for program in known:
                    if program.serves:
                        return program.launch(call, steps, every)
                program = ReplicaProgram(_weakly(fn), call, self, self._buffers)
                programs[key] = [program, *(each for each in known if not each.outdated)]
                return program.launch(call, steps, every)

        return launch

    @functools.cached_property
    def _programs(self) -> Any:
        return weakref.WeakKeyDictionary()

    @functools.cached_property
    def _buffers(self) -> ReplicaBuffers:
        return ReplicaBuffers()

    @functools.cached_property
    def _functions_of_code(self) -> Any:
        return weakref.WeakKeyDictionary()

    def _programs_of(self, fn) -> dict:
        # A bound method is a new object at every access, so its programs belong to its owner.
        owner, name = (fn.__self__, fn.__func__) if inspect.ismethod(fn) else (fn, None)
        try:
            by_name = self._programs.get(owner)
        except TypeError as error:
            raise TypeError(
                message(
                    "strategy.run caches programs as long as their function lives, so the "
                    "function must be hashable and weakly referable.",
                    received={"fn": type(owner).__name__},
                    fix="Pass a plain function that calls it.",
                )
            ) from error
        if by_name is None:
            by_name = self._programs[owner] = {}
            self._note_function(fn)
        return by_name.setdefault(name, {})

    def _note_function(self, fn) -> None:
        code = getattr(getattr(fn, "func", fn), "__code__", None)
        if code is None:
            return
        count = self._functions_of_code[code] = self._functions_of_code.get(code, 0) + 1
        if count == _FUNCTIONS_OF_ONE_CODE:
            logger.warning(
                "strategy.run was given the function %s of %s:%d as %d different objects, and "
                "every one is traced and compiled again; define the function once, outside of the "
                "loop",
                code.co_name,
                code.co_filename,
                code.co_firstlineno,
                count,
            )

    def _check_run(self, fn, args, kwargs, options) -> None:
        self._check_outside("run", "the function directly")
        if not self._programs:
            check_attached(self, "run")
        if not callable(fn):
            raise TypeError(
                _wrong("fn", fn, "a function", "Write for example strategy.run(step, args=(x,)).")
            )
        if not isinstance(args, (tuple, list)):
            raise TypeError(_wrong("args", args, "a tuple or list", "Write for example args=(x,)."))
        if not (kwargs is None or isinstance(kwargs, Mapping)):
            raise TypeError(_wrong("kwargs", kwargs, "a dict", "Write for example kwargs={}."))
        if not (options is None or isinstance(options, RunOptions)):
            fix = of_value(options) or "Write for example keras_tpu_dist.RunOptions(...)."
            raise TypeError(_wrong("options", options, "a RunOptions", fix))

    def _check_outside(self, name: str, inside: str) -> None:
        if in_replica_context():
            raise RuntimeError(
                message(
                    f"strategy.{name} is for code outside of strategy.run.",
                    received=f"strategy.{name} inside a function run by strategy.run.",
                    fix=f"There, call {inside}.",
                )
            )


def _wrong(name: str, value: Any, kind: str, fix: str) -> str:
    return message(
        f"{name} of strategy.run is {kind}.",
        received={name: type(value).__name__},
        fix=fix,
    )


def _weakly(fn) -> Callable[[], Any]:
    return weakref.WeakMethod(fn) if inspect.ismethod(fn) else weakref.ref(fn)


def _without_jit(fn):
    """The function without its `jax.jit`: the program is compiled as a whole."""
    jitted = hasattr(fn, "lower") and hasattr(fn, "trace") and hasattr(fn, "__wrapped__")
    return fn.__wrapped__ if jitted else fn


def _reduce(op: Any, value: Any, axis: Any, strategy: Strategy) -> Any:
    """Combines values over replicas; see `TPUStrategy.reduce`.

    Args:
        op: The reduction, as `checked_reduction` takes it.
        value: A `PerReplica`, a value that all replicas share, or a structure of those.
        axis: The dimension of the replicas' values, or several, to reduce as well, or `None`.
        strategy: The strategy of the values.

    Raises:
        ValueError: For an unknown reduction or a missing dimension; for a sum of a value that all
            replicas share; for values of different sizes without the axis in which they differ; if
            a value belongs to another strategy.
    """
    op = checked_reduction(op)
    return jax.tree.map(lambda leaf: _reduce_leaf(op, leaf, axis, strategy), value)


def _gather(value: Any, axis: int, strategy: Strategy) -> Any:
    """Joins values of replicas; see `TPUStrategy.gather`.

    Args:
        value: A `PerReplica` or a structure of them; other leaves are returned as they are.
        axis: The dimension of the replicas' values along which to join.
        strategy: The strategy of the values.

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


@in_own_mesh
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
    # In the dtype of one reduction over all values: partial sums in the values' dtype could
    # overflow.
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
                "A sum over replicas needs a value for every replica.",
                received=f"one {type(value).__name__} of shape {np.shape(value)} for "
                f"{strategy.num_replicas_in_sync} replicas.",
                fix="Reduce a result of strategy.run. If a value is the same on all replicas, "
                "multiply it by strategy.num_replicas_in_sync.",
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


@in_own_mesh
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
