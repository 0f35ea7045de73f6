"""Custom loops: what `TPUStrategy` does in run, loop, local_results, reduce and gather."""

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
from keras_tpu_dist.common.errors import runtime_error, type_error, value_error
from keras_tpu_dist.common.own_mesh import in_own_mesh
from keras_tpu_dist.common.tensorflow_names import of_value
from keras_tpu_dist.processes.arrays import put
from keras_tpu_dist.replica import hooks as hooks  # registers its replacements in Keras
from keras_tpu_dist.replica.blocks import every_block
from keras_tpu_dist.replica.buffers import ReplicaBuffers
from keras_tpu_dist.replica.call import prepare
from keras_tpu_dist.replica.context import checked_axis, in_replica_context
from keras_tpu_dist.replica.datasets import check_attached
from keras_tpu_dist.replica.iteration import DistributedDataset, DistributedIterator
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
from keras_tpu_dist.training.scope import Scope

logger = logging.getLogger("keras_tpu_dist")

# With so many function objects of the same code, the function is probably defined in a loop.
_FUNCTIONS_OF_ONE_CODE = 3
_NOTHING_VARIES = RunOptions()


class ReplicaCode:
    """The programs of one strategy's `run` and `loop`, cached by function."""

    def __init__(self):
        self._programs: Any = weakref.WeakKeyDictionary()
        self._functions_of_code: Any = weakref.WeakKeyDictionary()
        self._buffers = ReplicaBuffers()

    def run(
        self,
        strategy: Strategy,
        fn: Callable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        options: RunOptions | None,
        steps: int,
        outputs: str,
        use: Callable[..., Any] = ReplicaProgram.launch,
    ) -> Any:
        """See `TPUStrategy.run`; `use` gets the program, its arguments, steps and `every`.

        Args:
            strategy: The strategy.
            fn: The function. It returns arrays, numbers, `None` or a structure of them.
            args: Its positional arguments: arrays, `keras.Variable`s, structures of them, and
                constants; or an iterator over a distributed dataset, which every step replaces by
                the next batch.
            kwargs: Its keyword arguments.
            options: `RunOptions` for inputs of varying sizes.
            steps: The number of steps in the launch; fewer if the iterator has fewer batches left.
            outputs: Which results of several steps to return: `"last"`, or `"all"`, with the steps
                along a new first dimension of every replica's values.
            use: What to do with the program: by default, launch it.
        """
        self._check_run(strategy, fn, args, kwargs, options)
        # The usual call passes no checks; `True` is no number of steps.
        if (type(steps), steps, outputs) != (int, 1, "last"):
            check_steps("run", outputs, steps=steps)
        launch, every = self._launch_of(strategy, fn, options, use), outputs == "all"
        iterator = iterator_among(args, kwargs or {})
        if iterator is not None:
            alike = alike_under(options)
            return several(launch, iterator, args, kwargs or {}, steps, alike, every)
        results = launch(tuple(args), kwargs or {}, steps, every)
        return joined([(results, steps)]) if every else results

    def loop(
        self,
        strategy: Strategy,
        fn: Callable,
        dataset: DistributedDataset | DistributedIterator,
        steps_per_launch: int,
        args: Sequence[Any],
        options: RunOptions | None,
        outputs: str,
    ) -> Launches:
        """See `TPUStrategy.loop`.

        Args:
            strategy: The strategy.
            fn: The function of a batch. See `run`.
            dataset: The result of `distribute_dataset` or `distribute_datasets_from_function`, or
                an iterator over it, which continues.
            steps_per_launch: The number of steps in a launch.
            args: More arguments after the batch, the same in all steps.
            options: `RunOptions` for batches of varying sizes.
            outputs: Which results to return: `"last"`, those of a launch's last step; or `"all"`,
                with the steps along a new first dimension of every replica's values.
        """
        self._check_run(strategy, fn, args, None, options)
        check_steps("loop", outputs, steps_per_launch=steps_per_launch)
        return Launches(
            self._launch_of(strategy, fn, options),
            iterator_over(dataset),
            steps_per_launch,
            tuple(args),
            alike=alike_under(options),
            every=outputs == "all",
        )

    def _launch_of(
        self,
        strategy: Strategy,
        fn: Callable,
        options: RunOptions | None,
        use: Callable[..., Any] = ReplicaProgram.launch,
    ) -> Launch:
        """Runs the function with arguments and a number of steps; returns the last results or
        all."""
        # The function without its `jax.jit`: the program is compiled as a whole.
        jitted = hasattr(fn, "lower") and hasattr(fn, "trace") and hasattr(fn, "__wrapped__")
        fn = fn.__wrapped__ if jitted else fn

        def launch(args: tuple, kwargs: Mapping, steps: int, every: bool) -> Any:
            with Scope(strategy):
                call = prepare(args, kwargs, options or _NOTHING_VARIES, strategy)
                programs, key = self._programs_of(fn), call.key
                # One for every way in which layers were frozen, as when two networks take turns.
                candidates = programs.get(key, ())
                for program in candidates:
                    if program.serves:
                        return use(program, call, steps, every)
                program = ReplicaProgram(_weakly(fn), call, strategy, self._buffers)
                programs[key] = [program, *(other for other in candidates if not other.outdated)]
                return use(program, call, steps, every)

        return launch

    def _programs_of(self, fn) -> dict:
        # A bound method is a new object at every access, so its programs belong to its owner.
        owner, name = (fn.__self__, fn.__func__) if inspect.ismethod(fn) else (fn, None)
        try:
            by_name = self._programs.get(owner)
        except TypeError as error:
            raise type_error(
                "The function of strategy.run must be hashable and weakly referable.",
                received={"fn": type(owner).__name__},
                fix="Pass a plain function that calls it.",
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

    def _check_run(self, strategy, fn, args, kwargs, options) -> None:
        _check_outside("run", "the function directly")
        if not self._programs:
            check_attached(strategy, "run")
        if not callable(fn):
            raise _wrong("fn", fn, "a function", "Write for example strategy.run(step, args=(x,)).")
        if not isinstance(args, (tuple, list)):
            raise _wrong("args", args, "a tuple or list", "Write for example args=(x,).")
        if not (kwargs is None or isinstance(kwargs, Mapping)):
            raise _wrong("kwargs", kwargs, "a dict", "Write for example kwargs={}.")
        if not (options is None or isinstance(options, RunOptions)):
            fix = of_value(options) or "Write for example keras_tpu_dist.RunOptions(...)."
            raise _wrong("options", options, "a RunOptions", fix)


def local_results(strategy: Strategy, value: Any) -> tuple:
    """See `TPUStrategy.local_results`.

    Args:
        strategy: The strategy that made the values.
        value: A `PerReplica`, or a structure with some; other leaves are the same for every
            replica.
    """
    if isinstance(value, keras.Variable) and is_own(value):
        (copies,) = copies_of([value], strategy)
        value = PerReplica(copies, strategy, stacked=True)
    leaves, treedef = jax.tree.flatten(value)
    per_replica = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
    if not per_replica:
        return (value,)
    for leaf in per_replica:
        check_owner(leaf, strategy)
    number = len(per_replica[0].replica_ids)
    # A leaf that is no PerReplica is the same for every replica.
    columns = [leaf.values if isinstance(leaf, PerReplica) else (leaf,) * number for leaf in leaves]
    return tuple(jax.tree.unflatten(treedef, row) for row in zip(*columns, strict=True))


def reduce(strategy: Strategy, reduce_op: Any, value: Any, axis: Any) -> Any:
    """See `TPUStrategy.reduce`."""
    _check_outside("reduce", "get_replica_context().all_reduce")
    op = checked_reduction(reduce_op)
    return jax.tree.map(lambda leaf: _reduce_leaf(op, leaf, axis, strategy), value)


def gather(strategy: Strategy, value: Any, axis: int) -> Any:
    """See `TPUStrategy.gather`."""
    if not is_count(axis):
        raise value_error(
            "Values are gathered along a dimension.",
            received={"axis": axis},
            fix="Write for example axis=0.",
        )
    _check_outside("gather", "get_replica_context().all_gather")
    return jax.tree.map(lambda leaf: _gather_leaf(leaf, axis, strategy), value)


def _check_outside(name: str, inside: str) -> None:
    if in_replica_context():
        raise runtime_error(
            f"strategy.{name} is for code outside of strategy.run.",
            received=f"strategy.{name} inside a function run by strategy.run.",
            fix=f"There, call {inside}.",
        )


def _wrong(name: str, value: Any, kind: str, fix: str) -> TypeError:
    return type_error(
        f"{name} of strategy.run is {kind}.",
        received={name: type(value).__name__},
        fix=fix,
    )


def _weakly(fn) -> Callable[[], Any]:
    return weakref.WeakMethod(fn) if inspect.ismethod(fn) else weakref.ref(fn)


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
    array = array if stacked else _by_replica(array, at, number)
    result = reduced(op, array, (0, *(a + 1 for a in axes)))
    return jax.lax.with_sharding_constraint(result, sharding)


def _reduce_ragged(op: str, parts: list, axes: tuple[int, ...]):
    left = {tuple(n for i, n in enumerate(part.shape) if i not in axes) for part in parts}
    if len(left) > 1:
        raise value_error(
            "Values of different sizes can be reduced only along the dimension in which they "
            "differ.",
            received={"shapes": [part.shape for part in parts], "axis": axes or None},
            fix="Give that dimension, usually axis=0.",
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
        raise value_error(
            "A sum over replicas needs a value for every replica.",
            received=f"one {type(value).__name__} of shape {np.shape(value)} for "
            f"{strategy.num_replicas_in_sync} replicas.",
            fix="Reduce a result of strategy.run, or multiply by strategy.num_replicas_in_sync.",
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
            raise value_error(
                "Values of different sizes can be gathered only along the dimension in which "
                "they differ.",
                received={"shapes": [part.shape for part in parts], "axis": axis},
                fix="Give that dimension, usually axis=0.",
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
    array = array if stacked else _by_replica(array, split, number)
    array = jnp.moveaxis(array, 0, at)
    shape = array.shape
    joined = array.reshape(*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    return jax.lax.with_sharding_constraint(joined, sharding)


def _by_replica(array: jax.Array, axis: int, number: int) -> jax.Array:
    """An array with the replicas' parts of a dimension along a new first one."""
    shape = array.shape
    parts = array.reshape(*shape[:axis], number, shape[axis] // number, *shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)


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
