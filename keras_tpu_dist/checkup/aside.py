"""What a check makes and runs leaves nothing behind in the program that asks for it."""

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
    """A context that leaves names, random numbers and notices of the program as before."""
    numbers, logger = random_numbers(), logging.getLogger("keras_tpu_dist")
    level = logger.level
    # Which path a layer takes is said of the user's own layers.
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
    own = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        with jax.default_device(device):
            yield
    finally:
        keras.distribution.set_distribution(own)
