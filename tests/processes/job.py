"""What `test_processes.py` runs as several processes, and once as one: results into a file."""

import contextlib
import itertools
import json
import os
import pathlib
import sys

import jax
import keras
import numpy as np
from jax.experimental.sparse import BCOO

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from pydatasets import in_batches

import keras_tpu_dist as ktd

ROWS, BATCH = 29, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 12)).astype("float32")
Y = RNG.normal(size=(ROWS, 4)).astype("float32")
MESHES = {
    "data": ({"data": 8}, None),
    "fsdp": ({"fsdp": 8}, "fsdp"),
    "tensor": ({"data": 2, "model": 4}, "tensor_parallel"),
    "model": ({"data": 1, "model": 8}, "tensor_parallel"),
    "cube": ({"data": 2, "fsdp": 2, "model": 2}, "tensor_parallel"),
    "zero": ({"data": 8}, None),
}


def model(steps):
    built = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2, seed=3),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(4),
        ]
    )
    built.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        "mse",
        metrics=["mae"],
        steps_per_execution=1 if steps == "eager" else steps,
        run_eagerly=steps == "eager",
    )
    return built


def fed(kind):
    batches = in_batches(BATCH, X, Y)
    if kind == "arrays":
        return {"x": X, "y": Y, "batch_size": BATCH}
    if kind == "generator":
        return {"x": batches.endless(), "steps_per_epoch": len(batches), "shuffle": False}
    if kind == "pydataset":
        return {"x": batches, "shuffle": False}
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH), "shuffle": False}


def run(folder, plan, feed, steps):
    """One case; process 0 writes its numbers, and returns them."""
    name = f"{plan}-{feed}-{steps}"
    keras.utils.set_random_seed(0)
    keras.utils.clear_session()
    mesh, layout = MESHES[plan]
    strategy = ktd.TPUStrategy(mesh, layout, shard_optimizer=plan == "zero")
    with strategy.scope():
        one = model(steps)
    validation = (X[:13], Y[:13])
    history = one.fit(**fed(feed), epochs=2, verbose=0, validation_data=validation).history
    found = {f"history {key}": np.asarray(values) for key, values in history.items()}
    found["evaluate"] = np.asarray(one.evaluate(X[:13], Y[:13], batch_size=BATCH, verbose=0))
    found["predict"] = np.asarray(one.predict(X[:13], batch_size=BATCH, verbose=0))
    found["on_batch"] = np.asarray(one.train_on_batch(X[:5], Y[:5]))
    found |= {f"weight {i}": value for i, value in enumerate(one.get_weights())}
    found |= {f"optimizer {i}": v.numpy() for i, v in enumerate(one.optimizer.variables)}
    path = os.path.join(folder, f"{name}.keras")
    one.save(path)
    one.save_weights(os.path.join(folder, f"{name}.weights.h5"))
    with strategy.scope():
        again = keras.saving.load_model(path)
    found["loaded"] = np.asarray(again.predict(X[:13], batch_size=BATCH, verbose=0))
    if jax.process_index() == 0:
        np.savez(os.path.join(folder, f"{name}.npz"), **found)
    return found


def fitted(strategy, callbacks=(), make=model, x=X, y=Y, **options):
    keras.utils.set_random_seed(0)
    keras.utils.clear_session()
    with strategy.scope():
        one = make(1)
    options |= {"batch_size": BATCH, "epochs": 2, "verbose": 0, "callbacks": [*callbacks]}
    history = one.fit(x, y, **options).history
    found = {f"history {key}": np.asarray(values) for key, values in history.items()}
    return found | {f"weight {i}": value for i, value in enumerate(one.get_weights())}


def sequential(*layers, shape=(12,)):
    def make(steps):
        one = keras.Sequential([keras.Input(shape), *(layer() for layer in layers)])
        one.compile(keras.optimizers.SGD(0.05), "mse")
        return one

    return make


def attending(steps):
    x = keras.Input((4, 3))
    y = keras.layers.Dense(8)(x)
    y = y + keras.layers.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True)
    one = keras.Model(x, keras.layers.Dense(4)(keras.layers.Flatten()(y)))
    one.compile(keras.optimizers.SGD(0.05), "mse")
    return one


def along_time(mesh):
    strategy = ktd.TPUStrategy(mesh, ktd.Planner("fsdp", min_size=8))
    return fitted(strategy, make=attending, x=X.reshape(-1, 4, 3))


def own_rows_along_time():
    several = jax.process_count() > 1
    source = "per_process" if several else "global"
    strategy = ktd.TPUStrategy({"data": 2, "sequence": 4}, input=source)
    rows = np.arange(24).reshape(3, 2, 4)  # batch, process, row
    rows = (rows[:, jax.process_index()] if several else rows).ravel()
    x = X[rows].reshape(-1, 4, 3)
    return fitted(strategy, make=attending, x=x, y=Y[rows], shuffle=False)


def on_mesh(**options):
    return ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel", **options)


def sparse():
    """Batches of sparse arrays, the same in all processes; and one of them by itself."""
    strategy = ktd.TPUStrategy({"data": 8})
    keras.utils.set_random_seed(0)
    keras.utils.clear_session()
    rows = np.where(X[:24] > 0.5, X[:24], 0)
    with strategy.scope():
        one = keras.Sequential([keras.Input((12,), sparse=True), keras.layers.Dense(4)])
        one.compile(keras.optimizers.SGD(0.05), "mse")

    def batches():
        for i in itertools.cycle(range(0, 24, BATCH)):
            yield BCOO.fromdense(rows[i : i + BATCH], nse=60), Y[i : i + BATCH]

    history = one.fit(batches(), steps_per_epoch=3, shuffle=False, verbose=0).history
    found = {"history": np.asarray(history["loss"])}
    found["on_batch"] = np.asarray(one.train_on_batch(BCOO.fromdense(rows[:5]), Y[:5]))
    return found | {f"weight {i}": value for i, value in enumerate(one.get_weights())}


def made_with_a_layout():
    """Slots, and a variable that is given a layout, are read before anything runs."""
    strategy = on_mesh()
    with strategy.scope():
        one = model(1)
        one.optimizer.build(one.trainable_variables)
        given = keras.Variable(X[:8], layout=strategy.get_data_layout((8, 12)))
    found = {f"slot {i}": slot.numpy() for i, slot in enumerate(one.optimizer.variables)}
    given.assign(given.numpy() + 1)
    return found | {"given": given.numpy()}


class Counting(keras.layers.Layer):
    """A layer that counts what it gets."""

    def __init__(self, **options):
        super().__init__(**options)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        self.mean.update_state(x)
        return x


def counted_in_call():
    make = sequential(lambda: keras.layers.Dense(4), Counting)
    return fitted(on_mesh(), make=make, validation_data=(X[:13], Y[:13]))


def saved_by_functions(folder):
    """Process 0 writes, also where it is not a method of the model that is asked to."""
    own = pathlib.Path(folder, "files", str(jax.process_index()))
    own.mkdir(parents=True)
    with on_mesh().scope():
        one = model(1)
    with contextlib.chdir(own):
        keras.saving.save_model(one, "model.keras")
        keras.saving.save_model(one, "model", zipped=False)
        keras.saving.save_weights(one, "model.weights.h5")
        keras.saving.save_model(one, "model.h5")
    written = sorted(str(each.relative_to(own.parent)) for each in own.parent.glob("*/*"))
    return {"files": np.asarray(written)}


def absolute(y, predicted):
    return float(np.abs(y - predicted).mean())


CALLBACKS = {
    "stop": lambda folder: ktd.callbacks.StopAtStep(3),
    "nan": lambda folder: ktd.callbacks.NameNaN(),
    "early": lambda folder: keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
    "metrics": lambda folder: ktd.callbacks.HostMetrics(
        {"mean": absolute}, validation_data=(X, Y), batch_size=BATCH
    ),
    "whole state": lambda folder: ktd.callbacks.Checkpoint(
        os.path.join(folder, "whole state"), every_steps=2
    ),
    "log": lambda folder: keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
    "checkpoint": lambda folder: keras.callbacks.ModelCheckpoint(
        os.path.join(folder, "kept.weights.h5"), save_weights_only=True
    ),
}
FEATURES = {
    "counted in call": counted_in_call,
    "donate": lambda: fitted(on_mesh(donate_state=True)),
    "fsdp donate": lambda: fitted(ktd.TPUStrategy({"fsdp": 8}, "fsdp", donate_state=True)),
    "keep": lambda: fitted(on_mesh(donate_state=False)),
    "prefetch": lambda: fitted(on_mesh(prefetch=3)),
    "eager": lambda: fitted(on_mesh(), make=lambda steps: model("eager")),
    "assign": lambda: fitted(
        ktd.TPUStrategy({"data": 4, "logical": 2}),
        make=sequential(
            lambda: ktd.assign(keras.layers.Dense(8), 0),
            lambda: ktd.assign(keras.layers.Dense(4), 1),
        ),
    ),
    "recurrent": lambda: fitted(
        on_mesh(),
        make=sequential(lambda: ktd.layers.LSTM(8), lambda: keras.layers.Dense(4), shape=(6, 2)),
        x=X.reshape(-1, 6, 2),
    ),
    "sparse": sparse,
    "made with a layout": made_with_a_layout,
    "time": lambda: along_time({"data": 2, "sequence": 4}),
    "time over hosts": lambda: along_time({"sequence": 8}),
    "time of own rows": own_rows_along_time,
}


def feature(folder, name):
    """One feature; process 0 writes its numbers, and returns them."""
    called_back = [CALLBACKS[name](folder)] if name in CALLBACKS else []
    if name == "saved by functions":
        found = saved_by_functions(folder)
    else:
        found = FEATURES.get(name, lambda: fitted(on_mesh(), called_back))()
    if jax.process_index() == 0:
        np.savez(os.path.join(folder, f"{name}.npz"), **found)
    return found


def run_all(run):
    """Runs the cases that the command line names, as one of several processes."""
    ktd.initialize(timeout_s=60, peer_timeout_s=20)
    for case in json.loads(sys.argv[2]):
        run(sys.argv[1], *case)
        print("done", *case)


if __name__ == "__main__":
    run_all(lambda folder, *case: (feature if len(case) == 1 else run)(folder, *case))
