"""All pairs of callbacks, Keras's and ours, beside a `Checkpoint`: stopped, resumed, compared.

    python tests/checkpoint/pairs.py [--only NAME] [--every 1]

Each pair stands around a `Checkpoint` in one fit, which runs whole, and is stopped within an epoch
and after one, and goes on. Weights, optimizer, history and what callbacks know must be those of the
whole run. Every run has the same model, whose state is set back, so that it is compiled once.
"""

import argparse
import itertools
import logging
import pathlib
import sys
import tempfile
import time
import warnings

import keras
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from helpers import At, Stop

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras
from keras_tpu_dist.callbacks.states import states_of

ROWS, BATCH, EPOCHS = 13, 3, 3
# By steps of a launch, how many launches are made before the run is cut, within the second epoch.
STOP_AT = {1: 8, 4: 3}
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = X[:, :2]
FIT = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0, "validation_data": (X[:5], Y[:5])}


class Counts(keras.callbacks.Callback):
    """A user's callback that says what it knows, and changes the learning rate by it."""

    def __init__(self):
        super().__init__()
        self.seen = {"epochs": 0, "batches": 0}

    def on_epoch_begin(self, epoch, logs=None):
        self.seen["epochs"] += 1
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.9 ** self.seen["batches"])

    def on_train_batch_end(self, batch, logs=None):
        self.seen["batches"] += 1

    def state_dict(self):
        return dict(self.seen)

    def load_state_dict(self, state):
        self.seen = dict(state)


def worst(y, p):
    return np.abs(y - p).max()


def halved(epoch, rate):
    return rate * 0.5


K = keras.callbacks
CALLBACKS = {
    "BackupAndRestore": lambda d: K.BackupAndRestore(d / "theirs"),
    "BackupAndRestore of batches": lambda d: K.BackupAndRestore(d / "theirs", save_freq=4),
    "CSVLogger": lambda d: K.CSVLogger(d / "log.csv", append=True),
    "EarlyStopping": lambda d: K.EarlyStopping("val_loss", patience=1, min_delta=0.3),
    "EarlyStopping of the best": lambda d: K.EarlyStopping(
        "loss", patience=2, restore_best_weights=True, min_delta=0.1
    ),
    "History": lambda d: K.History(),
    "LambdaCallback": lambda d: K.LambdaCallback(on_epoch_begin=lambda epoch, logs: None),
    "LearningRateScheduler": lambda d: K.LearningRateScheduler(halved),
    "ModelCheckpoint": lambda d: K.ModelCheckpoint(d / "best.keras", "loss", save_best_only=True),
    "ModelCheckpoint of batches": lambda d: K.ModelCheckpoint(
        d / "batches.weights.h5", save_weights_only=True, save_freq=3
    ),
    "OrbaxCheckpoint": lambda d: K.OrbaxCheckpoint(d / "orbax"),
    "ProgbarLogger": lambda d: K.ProgbarLogger(),
    "ReduceLROnPlateau": lambda d: K.ReduceLROnPlateau("loss", patience=1, min_delta=9.0),
    "RemoteMonitor": lambda d: K.RemoteMonitor("http://127.0.0.1:9"),
    "SwapEMAWeights": lambda d: K.SwapEMAWeights(),
    "SwapEMAWeights of epochs": lambda d: K.SwapEMAWeights(swap_on_epoch=True),
    "TensorBoard": lambda d: K.TensorBoard(d / "board", write_graph=False),
    "TerminateOnNaN": lambda d: K.TerminateOnNaN(),
    "our BackupAndRestore": lambda d: ktd.callbacks.BackupAndRestore(d / "ours", 3),
    "our Checkpoint": lambda d: ktd.callbacks.Checkpoint(d / "other", every_steps=7),
    "our HostMetrics": lambda d: ktd.callbacks.HostMetrics({"worst": worst}),
    "our NameNaN": lambda d: ktd.callbacks.NameNaN(),
    "our StopAtStep": lambda d: ktd.callbacks.StopAtStep(13),
    "Counts": lambda d: Counts(),
}
# By how often Checkpoint saves, where the run is cut.
CUTS = {"within an epoch": {"every_steps": 3}, "between epochs": {"every_epochs": 1}}


def missing():
    """Callbacks that cannot be made here, as what they need is not installed."""
    names = set()
    for name, module in {"TensorBoard": "tensorboard", "RemoteMonitor": "requests"}.items():
        try:
            __import__(module)
        except ImportError:
            names.add(name)
    return names


def pairs():
    """All pairs, a callback with itself left out; what reads HostMetrics's logs follows it."""
    names = [name for name in CALLBACKS if name not in missing()]
    names.sort(key=lambda name: name != "our HostMetrics")
    return list(itertools.combinations(names, 2))


class Trainer:
    """One model, and its state before any training."""

    def __init__(self, mesh=None, steps=1):
        self.steps = steps
        keras.utils.set_random_seed(1)
        with ktd.TPUStrategy(mesh or {"data": 1}, devices=None if mesh else _first()).scope():
            self.model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
            )
            optimizer = keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9)
            self.model.compile(optimizer, "mse", steps_per_execution=steps)
        self.model.fit(X, Y, **{**FIT, "epochs": 1})
        keras.utils.set_random_seed(1)
        for variable in self.model.optimizer.variables:
            if "learning_rate" not in variable.path:
                variable.assign(0 * variable.value)
        rng = np.random.default_rng(3)
        self.model.set_weights([rng.normal(size=w.shape) for w in self.model.get_weights()])
        self.start = [np.asarray(v.value) for v in _keras.state_variables(self.model)]

    def run(self, directory, names, cut, stop_after=0):
        """Fits from the start, or from a checkpoint; weights and so on, or `None` if stopped."""
        np.random.seed(7)
        for variable, value in zip(_keras.state_variables(self.model), self.start):
            variable.assign(value)
        first, second = (CALLBACKS[name](directory) for name in names)
        saved = ktd.callbacks.Checkpoint(directory / "ours_too", **CUTS[cut])
        callbacks = [first, saved, second, At(stop_after)]
        if "HostMetrics" in names[0]:
            callbacks = [first, second, saved, At(stop_after)]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Could not reach RemoteMonitor")
                history = self.model.fit(X, Y, callbacks=callbacks, **FIT)
        except Stop:
            return None
        known, arrays = states_of([first, second])
        return {
            "epochs": history.epoch,
            "history": history.history,
            "state": [np.asarray(v.value) for v in _keras.state_variables(self.model)],
            "known": known,
            "arrays": arrays,
        }


def _first():
    import jax

    return jax.devices()[:1]


def difference(trainer, names, cut, directory):
    """Runs a pair whole, and cut; what differs, or an empty text."""
    whole, part = directory / "whole", directory / "part"
    whole.mkdir()
    part.mkdir()
    expected = trainer.run(whole, names, cut)
    if trainer.run(part, names, cut, STOP_AT[trainer.steps]) is not None:
        # A callback ended the fit before.
        return ""
    found = trainer.run(part, names, cut)
    try:
        assert found["epochs"] == expected["epochs"]
        assert sorted(found["history"]) == sorted(expected["history"])
        for key, values in expected["history"].items():
            np.testing.assert_allclose(found["history"][key], values, 1e-5, 1e-5, err_msg=key)
        for a, b in zip(found["state"], expected["state"]):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert [s["class"] for s in found["known"]] == [s["class"] for s in expected["known"]]
        for one, other in zip(found["known"], expected["known"]):
            a, b = (each.get("attributes", each.get("state")) for each in (one, other))
            assert list(a) == list(b), (a, b)
            for name in a:
                np.testing.assert_allclose(_number(a[name]), _number(b[name]), 1e-5, err_msg=name)
        assert list(found["arrays"]) == list(expected["arrays"])
        for key, values in expected["arrays"].items():
            np.testing.assert_allclose(found["arrays"][key], values, rtol=1e-5, atol=1e-5)
    except AssertionError as error:
        return str(error) or "differs"
    return ""


def _number(value):
    return np.nan if value is None else value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="pairs with a callback of this name")
    parser.add_argument("--every", type=int, default=1, help="of so many pairs one")
    arguments = parser.parse_args()
    logging.getLogger("keras_tpu_dist").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)
    chosen = [p for p in pairs() if arguments.only in " ".join(p)][:: arguments.every]
    trainer, wrong, began = Trainer(), 0, time.monotonic()
    for names, cut in itertools.product(chosen, CUTS):
        with tempfile.TemporaryDirectory() as folder:
            try:
                words = difference(trainer, names, cut, pathlib.Path(folder))
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
        wrong += bool(words)
        if words:
            print(f"WRONG {names[0]} + {names[1]}, {cut}: {' '.join(words.split())[:400]}")
    print(f"{len(chosen)} pairs, each cut in {len(CUTS)} ways, {wrong} wrong,", end=" ")
    print(f"{time.monotonic() - began:.0f} s, without {sorted(missing()) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
