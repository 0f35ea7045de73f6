"""Fits whose checkpoints fail in one process alone; `test_failing_saves.py` compares the processes.

python -m keras_tpu_dist launch --processes 2 --devices 1 failing_job.py FOLDER CASE ...
"""

import json
import logging
import os
import pathlib
import sys
from concurrent import futures

import jax
import keras
import numpy as np

import keras_tpu_dist as ktd
from keras_tpu_dist.checkpoint.store import Store

FAILS_AT, EVERY, STEPS = 4, 2, 8
X = np.random.default_rng(0).normal(size=(8 * STEPS, 4)).astype("float32")


class Fault:
    """Fails the saving of one step, in one process: where the directory is made, and so on."""

    def __init__(self, name):
        self.name, self.left = name, 1
        self.process = 1 if name.startswith("write") else 0

    def asked(self, name, path=""):
        here = jax.process_index() == self.process and self.left and self.name.startswith(name)
        if here and (not path or f"{os.sep}{FAILS_AT}." in os.fspath(path) + "."):
            self.left = 0
            raise OSError(28, "No space left on device")

    def put_in(self):
        import orbax.checkpoint as ocp

        fault, mkdir, rename, delete = self, os.mkdir, os.rename, Store._delete_others
        save = ocp.PyTreeCheckpointHandler.async_save

        def made(path, *args, **kwargs):
            fault.asked("mkdir", path)
            return mkdir(path, *args, **kwargs)

        def renamed(path, *args, **kwargs):
            fault.asked("rename", path)
            return rename(path, *args, **kwargs)

        def deleted(store):
            if FAILS_AT in store.steps:
                fault.asked("delete")
            return delete(store)

        async def saved(handler, directory, *args, **kwargs):
            found = list(await save(handler, directory, *args, **kwargs) or [])
            try:
                fault.asked("write", directory.parent / directory.parent.name)
            except OSError as error:
                failing = futures.Future()
                failing.set_exception(error)
                found.append(failing)
            return found

        os.mkdir, os.rename, Store._delete_others = made, renamed, deleted
        ocp.PyTreeCheckpointHandler.async_save = saved
        return lambda: self.take_out(mkdir, rename, delete, save)

    @staticmethod
    def take_out(mkdir, rename, delete, save):
        import orbax.checkpoint as ocp

        os.mkdir, os.rename, Store._delete_others = mkdir, rename, delete
        ocp.PyTreeCheckpointHandler.async_save = save


class Watch(keras.callbacks.Callback, logging.Handler):
    """Notes which step counts as saved after each launch, and what was said."""

    def __init__(self, saved):
        keras.callbacks.Callback.__init__(self)
        logging.Handler.__init__(self, logging.ERROR)
        self.saved, self.steps, self.said = saved, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(self.saved.checkpoints.place.saved_step)

    def emit(self, record):
        self.said.append(record.getMessage())


def main(folder, *cases):
    ktd.initialize(timeout_s=240, peer_timeout_s=120)
    keras.utils.set_random_seed(2)
    with ktd.TPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    for case in cases:
        found = train(model, pathlib.Path(folder) / case, Fault(case), case.endswith("async"))
        path = pathlib.Path(folder) / f"{case}.{jax.process_index()}.json"
        path.write_text(json.dumps(found))


def train(model, folder, fault, asynchronous):
    saved = ktd.callbacks.Checkpoint(folder, every_steps=EVERY, asynchronous=asynchronous)
    watch = Watch(saved)
    logging.getLogger("keras_tpu_dist").addHandler(watch)
    take_out = fault.put_in()
    try:
        model.fit(X, X[:, :2], batch_size=8, verbose=0, callbacks=[saved, watch])
    finally:
        take_out()
        logging.getLogger("keras_tpu_dist").removeHandler(watch)
    return {"counts": watch.steps, "said": watch.said, "steps": saved.steps}


if __name__ == "__main__":
    main(*sys.argv[1:])
