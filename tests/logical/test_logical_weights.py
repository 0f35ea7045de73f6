"""Weights of assigned layers: their parts on the logical devices, and the numbers of one device."""

import keras
import numpy as np
import pytest
from helpers import assert_close, scoped

import keras_tpu_dist as ktd

L = keras.layers
MESHES = [{"data": 4, "model": 2}, {"model": 4, "data": 2}, {"data": 2, "a": 2, "b": 2}]
X = np.random.RandomState(0).randn(26, 64).astype("float32")
Y = np.random.RandomState(1).randn(26, 1).astype("float32")


def tower(k):
    inner = [keras.Input((64,)), L.Dense(256, "relu"), L.BatchNormalization(), L.Dense(64)]
    return keras.Sequential([*inner[:2], L.Dropout(0.2, seed=k), *inner[2:]], name=f"tower{k}")


def towers(assigned=True, optimizer="adam"):
    keras.utils.set_random_seed(3)
    x = keras.Input((64,))
    parts = [tower(k) for k in range(2)]
    if assigned:
        parts = [ktd.assign(part, k) for k, part in enumerate(parts)]
    model = keras.Model(x, L.Dense(1)(L.Concatenate()([part(x) for part in parts])))
    model.compile(optimizer() if callable(optimizer) else optimizer, "mse")
    return model


def fitted(strategy, assigned=True, optimizer="adam", epochs=2):
    with scoped(strategy):
        model = towers(assigned, optimizer)
    model.fit(X, Y, batch_size=13, epochs=epochs, shuffle=False, verbose=0)
    return model


def bytes_on_a_device(variables):
    return sum(v.value.addressable_shards[0].data.nbytes for v in variables)


@pytest.fixture(scope="module")
def stock():
    return fitted(None, assigned=False)


@pytest.mark.parametrize(
    "mesh",
    [MESHES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in MESHES[1:])],
    ids=str,
)
def test_a_device_holds_its_part_of_weights_and_slots(mesh, stock):
    strategy = ktd.TPUStrategy(mesh)
    model = fitted(strategy)
    assert_close(model.get_weights(), stock.get_weights())
    assert_close(model.predict(X, verbose=0), stock.predict(X, verbose=0))
    ways = strategy.num_logical_devices
    explained = strategy.explain(model)
    kernels = [row for row in explained.rows if "tower" in row.path and len(row.shape) == 2]
    assert len(kernels) == 4
    for row in kernels:
        assert row.bytes_per_device * ways == row.bytes
        assert row.slot_bytes_per_device * ways == row.slot_bytes == 2 * row.bytes
        assert "assigned to logical device" in row.reason
    state = [*model.trainable_variables, *model.non_trainable_variables]
    slots = [v for v in model.optimizer.variables if v.ndim]
    held = bytes_on_a_device(state) + bytes_on_a_device(slots)
    assert held == explained.bytes_per_device
    assert held < explained.bytes / ways * 1.1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "muon", "adafactor", keras.optimizers.Lamb])
def test_optimizers_that_look_at_whole_weights(optimizer):
    found = fitted(ktd.TPUStrategy(MESHES[0]), optimizer=optimizer, epochs=1)
    expected = fitted(None, assigned=False, optimizer=optimizer, epochs=1)
    assert_close(found.get_weights(), expected.get_weights())


def test_saved_and_loaded_elsewhere(tmp_path, stock):
    model = fitted(ktd.TPUStrategy(MESHES[0]))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    alone = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(alone.predict(X, verbose=0), stock.predict(X, verbose=0))
    assert_close(
        [v.numpy() for v in alone.optimizer.variables],
        [v.numpy() for v in stock.optimizer.variables],
    )
    with ktd.TPUStrategy(MESHES[1]).scope():
        other = towers()
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_close(other.predict(X, verbose=0), stock.predict(X, verbose=0))


@pytest.mark.slow
def test_checkpoints_go_on_elsewhere(tmp_path, stock):
    pytest.importorskip("orbax.checkpoint")
    options = {"batch_size": 13, "shuffle": False, "verbose": 0}
    for mesh, epochs in ((MESHES[0], 1), (MESHES[2], 2)):
        with ktd.TPUStrategy(mesh).scope():
            model = towers()
        model.fit(X, Y, epochs=epochs, callbacks=[ktd.callbacks.Checkpoint(tmp_path)], **options)
    assert_close(model.get_weights(), stock.get_weights())
    with ktd.TPUStrategy({"data": 8}).scope():
        alone = towers(assigned=False)
    ktd.restore(alone, tmp_path)
    assert_close(alone.get_weights(), stock.get_weights())


def test_what_is_written_on_a_layer_or_in_rules_comes_first():
    rules = [("tower0/dense/kernel", (None, "model"))]
    strategy = ktd.TPUStrategy(MESHES[0], rules)
    with strategy.scope():
        x = keras.Input((64,))
        first = ktd.assign(L.Dense(256, name="first"), 0)
        second = ktd.replicate(ktd.assign(L.Dense(256, name="second"), 1))
        third = ktd.assign(L.Dense(256, name="third"), 1)
        odd = ktd.assign(L.Dense(3, name="odd"), 1)
        model = keras.Model(x, odd(L.Add()([first(x), second(x), third(x)])))
    axes = {row.path: (row.axes, row.reason) for row in strategy.explain(model).rows}
    assert axes["first/kernel"][0] == axes["third/kernel"][0] == (None, "model")
    assert axes["second/kernel"] == ((), "replicate() on layer 'second'")
    assert axes["first/bias"] == (
        (),
        "assigned to logical device 0: whole on each, as it is small",
    )
    ruled = ktd.TPUStrategy(MESHES[0], [("third/kernel", ("model", None))]).explain(model)
    assert {r.path: r.axes for r in ruled.rows}["third/kernel"] == ("model", None)


def test_in_replica_code(stock):
    strategy = ktd.TPUStrategy(MESHES[0])
    with strategy.scope():
        model = towers()
    single = towers(assigned=False)
    (batch,) = strategy.distribute_dataset(X[:8], batch_size=8)
    found = strategy.run(lambda x: model(x, training=False), (batch,))
    assert_close(strategy.gather(found, 0), single(X[:8]))
    spec = model.get_layer("tower0").layers[0].kernel.value.sharding.spec
    assert tuple(spec) == (None, "model")
