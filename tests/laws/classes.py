"""Classes of a user, as strangers write them: optimizers, layers and metrics with state."""

import keras
import numpy as np
from keras import ops

register = keras.saving.register_keras_serializable("laws")


@register
class Lookahead(keras.optimizers.SGD):
    """Its slots begin with the weights."""

    def __init__(self, learning_rate=0.05, momentum=0.5, name="lookahead", **kwargs):
        super().__init__(learning_rate, momentum=momentum, name=name, **kwargs)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]
        for slow, variable in zip(self.slow, variables, strict=True):
            slow.assign(ops.copy(variable))

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        self.assign(slow, slow + 0.5 * (variable - slow))
        self.assign(variable, slow)


@register
class SumOfErrors(keras.metrics.Sum):
    """A metric that adds up."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(ops.abs(y_true - y_pred))


@register
class MovingMean(keras.layers.Layer):
    """Subtracts the mean of what came so far, whose first value has a dtype of its own."""

    def __init__(self, start="int32", **kwargs):
        super().__init__(**kwargs)
        self.start = start

    def build(self, shape):
        def first_value(shape, dtype=None):
            return ops.zeros(shape, self.start)

        self.mean = self.add_weight(
            shape=(shape[-1],),
            initializer=first_value,
            dtype="float32",
            trainable=False,
            name="mean",
        )

    def call(self, x, training=False):
        if training:
            mean = ops.cast(ops.mean(x, axis=0), "float32")
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return x - ops.cast(self.mean, x.dtype)

    def get_config(self):
        return {**super().get_config(), "start": self.start}


class Score(keras.callbacks.Callback):
    """Adds a value to the logs, as a framework's array."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def on_epoch_end(self, epoch, logs=None):
        logs["val_score"] = self.kind(10.0 + epoch % 3)


class Counts(keras.callbacks.Callback):
    """Counts in plain numbers, and changes the learning rate by them."""

    def __init__(self):
        super().__init__()
        self.seen = {"epochs": 0, "batches": 0}

    def on_epoch_begin(self, epoch, logs=None):
        self.seen["epochs"] += 1
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.9 ** self.seen["batches"])

    def on_train_batch_end(self, batch, logs=None):
        self.seen["batches"] += 1

    def state_dict(self):
        return dict(self.seen)

    def load_state_dict(self, state):
        self.seen = dict(state)


class Remembers(keras.callbacks.Callback):
    """Knows what Python knows: arrays, scalars of NumPy, keys that are numbers, tuples."""

    def __init__(self):
        super().__init__()
        self.memory = {"sum": np.zeros(3), "best": np.float32(0), "by_epoch": {0: (0, 0.0)}}

    def on_epoch_end(self, epoch, logs=None):
        loss = np.float32(logs["loss"])
        self.memory["sum"] = self.memory["sum"] + loss
        self.memory["best"] = np.float32(max(self.memory["best"], loss))
        count, last = self.memory["by_epoch"][epoch]
        self.memory["by_epoch"][epoch + 1] = (count + 1, last + float(loss))

    def state_dict(self):
        return dict(self.memory)

    def load_state_dict(self, state):
        assert isinstance(state["by_epoch"][0], tuple)
        assert state["best"].dtype == "float32"
        self.memory = dict(state)
