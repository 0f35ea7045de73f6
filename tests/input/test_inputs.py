"""Every input library that Keras reads gives what arrays give, on every mesh."""

import importlib

import keras
import numpy as np
import pytest
from helpers import assert_close, built, data, mlp

import keras_tpu_dist as ktd

MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}]
# Keras says so of inputs that do not tell their length, too, and of epochs that data does not fill.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")
X, Y = data(rows=53)
WEIGHTS = np.linspace(0.5, 1.5, 53).astype("float32")
BATCH = 10


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def tf_dataset(*arrays):
    tf = library("tensorflow")
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


def torch_loader(*arrays):
    torch = library("torch")
    pairs = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays))
    return torch.utils.data.DataLoader(pairs, batch_size=BATCH)


def grain_rows(*arrays):
    grain = library("grain")
    rows = list(zip(*arrays))
    return grain.MapDataset.source(rows).to_iter_dataset()


def grain_dataset(*arrays):
    return grain_rows(*arrays).batch(BATCH)


def grain_loader(*arrays):
    grain = library("grain")
    rows = [tuple(a[i] for a in arrays) for i in range(len(X))]
    sampler = grain.samplers.SequentialSampler(len(rows), grain.sharding.ShardOptions(0, 1), seed=0)
    operations = [grain.transforms.Batch(BATCH)]
    return grain.DataLoader(data_source=rows, sampler=sampler, operations=operations)


SOURCES = {
    "tf.data": tf_dataset,
    "torch": torch_loader,
    "grain": grain_dataset,
    "grain loader": grain_loader,
}


@pytest.fixture(autouse=True)
def _modules():
    """Keras asks `sys.modules` which libraries a dataset could be of."""
    for name in ("grain", "grain.samplers", "grain.sharding", "grain.transforms"):
        if importlib.util.find_spec("grain"):
            importlib.import_module(name)


def histories(strategy, *args, build=mlp, **fit):
    model = built(build, strategy)
    fit = {"epochs": 2, "verbose": 0, "shuffle": False, **fit}
    history = model.fit(*args, **fit).history
    return {**history, "weights": model.get_weights()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_every_library_equals_arrays(source, mesh):
    make = SOURCES[source]
    strategy = ktd.TPUStrategy(mesh)
    expected = histories(None, X, Y, batch_size=BATCH, validation_data=(X, Y, WEIGHTS))
    found = histories(strategy, make(X, Y), validation_data=make(X, Y, WEIGHTS))
    assert_close(found, expected)
    model, stock = built(mlp, strategy), built(mlp, None)
    assert_close(model.evaluate(make(X, Y), verbose=0), stock.evaluate(X, Y, BATCH, verbose=0))
    assert_close(model.predict(make(X), verbose=0), stock.predict(X, BATCH, verbose=0))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_tf_data_infinite_weighted_and_cached(steps):
    tf = library("tensorflow")
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    weights = {0: 0.5, 1: 1.0, 2: 2.0}

    def build():
        model = mlp()
        model.steps_per_execution = steps
        return model

    endless = rows.repeat().batch(BATCH)
    ordered = np.resize(np.arange(len(X)), 7 * 2 * BATCH)
    expected = histories(None, X[ordered], Y[ordered], batch_size=BATCH, steps_per_epoch=7)
    found = histories(strategy, endless, build=build, steps_per_epoch=7)
    assert_close(found, expected)
    expected = histories(None, X, Y, batch_size=BATCH, class_weight=weights)
    found = histories(strategy, rows.batch(BATCH).cache(), build=build, class_weight=weights)
    assert_close(found, expected)


@pytest.mark.slow
def test_tf_data_of_dicts():
    tf = library("tensorflow")

    def build():
        inputs = {name: keras.Input((3,), name=name) for name in ("a", "b")}
        x = keras.layers.Concatenate()([inputs["b"], inputs["a"]])
        model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(x))
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    parts = {"a": X[:, :3], "b": X[:, 3:]}
    dataset = tf.data.Dataset.from_tensor_slices((parts, Y, WEIGHTS)).batch(BATCH)
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "fsdp")
    expected = histories(None, parts, Y, build=build, batch_size=BATCH, sample_weight=WEIGHTS)
    assert_close(histories(strategy, dataset, build=build), expected)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [80, 77])
@pytest.mark.parametrize("steps_per_epoch", [3, 5, 10])
@pytest.mark.parametrize("launch", [1, 2, 4, "auto"])
def test_steps_of_an_epoch_that_launches_do_not_fill(rows, steps_per_epoch, launch):
    """Keras counts whole launches, also those that the end of an epoch cut short."""
    x, y = data(rows=rows)
    made = []

    def build(steps):
        model = mlp()
        model.steps_per_execution = steps
        return model

    for strategy, steps in ((None, 1), (ktd.TPUStrategy({"data": 4, "model": 2}), launch)):
        model = built(lambda steps=steps: build(steps), strategy)
        model.fit(
            *(x, y, 8),
            epochs=30 // steps_per_epoch - 1,
            initial_epoch=1,
            steps_per_epoch=steps_per_epoch,
            validation_data=(x, y),
            validation_steps=2,
            verbose=0,
            shuffle=False,
        )
        made.append((int(model.optimizer.iterations.value), model.get_weights()))
    assert made[0][0] == made[1][0]
    assert_close(made[1][1], made[0][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "steps_per_epoch"), [(2, 6), (3, 4), (4, 3), (3, 7), (2, 5), (8, 6)]
)
def test_inputs_of_unknown_length_that_end_within_a_launch(launch, steps_per_epoch):
    """Keras learns of the end from a launch without a batch; an epoch's last one may have some."""
    x, y = data(rows=37)
    library("grain")

    def trained(strategy, steps):
        model = built(mlp, strategy)
        model.steps_per_execution = steps
        rows = grain_rows(x, y).batch(8)
        model.fit(rows, epochs=4, steps_per_epoch=steps_per_epoch, verbose=0, shuffle=False)
        return int(model.optimizer.iterations.value), model.get_weights()

    expected, made = trained(None, 1), trained(ktd.TPUStrategy(), launch)
    assert made[0] == expected[0]
    assert_close(made[1], expected[1])


class OneBuffer(keras.utils.PyDataset):
    """Writes each batch into the arrays of the one before."""

    def __init__(self):
        super().__init__()
        self.buffers = np.zeros_like(X[:BATCH]), np.zeros_like(Y[:BATCH])

    def __len__(self):
        return len(X) // BATCH

    def __getitem__(self, index):
        for buffer, array in zip(self.buffers, (X, Y)):
            buffer[:] = array[index * BATCH : (index + 1) * BATCH]
        return self.buffers


@pytest.mark.parametrize(("launch", "prefetch"), [(3, 0), (1, 2)])
def test_a_dataset_that_writes_into_the_batch_before(launch, prefetch):
    def losses(*data, **options):
        model = built(mlp, ktd.TPUStrategy({"data": 4, "model": 2}, prefetch=prefetch))
        model.steps_per_execution = launch
        history = model.fit(*data, shuffle=False, verbose=0, **options).history["loss"]
        return history, model.get_weights()

    whole = len(X) // BATCH * BATCH
    assert_close(losses(OneBuffer()), losses(X[:whole], Y[:whole], batch_size=BATCH))


@pytest.mark.parametrize(
    ("steps", "batches"),
    [
        (1, 3),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(3, 3, marks=pytest.mark.slow),
    ],
)
def test_an_epoch_without_data_has_the_logs_of_the_one_before_as_in_keras(steps, batches):
    def rows():
        yield from [(X[:BATCH], Y[:BATCH]), (X[BATCH:23], Y[BATCH:23]), (X[23:33], Y[23:33])]

    def build():
        model = mlp()
        model.steps_per_execution = steps
        return model

    strategy = ktd.TPUStrategy({"data": 4, "model": 2})
    fit = {"steps_per_epoch": batches, "epochs": 3, "shuffle": None}
    expected = histories(None, rows(), **fit)
    assert_close(histories(strategy, rows(), build=build, **fit), expected)
    # After a validation Keras would fail there.
    found = histories(strategy, rows(), build=build, validation_data=(X, Y), **fit)
    assert_close({name: found[name] for name in expected}, expected)
