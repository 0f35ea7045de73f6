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
try:
    model.fit(x, x, verbose=0, callbacks=[ktd.callbacks.Checkpoint(sys.argv[1])])
except RuntimeError as error:
    print(error)
callback = ktd.callbacks.Checkpoint(sys.argv[1])
model.fit(x, x, verbose=0, callbacks=[callback])
print(callback.steps)
"""


@pytest.mark.slow
def test_it_is_one_error_and_a_line_before_is_right(tmp_path):
    done = python("-c", _FIT, tmp_path / "run", env=os.environ | {"KERAS_BACKEND": "jax"})
    error, steps = done.stdout.splitlines()[-2:]
    assert error == (
        "A callback of keras_tpu_dist must exist before fit is called. Received: Checkpoint(...) "
        "within the call of fit, as the first object of this package. Write callback = "
        "Checkpoint(...) on a line before, and fit(callbacks=[callback])."
    )
    assert steps == "[2]"
