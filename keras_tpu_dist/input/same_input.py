"""Checks that all processes read the same input, by the first batch of an epoch."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from keras_tpu_dist.common.errors import value_error
from keras_tpu_dist.input.batch_axis import element_names, flatten
from keras_tpu_dist.processes.agreement import first_difference
from keras_tpu_dist.processes.arrays import checksum
from keras_tpu_dist.processes.channel import agree

_NO_BATCH = "no batch"


def compared(batches: Iterable) -> Iterator:
    """Batches that are the same in all processes; the first of them is compared.

    Args:
        batches: Host batches.
    """
    batches = iter(batches)
    first = next(batches, None)
    fix = (
        "Give every process the same arrays, or the same stream in the same order: set the seed "
        "for shuffling (keras.utils.set_random_seed, tf.data.Dataset.shuffle(seed=...))."
    )
    mine = [_NO_BATCH] if first is None else _checksums(first)
    difference = first_difference(mine, agree("the first batch of an epoch", fix, mine))
    if difference is not None:
        process, place, *_ = difference
        names = [] if first is None else element_names(first)
        element = names[place] if place < len(names) else "batch"
        raise value_error(
            "All processes read the same batches.",
            received=f"{element} of an epoch's first batch, which differs between process "
            f"{jax.process_index()} and process {process}.",
            fix=fix,
        )
    if first is not None:
        yield first
        yield from batches


def _checksums(batch: Any) -> list[str]:
    # A sparse array is one leaf of the batch, and several arrays.
    return [" ".join(map(_described, jax.tree.leaves(leaf))) for leaf in flatten(batch)[0]]


def _described(array: Any) -> str:
    array = np.asarray(array)
    return f"{array.shape} {array.dtype} {checksum(array)}"
