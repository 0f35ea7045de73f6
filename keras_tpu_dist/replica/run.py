"""What `TPUStrategy` offers for custom loops: run, loop, local_results, reduce, gather."""

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
from keras_tpu_dist.common.tensorflow_names import of_value
from keras_tpu_dist.processes.arrays import put
from keras_tpu_dist.replica import hooks as hooks  # declares what it replaces in Keras
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
from keras_tpu_dist.training.protocol import Strategy

logger = logging.getLogger("keras_tpu_dist")

# With so many function objects of one code, the function is probably defined in a loop.
_FUNCTIONS_OF_ONE_CODE = 3
_NOTHING_VARIES = RunOptions()


class ReplicaCode(DistributedInput):
    """The part of `TPUStrategy` that runs a user's own code once per replica."""

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

        Each replica gets its own part of per-replica arguments (from `distribute_dataset`,
        `distribute_values_from_function` or an earlier `run`) and all other arrays and numbers
        whole; `True`, strings and other objects are constants of the program. Within the function
        `get_replica_context()` tells the replica's number and talks to the others.

        With `steps=N` the function runs N times, one after the other, in one launch: with the next
        N batches of a distributed dataset if an argument is an iterator over one, else with the
        same arguments. Variables, seeds and metrics go from step to step, so that the results are
        those of N calls. Batches are transferred together, and the next N while the devices work.
        If fewer are left, or they differ in shape, they are launched one by one; so are those of
        `RunOptions(buckets=...)`. `strategy.loop` does the same for a whole dataset.

        Keras variables, layers, models, optimizers and metrics that the function finds in its
        closure or among its arguments can be read and updated. An update is combined by the
        variable's `aggregation`: `"mean"`, `"sum"`, `"only_first_replica"`; with `"none"`, Keras's
        default, an update that is the same on all replicas is taken as it is, a floating-point
        one that differs (moving statistics) is averaged, and a trainable weight that would differ
        is an error: reduce the gradients first. Metrics (`synchronization="on_read"`) keep each
        replica's own value and are combined for who reads them outside. Seed generators draw
        differently on each replica and advance once a step. If anything raises before the program
        is launched, no variable is assigned. Whether a launch overwrites updated variables, or
        keeps the old values and needs memory for both, is the strategy's `donate_state`, as in
        `fit`; arrays that you keep, such as `variable.value`, are never overwritten.
        Within the function a variable is whole, also one that lies split over the data axes
        ("fsdp"); splits over other axes stay.

        The function is traced at its first call and for new shapes, then not called again: pass
        the same function object each time. A lambda written in the loop is a new function each
        time, traced and compiled anew, which the log warns of.

        Where the mesh spans several processes, all of them call `run` with the same function and
        the same arguments; what differs comes as a per-replica value. That is checked at the
        first call of each program, as are the values of the variables.

        Args:
            fn: The function. It returns arrays, numbers, `None` or a structure of them.
            args: Its positional arguments: arrays, `keras.Variable`s, structures of them, and
                constants; or an iterator over a distributed dataset, in whose place each step
                gets the next batch.
            kwargs: Its keyword arguments.
            options: `RunOptions` for inputs of varying sizes.
            steps: How many steps the launch makes; fewer if the iterator has fewer left.
            outputs: Which results of several steps to return: `"last"`, or `"all"`, with the
                steps along a new first dimension of each replica's values.

        Returns:
            The structure that `fn` returned, with a `PerReplica` in place of each array.

        Raises:
            ValueError: If `fn` returns something else, a per-replica argument belongs to another
                strategy or is uneven, or an update cannot be combined; on all processes, if their
                arguments or variables differ; if `outputs="all"` and steps give several shapes.
            StopIteration: If the iterator among the arguments has no batch left.
            PeerError: If other processes run something else.
            RuntimeError: Inside of another `run`.
            TypeError: If an argument is of a wrong kind.
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
        """Runs a function for each batch of a dataset, many in one launch.

        It is `strategy.run(fn, (batch, *args))` for one batch after the other, and gives the same
        numbers, at the speed of `fit` with `steps_per_execution`: `steps_per_launch` batches of
        one shape are one program with a loop on the devices, the next ones are read and
        transferred meanwhile. What is left at the end, and batches of another shape, are launched
        one by one.

        Steps are made while you iterate, so between two launches you may print, save, evaluate or
        leave. `keras.utils.Progbar` and Keras's callbacks fit in there.

        Args:
            fn: The function of a batch. See `run`.
            dataset: What `distribute_dataset` or `distribute_datasets_from_function` returned; or
                an iterator over it, which goes on.
            steps_per_launch: How many steps a launch makes.
            args: More arguments, the same in all steps, behind the batch.
            options: `RunOptions` for batches of varying sizes.
            outputs: Which results to give: `"last"`, those of a launch's last step; or `"all"`,
                with the steps along a new first dimension of each replica's values.

        Returns:
            An iterator that makes the next launch and gives the number of steps made so far, and
            the results: the structure that `fn` returned, with a `PerReplica` for each array.

        Raises:
            ValueError: Where `run` raises it.
            TypeError: If `dataset` is none of those, or an argument is of a wrong kind.

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

        With several processes each gets the values of its own replicas, as in `tf.distribute`: of
        those that have a device there (`PerReplica.replica_ids`), one that spans processes in
        each of them. They are this process's own arrays.

        Args:
            value: What `run` returned or a distributed dataset gave: a `PerReplica` or a structure
                with some; or an `"on_read"` variable, for each replica's own value.

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
        """Combines values over replicas, and over a dimension of each.

        Args:
            reduce_op: `"sum"`, `"mean"`, `"max"`, `"min"`, in any case, or an enum with such names.
            value: A `PerReplica` or a structure of them. A value that all replicas share is its
                own mean, maximum and minimum.
            axis: The dimension, or several, of each replica's value to reduce as well, usually 0,
                the batch; `None`: only over replicas. A mean over uneven batches counts rows, not
                replicas.

        A sum of whole numbers or of `bool` has at least 32 bits, their mean is a floating-point
        number, everything else keeps its dtype; numbers of less than 32 bits are added up in
        float32. `all_reduce` of the replica context does the same.

        Returns:
            Arrays, the same on all devices and in all processes, which all call it.

        Raises:
            ValueError: For a sum of a value that all replicas share; for values of different sizes
                without the axis in which they differ; for the largest or smallest of no values or
                of complex numbers; if a value belongs to another strategy.
        """
        self._check_outside("reduce", "get_replica_context().all_reduce")
        return _reduce(reduce_op, value, axis, self)

    def gather(self, value: Any, axis: int) -> Any:
        """Joins values of all replicas along a dimension.

        Args:
            value: A `PerReplica` or a structure of them; others are returned as they are.
            axis: The dimension.

        Returns:
            Arrays, the same on all devices and in all processes, which all call it.

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
        """Runs the function with arguments: so many steps, the results of the last or of all."""
        fn = _without_jit(fn)

        def launch(args: tuple, kwargs: Mapping, steps: int, every: bool) -> Any:
            with self.scope():
                call = prepare(args, kwargs, options or _NOTHING_VARIES, self)
                programs, key = self._programs_of(fn), call.key
                program = programs.get(key)
                if program is None or program.outdated:
                    program = programs[key] = ReplicaProgram(_weakly(fn), call, self, self._buffers)
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
                    "strategy.run keeps programs for as long as their function lives, so that it "
                    "must be hashable and weakly referable.",
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
                "strategy.run was given the function %s of %s:%d as %d different objects: each is "
                "traced and compiled anew; define it once, outside of the loop",
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
                    received=f"strategy.{name} inside of a function run by strategy.run.",
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
    """The function under `jax.jit`: the program is compiled as a whole."""
    jitted = hasattr(fn, "lower") and hasattr(fn, "trace") and hasattr(fn, "__wrapped__")
    return fn.__wrapped__ if jitted else fn


def _reduce(op: Any, value: Any, axis: Any, strategy: Strategy) -> Any:
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


def _gather(value: Any, axis: int, strategy: Strategy) -> Any:
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
    # In the dtype of one reduction over all values: partial sums in the values' own could overflow.
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
