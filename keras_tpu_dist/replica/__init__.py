"""Code for each replica: `strategy.run`, its context, values and datasets."""

from keras_tpu_dist.replica.context import ReplicaContext as ReplicaContext
from keras_tpu_dist.replica.context import get_replica_context as get_replica_context
from keras_tpu_dist.replica.datasets import InputContext as InputContext
from keras_tpu_dist.replica.datasets import ValueContext as ValueContext
from keras_tpu_dist.replica.gradients import loss_and_gradients as loss_and_gradients
from keras_tpu_dist.replica.iteration import DistributedDataset as DistributedDataset
from keras_tpu_dist.replica.run import ReplicaCode as ReplicaCode
from keras_tpu_dist.replica.run_options import RunOptions as RunOptions
from keras_tpu_dist.replica.values import PerReplica as PerReplica
