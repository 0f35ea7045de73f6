"""Contexts in which a check runs models without side effects on your program."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common import once
from keras_tpu_dist.input.position import random_numbers, set_random_numbers


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """A context that restores the program's layer names, random numbers and log at its end."""
    numbers, logger = random_numbers(), logging.getLogger("keras_tpu_dist")
    level = logger.level
    # Log lines about the check's own layers would confuse users.
    logger.setLevel(logging.ERROR)
    try:
        with once.forgotten(), _keras.fresh_names():
            yield
    finally:
        logger.setLevel(level)
        set_random_numbers(numbers)


@contextlib.contextmanager
def on_one(device: Any) -> Iterator[None]:
    """A context in which Keras and JAX compute on one device, without a distribution.

    Args:
        device: A `jax.Device` of this process.
    """
    with _keras.without_distribution(), jax.default_device(device):
        yield


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """A context in which Keras computes in float32, whatever the program has set for its models.

    Other threads keep their policies. They see another `floatx` only if the program has set one
    that is not float32: Keras has none for one thread.
    """
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    if floatx != "float32":
        keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        if floatx != "float32":
            keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
