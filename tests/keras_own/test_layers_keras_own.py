"""Keras's own tests of these layers, with our classes in their place."""

import importlib
import types

import keras
import pytest

from keras_tpu_dist import layers as fast

pytest.importorskip("keras.src.layers.rnn.lstm_test", reason="a nightly Keras brings no tests")
# Keras's test helpers warn about their own generators and variables.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

OURS = ("LSTM", "GRU", "SimpleRNN", "Bidirectional", "TimeDistributed")
MIXED = types.SimpleNamespace(
    **{name: getattr(keras.layers, name) for name in dir(keras.layers) if name not in OURS},
    **{name: getattr(fast, name) for name in OURS},
)


def own_tests(file, test_class):
    """Keras's test class; its module's `layers` becomes ours."""
    module = importlib.import_module(f"keras.src.layers.rnn.{file}")
    module.layers = MIXED
    return getattr(module, test_class)


class TestLSTM(own_tests("lstm_test", "LSTMTest")):
    pass


class TestGRU(own_tests("gru_test", "GRUTest")):
    pass


class TestSimpleRNN(own_tests("simple_rnn_test", "SimpleRNNTest")):
    pass


class TestBidirectional(own_tests("bidirectional_test", "SimpleRNNTest")):
    def test_the_classes_are_ours(self):
        layer = MIXED.Bidirectional(MIXED.LSTM(2))
        assert type(layer.forward_layer) is fast.LSTM


class TestTimeDistributed(own_tests("time_distributed_test", "TimeDistributedTest")):
    pass
