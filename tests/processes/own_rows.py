"""Input that each process brings for itself, once as several processes and once as one."""

import itertools
import os
import pathlib
import sys

import jax
import keras
import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent))

from helpers import loaded  # noqa: E402
from pydatasets import Batches  # noqa: E402

import keras_tpu_dist as ktd  # noqa: E402

job = loaded(HERE / "job.py", "process_job")
BATCH = 12
# Rows that divide everywhere, that do not, and processes without any.
SPLITS = {"even": [16, 16, 16, 16], "uneven": [13, 5, 9, 2], "none": [11, 0, 7, 0]}


def rows_of(split, count):
    """The rows of each input shard."""
    ends = np.cumsum([0, *(SPLITS[split][:count])])
    return [np.arange(a, b) % job.ROWS for a, b in itertools.pairwise(ends)]


def size_of(index, count, batch=BATCH):
    return batch * (index + 1) // count - batch * index // count


def batches_of(split, index, count, batch=BATCH):
    rows, size = rows_of(split, count)[index], size_of(index, count, batch)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def merged(split, count, batch=BATCH, times=1):
    """The rows of each step of all processes together."""
    each = [batches_of(split, i, count, batch) * times for i in range(count)]
    steps = max(map(len, each))
    return [np.concatenate([b[i] for b in each if i < len(b)]) for i in range(steps)]


def dataset(batches):
    return Batches((job.X, job.Y), batches)


def fed(feed, split, shard):
    """What a process gives to fit; `shard` is None for the one process that has all rows."""
    if shard is None and feed == "generator":
        # What a process has for two epochs, however few: its stream knows of no epochs.
        steps = merged(split, fed.count, times=2)
        return {
            "x": (dataset(steps)[i] for i in range(len(steps))),
            "steps_per_epoch": len(merged(split, fed.count)),
            "shuffle": False,
        }
    if shard is None:
        return {"x": dataset(merged(split, fed.count)), "shuffle": False}
    own = rows_of(split, shard.count)[shard.index]
    batches = batches_of(split, shard.index, shard.count)
    if feed == "arrays":
        return {"x": job.X[own], "y": job.Y[own], "batch_size": BATCH, "shuffle": False}
    if feed == "generator":
        # It ends where its rows do; the others go on.
        generator = (dataset(batches * 2)[i] for i in range(2 * len(batches)))
        steps = max(len(batches_of(split, i, shard.count)) for i in range(shard.count))
        return {"x": generator, "steps_per_epoch": steps, "shuffle": False}
    if feed == "pydataset":
        return {"x": dataset(batches), "shuffle": False}
    size = size_of(shard.index, shard.count)
    return {"x": LOADERS[feed](own, size), "shuffle": False}


def tf_data(rows, size):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((job.X[rows], job.Y[rows])).batch(size)


def torch_loader(rows, size):
    import torch

    data = torch.utils.data.TensorDataset(torch.tensor(job.X[rows]), torch.tensor(job.Y[rows]))
    return torch.utils.data.DataLoader(data, batch_size=size)


def grain_dataset(rows, size):
    import grain

    return grain.MapDataset.source([(job.X[i], job.Y[i]) for i in rows]).batch(size)


LOADERS = {"tf.data": tf_data, "torch": torch_loader, "grain": grain_dataset}


def run(folder, plan, feed, steps, split):
    """One case; each process writes its numbers, and returns them."""
    keras.utils.set_random_seed(0)
    keras.utils.clear_session()
    mesh, layout = job.MESHES[plan]
    several = jax.process_count() > 1
    strategy = ktd.TPUStrategy(mesh, layout, input="per_process" if several else "global")
    with strategy.scope():
        one = job.model(steps)
    shard = strategy.input_shard if several else None
    count = shard.count if several else fed.count
    parts = rows_of(split, count)
    own = np.arange(0) if shard is None else parts[shard.index]
    validation = (job.X[own], job.Y[own]) if several else dataset(merged(split, count, 8))
    history = one.fit(
        **fed(feed, split, shard),
        epochs=2,
        verbose=0,
        validation_data=validation,
        **({"validation_batch_size": 8} if several else {}),
        callbacks=[ktd.callbacks.HostMetrics({"mean": job.absolute}, prefix="all_")],
    ).history
    found = {f"history {key}": np.asarray(values) for key, values in history.items()}
    given = {"x": job.X[own], "y": job.Y[own], "batch_size": 8} if several else {"x": validation}
    found["evaluate"] = np.asarray(one.evaluate(**given, verbose=0))
    of_all = np.concatenate(parts)
    step = [rows[:3] for rows in parts]
    rows = step[shard.index] if several else np.concatenate(step)
    found["on_batch"] = np.asarray(one.train_on_batch(job.X[rows], job.Y[rows]))
    found |= {f"weight {i}": value for i, value in enumerate(one.get_weights())}
    if several:
        found["count"] = np.asarray(count)
        predicted = one.predict(job.X[own], batch_size=8, verbose=0)
        on_batch = one.predict_on_batch(job.X[rows])
        path = os.path.join(folder, f"{plan}-{feed}-{steps}-{split}-{shard.index}.npz")
        np.savez(path, **found, predicted=predicted, predicted_on_batch=on_batch)
        return found
    found["predicted"] = one.predict(job.X[of_all], batch_size=8, verbose=0)
    found["predicted_on_batch"] = one.predict_on_batch(job.X[rows])
    return found


if __name__ == "__main__":
    job.run_all(run)
