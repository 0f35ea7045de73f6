"""Runs what the TPU compiler makes of a model, on simulated devices."""

from keras_tpu_dist.tools.replay.errors import CannotRun as CannotRun
from keras_tpu_dist.tools.replay.report import Row as Row
from keras_tpu_dist.tools.replay.report import Verification as Verification
from keras_tpu_dist.tools.replay.run import verify as verify
