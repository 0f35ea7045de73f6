"""Muon's kernels, whole on one device each, against one device."""

import logging

import keras
import numpy as np
import pytest
from conformance.precision import in_float64
from helpers import assert_close, built, compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.programs import muon
from keras_tpu_dist.programs.answers import kept

L, O = keras.layers, keras.optimizers
CLOSE = 1e-6
SMALL = {"min_size": 4}
THREE = {"data": 2, "fsdp": 2, "model": 2}
PLANS = {
    "data": ({"data": 8}, None),
    "fsdp": ({"fsdp": 8}, ktd.Planner("fsdp", **SMALL)),
    "model": ({"data": 4, "model": 2}, ktd.Planner("tensor_parallel", **SMALL)),
    "three": (THREE, [("(up|wide).*/kernel", ("fsdp", "model")), ("down.*", ("model", "fsdp"))]),
    "rules": (THREE, [("up_1/kernel", (None, ("data", "model"))), ("down.*/kernel", ("fsdp",))]),
}


def mlp(optimizer, layers=3, loss="mse", **options):
    """Kernels of (8, 16), (16, 8), (16, 16) and (8, 24), of which one is frozen."""
    inputs = x = keras.Input((8,))
    for n in range(layers):
        y = L.Dense(16, activation="tanh", name=f"up_{n}")(x)
        if n < 2:
            y = L.Dense(16, activation="tanh", name=f"square_{n}")(y)
        x = L.Add()([x, L.Dense(8, name=f"down_{n}", trainable=n != 1)(y)])
    x = L.Dense(24, activation="tanh", name="wide")(x)
    model = keras.Model(inputs, L.Dense(2, name="head")(x))
    return compiled(model, optimizer(), loss, **options)


def plain(**options):
    return lambda: O.Muon(0.01, exclude_layers=["head"], **options)


def several():
    kernels = {"wide/.*": O.SGD(0.1), "up_0/.*": O.Muon(0.02)}
    return O.MultiOptimizer(O.OptimizerMap(O.Muon(0.01, exclude_layers=["head"]), kernels))


OPTIMIZERS = {
    "muon": plain(),
    "decay": plain(weight_decay=0.1, clipnorm=0.5),
    "no nesterov": plain(nesterov=False, rms_rate=None, ns_steps=2),
    "accumulated": plain(gradient_accumulation_steps=2),
    "ema": plain(use_ema=True, ema_overwrite_frequency=2),
    "scaled": lambda: O.LossScaleOptimizer(plain()()),
    "several": several,
}


def trained(strategy, optimizer, rows=13, start=None, build=mlp, **options):
    model = built(lambda: build(OPTIMIZERS[optimizer], **options), strategy)
    if start is not None:
        model.set_weights(start)
    start = model.get_weights()
    rng = np.random.default_rng(0)
    dtype = keras.config.floatx()
    x, y = rng.normal(size=(rows, 8)).astype(dtype), rng.normal(size=(rows, 2)).astype(dtype)
    losses = model.fit(x, y, batch_size=5, shuffle=False, verbose=0).history
    return model, start, [losses, *(v.numpy() for v in [*model.weights, *model.optimizer.variables])]


def check(plan, optimizer="muon", tolerance=CLOSE, **options):
    with in_float64():
        _, start, expected = trained(None, optimizer, **options)
        strategy = ktd.TPUStrategy(*PLANS[plan])
        model, _, found = trained(strategy, optimizer, start=start, **options)
        assert model.optimizer.variables[0].dtype in ("int32", "int64")
        assert_close(found, expected, tolerance)
    return strategy, model


def lines(model):
    return {path: answer.words for path, answer in kept(model, "muon").items()}


@pytest.mark.parametrize("plan", PLANS)
def test_kernels_that_are_whole_equal_one_device(plan):
    _, model = check(plan, steps_per_execution=4)
    assert any(answer.done for answer in kept(model, "muon").values()), lines(model)
