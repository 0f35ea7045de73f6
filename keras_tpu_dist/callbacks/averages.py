"""Whether `SwapEMAWeights` of Keras has averages in the place of the weights."""

import logging
from collections.abc import Sequence
from typing import Any

import keras

from keras_tpu_dist import _keras

logger = logging.getLogger("keras_tpu_dist")


def swapped(callbacks: Sequence[Any]) -> bool:
    """Whether the model's weights are averages now, and the optimizer has the weights.

    Args:
        callbacks: The callbacks of a fit.
    """
    return any(_keras.averages_are_in_model(each) for each in _that_swap(callbacks))


def note_swapped(callbacks: Sequence[Any], now: bool) -> None:
    """Tells callbacks what the weights are that were loaded.

    Of a checkpoint that says it of all together, as those of version 0.2 and before do; newer ones
    hold what each of them knows.

    Args:
        callbacks: The callbacks of the fit that goes on.
        now: What `swapped` returned for those of the fit that ended.
    """
    that_swap = _that_swap(callbacks)
    for each in that_swap:
        _keras.note_averages(each, now)
    if now and not that_swap:
        logger.warning(
            "the checkpoint has averages in the place of the weights, and no SwapEMAWeights of "
            "this fit swaps them back: training goes on with the averages"
        )


def _that_swap(callbacks: Sequence[Any]) -> list:
    return [each for each in callbacks if isinstance(each, keras.callbacks.SwapEMAWeights)]
