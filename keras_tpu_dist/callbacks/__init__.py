"""Callbacks that Keras lacks: exact steps, NaN, Python metrics, checkpoints, rates, profiles."""

from keras_tpu_dist.callbacks.checkpoint import Checkpoint as Checkpoint
from keras_tpu_dist.callbacks.host_metrics import HostMetrics as HostMetrics
from keras_tpu_dist.callbacks.name_nan import NameNaN as NameNaN
from keras_tpu_dist.callbacks.profile import Profile as Profile
from keras_tpu_dist.callbacks.rates import Rates as Rates
from keras_tpu_dist.callbacks.stop_at_step import StopAtStep as StopAtStep
