"""What goes wrong in one process of several; `test_faults.py` looks how all of them end."""

import os
import signal
import sys
import time

import jax
import keras
import numpy as np

import keras_tpu_dist as ktd
from keras_tpu_dist.processes import start

PEER_TIMEOUT_S = 6


class At(keras.callbacks.Callback):
    """Does something in one process at the end of an epoch, or of a batch of each epoch."""

    def __init__(self, act, epoch=False, process=1, batch=1):
        super().__init__()
        self.act, self.epoch, self.process, self.batch = act, epoch, process, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and not self.epoch and jax.process_index() == self.process:
            self.act()

    def on_epoch_end(self, epoch, logs=None):
        if self.epoch and jax.process_index() == self.process:
            self.act()


def fail():
    raise OSError("the disk of this host is full")


def kill(number):
    return lambda: os.kill(os.getpid(), number)


class Slow(keras.callbacks.Callback):
    """Takes longer than JAX needs to notice a signal, which it looks for once a second."""

    def on_epoch_begin(self, epoch, logs=None):
        time.sleep(0.1)


class InValidation(keras.callbacks.Callback):
    """Sends SIGTERM twice to process 1 in the second validation, which takes 4 s from there on."""

    def __init__(self):
        super().__init__()
        self.validations = 0

    def on_test_begin(self, logs=None):
        self.validations += 1

    def on_test_batch_begin(self, batch, logs=None):
        if self.validations == 2 and batch == 2 and jax.process_index() == 1:
            for _ in range(2):
                kill(signal.SIGTERM)()
        if self.validations == 2 and batch >= 2:
            time.sleep(0.2)


def validated(folder, *callbacks):
    """A fit of three epochs with a validation of 22 batches; prints how it ended."""
    keras.utils.set_random_seed(0)
    with ktd.TPUStrategy({"data": 2, "model": 2}, "tensor_parallel").scope():
        layers = [keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(88, 4)).astype("float32")
    history = model.fit(
        x[:19],
        x[:19, :2],
        batch_size=4,
        epochs=3,
        validation_data=(x, x[:, :2]),
        verbose=0,
        callbacks=[ktd.callbacks.Checkpoint(f"{folder}/kept"), *callbacks],
    )
    numbers = {f"{i}": weight for i, weight in enumerate(model.get_weights())}
    numbers |= {name: np.asarray(values) for name, values in history.history.items()}
    if jax.process_index() == 0:
        np.savez(f"{folder}/ended.npz", **numbers)
    print("came to its end")


def batches(fault):
    for i in range(100):
        if fault == "input" and i == 3 and jax.process_index() == 1:
            raise OSError("the file of this host is gone")
        yield np.full((8, 4), i, "float32"), np.zeros((8, 2), "float32")


def replica_code(fault):
    """A loop of one's own, in which process 1 raises, leaves, or does something else."""
    strategy, alone = ktd.TPUStrategy(), jax.process_index() == 1

    def step(x):
        return ktd.get_replica_context().all_reduce("sum", x)

    def other(x):
        return x

    for number in range(4):
        if number == 2 and alone and fault == "replica code":
            fail()
        if number == 2 and alone and fault == "replica leaves":
            return
        function = other if number == 2 and alone and fault == "replica other" else step
        print(float(strategy.reduce("sum", strategy.run(function, (1.0,)))))


def begin(fault, order):
    """Starts JAX's distributed runtime, by us or by others, and the watch."""
    # What can be seen at once must not wait for a time of silence.
    timeout_s = 60 if fault in ("leaves fit", "exits in fit") else PEER_TIMEOUT_S
    coordinator = os.environ.get("KTD_COORDINATOR")
    number, own = int(os.environ["KTD_NUM_PROCESSES"]), int(os.environ["KTD_PROCESS_ID"])
    # What is given nowhere else where initialize is not called.
    start.PEER_TIMEOUT_S = timeout_s
    if order.startswith("jax"):
        jax.distributed.initialize(coordinator, number, own)
    if order.startswith("keras"):
        keras.utils.set_random_seed(0)
        keras.distribution.initialize(coordinator, number, own)
    if order.endswith("ours"):
        ktd.initialize(timeout_s=5 if fault == "missing" else 60, peer_timeout_s=timeout_s)


def main(fault, folder, order="ours"):
    begin(fault, order)
    if fault.startswith("replica"):
        replica_code(fault)
        return
    if fault in ("terminate in validation", "goes on"):
        validated(folder, *([InValidation()] if fault != "goes on" else []))
        return
    alone = jax.process_index() == 1
    keras.utils.set_random_seed(int(alone) if fault == "seed" else 0)
    rules = {"kernel": (None, "model")} if fault == "plan" and alone else "tensor_parallel"
    strategy = ktd.TPUStrategy({"data": 2, "model": 2}, rules)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
        if fault == "layers" and alone:
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(9), keras.layers.Dense(2)], name="sequential"
            )
        if fault == "model" and alone:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="other")
        several = fault == "terminate in a launch of several"
        model.compile("sgd", "mse", steps_per_execution=3 if several else 1)
    x = np.arange(64, dtype="float32").reshape(16, 4) / 64
    if fault == "data" and alone:
        x = x[::-1]
    y = x[:, :2]
    one = np.ones((4, 8), "float32")
    callbacks = {
        "callback": At(fail),
        "callback of process 0": At(fail, process=0),
        "epoch end": At(fail, epoch=True),
        "kill process 0": At(kill(signal.SIGKILL), process=0),
        "leaves fit": At(lambda: sys.exit(0)),
        "exits in fit": At(lambda: os._exit(0)),
        "exits in fit of process 0": At(lambda: os._exit(0), process=0),
        "kill": At(kill(signal.SIGKILL)),
        "stop": At(kill(signal.SIGSTOP)),
        "terminate": At(kill(signal.SIGTERM)),
        "terminate in a launch of several": At(kill(signal.SIGTERM), batch=2),
        "terminate between two fits": At(kill(signal.SIGTERM), batch=3),
        "learning rate in callback": At(
            lambda: model.optimizer.learning_rate.assign(0.5), epoch=True
        ),
        "weight in callback": At(lambda: model.layers[0].kernel.assign_add(one), epoch=True),
        "same value in callback": At(
            lambda: model.optimizer.learning_rate.assign(0.01), epoch=True
        ),
        "save in callback": At(lambda: model.save(f"{folder}/a.keras"), epoch=True),
    }
    terminated = fault.startswith("terminate")
    kept = [ktd.callbacks.Checkpoint(f"{folder}/kept", every_epochs=9)] if terminated else []
    kept += [Slow()] if terminated and fault != "terminate between two fits" else []
    if fault == "input":
        model.fit(batches(fault), steps_per_epoch=50, epochs=2, verbose=0)
    else:
        model.fit(
            x,
            y,
            batch_size=4,
            epochs=40 if Slow in map(type, kept) else 3,
            verbose=0,
            callbacks=[*kept, *filter(None, [callbacks.get(fault)])],
        )
    if fault == "terminate between two fits":
        time.sleep(2)
        model.fit(x, y, batch_size=4, epochs=6, verbose=0, callbacks=kept)
    if fault == "learning rate in own loop":
        for batch in range(40):
            model.train_on_batch(x[:4], y[:4])
            if batch == 3 and alone:
                model.optimizer.learning_rate = 0.5
    if fault == "learning rate between" and alone:
        model.optimizer.learning_rate = 0.5
    if fault == "weight between" and alone:
        bias = np.array(model.layers[1].bias)
        bias[1] += 1e-3
        model.layers[1].bias.assign(bias)
    if fault == "save alone" and jax.process_index() == 0:
        model.save(f"{folder}/a.keras")
    if fault == "fit alone" and alone:
        model.fit(x, y, verbose=0)
    if fault == "slow" and alone:
        time.sleep(2 * PEER_TIMEOUT_S)
    model.evaluate(x, y, verbose=0)
    print("came to its end")


if __name__ == "__main__":
    main(*sys.argv[1:])
