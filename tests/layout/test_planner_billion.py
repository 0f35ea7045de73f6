"""What "tensor_parallel" leaves whole of models of a billion weights, built without memory."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_tpu_dist as ktd

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
import models

SIZES = {
    "llama_like": {"WIDTH": 2048, "HEADS": 32, "KV_HEADS": 8, "VOCAB": 128256, "BLOCKS": 24},
    "llama_rotary": {"WIDTH": 2048, "HEADS": 32, "KV_HEADS": 8, "VOCAB": 128256, "BLOCKS": 24},
    "moe_like": {"WIDTH": 1024, "HEADS": 16, "VOCAB": 50257, "BLOCKS": 16, "EXPERTS": 32},
    "bert_like": {"WIDTH": 2048, "HEADS": 16, "VOCAB": 30522, "BLOCKS": 18},
    "gpt_like": {"WIDTH": 2048, "HEADS": 16, "VOCAB": 50257, "BLOCKS": 18},
    "vit_like": {"WIDTH": 2048, "HEADS": 16, "BLOCKS": 20},
    "t5_like": {"WIDTH": 1536, "HEADS": 16, "VOCAB": 32128, "BLOCKS": 16},
}
STEPS = 512


def billion(name, monkeypatch):
    for constant, value in {**SIZES[name], "STEPS": STEPS}.items():
        monkeypatch.setattr(models, constant, value)
    monkeypatch.setattr(models, "HEAD", models.WIDTH // models.HEADS)
    keywords = {"experts": models.EXPERTS, "units": 2 * models.WIDTH}
    monkeypatch.setattr(
        models.Experts,
        "__init__",
        lambda self, top=2, **kwargs: _with_experts(self, top, keywords, kwargs),
    )
    monkeypatch.setattr(models.mlp, "__defaults__", ("gelu", 4 * models.WIDTH))
    return {case.name: case.build for case in models.CASES}[name]()


def _with_experts(layer, top, keywords, kwargs):
    keras.Layer.__init__(layer, **kwargs)
    layer.experts, layer.units, layer.top = keywords["experts"], keywords["units"], top


@pytest.mark.parametrize(
    "mesh",
    [{"data": 2, "model": 8}, pytest.param({"data": 4, "model": 4}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("name", SIZES)
def test_at_most_3_percent_are_replicated(name, mesh, monkeypatch):
    strategy = ktd.TPUStrategy(mesh, "tensor_parallel", topology="v5e:4x4")
    with strategy.scope():
        model = billion(name, monkeypatch)
    plan = strategy.plan(model)
    total = sum(int(np.prod(v.shape)) for v in model.weights)
    whole = {
        path: int(np.prod(shape)) for path, shape, found in plan.decisions if not any(found.axes)
    }
    assert 0.7e9 < total < 2.6e9
    largest = sorted(whole.items(), key=lambda row: -row[1])[:3]
    assert sum(whole.values()) <= 0.03 * total, largest
    found = strategy.lint(model, batch_size=64).findings
    assert not found, found


def test_depthwise_kernels_and_heads_that_do_not_divide():
    layers = keras.layers
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    with strategy.scope():
        inputs = keras.Input((8, 8, 512))
        x = layers.DepthwiseConv2D(3, name="depthwise")(inputs)
        x = layers.SeparableConv2D(512, 3, name="separable")(x)
        x = layers.Conv2D(512, 3, groups=4, name="grouped", padding="same")(x)
        x = layers.GlobalAveragePooling2D()(x)
        model = keras.Model(inputs, layers.Dense(50257, name="head")(x))
    axes = {path: found.axes for path, _, found in strategy.plan(model).decisions}
    assert axes["depthwise/kernel"] == (None, None, "model", None)
    assert axes["separable/depthwise_kernel"] == (None, None, "model", None)
    assert "model" in axes["separable/pointwise_kernel"]
    assert axes["grouped/kernel"] == (None, None, None, "model")
    assert axes["head/kernel"] == ("model", None)
