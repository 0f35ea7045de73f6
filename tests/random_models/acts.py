"""Callbacks that change what fit trains."""

from collections.abc import Callable

import keras


class Acts(keras.callbacks.Callback):
    """Assigns a weight or sets the learning rate at the end of epochs, and of steps if told.

    With `stock` Keras must be asked for the state before.
    """

    def __init__(self, what: str, steps: bool, stock: bool):
        super().__init__()
        self._what, self._steps, self._stock = what, steps, stock

    def on_train_batch_end(self, batch, logs=None):
        if self._steps:
            self._act()

    def on_epoch_end(self, epoch, logs=None):
        self._act()

    def _act(self):
        if self._stock:
            self.model.jax_state_sync()
        if self._what == "sets_rate":
            optimizer = self.model.optimizer
            optimizer.learning_rate = 0.7 * float(optimizer.learning_rate)
            return
        weights = self.model.trainable_variables
        middle = weights[len(weights) // 2]
        middle.assign(0.9 * middle.numpy())


class Compiles(keras.callbacks.Callback):
    """Compiles the model at the first epoch's end."""

    def __init__(self, compile_: Callable[[keras.Model], None]):
        super().__init__()
        self._compile = compile_

    def on_epoch_end(self, epoch, logs=None):
        self._compile(self.model)
