"""The attributes that Keras's own callbacks change while they run."""

import logging
from typing import Any

import keras

logger = logging.getLogger("keras_tpu_dist")

# Whether averages have replaced the weights; public replacement: none.
AVERAGES_IN_MODEL = "_ema_weights_in_model"
# Plain values, without those that `on_train_begin` or `on_epoch_begin` resets.
CHANGING: dict[str, tuple[str, ...]] = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch"),
    "ReduceLROnPlateau": ("wait", "cooldown_counter", "best"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "OrbaxCheckpoint": (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
        "_total_batches_seen",
    ),
    "BackupAndRestore": (
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
        "_current_epoch",
    ),
    "SwapEMAWeights": (AVERAGES_IN_MODEL,),
    "TensorBoard": ("_global_train_batch", "_global_test_batch"),
}
# Lists of NumPy arrays, or `None`.
ARRAYS: dict[str, tuple[str, ...]] = {"EarlyStopping": ("best_weights",)}


def changing(callback: Any, table: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The attributes that a Keras callback changes, as far as this Keras has them.

    Public replacement: none; `state_dict()` of callbacks.

    Args:
        callback: Any callback; for callbacks that Keras does not define, none are known.
        table: `CHANGING` or `ARRAYS`.
    """
    kinds = [getattr(keras.callbacks, name, None) for name in table]
    found = [
        n
        for kind, n in zip(kinds, table.values(), strict=True)
        if kind and isinstance(callback, kind)
    ]
    return tuple(name for names in found for name in names if _has(callback, name))


def _has(callback: Any, name: str) -> bool:
    if hasattr(callback, name):
        return True
    logger.warning(
        "%s of keras %s has no attribute %s: a checkpoint does not hold it",
        type(callback).__name__,
        keras.__version__,
        name,
    )
    return False
