"""Run by `test_under_strategy.py` through the plugin: is the distribution active in the body?

These are written as Keras writes its tests; they fail where no `TPUStrategy` is active.
"""

import unittest

import keras
import numpy as np
from keras.src import testing

import keras_tpu_dist as ktd


class AfterKerasSetUp(testing.TestCase):
    def setUp(self):
        super().setUp()
        self.dense = keras.layers.Dense(2)
        self.dense.build((None, 3))

    def test_a_layer_of_set_up_lies_on_all_devices(self):
        assert isinstance(keras.distribution.distribution(), ktd.TPUStrategy)
        assert len(self.dense.kernel.value.sharding.device_set) == 8


class WithoutKerasSetUp(unittest.TestCase):
    def test_fit_of_ragged_rows(self):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        # 5 rows do not divide by 8: Keras's own distributions refuse them.
        model.fit(np.ones((5, 3)), np.ones((5, 1)), verbose=0)
        assert len(model.layers[0].kernel.value.sharding.device_set) == 8


def test_a_plain_function():
    assert isinstance(keras.distribution.distribution(), ktd.TPUStrategy)
