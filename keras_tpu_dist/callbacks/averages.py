"""Whether `SwapEMAWeights` of Keras has averages in the place of the weights."""

import logging
from collections.abc import Sequence
from typing import Any

import keras

logger = logging.getLogger("keras_tpu_dist")

_SWAPPED = "_ema_weights_in_model"


def swapped(callbacks: Sequence[Any]) -> bool:
    """Whether the model's weights are averages now, and the optimizer has the weights.

    Args:
        callbacks: The callbacks of a fit.
    """
    return any(getattr(each, _SWAPPED, False) for each in _that_swap(callbacks))


def note_swapped(callbacks: Sequence[Any], now: bool) -> None:
    """Tells callbacks what the weights are that were loaded.

    Told when training begins, not as what else callbacks know: in its `on_epoch_begin`, which may
    come before that of others, `SwapEMAWeights` swaps back.

    Args:
        callbacks: The callbacks of the fit that goes on.
        now: What `swapped` returned for those of the fit that ended.
    """
    that_swap = _that_swap(callbacks)
    for each in that_swap:
        setattr(each, _SWAPPED, now)
    if now and not that_swap:
        logger.warning(
            "the checkpoint has averages in the place of the weights, and no SwapEMAWeights of "
            "this fit swaps them back: training goes on with the averages"
        )


def _that_swap(callbacks: Sequence[Any]) -> list:
    return [each for each in callbacks if isinstance(each, keras.callbacks.SwapEMAWeights)]
