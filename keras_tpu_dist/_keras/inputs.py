"""The seam to Keras's input: whose dataset is split by whom, and the count of an epoch's steps."""

from typing import Any

from keras.src.trainers.epoch_iterator import EpochIterator

from keras_tpu_dist._keras.seam import Replacement, declare
from keras_tpu_dist._keras.trainer import is_strategy


def _read_dataset(stock, adapter, dataset, class_weight=None, distribution=None):
    ours = is_strategy(distribution)
    stock(adapter, dataset, class_weight=class_weight, distribution=None if ours else distribution)


def uncount_steps(epoch_iterator: EpochIterator, steps: int, ran_out: bool) -> None:
    """Tells an epoch's iterator of steps that it counted and that were not made.

    Keras counts `steps_per_execution` for each launch, also for one that was cut short; and it
    learns that an input of unknown length ran out from a launch without any batch, of which there
    is none after the last of an epoch.
    Public replacement: none.

    Args:
        epoch_iterator: The iterator of the epoch under way.
        steps: How many of the steps that it counted were not made.
        ran_out: Whether the launch was the epoch's last one, cut short by the end of the input.
    """
    seen: Any = epoch_iterator._steps_seen
    epoch_iterator._steps_seen = seen - steps
    if ran_out and epoch_iterator._num_batches is None:
        epoch_iterator._num_batches = epoch_iterator._steps_seen
        epoch_iterator._interrupted_warning()


declare(
    Replacement(
        "keras.src.trainers.data_adapters.tf_dataset_adapter:TFDatasetAdapter",
        "__init__",
        _read_dataset,
        why="Keras has the distribution cut the dataset for its process; a method of the same name "
        "makes per-replica batches here, as in tf.distribute",
        hook="a name of its own for that",
        parameters=("dataset", "class_weight", "distribution"),
    )
)
