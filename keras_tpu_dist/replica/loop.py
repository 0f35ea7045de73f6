"""Several steps of a custom loop in one launch: their batches and their results."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_tpu_dist.common.checks import one_of, require, whole
from keras_tpu_dist.common.errors import type_error, value_error
from keras_tpu_dist.common.own_mesh import in_own_mesh
from keras_tpu_dist.replica.iteration import DistributedDataset, DistributedIterator
from keras_tpu_dist.replica.run_options import RunOptions
from keras_tpu_dist.replica.values import PerReplica

logger = logging.getLogger("keras_tpu_dist")

_OUTPUTS = one_of("last", "all")
# Launches a function: arguments, keyword arguments, number of steps, whether to return all results.
Launch = Callable[[tuple, Mapping, int, bool], Any]


class Launches:
    """The launches of one pass over a dataset, as `strategy.loop` makes them.

    Args:
        launch: Launches the function.
        iterator: The batches.
        steps: The steps of a launch.
        args: The function's arguments after the batch.
        alike: Whether batches of one shape are launched together.
        every: Whether to return the results of every step.
    """

    def __init__(
        self,
        launch: Launch,
        iterator: DistributedIterator,
        steps: int,
        args: tuple,
        alike: bool,
        every: bool,
    ):
        self._launch, self._iterator = launch, iterator
        self._steps, self._args, self._alike, self._every = steps, args, alike, every
        self._done: int | None = None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        self._done = self._done or 0
        taken = self._iterator.take(self._steps, self._alike)
        if taken is None:
            raise StopIteration
        batch, steps = taken
        results = self._launch((batch, *self._args), {}, steps, self._every)
        # Before the user's code waits for the results.
        self._iterator.read_ahead(self._steps, self._alike)
        self._done += steps
        return self._done, joined([(results, steps)]) if self._every else results

    def __del__(self):
        if getattr(self, "_done", 0) is None:
            logger.warning(
                "strategy.loop ran no step: it runs them while you iterate over it, as in "
                "`for step, results in strategy.loop(fn, dataset): ...`"
            )


def several(
    launch: Launch,
    iterator: DistributedIterator,
    args: Sequence,
    kwargs: Mapping[str, Any],
    steps: int,
    alike: bool,
    every: bool,
) -> Any:
    """Runs a number of steps, fewer if the input ends before.

    Args:
        launch: Launches the function.
        iterator: The batches; every step gets the next one instead of the iterator.
        args: The positional arguments.
        kwargs: The keyword arguments.
        steps: The number of steps.
        alike: Whether batches of one shape are launched together.
        every: Whether to return the results of every step, or of the last one.

    Raises:
        StopIteration: If the input has already ended.
    """
    made, found = 0, []
    while made < steps and (taken := iterator.take(steps - made, alike)) is not None:
        batch, number = taken
        here = [batch if argument is iterator else argument for argument in args]
        named = {k: batch if argument is iterator else argument for k, argument in kwargs.items()}
        results = launch(tuple(here), named, number, every)
        found = [*found, (results, number)] if every else [(results, number)]
        made += number
    if not made:
        raise StopIteration
    iterator.read_ahead(steps, alike)
    return joined(found) if every else found[-1][0]


def iterator_among(args: Sequence, kwargs: Mapping[str, Any]) -> DistributedIterator | None:
    """The iterator over a distributed dataset among a function's arguments.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    given = [*args, *kwargs.values()]
    found = {id(a): a for a in given if isinstance(a, DistributedIterator)}
    if len(found) > 1:
        raise value_error(
            "strategy.run takes its batches from one iterator.",
            received={"iterators": len(found)},
            fix="Distribute the datasets together: strategy.distribute_dataset(zip(a, b)).",
        )
    return next(iter(found.values()), None)


def iterator_over(dataset: Any) -> DistributedIterator:
    """An iterator over the dataset of `strategy.loop`.

    Args:
        dataset: A `DistributedDataset`, or an iterator over one, which continues.
    """
    if not isinstance(dataset, (DistributedDataset, DistributedIterator)):
        raise type_error(
            "strategy.loop iterates over a distributed dataset.",
            received={"dataset": type(dataset).__name__},
            fix="Write strategy.loop(fn, strategy.distribute_dataset(dataset)).",
        )
    return dataset if isinstance(dataset, DistributedIterator) else iter(dataset)


def check_steps(where: str, outputs: str, **steps: int) -> None:
    """Checks the number of steps, and which results are requested.

    Args:
        where: The method, for errors.
        outputs: `"last"` or `"all"`.
        steps: The number, by the name of the argument.
    """
    require(where, whole(1), **steps)
    require(where, _OUTPUTS, outputs=outputs)


def alike_under(options: RunOptions | None) -> bool:
    """Whether batches are launched together; not if they are padded to different buckets.

    Args:
        options: The options of the run.
    """
    return options is None or options.buckets is None


def joined(launches: list[tuple[Any, int]]) -> Any:
    """The results of launches as one, with the steps along a new first dimension.

    Args:
        launches: The results of every launch, stacked if there are several steps, and their number.
    """
    if len(launches) == 1 and launches[0][1] > 1:
        return launches[0][0]
    flat = [(jax.tree.flatten(results), steps) for results, steps in launches]
    treedef = flat[0][0][1]
    columns = zip(*(leaves for (leaves, _), _ in flat), strict=True)
    counts = tuple(steps for _, steps in launches)
    return jax.tree.unflatten(treedef, [_joined(column, counts) for column in columns])


def _joined(values: Sequence[PerReplica], steps: tuple[int, ...]) -> PerReplica:
    forms = [
        (v.padded_shape[n > 1 :], {axis - (n > 1): true for axis, true in v.sizes.items()})
        for v, n in zip(values, steps, strict=True)
    ]
    if any(form != forms[0] for form in forms):
        raise value_error(
            'outputs="all" joins values of one shape.',
            received={"shapes": sorted({shape for shape, _ in forms}), "steps": sum(steps)},
            fix='Take outputs="last", or iterate over strategy.loop.',
        )
    first, single = values[0], tuple(n == 1 for n in steps)
    array = _concatenate([v.array for v in values], single, first.strategy.placer.by_replica)
    sizes = {axis + 1: true for axis, true in forms[0][1].items()}
    rows = None if first.rows is None else first.rows + single[0]
    return PerReplica(array, first.strategy, stacked=True, sizes=sizes, rows=rows)


@in_own_mesh
@functools.partial(jax.jit, static_argnums=(1, 2))
def _concatenate(arrays, single, sharding):
    stacks = [array[:, None] if one else array for array, one in zip(arrays, single, strict=True)]
    return jax.lax.with_sharding_constraint(jnp.concatenate(stacks, 1), sharding)
