"""A callback that is made within the call of `fit`, as the first object of ours in the process."""

import os

import pytest
from helpers import python

_FIT = """
import sys
import keras, numpy as np
import keras_tpu_dist as ktd

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
model.compile("adam", "mse")
x = np.ones((64, 4))
model.fit(x, x, verbose=0, callbacks=[callback := ktd.callbacks.Checkpoint(sys.argv[1])])
print(callback.steps)
"""


@pytest.mark.slow
def test_it_is_right(tmp_path):
    done = python("-c", _FIT, tmp_path / "run", env=os.environ | {"KERAS_BACKEND": "jax"})
    assert done.stdout.splitlines()[-1] == "[2]"
