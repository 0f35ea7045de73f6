"""Recurrent layers on meshes: equal to one device, and no collective inside a loop."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import compiled, python
from jax.sharding import NamedSharding, PartitionSpec
from recurrent import MESHES, close, without_loops

import keras_tpu_dist as ktd
from benchmarks.tpu_schedule import collectives
from keras_tpu_dist import layers as fast
from keras_tpu_dist import recurrence
from keras_tpu_dist.layers import place
from keras_tpu_dist.recurrence import split_weights

WIDTH, UNITS, STEPS = 3, 8, 6


def small(kind, package, **config):
    """A model whose gradient passes through the input of the second recurrent layer."""
    layer = functools.partial(getattr(package, kind), **config)
    model = keras.Sequential(
        [
            keras.Input((STEPS, WIDTH)),
            keras.layers.Masking(),
            layer(UNITS, return_sequences=True),
            layer(UNITS),
            keras.layers.Dense(1),
        ]
    )
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=w.shape) * 0.4 for w in model.weights])
    return compiled(model, keras.optimizers.SGD(0.1), "mse")


def data(rows):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, STEPS, WIDTH)).astype("float32")
    x[::2, -2:] = 0  # masked
    return x, rng.normal(size=(rows, 1)).astype("float32")


SPLIT = [(".*/recurrent_kernel", (None, "model")), (".*_cell/kernel", (None, "model"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "loop"),
    [
        ("LSTM", MESHES["data8"], True),
        ("GRU", MESHES["data2_model4"], True),
        ("LSTM", ({"data": 4, "model": 2}, SPLIT), False),
        ("GRU", ({"data": 2, "fsdp": 2, "model": 2}, SPLIT), False),
    ],
    ids=["data8", "data2_model4", "data4_model2 no loop", "data2_fsdp2_model2 no loop"],
)
def test_a_train_step_equals_keras_on_one_device(kind, mesh, loop, monkeypatch):
    if not loop:
        without_loops(monkeypatch)
    reference = small(kind, keras.layers)
    strategy = ktd.TPUStrategy(*mesh)
    with strategy.scope():
        model = small(kind, fast)
    for rows in (16, 13):  # 13 does not divide by 8 or by 2
        x, y = data(rows)
        assert model.train_on_batch(x, y) == pytest.approx(reference.train_on_batch(x, y), rel=1e-5)
    close([w.value for w in model.weights], [w.value for w in reference.weights])
    close(model.predict(x, verbose=0), reference.predict(x, verbose=0))


def train_step(layer, shape, strategy):
    """Lowers one step of gradient descent on a layer's weights, laid out by the strategy."""
    rows = NamedSharding(strategy.mesh, PartitionSpec(strategy.data_axes))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
    variables = layer.trainable_variables
    weights = [
        jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=strategy.get_variable_layout(v))
        for v in variables
    ]

    frozen = [v.value for v in layer.non_trainable_variables]  # the dropout's random state

    def step(weights, x):
        def loss(weights):
            outputs, _ = layer.stateless_call(weights, frozen, x)
            return jnp.mean(outputs**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    with strategy.scope():
        return jax.jit(step, out_shardings=(None, [w.sharding for w in weights])).lower(weights, x)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_no_collective_lies_inside_a_loop(mesh):
    counts = {}
    strategy = ktd.TPUStrategy(*MESHES[mesh])
    for kind in ("LSTM", "GRU", "SimpleRNN"):
        with strategy.scope():
            layer = getattr(fast, kind)(16, return_sequences=True)
            layer.build((16, STEPS, WIDTH))
        text = train_step(layer, (16, STEPS, WIDTH), strategy).compile().as_text()
        counts[kind], inside = collectives(text)
        assert inside == 0
        assert "while(" in text
    if mesh == "data8":
        # The gradients' all-reduce, which the CPU compiler does not merge with the loss's.
        assert max(counts.values()) <= 2, counts
    else:
        assert max(counts.values()) <= 12, counts


# Keras 3.16 says so of its own LSTM too.
@pytest.mark.filterwarnings("ignore:.*does not support masking")
def test_split_weights_are_gathered_as_long_as_they_fit(monkeypatch, caplog):
    strategy = ktd.TPUStrategy(*MESHES["data2_model4"])
    with strategy.scope():
        model = small("LSTM", fast)
    first = strategy.explain(model).layers[0]
    assert first.path == model.layers[1].path
    assert "whole: gathered on every device before the loop" in first.choice
    words = " ".join(str(strategy.explain(model)).split())
    assert "gathered on every device before the loop" in words
    assert not ktd.TPUStrategy().explain(small("LSTM", fast)).layers


def test_more_than_fits_takes_the_path_of_keras(monkeypatch, caplog):
    monkeypatch.setattr(split_weights, "GATHERED_BYTES", 100)
    strategy = ktd.TPUStrategy({"data": 2, "model": 4}, SPLIT)
    with strategy.scope():
        model = small("LSTM", fast)
    choice = strategy.explain(model).layers[0].choice
    assert "more than the 0 MiB to gather: the loop is Keras's" in choice
    reference = small("LSTM", keras.layers)
    x, y = data(16)
    assert model.train_on_batch(x, y) == pytest.approx(reference.train_on_batch(x, y), rel=1e-5)
    close([w.value for w in model.weights], [w.value for w in reference.weights])
    assert caplog.text.count("the loop is Keras's") == 2  # once for each layer


def test_the_place_is_read_from_any_distribution():
    assert place.find() == place.Place(recurrence.Split(), alone=False, device=jax.devices()[0])
    assert place.find().core == "arrays may be on several devices"
    parallel = keras.distribution.DataParallel(auto_shard_dataset=False)
    with parallel.scope():
        found = place.find()
    assert found.split.axes == ("batch",)
    assert found.split.parts == 8
    with ktd.TPUStrategy({"model": 8}, data_axes=()).scope():
        found = place.find()
        assert (found.split.axes, found.split.parts, found.alone) == ((), 1, True)
        assert not found.rounds
        x = jnp.asarray(data(3)[0])
        layer = fast.SimpleRNN(UNITS)
        assert layer(x).shape == (3, UNITS)


@pytest.mark.parametrize(
    ("topology", "vmem_mib", "cores"), [("v4:2x2x1", 16, 2), ("v5e:2x4", 128, 1), ("v3:2x2", 0, 0)]
)
def test_what_a_kernel_would_run_on(topology, vmem_mib, cores):
    with ktd.TPUStrategy(topology=topology).scope():
        found = place.find()
        assert found.rounds
        if cores:
            assert found.core == recurrence.Core(vmem_mib * 2**20, cores)
        else:
            assert found.core == "v3 has none for bfloat16"
        with jax.default_matmul_precision("highest"):
            assert not found.rounds
            assert found.core == "jax_default_matmul_precision is set"
            assert fast.LSTM(64)._rounded_to(found) is None
        assert fast.LSTM(64)._rounded_to(found) == "bfloat16"
        half = fast.LSTM(64, dtype="mixed_float16")
        assert half._core(found) == (
            "kernels multiply bfloat16, not float16" if cores else "v3 has none for bfloat16"
        )


def test_a_layer_inside_of_a_shard_map_sees_its_part_alone():
    strategy = ktd.TPUStrategy()
    with strategy.scope():
        layer = fast.GRU(UNITS)
        layer.build((16, STEPS, WIDTH))
    x = jnp.asarray(data(16)[0])
    rows = PartitionSpec("data")

    def call(x):
        with strategy.scope():
            return layer(x)

    parts = jax.shard_map(call, mesh=strategy.mesh, in_specs=rows, out_specs=rows, check_vma=False)
    close(jax.jit(parts)(x), jax.jit(call)(x))


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_no_collective_lies_inside_a_loop_on_tpu():
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "recurrent.py"
    case = {"cell": "LSTM", "size": (16, 8, 128), "kind": "ours"}
    cases = [case | {"mesh": mesh} for mesh in ({"data": 8}, {"data": 2, "model": 4})]
    done = python(script, "one", "--case", json.dumps(cases))
    schedules = json.loads(done.stdout.splitlines()[-1])
    assert [schedule["collectives_in_loops"] for schedule in schedules] == [0, 0]
    assert schedules[0]["collectives"] == 1
    assert 1 <= schedules[1]["collectives"] <= 12
    assert min(schedule["scheduled_cycles"] for schedule in schedules) > 0


def test_a_layer_sees_its_weights_as_they_lie_not_as_they_were_made():
    """A plan leaves three gates whole on two devices; while it is made, a kernel is split."""
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, ktd.Planner("tensor_parallel", min_size=1))
    with strategy.scope():
        model = keras.Sequential([keras.Input((5, 4)), fast.GRU(6)])
        model.compile("sgd", "mse")
    model.predict(np.ones((8, 5, 4)), verbose=0)
    kernel = model.layers[0].cell.recurrent_kernel
    with strategy.scope():
        assert any(strategy.get_variable_layout(kernel).spec)
        assert not any(place.axes_of(kernel))
