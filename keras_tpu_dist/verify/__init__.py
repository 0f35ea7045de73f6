"""Runs what the TPU compiler makes of a model, on simulated devices."""

from keras_tpu_dist.verify.report import Row as Row
from keras_tpu_dist.verify.report import Verification as Verification
from keras_tpu_dist.verify.rewrite import CannotRun as CannotRun
from keras_tpu_dist.verify.run import verify as verify
