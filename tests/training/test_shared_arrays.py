"""Steps that consume their state consume nothing that somebody else holds."""

import copy
import json
import pickle
import weakref
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
import shared_arrays
from helpers import TOLERANCE, At, Stop, python

import keras_tpu_dist as ktd
from keras_tpu_dist.training import buffers

MESHES = ({"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 8})


@pytest.mark.slow
@pytest.mark.parametrize("case", shared_arrays.CASES)
def test_nobody_loses_an_array(case):
    assert shared_arrays.difference(case, MESHES[0], 2, donate_state=True) <= TOLERANCE


def test_a_target_network():
    mesh = {"data": 4, "model": 2}
    assert shared_arrays.difference("deleted", mesh, 1, donate_state=True) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"), [("target", "fsdp"), ("averages", "tensor_parallel"), ("kept", "auto")]
)
def test_nobody_loses_a_split_array(case, layout):
    gap = shared_arrays.difference(case, MESHES[1], 2, layout=layout, donate_state=True)
    assert gap <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mesh"), [("target", MESHES[0]), ("averages", MESHES[2])], ids=str
)
def test_a_model_of_many_variables(case, mesh):
    """By default the state of so many is donated; at fault, the process dies."""
    arguments = shared_arrays.__file__, case, json.dumps(mesh), "21"
    done = python(*arguments, timeout=600, cwd=Path(__file__).parent)
    assert float(done.stdout.split()[-1]) <= TOLERANCE


def test_what_is_copied_is_copied_once(monkeypatch):
    copied = []
    stock = buffers.copies_apart
    monkeypatch.setattr(
        buffers, "copies_apart", lambda arrays: copied.append(arrays) or stock(arrays)
    )
    with ktd.TPUStrategy({"data": 4, "model": 2}, donate_state=True).scope():
        model = shared_arrays.build(1)
    shared_arrays.fit(model, epochs=1)
    assert len(copied) == 1  # the initial values, and not at every step
    shared_arrays.fit(model, epochs=1)
    model.train_on_batch(shared_arrays.X, shared_arrays.Y)
    later = [array for arrays in copied[1:] for array in arrays]
    assert all(array.ndim == 0 for array in later), "metrics are reset, all else is known"


def test_a_state_is_copied_in_groups(monkeypatch):
    monkeypatch.setattr(buffers, "_GROUP_BYTES", 300)
    gap = shared_arrays.difference("deleted", {"data": 8}, 1, donate_state=True)
    assert gap <= TOLERANCE


def test_a_group_is_freed_before_the_next_is_copied(monkeypatch):
    originals, alive, stock = [], [], buffers.copies_apart

    def copied(arrays):
        alive.append(sum(array() is not None for array in originals))
        originals.extend(map(weakref.ref, arrays))
        return stock(arrays)

    monkeypatch.setattr(buffers, "copies_apart", copied)
    monkeypatch.setattr(buffers, "_GROUP_BYTES", 300)
    with ktd.TPUStrategy({"data": 8}, donate_state=True).scope():
        model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(4))])
        model.compile("sgd", "mse")
    x = np.ones((16, 8), "float32")
    model.fit(x, x, batch_size=8, verbose=0)
    assert len(alive) > 2
    assert not any(alive)


def test_a_variable_that_trained_is_copied_and_pickled():
    with ktd.TPUStrategy({"data": 8}, donate_state=True).scope():
        model = shared_arrays.build(1)
    shared_arrays.fit(model, epochs=1)
    again = pickle.loads(pickle.dumps(model))
    assert copy.copy(model.weights[0]).shape == model.weights[0].shape
    assert len(again.weights) == len(model.weights)
    shared_arrays.fit(again, epochs=1)
    assert not any(v.value.is_deleted() for v in model.weights if isinstance(v.value, jax.Array))


def test_an_array_that_was_read_after_another_fit_began():
    """Of two models that share a layer, the second one owns it, and fails before it trains."""
    with ktd.TPUStrategy({"data": 8}, donate_state=True).scope():
        shared = keras.layers.Dense(8)
        one, other = (keras.Sequential([keras.Input((8,)), shared]) for _ in range(2))
        for model in (one, other):
            model.compile("sgd", "mse")
    x = np.ones((16, 8), "float32")
    for model in (other, one):
        model.fit(x, x, batch_size=8, verbose=0)
    with pytest.raises(Stop):
        other.fit(x, x, verbose=0, callbacks=[At(1, method="on_train_batch_begin")])
    held = shared.kernel.value
    one.fit(x, x, batch_size=8, verbose=0)
    assert not held.is_deleted()
