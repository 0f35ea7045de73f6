"""The TPU compiler takes the program of strategy.run; no chip is needed."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from compile_only import compiled_for_tpu
from helpers import stepped

import keras_tpu_dist as ktd

pytestmark = pytest.mark.tpu_compiler


@pytest.mark.slow
def test_a_step_of_4_replicas_of_2_logical_devices_compiles():
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, [("hidden/kernel", (None, "model"))])
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((128,)),
                layers.Dense(256, activation="relu", name="hidden"),
                layers.BatchNormalization(),
                layers.Dropout(0.1),
                layers.Dense(16),
            ]
        )
        optimizer, mean = keras.optimizers.Adam(0.1), keras.metrics.Mean()
        first = keras.Variable(np.zeros(3, "int32"), aggregation="only_first_replica")

    def step(x):
        context = ktd.get_replica_context()
        value, _ = stepped(model, optimizer, x, lambda outputs: (outputs**2).mean())
        mean.update_state(value)
        first.assign(first.value + context.replica_id_in_sync_group)
        return [context.all_reduce(op, x > 0) for op in ("max", "min", "sum")], (
            context.all_gather(jnp.argmax(x, -1), 0)
        )

    (batch,) = strategy.distribute_dataset([np.ones((64, 128), "float32")])
    strategy.run(step, (batch,))
    compiled = compiled_for_tpu(strategy, step, (batch,), "v5e:2x4")
    assert compiled.error is None
    assert compiled.compiled_for == "v5e:2x4"
    assert "all-reduce" in compiled.text
