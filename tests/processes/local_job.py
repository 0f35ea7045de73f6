"""Trainings whose processes keep checkpoints on disks of their own; `test_local.py` ends them.

python -m keras_tpu_dist launch --processes 2 local_job.py KILL "FOLDER|PLAN|DISK|DISK" ...
"""

import json
import logging
import os
import pathlib
import signal
import sys
import time

import jax
import keras

import keras_tpu_dist as ktd

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent))

from helpers import loaded  # noqa: E402

job = loaded(HERE.parent / "checkpoint" / "job.py", "local_checkpoint_job")
PLANS = {
    "data": ({"data": -1}, None),
    # Of a model as small as this one all else would be copied to each device.
    "fsdp": ({"fsdp": -1}, ktd.Planner("fsdp", min_size=8)),
    "tensor": ({"data": -1, "model": 2}, "tensor_parallel"),
}
EPOCHS, SHARED_EVERY, LOCAL_EVERY, KILLED_AT = 3, 6, 2, 11
# JAX tells of a signal some steps later, by its clock.
TERMINATED_AT, SLOW_S = 3, 0.5


class KillAt(keras.callbacks.Callback):
    """Kills the last process after so many steps of this fit, once checkpoints are written."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.left = TERMINATED_AT if how == "SIGTERM" else KILLED_AT

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.how == "SIGTERM":
            time.sleep(SLOW_S)
        if self.left or self.how == "none":
            return
        time.sleep(3)
        if jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), getattr(signal, self.how))


class FromWhere(logging.Handler):
    """Notes from which step and directory the fit goes on."""

    found: list = []  # noqa: RUF012

    def emit(self, record):
        if "training goes on with the run" in str(record.msg):
            FromWhere.found = [record.args[2], pathlib.Path(record.args[5]).name]


def main(how, *cases):
    ktd.initialize(timeout_s=240, peer_timeout_s=120)
    logging.getLogger("keras_tpu_dist").addHandler(FromWhere())
    for case in cases:
        folder, plan, *disks = case.split("|")
        train(how, pathlib.Path(folder), plan, disks)


def train(how, folder, plan, disks):
    FromWhere.found = []
    keras.utils.clear_session()
    keras.utils.set_random_seed(2)
    with ktd.TPUStrategy(*PLANS[plan]).scope():
        model = job.network()
        model.compile(job.optimizer("adam"), "mse", metrics=["mae"])
    saved = ktd.callbacks.Checkpoint(
        folder / "shared",
        every_steps=SHARED_EVERY,
        local=folder / disks[jax.process_index()],
        local_every_steps=LOCAL_EVERY,
        # Else one that is due while the one before is being written is left out.
        asynchronous=how == "none",
    )
    history = model.fit(
        **job.fed("arrays"),
        epochs=EPOCHS,
        verbose=0,
        validation_data=(job.X[:9], job.Y[:9]),
        callbacks=[saved, KillAt(how)],
    )
    weights = [w.tolist() for w in model.get_weights()]
    result = {"weights": weights, "history": history.history, "from": FromWhere.found}
    if jax.process_index() == 0:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
