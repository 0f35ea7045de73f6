"""A callback that is made within the call of `fit`, as the first object of ours in the process.

Python looks `model.fit` up, which is stock's then, before it makes the callback.
"""

import json
import os
import subprocess
import sys

import pytest

_MODEL = """
import json, os, sys, threading
import keras, numpy as np
import keras_tpu_dist as ktd

def made():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    return model

class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            raise OSError("power cut")

def early():
    return keras.callbacks.EarlyStopping("val_loss", patience=9, min_delta=10.0)

folder, x = sys.argv[1], np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
given = {"x": x, "y": x, "epochs": 4, "verbose": 0, "validation_split": 0.25}
model = made()
"""
_FIT = (
    _MODEL
    + """
stop = early()
model.fit(**given, callbacks=[stop, ktd.callbacks.Checkpoint(folder), Fails()][:2])
busy = [each.name for each in threading.enumerate() if each.name.startswith("checkpoint")]
manifest = f"{folder}/8/manifest/metadata"
state = json.load(open(manifest))["training"]["callbacks"]
open_files = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
print(json.dumps([busy, state, [each for each in open_files if folder in each]]))
"""
)
_FAILS = (
    _MODEL
    + """
try:
    model.fit(**given, callbacks=[early(), ktd.callbacks.Checkpoint(folder), Fails()])
except OSError:
    pass
again, stop = made(), early()
history = again.fit(**given, callbacks=[stop, ktd.callbacks.Checkpoint(folder)])
whole, other = made(), early()
expected = whole.fit(**given, callbacks=[other])
near = all(map(np.allclose, again.get_weights(), whole.get_weights()))
print(json.dumps([history.epoch, near, stop.wait == other.wait]))
"""
)
_METRICS = (
    _MODEL
    + """
history = model.fit(
    **given, callbacks=[ktd.callbacks.HostMetrics({"mean": lambda y, p: float(np.mean(y))})]
)
print(json.dumps([sorted(history.history)]))
"""
)


def run(code, folder):
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"KERAS_BACKEND": "jax"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_its_last_checkpoint_is_whole_and_holds_what_callbacks_know(tmp_path):
    busy, states, open_files = run(_FIT, tmp_path / "run")
    assert (busy, open_files) == ([], [])
    assert [(each["class"], each["attributes"]["wait"]) for each in states] == [
        ("EarlyStopping", 3)
    ]


@pytest.mark.slow
def test_a_fit_that_fails_goes_on_in_the_same_process(tmp_path):
    assert run(_FAILS, tmp_path / "run") == [[0, 1, 2, 3], True, True]


@pytest.mark.slow
def test_host_metrics_see_the_validation_data(tmp_path):
    assert run(_METRICS, tmp_path)[0] == ["loss", "val_loss", "val_mean"]
