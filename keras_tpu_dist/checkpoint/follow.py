"""New checkpoints as they are written, for programs that run beside training."""

import os
import time
from collections.abc import Iterator

from keras_tpu_dist.checkpoint.keeping import has_ended
from keras_tpu_dist.checkpoint.reader import CheckpointReader, checkpoint_errors, folder
from keras_tpu_dist.common.checks import SECONDS, checked_path, require
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
    require("checkpoints", SECONDS, True, timeout_s=timeout_s)
    return _followed(directory, timeout_s)


def _followed(directory: str, timeout_s: float | None) -> Iterator[int]:
    # The time of writing comes first: a run may return to an earlier step.
    last, since_s = [0.0, -1], time.monotonic()
    reader: CheckpointReader | None = None
    while True:
        if reader is None and folder(directory).is_dir():
            reader = CheckpointReader(directory, alone=True)
        # Read before the time and the agreement: a run that ends meanwhile has one more
        # checkpoint.
        at_s, step = (0.0, -1) if reader is None else reader.newest
        ended = False
        if step >= 0:
            with checkpoint_errors(directory, "read"):
                ended = has_ended(folder(directory) / str(step))
        late = timeout_s is not None and time.monotonic() - since_s > timeout_s
        newest, ended, late = agree(
            "looking for new checkpoints", _FIX, [[at_s, step], ended, late]
        )[0]
        if newest > last:
            yield int(newest[1])
            last, since_s = newest, time.monotonic()
        elif ended or late:
            return
        else:
            time.sleep(_POLL_S)
