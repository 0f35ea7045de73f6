"""Callbacks are copied and pickled, as tuners of hyperparameters do before each trial."""

import copy
import inspect
import pickle

import keras
import numpy as np
import pytest
from helpers import sequential

import keras_tpu_dist as ktd

X = np.ones((24, 4), "float32")


def worst(y_true, y_pred):
    return float(np.abs(y_true - y_pred).max())


ARGUMENTS = {
    "Checkpoint": lambda folder: (folder / "checkpoint",),
    "HostMetrics": lambda folder: ({"worst": worst}, (X, X[:, :1])),
    "Profile": lambda folder: ((1, 2), folder / "profile"),
    "StopAtStep": lambda folder: (3,),
}
NAMES = [name for name, kind in vars(ktd.callbacks).items() if inspect.isclass(kind)]
WAYS = {"copied": copy.deepcopy, "pickled": lambda callback: pickle.loads(pickle.dumps(callback))}


def fit(callback):
    keras.utils.set_random_seed(1)
    with ktd.TPUStrategy().scope():
        model = sequential(4, keras.layers.Dense(1))
    return model.fit(X, X[:, :1], batch_size=8, verbose=0, callbacks=[callback])


def test_there_are_callbacks():
    assert len(NAMES) >= 6
    assert set(ARGUMENTS) < set(NAMES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_does_what_the_callback_does(name, way, tmp_path):
    if name == "Checkpoint":
        pytest.importorskip("orbax.checkpoint")
    kind = getattr(ktd.callbacks, name)
    one = kind(*ARGUMENTS.get(name, lambda folder: ())(tmp_path))
    other = WAYS[way](one)
    assert type(other) is kind
    assert sorted(vars(other)) == sorted(vars(one))
    names = sorted(fit(other).history)
    WAYS[way](other)  # and after a fit
    if name == "Checkpoint":
        return  # the original would resume
    assert sorted(fit(one).history) == names
