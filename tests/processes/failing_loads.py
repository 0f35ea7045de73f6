"""Checkpoints that one process alone cannot read; `test_failing_loads.py` compares the processes.

python -m keras_tpu_dist launch --processes 2 --devices 1 failing_loads.py FOLDER CASE ...
"""

import contextlib
import dataclasses
import json
import pathlib
import sys
from unittest import mock

import jax
import keras
import numpy as np

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.checkpoint import reader
from keras_tpu_dist.checkpoint.reader import CheckpointReader

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
FAILING_PROCESS = 1


class Fault:
    """Fails in one process, once, or whenever it is asked."""

    def __init__(self, name, always=False):
        self.name, self.always, self.count = name, always, 0

    def comes(self):
        self.count += 1
        return jax.process_index() == FAILING_PROCESS and (self.always or self.count == 1)

    def ahead_of(self, function):
        def called(*args, **kwargs):
            if self.comes():
                raise OSError(5, "Input/output error")
            return function(*args, **kwargs)

        return called

    def instead_of_values(self, function):
        def called(arrays):
            found = function(arrays)
            return [number ^ 1 for number in found] if self.comes() else found

        return called

    def in_another(self, function):
        def called(*args):
            found = function(*args)
            return dataclasses.replace(found, written={}) if self.comes() else found

        return called

    def put_in(self):
        import orbax.checkpoint as ocp

        handler, weights = ocp.PyTreeCheckpointHandler, _keras.WeightsFile
        places = {
            "manifest": (reader, "check_files", self.ahead_of(reader.check_files)),
            "another manifest": (
                CheckpointReader,
                "manifest",
                self.in_another(CheckpointReader.manifest),
            ),
            "values": (reader, "fingerprints", self.instead_of_values(reader.fingerprints)),
            "arrays": (handler, "restore", self.ahead_of(handler.restore)),
            "file": (_keras, "WeightsFile", self.ahead_of(weights)),
            "damaged file": (weights, "read", self.ahead_of(weights.read)),
        }
        return mock.patch.object(*places[self.name])


def made():
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    with ktd.TPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    return model


def trained(folder, fault=None, epochs=2):
    """A model after a fit; with a fault, a fit that goes on."""
    model = made()
    saved = ktd.callbacks.Checkpoint(folder, every_epochs=1, keep=None)
    with fault.put_in() if fault else contextlib.nullcontext():
        model.fit(X, X[:, :2], batch_size=16, epochs=epochs, verbose=0, callbacks=[saved])
    return model


def of_fit(folder, fault):
    trained(folder)
    return trained(folder, fault, epochs=3), CheckpointReader(folder, alone=True).steps


def restored(path, fault, **options):
    """Another model after `ktd.restore`, and the step that it loaded, or its error."""
    model = made()
    with fault.put_in():
        try:
            return model, ktd.restore(model, path, **options).step
        except (ktd.CheckpointError, ValueError) as error:
            return model, str(error)


def of_restore(folder, fault):
    trained(folder)
    return restored(folder, fault)


def of_step(folder, fault):
    trained(folder)
    return restored(folder, fault, step=8)


def of_file(folder, fault):
    if jax.process_index() == 0:
        folder.mkdir()
    model = trained(folder / "run")
    path = folder / "model.weights.h5"
    model.save_weights(path)
    return restored(path, fault)


def of_loop(folder, fault):
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        total = keras.Variable(np.zeros(3, "float32"), name="total")
    with ktd.LoopCheckpoint(folder, total) as saved:
        for step in (1, 2):
            total.assign_add(np.full(3, step, "float32"))
            saved.save(step)
        with fault.put_in():
            found = saved.restore()
    return [np.asarray(total).tolist()], found


CASES = {
    "fit, manifest": (of_fit, Fault("manifest")),
    "fit, arrays": (of_fit, Fault("arrays")),
    "fit, values": (of_fit, Fault("values")),
    "restore, manifest": (of_restore, Fault("manifest")),
    "restore, arrays": (of_restore, Fault("arrays")),
    "step, arrays": (of_step, Fault("arrays", always=True)),
    "step, values": (of_step, Fault("values", always=True)),
    # The directory has the same name on all hosts, but they do not share it.
    "another run, another manifest": (of_restore, Fault("another manifest")),
    "file, file": (of_file, Fault("file")),
    "file, damaged file": (of_file, Fault("damaged file")),
    "loop, manifest": (of_loop, Fault("manifest")),
    "loop, arrays": (of_loop, Fault("arrays")),
}


def main(folder, *cases):
    ktd.initialize(timeout_s=240, peer_timeout_s=120)
    for case in cases:
        run, fault = CASES[case]
        model, found = run(pathlib.Path(folder) / case.replace(", ", "_"), fault)
        if isinstance(model, keras.Model):
            model = [np.asarray(weight).tolist() for weight in model.get_weights()]
        path = pathlib.Path(folder) / f"{case}.{jax.process_index()}.json"
        path.write_text(json.dumps({"weights": model, "found": found, "asked": fault.count}))


if __name__ == "__main__":
    main(*sys.argv[1:])
