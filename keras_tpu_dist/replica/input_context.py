"""What functions that make input for replicas are told."""

from dataclasses import dataclass

from keras_tpu_dist.common.checks import check_counts
from keras_tpu_dist.common.errors import message


@dataclass(frozen=True)
class InputContext:
    """What a function that makes a dataset knows about where its batches go.

    Under `TPUStrategy(input="per_process")` there is one pipeline for each input shard, else one
    that all processes read.

    Args:
        num_input_pipelines: How many different pipelines are read: `strategy.input_shard.count`.
        input_pipeline_id: The number of this process's: `strategy.input_shard.index`.
        num_replicas_in_sync: The number of replicas, those of all processes.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> ktd.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(32)
    8
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self):
        check_counts("InputContext", 1, num_input_pipelines=self.num_input_pipelines)
        check_counts("InputContext", 1, num_replicas_in_sync=self.num_replicas_in_sync)
        check_counts("InputContext", 0, input_pipeline_id=self.input_pipeline_id)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows each replica gets of a global batch.

        Args:
            global_batch_size: Rows of all replicas together.

        Raises:
            ValueError: If they do not divide by the number of replicas.
        """
        check_counts("get_per_replica_batch_size", 1, global_batch_size=global_batch_size)
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                message(
                    "The global batch size must be divisible by the number of replicas.",
                    received={
                        "global_batch_size": global_batch_size,
                        "num_replicas_in_sync": self.num_replicas_in_sync,
                    },
                    fix="Choose a multiple of it; distribute_dataset takes batches of any size.",
                )
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """What a function that makes one replica's value knows.

    Args:
        replica_id_in_sync_group: The replica's number, a Python integer.
        num_replicas_in_sync: The number of replicas.

    Example:

    >>> import keras_tpu_dist as ktd
    >>> context = ktd.ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    >>> context.replica_id_in_sync_group / context.num_replicas_in_sync
    0.5
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self):
        check_counts("ValueContext", 1, num_replicas_in_sync=self.num_replicas_in_sync)
        check_counts("ValueContext", 0, replica_id_in_sync_group=self.replica_id_in_sync_group)
