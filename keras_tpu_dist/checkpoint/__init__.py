"""Checkpoints: the state of training on disk, written from shards, loaded onto any mesh."""

from keras_tpu_dist.checkpoint.follow import checkpoints as checkpoints
from keras_tpu_dist.checkpoint.loop import LoopCheckpoint as LoopCheckpoint
from keras_tpu_dist.checkpoint.manifest import CheckpointError as CheckpointError
from keras_tpu_dist.checkpoint.restore import restore as restore
from keras_tpu_dist.checkpoint.restored import Restored as Restored
