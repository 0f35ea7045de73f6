"""A training that `kill_restart.py` starts under `launch --restart`, and that kills itself."""

import json
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import keras
import numpy as np

import keras_tpu_dist as ktd

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent))

from helpers import loaded  # noqa: E402

network = loaded(HERE.parent / "checkpoint" / "network.py", "restarted_network").network
X = np.random.default_rng(0).normal(size=(53, 12)).astype("float32")
Y = X[:, :4]
MESHES = {
    "data": ({"data": -1}, None),
    "fsdp": ({"fsdp": -1}, "fsdp"),
    "tensor": ({"data": -1, "model": 2}, "tensor_parallel"),
}
EPOCHS = 6


class Notes(keras.callbacks.Callback):
    """Leaves time to be killed in, and notes the first step of this start."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.first, self.fails = folder, True, None

    def on_train_batch_end(self, batch, logs=None):
        if self.first and jax.process_index() == 0:
            note(self.folder, "step")
        self.first = False
        time.sleep(0.03)
        if self.fails is not None:
            note(self.folder, "kill")
            raise self.fails

    def on_test_batch_end(self, batch, logs=None):
        time.sleep(0.03)


def note(folder, what):
    with open(f"{folder}/times", "a") as file:
        file.write(f"{what} {time.time()}\n")


def kill_later(folder, notes, start):
    """Does to one process what the plan has for this start, at its moment."""
    plan = json.loads(pathlib.Path(folder, "kills").read_text())
    if start >= len(plan):
        return
    how, after_s, which = plan[start]
    if jax.process_index() != which % jax.process_count():
        return

    def act():
        time.sleep(after_s)
        if how == "raise":
            notes.fails = type(f"Fault{start}", (OSError,), {})("power cut")
            return
        note(folder, "kill")
        if how == "exit":
            os._exit(10 + start)
        os.kill(os.getpid(), getattr(signal, how))

    threading.Thread(target=act, daemon=True).start()


def main(mesh, folder, before):
    start = int(before) + int(pathlib.Path(os.environ["KTD_REPORT"]).parent.name) - 1
    ktd.initialize(timeout_s=120, peer_timeout_s=20)
    keras.utils.set_random_seed(2)
    with ktd.TPUStrategy(*MESHES[mesh]).scope():
        model = network()
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    notes = Notes(folder)
    kill_later(folder, notes, start)
    history = model.fit(
        X,
        Y,
        batch_size=8,
        epochs=EPOCHS,
        verbose=0,
        validation_data=(X[:9], Y[:9]),
        callbacks=[ktd.callbacks.Checkpoint(f"{folder}/kept", every_steps=3), notes],
    )
    weights = [w.tolist() for w in model.get_weights()]
    if jax.process_index() == 0:
        with open(f"{folder}/result.json", "w") as file:
            json.dump({"weights": weights, "history": history.history}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
