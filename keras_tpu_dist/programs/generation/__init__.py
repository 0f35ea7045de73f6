"""Writes the caches of loops over tokens in place."""

from keras_tpu_dist.programs.generation.in_place import caches_in_place as caches_in_place
