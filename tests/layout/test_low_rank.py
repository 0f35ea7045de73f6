"""LoRA: only the gradients of the factors are summed over the devices, and results are the same."""

import keras
import numpy as np
import pytest
from conformance.precision import in_float64
from helpers import assert_close, compiled

import keras_tpu_dist as ktd
from keras_tpu_dist.programs import low_rank

L = keras.layers
WIDTH, RANK = 64, 4
KINDS = {
    "dense": lambda: [
        L.Dense(2 * WIDTH, activation="gelu", name="one"),
        L.Dense(WIDTH, use_bias=False, name="two"),
    ],
    "einsum": lambda: [
        L.EinsumDense(
            "btd,dnh->btnh", output_shape=(None, 4, WIDTH // 4), bias_axes="nh", name="one"
        ),
        L.EinsumDense("btnh,nhd->btd", output_shape=(None, WIDTH), name="two"),
    ],
    # Its last dimension is that of the input.
    "transposed": lambda: [L.EinsumDense("btd,fd->btf", output_shape=(None, WIDTH), name="one")],
    "attention": lambda: [Attention(name="attention")],
}
MESHES = {
    "data": ({"data": 8}, None),
    "data_model": ({"data": 4, "model": 2}, ktd.Planner("tensor_parallel", min_size=16)),
    "data_fsdp_model": ({"data": 2, "fsdp": 2, "model": 2}, ktd.Planner("fsdp", min_size=16)),
}


class Attention(L.Layer):
    """Attention of one sequence with itself, of which queries and values have LoRA."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = L.MultiHeadAttention(4, WIDTH // 4, name="inner")

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


def data(rows=39):
    x = np.random.default_rng(0).normal(size=(rows, 6, WIDTH)).astype("float32")
    return x, x[..., :1]


def build(kind, rank=RANK, **compile_options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6, WIDTH)), *KINDS[kind](), L.Dense(1, name="head")]
    model = keras.Sequential(layers)
    for layer in model._flatten_layers():
        if layer.name in ("one", "two", "query", "value") and hasattr(layer, "enable_lora"):
            layer.enable_lora(rank, lora_alpha=6)
            factor = np.random.default_rng(0).normal(size=layer.lora_kernel_b.shape)
            layer.lora_kernel_b.assign(factor * 0.1)
    return compiled(model, keras.optimizers.SGD(0.02), "mse", **compile_options)


def quantized(model, mode):
    """A model whose kernels beside the factors are quantized."""
    for name in ("one", "two"):
        model.get_layer(name).quantize(mode)
    return compiled(model, keras.optimizers.SGD(0.02), "mse")


def results(model):
    x, y = data()
    history = model.fit(x, y, batch_size=13, epochs=2, shuffle=False, verbose=0).history
    return [np.array(history["loss"]), model.predict(x, verbose=0), *model.get_weights()]


def cases():
    for kind in KINDS:
        for mesh in MESHES:
            fast = (kind, mesh) in (("dense", "data_model"), ("transposed", "data"))
            yield pytest.param(kind, mesh, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "mesh"), list(cases()))
def test_results_are_those_of_one_device(kind, mesh, monkeypatch):
    found = []
    stock = low_rank.sums_in
    monkeypatch.setattr(low_rank, "sums_in", lambda graph: found.extend(stock(graph)) or found)
    expected = results(build(kind, steps_per_execution=2))
    assert not found
    with ktd.TPUStrategy(*MESHES[mesh]).scope():
        model = build(kind, steps_per_execution=2)
    assert_close(results(model), expected)
    assert found


@pytest.mark.slow
@pytest.mark.parametrize("option", ["remat", "mixed_bfloat16", "run_eagerly"])
def test_beside_other_options(option):
    keras.config.set_dtype_policy(option if option == "mixed_bfloat16" else "float32")
    options = {"run_eagerly": True} if option == "run_eagerly" else {}
    expected = results(build("dense", **options))
    with ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel").scope():
        model = build("dense", **options)
        if option == "remat":
            ktd.remat(model.get_layer("one"))
    tolerance = 3e-2 if option == "mixed_bfloat16" else 1e-5
    assert_close(results(model), expected, tolerance)


@pytest.mark.slow
def test_beside_int8():
    # In float32 a rounding may move an activation to the next of 255 values.
    with in_float64():
        expected = results(quantized(build("dense"), "int8"))
        with ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel").scope():
            model = build("dense")
        assert_close(results(quantized(model, "int8")), expected)


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("kind", [*KINDS, "dense, int8", "dense, int4"])
@pytest.mark.parametrize(
    ("mesh", "plan"),
    [({"data": 8}, None), ({"data": 4, "model": 2}, "tensor_parallel"), ({"fsdp": 8}, "fsdp")],
)
def test_the_factors_are_all_that_is_summed(kind, mesh, plan):
    """By the TPU compiler: at most twice the bytes of what trains, over the axes of the batch."""
    kind, _, mode = kind.partition(", ")

    def made():
        model = build(kind)
        for layer in model._flatten_layers():
            # Attention has other kernels, of gradients as large as those that must not be sent.
            if layer.name in ("key", "attention_output"):
                layer.trainable = False
        return quantized(model, mode) if mode else model

    strategy = ktd.TPUStrategy(mesh, plan, topology="v5e:2x4")
    run = ktd.dry_run(made, strategy, batch_size=64)
    trained = sum(4 * int(np.prod(weight.shape)) for weight in made().trainable_weights)
    data_axes = set(strategy.data_axes)
    summed = [
        c.bytes * c.times
        for c in run.cost.collectives
        if c.kind in ("all-reduce", "reduce-scatter") and data_axes & set(c.axes)
    ]
    print(kind, mode, mesh, f"{trained} bytes train, {sum(summed):g} are summed")
    assert sum(summed) < 2 * trained
