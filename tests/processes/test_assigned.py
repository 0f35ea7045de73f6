"""What is assigned outside of a step is marked, part by part, and compared."""

import jax
import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.processes import channel
from keras_tpu_dist.processes.assigned import TIMES, assignments, differ, forget, sampled_bytes


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(channel, "_open", object())
    with ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel").scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    forget(_keras.state_variables(model))
    return model


def marked(model):
    return assignments(_keras.state_variables(model))


def test_each_way_to_assign_is_seen(model):
    variables = _keras.state_variables
    kernel = model.layers[0].kernel
    ways = [
        lambda: kernel.assign(np.ones((4, 8))),
        lambda: kernel.assign_add(np.ones((4, 8))),
        lambda: setattr(model.optimizer, "learning_rate", 0.3),
        lambda: model.optimizer.learning_rate.assign(0.2),
        lambda: model.set_weights([w + 1 for w in model.get_weights()]),
        lambda: model.layers[1].set_weights([w + 1 for w in model.layers[1].get_weights()]),
    ]
    for way in ways:
        assert marked(model) == {}
        way()
        assert marked(model)
        forget(variables(model))


def test_training_alone_assigns_nothing(model):
    x = np.zeros((16, 4), "float32")
    model.fit(x, x[:, :2], batch_size=8, verbose=0)
    forget(_keras.state_variables(model))

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.get_weights()

        def on_epoch_end(self, epoch, logs=None):
            self.model.get_weights()

    model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0, callbacks=[Reads()])
    model.evaluate(x, x[:, :2], verbose=0)
    metrics = {id(v) for v in model.metrics_variables}
    others = [v for v in _keras.state_variables(model) if id(v) not in metrics]
    assert assignments(others) == {}
    # A move to where a variable lies is none, either.
    _keras.move_variables([(others[0], _keras.variable_layout(others[0]))])
    assert assignments(others) == {}


def test_parts_of_one_layout_are_marked_together(model):
    first, second = model.layers
    model.predict(np.zeros((8, 4)), verbose=0)
    forget(_keras.state_variables(model))
    assert not first.kernel.value.is_fully_replicated
    first.kernel.assign(np.arange(32).reshape(4, 8))
    second.bias.assign(np.arange(2))
    marks = marked(model)
    assert len(marks) == 4  # how often, what is whole, and two halves
    # Of a process with the other half alone the halves are not compared.
    halves = [name for name in marks if name not in (TIMES, "whole")]
    one = {name: m for name, m in marks.items() if name != halves[0]}
    other = {name: m for name, m in marks.items() if name != halves[1]}
    assert not differ([one, other, marks])
    assert differ([one, {**marks, halves[1]: 0}])
    assert differ([one, {**other, TIMES: 0}])
    assert differ([marks, {}])
    assert not differ([{}, {}])


def test_one_element_of_many_changes_a_mark():
    array = np.zeros(100_000, "float32")
    before = sampled_bytes(array)
    array[77_777] = 1e-7
    assert sampled_bytes(array) != before
    assert len(sampled_bytes(jax.numpy.zeros((3, 2**22), "int8"))) <= 2**23
