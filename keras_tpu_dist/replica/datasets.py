"""Datasets and values, distributed over replicas for `strategy.run`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from keras_tpu_dist.common.checks import (
    NaturalInt,
    PositiveInt,
    checked_arguments,
    checked_constructor,
)
from keras_tpu_dist.common.errors import message, runtime_error, type_error, value_error
from keras_tpu_dist.common.tensorflow_names import of_value
from keras_tpu_dist.input.own_input import OwnInput
from keras_tpu_dist.replica.blocks import own_replicas
from keras_tpu_dist.replica.iteration import DistributedDataset
from keras_tpu_dist.replica.placing import (
    place_global,
    place_many_global,
    place_parts,
    place_parts_of_steps,
)
from keras_tpu_dist.replica.run_options import RunOptions
from keras_tpu_dist.replica.sources import agreed_length, batches_of, in_groups, in_step, reads_once
from keras_tpu_dist.replica.values import stack_structures
from keras_tpu_dist.training.protocol import Strategy


@checked_constructor
@dataclass(frozen=True)
class InputContext:
    """The arguments for a function that creates a dataset for `strategy.run`.

    With `TPUStrategy(input="per_process")` there is one pipeline for every input shard; otherwise
    there is one that all processes read.

    Args:
        num_input_pipelines: The number of different pipelines: `strategy.input_shard.count`.
        input_pipeline_id: The number of this process's pipeline: `strategy.input_shard.index`.
        num_replicas_in_sync: The number of replicas in all processes.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> ktd.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(32)
    8
    """

    num_input_pipelines: PositiveInt = 1
    input_pipeline_id: NaturalInt = 0
    num_replicas_in_sync: PositiveInt = 1

    @checked_arguments
    def get_per_replica_batch_size(self, global_batch_size: PositiveInt) -> int:
        """The rows of a global batch that one replica gets.

        Args:
            global_batch_size: The rows of all replicas together.

        Raises:
            ValueError: If they are not divisible by the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise value_error(
                "The global batch size must be divisible by the number of replicas.",
                received={"global_batch_size": global_batch_size}
                | {"num_replicas_in_sync": self.num_replicas_in_sync},
                fix="Choose a multiple of it; distribute_dataset takes batches of any size.",
            )
        return global_batch_size // self.num_replicas_in_sync


@checked_constructor
@dataclass(frozen=True)
class ValueContext:
    """The arguments for a function that creates one replica's value.

    Args:
        replica_id_in_sync_group: The replica's number, a Python integer.
        num_replicas_in_sync: The number of replicas.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> context = ktd.ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    >>> context.replica_id_in_sync_group / context.num_replicas_in_sync
    0.5
    """

    replica_id_in_sync_group: NaturalInt = 0
    num_replicas_in_sync: PositiveInt = 1


def distribute_dataset(
    strategy: Strategy, dataset: Any, options: RunOptions | None, batch_size: int | None
) -> DistributedDataset:
    """See `TPUStrategy.distribute_dataset`."""
    check_attached(strategy, "distribute_dataset")
    if options is not None and not isinstance(options, RunOptions):
        raise type_error(
            "distribute_dataset takes the same options as run.",
            received={"options": type(options).__name__},
            fix=of_value(options)
            or "Pass a keras_tpu_dist.RunOptions, or nothing; to set how many batches are "
            "transferred ahead, write TPUStrategy(prefetch=...).",
        )
    own = strategy.runner.own_input
    batches, length = batches_of(dataset, batch_size, strategy.placer, own)
    return DistributedDataset(
        in_step(batches, strategy.placer, own),
        lambda batch: place_global(strategy, batch, options),
        strategy.runner.prefetch,
        agreed_length(length, own),
        lambda several: place_many_global(strategy, several, options),
        batch_size,
        reads_once(dataset),
    )


def distribute_datasets_from_function(
    strategy: Strategy, dataset_fn: Callable[[InputContext], Iterable]
) -> DistributedDataset:
    """See `TPUStrategy.distribute_datasets_from_function`."""
    check_attached(strategy, "distribute_datasets_from_function")
    own, number = strategy.runner.own_input, strategy.num_replicas_in_sync
    context = InputContext(num_replicas_in_sync=number)
    if own is not None:
        shard = own.shards.shard
        context = InputContext(shard.count, shard.index, number)
        # Here, every replica has its own arrays without a batch axis.
        own = OwnInput(own.shards, strategy.placer.axes, alike=False)
    dataset = dataset_fn(context)
    batches, length = batches_of(dataset, None, strategy.placer)
    each = number // context.num_input_pipelines
    together = in_step(batches, strategy.placer, own)
    return DistributedDataset(
        lambda: in_groups(together(), each),
        lambda parts: place_parts(parts, strategy),
        strategy.runner.prefetch,
        agreed_length(None if length is None else -(-length // each), own),
        lambda several: place_parts_of_steps(several, strategy),
        reads_once=reads_once(dataset),
    )


def distribute_values_from_function(
    strategy: Strategy, value_fn: Callable[[ValueContext], Any]
) -> Any:
    """See `TPUStrategy.distribute_values_from_function`."""
    check_attached(strategy, "distribute_values_from_function")
    number = strategy.num_replicas_in_sync
    made = {i: value_fn(ValueContext(i, number)) for i in own_replicas(strategy)}
    return stack_structures(made, strategy, "value_fn")


def check_attached(strategy: Strategy, what: str) -> None:
    """Raises if a strategy has no attached devices, or those of only some of the processes.

    Args:
        strategy: The strategy.
        what: The method that needs devices, for the error.
    """
    if strategy.topology is not None:
        raise runtime_error(
            "A strategy for a slice without its chips can compile a model, but not run code.",
            received=f"{what} with topology={strategy.topology.name!r}.",
            fix="Leave `topology` out to run on the attached devices.",
        )
    if 1 < strategy.num_hosts < jax.process_count():
        raise NotImplementedError(
            message(
                "Replica code runs in one process, or in all of them.",
                received=f"{what} on a mesh of {strategy.num_hosts} of {jax.process_count()} "
                "processes.",
                fix="Build the strategy on all devices, or on jax.local_devices().",
            )
        )
