"""Several hosts: how their processes start, find one another, and agree."""

from keras_tpu_dist.processes.start import initialize as initialize
