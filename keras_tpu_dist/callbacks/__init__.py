"""Callbacks that Keras lacks: for exact steps, NaN, plain Python metrics, checkpoints."""

from keras_tpu_dist.callbacks.backup import BackupAndRestore as BackupAndRestore
from keras_tpu_dist.callbacks.checkpoint import Checkpoint as Checkpoint
from keras_tpu_dist.callbacks.host_metrics import HostMetrics as HostMetrics
from keras_tpu_dist.callbacks.name_nan import NameNaN as NameNaN
from keras_tpu_dist.callbacks.stop_at_step import StopAtStep as StopAtStep
