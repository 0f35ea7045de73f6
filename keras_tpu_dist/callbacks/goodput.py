"""A callback that records how the time of a run is spent."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common import phases, recorder
from keras_tpu_dist.common.checks import checked_path
from keras_tpu_dist.common.paths import absolute_path
from keras_tpu_dist.common.phases import BUILD, START
from keras_tpu_dist.common.records import check_ours

if TYPE_CHECKING:
    from keras_tpu_dist.tools.goodput.report import GoodputReport


class Goodput(keras.callbacks.Callback):
    """Records how the time of a run is spent, over all its restarts.

    Process 0 adds a line to the file every second, later less often. A line has the step, and the
    seconds of compiling, restoring, training, repeating steps after a restart, waiting for input,
    saving and validation. Time counts from the start of the process to its end, also before and
    after the fit. `ktd goodput FILE` prints the share of the time that trained, and what the rest
    went to. A restarted run adds to the same file; give a new run another file.

    Under `ktd launch --goodput FILE` the file is written without this callback, and includes the
    time lost by failures. Without a `TPUStrategy`, compiling and waiting for input count as
    training.

    Args:
        path: The file; only process 0 writes it.

    Raises:
        ValueError: If the path is empty; in `fit`, if this process already writes to another file,
            or the file is none of goodput.
        OSError: In `fit`, if the file cannot be written.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd, tempfile
    >>> with ktd.TPUStrategy().scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
    ...     goodput = ktd.callbacks.Goodput(folder + "/goodput.jsonl")
    ...     _ = model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0, callbacks=[goodput])
    ...     print(goodput.report())
    """

    # It does nothing after a batch, so Keras need not wait for it.
    async_safe = True

    def __init__(self, path: str | os.PathLike):
        super().__init__()
        _keras.install()  # for `before_fit`, also without a strategy
        where = "Write for example Goodput('goodput.jsonl')."
        self.path = absolute_path(checked_path("Goodput", where, path=path))

    def before_fit(self, arguments: Mapping[str, Any]) -> None:
        """Starts recording, if this process does not record yet.

        Args:
            arguments: The arguments of `fit`.
        """
        if jax.process_index() == 0:
            check_ours(self.path)
            recorder.begin(self.path)
            phases.turn(BUILD, of=START)

    def report(self) -> "GoodputReport":
        """How the time was spent, until now."""
        if jax.process_index() == 0:
            recorder.write_rest()
        # Imported here: what trains needs no tool.
        from keras_tpu_dist.tools.goodput.report import goodput_of

        return goodput_of(self.path)
