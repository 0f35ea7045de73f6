"""Replica code, once as several processes and once as one: what `run`, `reduce` and others give."""

import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist.processes.channel import PeerError

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent))

from helpers import loaded, stepped  # noqa: E402
from pydatasets import in_batches  # noqa: E402

own_rows = loaded(HERE / "own_rows.py", "process_own_rows")
job = own_rows.job
BATCH = own_rows.BATCH
DYNAMIC = ktd.RunOptions(dynamic_batch=True)
BUCKETS = ktd.RunOptions(buckets="power_of_two", axis=1)


context = ktd.get_replica_context


def by_replica(strategy, name, value):
    """This process's replicas' values, each under its replica's number."""
    rows = strategy.local_results(value)
    return {f"{name} of replica {i}": np.asarray(row) for i, row in zip(value.replica_ids, rows)}


# Values: run, reduce, gather. Even and uneven, whole and stacked.


def values(strategy, found):
    rng = np.random.default_rng(1)
    table, long = rng.normal(size=(8, 3)).astype("float32"), rng.normal(size=(8, 5, 2))
    with strategy.scope():
        seeds = keras.random.SeedGenerator(7)

    def numbers(value, scale, flag):
        me = context()
        return {
            "scaled": value * scale if flag else value,
            "sum": me.all_reduce("sum", value),
            "gathered": me.all_gather(value[None], axis=0),
            "number": me.replica_id_in_sync_group,
            "drawn": keras.random.normal((2,), seed=seeds),
        }

    value = strategy.distribute_values_from_function(lambda c: table[c.replica_id_in_sync_group])
    for scale, name in ((2.0, "number"), (jnp.float32(3), "array"), (np.ones(3), "numpy")):
        result = strategy.run(numbers, (value, scale), {"flag": True})
        for key, each in result.items():
            found |= by_replica(strategy, f"{name} {key}", each)
        for op in ("SUM", "mean", "max", "min") if name == "number" else ():
            found[f"{name} {op}"] = np.asarray(strategy.reduce(op, result["scaled"]))
            found[f"{name} {op} 0"] = np.asarray(strategy.reduce(op, result["scaled"], axis=0))
        found[f"{name} joined"] = np.asarray(strategy.gather(result["gathered"], 1))
    uneven = strategy.distribute_values_from_function(
        lambda c: {"x": long[c.replica_id_in_sync_group, : 1 + c.replica_id_in_sync_group % 5]}
    )
    found |= by_replica(strategy, "uneven", uneven["x"])
    for op in ("sum", "mean", "max", "min"):
        found[f"uneven {op}"] = np.asarray(strategy.reduce(op, uneven["x"], axis=0))
    found["uneven joined"] = np.asarray(strategy.gather(uneven["x"], 0))
    assert strategy.reduce("mean", 3.0) == 3.0
    # What was read here goes back as what all replicas share, if all processes have it.
    total = strategy.reduce("sum", value)
    again = strategy.run(lambda x, y: x + y, (value, total))
    found["again"] = np.asarray(strategy.gather(strategy.run(jnp.atleast_2d, (again,)), 0))


def variables(strategy, found):
    with strategy.scope():
        kinds = {
            how: keras.Variable(1.0, aggregation=how, trainable=False)
            for how in ("sum", "mean", "only_first_replica", "none")
        }
        own = {
            how: keras.Variable(8.0, aggregation=how, trainable=False, synchronization="on_read")
            for how in ("sum", "mean", "only_first_replica")
        }

    def step(scale):
        number = context().replica_id_in_sync_group.astype("float32") + scale
        for each in (*kinds.values(), *own.values()):
            each.assign_add(number)

    for scale in (1.0, 2.0):
        strategy.run(step, (scale,))
        own["mean"].assign(own["mean"] * 2.0)
    for how, each in kinds.items():
        found[f"variable {how}"] = np.asarray(each)
    for how, each in own.items():
        found[f"own {how}"] = np.asarray(each)
        rows = strategy.local_results(each)
        numbers = strategy.run(lambda: context().replica_id_in_sync_group)
        for i, row in zip(numbers.replica_ids, rows):
            found[f"own {how} of replica {i}"] = np.asarray(row)


# Inputs of varying sizes.


def per_row(x, y):
    me = context()
    mask = me.batch_mask
    return {"row": x * 2 + 1, "sum": jnp.where(mask[:, None], y, 0).sum(0), "size": me.batch_size}


def along(x):
    mask = context().length_mask[None, :, None]
    return {"mean": jnp.where(mask, x, 0).sum(1) / context().length, "same": jnp.tanh(x)}


def sizes(strategy, found):
    rng = np.random.default_rng(2)
    for i, (x, y) in enumerate(strategy.distribute_dataset((job.X, job.Y), batch_size=BATCH)):
        result = strategy.run(per_row, (x, y), options=DYNAMIC)
        found |= by_replica(strategy, f"rows {i}", result["row"])
        found |= by_replica(strategy, f"size {i}", result["size"])
        found[f"rows {i}"] = np.asarray(strategy.gather(result["row"], 0))
        found[f"sum {i}"] = np.asarray(strategy.reduce("sum", result["sum"]))
        found[f"mean {i}"] = np.asarray(strategy.reduce("mean", y, axis=0))
    given = [rng.normal(size=(8, n, 2)).astype("float32") for n in (3, 5, 4)]
    for padded in (BUCKETS, None):  # padded before the transfer, or from the devices
        for i, x in enumerate(strategy.distribute_dataset(given, padded)):
            result = strategy.run(along, (x,), options=BUCKETS)
            name = f"length {i} {padded is None}"
            found[f"{name} mean"] = np.asarray(strategy.gather(result["mean"], 0))
            found[f"{name} same"] = np.asarray(strategy.gather(result["same"], 0))
    whole = strategy.run(
        lambda x: jnp.where(context().length_mask, x, 0).sum(),
        (jnp.arange(5.0),),
        options=ktd.RunOptions(buckets="power_of_two", axis=0),
    )
    found["whole"] = np.asarray(strategy.reduce("mean", whole))


# A training loop.


def trained(strategy, dataset, found, name):
    keras.utils.set_random_seed(0)
    keras.utils.clear_session()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.Dense(32, activation="tanh"),
                keras.layers.Dense(4),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
        seen = keras.metrics.Mean()

    def step(x, y):
        mask = context().batch_mask
        rows = context().all_reduce("sum", context().batch_size)

        def of_rows(predicted):
            error = jnp.square(predicted - y).mean(-1)
            return jnp.where(mask, error, 0).sum() / rows

        loss, _ = stepped(model, optimizer, x, of_rows, "sum")
        seen.update_state(loss, sample_weight=rows)
        return loss

    def of_batch(batch, seen):
        seen.assign_add(context().batch_size)
        return step(*batch)

    with strategy.scope():
        rows = keras.Variable(0, dtype="int32", aggregation="sum", trainable=False)
    losses = []
    for epoch in range(2):
        if epoch:  # many steps in one launch
            launched = strategy.loop(
                of_batch, dataset(epoch), 2, args=(rows,), options=DYNAMIC, outputs="all"
            )
            for _, results in launched:
                losses.extend(strategy.reduce("SUM", results))
            found[f"{name} rows"] = np.asarray(rows)
        else:
            for x, y in dataset(epoch):
                losses.append(strategy.reduce("SUM", strategy.run(step, (x, y), options=DYNAMIC)))
        found[f"{name} metric {epoch}"] = np.asarray(seen.result())
        seen.reset_state()
    found[f"{name} losses"] = np.asarray([float(loss) for loss in losses])
    found |= {f"{name} weight {i}": value for i, value in enumerate(model.get_weights())}
    found |= {f"{name} optimizer {i}": np.asarray(v) for i, v in enumerate(optimizer.variables)}
    return model


def training(strategy, found, feed):
    def batches():
        for start in range(0, job.ROWS, BATCH):
            yield job.X[start : start + BATCH], job.Y[start : start + BATCH]

    def parts(given):
        size = given.get_per_replica_batch_size(16)
        rows = np.arange(job.ROWS)[given.input_pipeline_id :: given.num_input_pipelines]
        return [(job.X[p], job.Y[p]) for p in np.split(rows, range(size, len(rows), size))]

    makers = {
        "arrays": lambda e: strategy.distribute_dataset((job.X, job.Y), batch_size=BATCH),
        "generator": lambda e: strategy.distribute_dataset(batches()),
        "pydataset": lambda e: strategy.distribute_dataset(in_batches(job.BATCH, job.X, job.Y)),
        "tf.data": lambda e: strategy.distribute_dataset(
            own_rows.tf_data(np.arange(job.ROWS), BATCH)
        ),
        "function": lambda e: strategy.distribute_datasets_from_function(parts),
    }
    model = trained(strategy, makers[feed], found, feed)
    # The same model by fit, beside.
    model.compile("sgd", "mse")
    history = model.fit(job.X, job.Y, batch_size=BATCH, shuffle=False, verbose=0).history
    found[f"{feed} fit"] = np.asarray(history["loss"])
    found |= {f"{feed} fitted {i}": value for i, value in enumerate(model.get_weights())}


def own_training(strategy, found, feed, split):
    """Each process its own rows; the one process has those of all."""
    if strategy.runner.own_input is None:
        parts = own_rows.rows_of(split, own_rows.fed.count)
        batches = own_rows.merged(split, len(parts))
        if feed == "function":
            batches = _in_turn(parts, 16 // len(parts))
        given = own_rows.dataset(batches)

        def dataset(epoch):
            return strategy.distribute_dataset(given)

    else:
        dataset = own_dataset(strategy, found, feed, split)
    trained(strategy, dataset, found, feed)
    for i, (x, _) in enumerate(dataset(0)):
        found[f"rows {i}"] = np.asarray(strategy.gather(x, 0))


def own_dataset(strategy, found, feed, split):
    index, count = strategy.input_shard.index, strategy.input_shard.count
    found["count"] = np.asarray(count)
    rows, size = own_rows.rows_of(split, count)[index], own_rows.size_of(index, count)
    own = own_rows.dataset(own_rows.batches_of(split, index, count))

    def parts(given):
        assert (given.num_input_pipelines, given.input_pipeline_id) == (count, index)
        size = given.get_per_replica_batch_size(16)
        for start in range(0, len(rows), size):
            yield job.X[rows[start : start + size]], job.Y[rows[start : start + size]]

    def arrays():
        made = strategy.distribute_dataset((job.X[rows], job.Y[rows]), batch_size=BATCH)
        assert len(made) == len(own_rows.merged(split, count))
        return made

    makers = {
        "arrays": arrays,
        "function": lambda: strategy.distribute_datasets_from_function(parts),
        "pydataset": lambda: strategy.distribute_dataset(own),
        "generator": lambda: strategy.distribute_dataset(own[i] for i in range(len(own))),
    }
    for name, loader in own_rows.LOADERS.items():
        makers[name] = lambda loader=loader: strategy.distribute_dataset(loader(rows, size))
    return lambda epoch: makers[feed]()


def _in_turn(parts, size):
    """The rows of each step where every part gives `size` of its own."""
    steps = max(-(-len(rows) // size) for rows in parts)
    return [np.concatenate([r[i * size : (i + 1) * size] for r in parts]) for i in range(steps)]


# What cannot be: an error in all processes, after which they go on.


def mistakes(strategy, found, folder):
    me = jax.process_index()
    other = ktd.TPUStrategy({"data": 8}, input="per_process")
    with strategy.scope():
        weight = keras.Variable(np.float32([me, 1]), name="apart")

    def one(x=1):
        return x

    def two():
        return weight.value

    def three():
        return 3

    value, make = strategy.run(one), strategy.distribute_values_from_function
    lengths = [np.ones((4, 3 + me), "float32")]
    for kind, words, call in (
        (
            ValueError,
            "All processes must run a function",
            lambda: strategy.run(one, (np.ones(me),)),
        ),
        (ValueError, "'apart', which differs", lambda: strategy.run(two)),
        (PeerError, "strategy.run of 'two'", lambda: strategy.run(two if me else three)),
        (TypeError, "not one array", lambda: np.asarray(value)),
        (ValueError, "the same structure", lambda: make(lambda c: [1.0] if me else 1.0)),
        (
            ValueError,
            "same dtype on all replicas, and the same shape",
            lambda: make(lambda c: np.ones((2, 2 + me))),
        ),
        (ValueError, "must return numbers", lambda: make(lambda c: "a")),
        (ValueError, "fit together", lambda: list(other.distribute_dataset(lengths, BUCKETS))),
        (ValueError, "same batches", lambda: list(strategy.distribute_dataset([np.full(8, me)]))),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            call()
    assert not list(other.distribute_dataset([]))
    given = {"x": job.X, "y": job.Y, "batch_size": BATCH, "verbose": 0}
    with strategy.scope():
        model = job.model(1)
    model.fit(**given, callbacks=[ktd.callbacks.Checkpoint(os.path.join(folder, "all"))])
    weights = model.get_weights()
    # A strategy of this process's devices waits for nobody.
    if me == 1:
        local = ktd.TPUStrategy(devices=jax.local_devices())
        (batch,) = local.distribute_dataset(np.arange(8.0), batch_size=8)
        assert float(local.reduce("sum", local.run(lambda x: x * 2, (batch,)), axis=0)) == 56
        made = local.distribute_datasets_from_function(lambda c: [np.ones(1)] * local.num_hosts)
        assert len(list(made)) == 1
        checkpoints_alone(local, folder, given, weights)
    if jax.process_count() == 4:
        some = ktd.TPUStrategy(devices=jax.devices()[1:3])
        with pytest.raises(NotImplementedError, match="in all of them"):
            some.run(one)
    found["mistakes"] = np.asarray(0)


def checkpoints_alone(strategy, folder, given, weights):
    """Read by one process; written by all together, or not, and then it says so."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = job.model(1)
    assert ktd.restore(model, os.path.join(folder, "all")).step == 3
    for kept, value in zip(weights, model.get_weights()):
        np.testing.assert_array_equal(kept, value)
    with pytest.raises(NotImplementedError, match="write a checkpoint together"):
        model.fit(**given, callbacks=[ktd.callbacks.Checkpoint(folder, every_steps=2)])
    path = os.path.join(folder, "kept.keras")
    model.fit(**given, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    for kept, value in zip(keras.saving.load_model(path).get_weights(), model.get_weights()):
        np.testing.assert_array_equal(kept, value)


CASES = {"values": values, "variables": variables, "sizes": sizes, "mistakes": mistakes}


def run(folder, plan, what, *how):
    """One case; each process writes its numbers, and returns them."""
    keras.utils.set_random_seed(0)
    keras.utils.clear_session()
    mesh, layout = job.MESHES[plan]
    several, own = jax.process_count() > 1, what == "own"
    strategy = ktd.TPUStrategy(mesh, layout, input="per_process" if several and own else "global")
    found = {}
    made = {**CASES, "training": training, "own": own_training}[what]
    made(strategy, found, *how, *([folder] if what == "mistakes" else []))
    if several:
        name = "-".join(map(str, (plan, what, *how)))
        np.savez(os.path.join(folder, f"{name}-{jax.process_index()}.npz"), **found)
    return found


if __name__ == "__main__":
    job.run_all(run)
