"""New checkpoints as they are written, for programs that run beside training."""

import os
import time
from collections.abc import Iterator

from keras_tpu_dist.checkpoint.keeping import has_ended
from keras_tpu_dist.checkpoint.store import Store, checkpoint_errors, folder
from keras_tpu_dist.common.checks import check_seconds, checked_path
from keras_tpu_dist.processes.channel import agree

_POLL_S = 1.0
_FIX = "Iterate over ktd.checkpoints in all processes."


def checkpoints(directory: str | os.PathLike, timeout_s: float | None = None) -> Iterator[int]:
    """Yields the steps of new checkpoints as training writes them, for evaluation beside it.

    First it yields the newest existing checkpoint, and then, every time, the newest one that is
    newer. If your loop takes longer than training needs for the next checkpoint, it skips some, and
    always gets the last one. The directory need not exist yet. The iteration ends when the run has
    ended, or when nothing new came for `timeout_s`. All processes get the steps that process 0
    sees.

    Args:
        directory: The directory of `keras_tpu_dist.callbacks.Checkpoint`.
        timeout_s: The seconds to wait for a new checkpoint; `None` to wait until the run ends.

    Returns:
        An iterator over steps, for `keras_tpu_dist.restore(model, directory, step=step)`.

    Raises:
        ValueError: If an argument has the wrong type or value.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd, tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = ktd.callbacks.Checkpoint(folder)
    ...     _ = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[saved])
    ...     list(ktd.checkpoints(folder))
    [1]
    """
    where = 'Write for example ktd.checkpoints("run7", timeout_s=3600).'
    directory = checked_path("checkpoints", where, directory=directory)
    if timeout_s is not None:
        check_seconds("checkpoints", timeout_s=timeout_s)
    return _followed(directory, timeout_s)


def _followed(directory: str, timeout_s: float | None) -> Iterator[int]:
    last, since_s = -1, time.monotonic()
    while True:
        # Read before the time and the agreement: a run that ends meanwhile has one more checkpoint.
        newest, ended = _newest(directory)
        late = timeout_s is not None and time.monotonic() - since_s > timeout_s
        newest, ended, late = agree(
            "looking for new checkpoints", _FIX, [newest, ended, late], [int, bool, bool]
        )[0]
        if newest > last:
            yield newest
            last, since_s = newest, time.monotonic()
        elif ended or late:
            return
        else:
            time.sleep(_POLL_S)


def _newest(directory: str) -> tuple[int, bool]:
    """The newest step, -1 if there is none, and whether the run has ended with it."""
    with checkpoint_errors(directory, "read"):
        if not folder(directory).is_dir():
            return -1, False
        store = Store(directory, read_only=True, alone=True)
        try:
            steps = store.steps
        finally:
            store.close()
        if not steps:
            return -1, False
        return steps[-1], has_ended(folder(directory) / str(steps[-1]))
