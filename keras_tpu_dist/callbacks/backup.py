"""Training that is interrupted anywhere and goes on from there."""

import signal
import threading
from typing import Any

import keras

from keras_tpu_dist import _keras
from keras_tpu_dist.common.errors import message
from keras_tpu_dist.training.membership import guard_in_training


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` that goes on within the epoch, and saves on SIGTERM.

    Keras's own, with `save_freq` in batches, restores weights from the middle of an epoch and then
    trains on that epoch's first batches again. This one reads the batches that were trained on
    already without training on them, so the final weights are those of a run that was
    never interrupted, random layers such as Dropout included, given the same batches in the same
    order: `shuffle=False`, or an input that shuffles by its own seed and epoch.

    A preempted TPU gets SIGTERM and some seconds. The launch that runs then is finished, the model
    is saved, and the signal goes on to whatever handled it before, by default the end of the
    process. A second SIGTERM is not held back.

    The backup is made after a whole launch (`steps_per_execution`), at least `save_freq` batches
    after the last. Logs of the epoch in which training goes on are those of its later
    batches. Needs a `TPUStrategy` and a `backup_dir` on a file system.

    Args:
        backup_dir: Where to save; as in Keras.
        save_freq: `"epoch"` or a number of batches; as in Keras.
        double_checkpoint: Whether to keep the last backup but one; as in Keras.
        delete_checkpoint: Whether to delete the backup when training ends; as in Keras.
        on_sigterm: Whether to save on SIGTERM.

    Raises:
        ValueError: In `fit`, without a `TPUStrategy`.

    Example:

    >>> import keras, numpy as np, keras_tpu_dist as ktd, tempfile
    >>> with ktd.TPUStrategy().scope():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse", steps_per_execution=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     backup = ktd.callbacks.BackupAndRestore(folder + "/backup", save_freq=16)
    ...     _ = model.fit(np.ones((99, 4)), np.ones((99, 1)), verbose=0, callbacks=[backup])
    """

    def __init__(
        self,
        backup_dir,
        save_freq: Any = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        on_sigterm: bool = True,
    ):
        super().__init__(str(backup_dir), save_freq, double_checkpoint, delete_checkpoint)
        self._on_sigterm = on_sigterm
        self._terminated = False
        self._epoch = self._done = self._resumed_at = self._since_backup = 0

    def on_train_begin(self, logs=None):
        """Restores the last backup, and its place in the epoch."""
        guard = guard_in_training(self.model)
        if guard is None:
            raise ValueError(
                message(
                    "This BackupAndRestore leaves out batches in the loop of a TPUStrategy.",
                    received="a fit without one.",
                    fix="Build the model in TPUStrategy().scope(), or use "
                    "keras.callbacks.BackupAndRestore with save_freq='epoch'.",
                )
            )
        super().on_train_begin(logs)
        _keras.restore_seeds(self, self.model)
        self._epoch, self._resumed_at = _keras.backup_position(self)
        guard.batches_to_skip = self._resumed_at
        self._since_backup = 0
        self._terminated = False
        if self._on_sigterm and threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._note_sigterm)
            self._before = signal.SIG_DFL if before is None else before
            guard.at_end.append(self._stop_listening)

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        if epoch != self._epoch:
            self._resumed_at = 0
        self._epoch, self._done = epoch, 0

    def on_train_batch_end(self, batch, logs=None):
        """Saves after enough batches, or when the process is to end."""
        if batch + 1 <= self._resumed_at:
            self._done = batch + 1
            return
        self._since_backup += batch + 1 - max(self._done, self._resumed_at)
        self._done = batch + 1
        batches = 0 if isinstance(self.save_freq, str) else int(self.save_freq)
        due = 0 < batches <= self._since_backup
        self._save_if(due, self._epoch, self._done)

    def on_epoch_end(self, epoch, logs=None):
        """Saves at the end of an epoch."""
        self._save_if(self.save_freq == "epoch", epoch + 1, 0)

    def _save_if(self, due: bool, epoch: int, done: int) -> None:
        if due or self._terminated:
            _keras.save_backup(self, self.model, epoch, done)
            self._since_backup = 0
        if self._terminated:
            self._stop_listening()
            signal.raise_signal(signal.SIGTERM)

    def _note_sigterm(self, number, frame):
        if self._terminated:
            self._stop_listening()
            signal.raise_signal(signal.SIGTERM)
        self._terminated = True

    def _stop_listening(self) -> None:
        # Compared by equality: a bound method is a new object each time.
        if signal.getsignal(signal.SIGTERM) == self._note_sigterm:
            signal.signal(signal.SIGTERM, self._before)
