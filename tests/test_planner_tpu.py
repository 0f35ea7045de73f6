"""The train step under "fsdp", compiled by the TPU compiler for eight chips."""

import re

import jax
import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd
from keras_tpu_dist import _keras, adoption

topologies = pytest.importorskip("jax.experimental.topologies")
L = keras.layers
BATCH, WIDTH = 512, 1024


def topology():
    pytest.importorskip("libtpu")
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices


def lowered(model, strategy, x):
    """The train step of a model that lies on CPU, lowered for the strategy's compile-only mesh."""
    member = adoption.Membership(strategy, placement=strategy.placement(model))
    mesh = strategy.mesh

    def abstract(variable):
        axes = member.placement.decision(variable).axes
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([abstract(v) for v in group] for group in groups)
    rows = jax.ShapeDtypeStruct(x, "float32", sharding=strategy.get_data_layout(x))
    shardings = tuple([leaf.sharding for leaf in group] for group in state)
    with strategy.scope():
        strategy._running_member = member
        step = jax.jit(model.train_step, out_shardings=(None, shardings))
        return step.lower(state, (rows, rows, None))


@pytest.mark.tpu_compiler
def test_gradients_of_split_weights_are_scattered_not_summed_whole():
    strategy = ktd.TPUStrategy({"data": 8}, "fsdp", devices=topology())
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((WIDTH,)), L.Dense(4 * WIDTH), L.Dense(WIDTH)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=(np.ones((2, WIDTH)), np.ones((2, WIDTH))))
    text = (
        lowered(model, strategy, (BATCH, WIDTH))
        .compile(compiler_options={"xla_optimization_level": "EFFORT_O1"})
        .as_text()
    )
    assert _keras.state_variables(model)
    full = WIDTH * 4 * WIDTH
    for line in re.findall(r"= .* all-reduce(?:-start)?\(.*", text):
        shapes = re.findall(r"f32\[([\d,]+)\]", line.split("all-reduce")[0])
        sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes]
        assert all(size < full for size in sizes), line[:200]
    assert "reduce-scatter" in text
    assert "all-gather" in text
