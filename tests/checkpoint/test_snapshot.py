"""A checkpoint's manifest tells of the moment it was asked for, and holds nobody up."""

import threading

import keras
import numpy as np

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.fingerprint import fingerprints
from keras_tpu_dist.checkpoint.snapshot import snapshot
from keras_tpu_dist.checkpoint.store import Store


def made():
    with ktd.TPUStrategy({"data": 4, "model": 2}, "fsdp").scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512, name="dense")])
    return model


def test_the_manifest_tells_of_the_snapshot_whatever_is_trained_after_it():
    model = made()
    expected = fingerprints([w.value for w in model.weights])
    training = {"history": {"loss": [3.0]}}
    arrays, manifest = snapshot(model, training, {"seen": np.arange(3)})
    training["history"]["loss"].append(2.0)
    # The bias and "seen" are small, and were copied; the kernel is saved from its shards.
    assert {key: type(array) is np.ndarray for key, array in arrays.items()} == {
        "weights_00000": False,
        "small": True,
    }
    for weight in model.weights:
        weight.value.delete()  # as a launch does that the state is donated to
    told = manifest()
    assert [saved.fingerprint for saved in told.arrays["weights"]] == expected
    assert [saved.packed for saved in told.arrays["weights"]] == [None, (0, 2072)]
    assert told.training["history"] == {"loss": [3.0]}


def test_what_is_saved_asynchronously_is_described_in_the_background(tmp_path):
    model = made()
    arrays, manifest = snapshot(model, {"step": 7, "run": "run7"}, {})
    threads = []

    def described():
        threads.append(threading.current_thread())
        return manifest()

    store = Store(tmp_path, asynchronous=True)
    store.save(7, arrays, described)
    store.wait()
    assert threads
    assert threading.main_thread() not in threads
    assert store.manifest(7).arrays == manifest().arrays
    store.close()
