"""`Checkpoint` with the arguments of Keras's BackupAndRestore."""

import os
from typing import Annotated

import jax

from keras_tpu_dist.callbacks.checkpoint import Checkpoint
from keras_tpu_dist.callbacks.fit_checkpoints import FIX
from keras_tpu_dist.checkpoint.reader import folder
from keras_tpu_dist.common.checks import Requirement, checked_path, is_count, known_words
from keras_tpu_dist.processes.channel import agree
from keras_tpu_dist.processes.preemption import Preemption

_WHERE = "Write for example BackupAndRestore('backup')."


_FREQUENCY = Requirement(
    '"epoch" or a number of batches', lambda value: value == "epoch" or is_count(value, 1), "500"
)


class BackupAndRestore(Checkpoint):
    """A `keras.callbacks.BackupAndRestore` that resumes within an epoch and saves on SIGTERM.

    With `save_freq` in batches, Keras's own callback restores weights from the middle of an epoch,
    and then trains on the first batches of that epoch again. This one is a `Checkpoint` with
    Keras's arguments. It resumes with the next batch, so the final weights and the history are
    those of a run without interruption. You can resume on any mesh, with any plan and any number of
    processes. It does not read what Keras's callback saved: for that, call
    `model.load_weights("backup/latest.weights.h5")`.

    A preempted TPU gets SIGTERM and some seconds. The running launch is finished, also in
    validation. Then the model is saved, and the signal goes to its previous handler, which by
    default ends the process. Further signals within 30 seconds wait for the backup too; a later one
    is handled at once.

    Args:
        backup_dir: The directory to save in, as in Keras.
        save_freq: `"epoch"`, or a number of batches, which needs a `TPUStrategy`. With
            `steps_per_execution`, the backup follows the launch that reaches this number.
        double_checkpoint: Whether to keep the previous backup too, as in Keras.
        delete_checkpoint: Whether to delete the directory when training has ended, as in Keras.
        on_sigterm: Whether to save on SIGTERM, under a `TPUStrategy`.

    Raises:
        ValueError: If an argument has the wrong type or value; in `fit`, if `save_freq` is a number
            and there is no `TPUStrategy`.
        ImportError: In `fit`, if Orbax is not installed.
        CheckpointError: In `fit`, if there is a backup that cannot be read.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd, tempfile
    >>> with ktd.TPUStrategy().scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse", steps_per_execution=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     backup = ktd.callbacks.BackupAndRestore(folder + "/backup", save_freq=16)
    ...     _ = model.fit(np.ones((99, 4)), np.ones((99, 1)), verbose=0, callbacks=[backup])
    """

    @known_words
    def __init__(
        self,
        backup_dir: str | os.PathLike,
        save_freq: Annotated[str | int, _FREQUENCY] = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        on_sigterm: bool = True,
    ):
        checked_path("BackupAndRestore", _WHERE, backup_dir=backup_dir)
        steps = None if isinstance(save_freq, str) else int(save_freq)
        super().__init__(backup_dir, every_steps=steps, keep=2 if double_checkpoint else 1)
        self.backup_dir, self.save_freq = self.directory, save_freq
        self.double_checkpoint, self.delete_checkpoint = double_checkpoint, delete_checkpoint
        self._preemption = Preemption(on_sigterm)
        self._ended = False

    def on_train_end(self, logs=None):
        """Notes that the training has ended."""
        # If the process is about to end on a signal, it ends here, before the backup is deleted.
        under_strategy = self._in_fit.fit.control is not None
        ends = under_strategy and self._sigterm.comes_at_end()
        self._ended = not ends or jax.process_count() == 1
        if not self.delete_checkpoint or ends:
            super().on_train_end(logs)

    def after_fit(self) -> None:
        """Deletes the backup if the training has ended; other fits keep theirs."""
        ended, self._ended = self._ended, False
        super().after_fit()
        if not (ended and self.delete_checkpoint):
            return
        if jax.process_index() == 0 and folder(self.directory).is_dir():
            folder(self.directory).rmtree()
        # A process that starts a new fit could otherwise find a backup that another one is
        # deleting.
        agree(f"deleting the backup in {self.directory}", FIX, None)
