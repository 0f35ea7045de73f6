"""Kernels of 8 and of 4 bits, two of which lie in a byte, are split as those of floats are."""

import functools
import itertools
import math
import warnings

import keras
import numpy as np
import pytest
from decoders import HEADS, TIME, WIDTH, Attention, Block, Halved, stacked
from helpers import assert_close, built
from keras import quantizers
from programs import compiled, program, sent

import keras_tpu_dist as ktd
from keras_tpu_dist.layout.planner import Planner

L = keras.layers
slow = pytest.mark.slow
BY_TWO = {"data": 4, "model": 2}
MESHES = [BY_TWO, {"data": 2, "fsdp": 2, "model": 2}]
# Sums of few values, so that scales differ inside a kernel.
MODES = {
    "int8": lambda: "int8",
    "int8, weights alone": lambda: quantizers.Int8QuantizationConfig(activation_quantizer=None),
    "int4": lambda: quantizers.Int4QuantizationConfig(block_size=8),
    "int4, by channel": lambda: quantizers.Int4QuantizationConfig(block_size=-1),
}
X, Y = np.random.default_rng(0).normal(size=(2, 26, TIME, WIDTH)).astype("float32")


def multi_head():
    x = keras.Input((TIME, WIDTH))
    return keras.Model(x, x + L.MultiHeadAttention(HEADS, 4, name="attention")(x, x))


def grouped():
    x = keras.Input((TIME, WIDTH))
    return keras.Model(x, x + L.GroupQueryAttention(4, HEADS, 2, name="attention")(x, x))


def dense():
    x = keras.Input((TIME, WIDTH))
    y = L.Dense(4 * WIDTH, activation="gelu", name="up")(x)
    return keras.Model(x, L.Dense(WIDTH, name="down")(y))


def einsum():
    x = keras.Input((TIME, WIDTH))
    up = L.EinsumDense("btd,df->btf", (None, 4 * WIDTH), bias_axes="f", name="up")
    down = L.EinsumDense("btf,fd->btd", (None, WIDTH), bias_axes="d", name="down")
    return keras.Model(x, down(keras.ops.gelu(up(x))))


def by_hand(form):
    def build():
        x = keras.Input((TIME, WIDTH))
        return keras.Model(x, Block(Attention(form=form, positions=None))(x))

    return build


class Gated(L.Layer):
    """Gates and values by one `EinsumDense`."""

    def __init__(self):
        super().__init__()
        shape = (None, 8 * WIDTH)
        self.both = L.EinsumDense("btd,df->btf", shape, bias_axes="f", name="both")
        self.down = L.Dense(WIDTH, name="down")

    def call(self, x):
        gate, value = keras.ops.split(self.both(x), 2, axis=-1)
        return x + self.down(keras.ops.silu(gate) * value)


# One kernel for several kinds of features: its name, and the model.
FUSED = {
    "in a row": (
        "query_key_value",
        lambda: stacked(Block(Attention(form="in a row", positions=None))),
    ),
    "split": ("query_key_value", lambda: stacked(Block(Attention(form="split")))),
    "halved": ("both", lambda: stacked(Halved())),
    "gated": ("both", lambda: stacked(Gated())),
}
MODELS = {
    **{name: build for name, (_, build) in FUSED.items()},
    "multi-head": multi_head,
    "grouped": grouped,
    "dense": dense,
    "einsum": einsum,
    "by hand, dense": by_hand("dense"),
    "by hand, einsum": by_hand("einsum"),
}
# All-reduces forward and backward of what each has.
SUMS = {"multi-head": 1, "grouped": 1, "dense": 1, "einsum": 1}


def quantize(model, mode):
    config = MODES[mode]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that cannot be
        model.quantize(**({"mode": config} if isinstance(config, str) else {"config": config}))
    return model


def quantized(name, mode, lora=False):
    def build():
        model = quantize(MODELS[name](), mode)
        for layer in model._flatten_layers():
            if lora and isinstance(layer, (L.Dense, L.EinsumDense)):
                layer.enable_lora(2, b_initializer="glorot_uniform")
        return model

    return build


def strategy_of(mesh, kind="tensor_parallel"):
    return ktd.TPUStrategy(mesh, Planner(kind, min_size=64))


def layouts(name, mode, lora=False, mesh=BY_TWO):
    strategy = strategy_of(mesh)
    model = built(quantized(name, mode, lora), strategy)
    rows = strategy.explain(model).rows
    return {"/".join(row.path.split("/")[-2:]): row.axes for row in rows}


@pytest.mark.parametrize("mode", MODES)
def test_attention_is_split_by_heads(mode):
    packed = mode.startswith("int4")
    for name in ("multi-head", "grouped"):
        found = layouts(name, mode)
        column = (None, "model") if packed else (None, "model", None)
        for part in ("query", "key", "value"):
            assert found[f"{part}/kernel"] == column
            assert found[f"{part}/bias"] == ("model", None)
        row = ("model", None) if packed else ("model", None, None)
        assert found["attention_output/kernel"] == row
        assert not any(found["attention_output/bias"])
        scale = {
            "int4": (None, "model"),
            "int4, by channel": ("model",),
        }.get(mode, (None, None, "model", None))
        assert found["query/kernel_scale"] == scale
        assert not any(found["attention_output/kernel_scale"])


@pytest.mark.parametrize("mode", [m if m == "int4" else pytest.param(m, marks=slow) for m in MODES])
@pytest.mark.parametrize(
    "name", [n if n == "in a row" else pytest.param(n, marks=slow) for n in FUSED]
)
def test_fused_kernels_are_used_by_heads(name, mode):
    strategy, fused = strategy_of(BY_TWO), FUSED[name][0]
    rows = strategy.explain(built(quantized(name, mode), strategy)).rows
    own = {row.path.rpartition("/")[2]: row for row in rows if f"{fused}/" in row.path}
    for part in ("kernel", "kernel_scale", "kernel_zero", "bias"):
        assert part not in own or "used as" in own[part].reason, own[part]
    assert own["kernel"].axes == ("model", None)
    down = {"in a row": "attention/dense", "split": "attention/dense"}.get(name, "down")
    (row,) = [row for row in rows if row.path.endswith(f"{down}/kernel")]
    assert row.axes == ("model", None), row


@pytest.mark.parametrize("mode", MODES)
def test_scales_of_pairs_lie_as_their_features(mode):
    for name in ("dense", "einsum"):
        found = layouts(name, mode)
        assert found["up/kernel"] == (None, "model")
        assert found["down/kernel"] == ("model", None)
        assert found["up/bias"] == ("model",)
        assert found["up/kernel_scale"][-1] == "model"
        assert not any(found["down/kernel_scale"])


def test_heads_of_odd_width_share_bytes():
    """Of 4 heads of 3 values two lie in 3 bytes: they go in two parts, and not in four."""
    x = keras.Input((TIME, WIDTH))

    def build():
        return quantize(keras.Model(x, L.MultiHeadAttention(4, 3)(x, x)), "int4")

    for ways, axes in ((2, (None, "model")), (4, ())):
        strategy = strategy_of({"data": 8 // ways, "model": ways})
        rows = strategy.explain(built(build, strategy)).rows
        (query,) = [row for row in rows if row.path.endswith("query/kernel")]
        assert query.axes == axes
        if ways == 4:
            assert "4 heads of 3 values, two in a byte, are not divisible by" in query.reason


@slow
def test_fused_kernels_whose_bytes_do_not_divide_are_named():
    """Of 4 heads of 3 values of a kind two lie in 3 bytes, which four devices cannot share."""

    class Odd(L.Layer):
        def __init__(self):
            super().__init__()
            self.fused, self.out = L.Dense(36, name="fused"), L.Dense(WIDTH, name="out")

        def call(self, x):
            y = keras.ops.reshape(self.fused(x), (-1, TIME, 3, 4, 3))
            q, k, v = keras.ops.unstack(y, axis=2)
            p = keras.ops.softmax(keras.ops.einsum("bqnh,bknh->bnqk", q, k))
            y = keras.ops.einsum("bnqk,bknh->bqnh", p, v)
            return self.out(keras.ops.reshape(y, (-1, TIME, 12)))

    for ways, by_heads in ((2, True), (4, False)):
        strategy = strategy_of({"data": 8 // ways, "model": ways})
        model = built(lambda: quantize(stacked(Odd()), "int4"), strategy)
        (row,) = [r for r in strategy.explain(model).rows if r.path.endswith("fused/kernel")]
        assert ("used as (16, 3, 6)" in row.reason) == by_heads, row


def test_an_odd_number_of_units_is_in_no_equal_parts_of_bytes():
    def build():
        x = keras.Input((WIDTH,))
        return quantize(keras.Model(x, L.Dense(7)(x)), "int4")

    strategy = ktd.TPUStrategy(BY_TWO, Planner("tensor_parallel", min_size=1))
    rows = strategy.explain(built(build, strategy)).rows
    (kernel,) = [row for row in rows if row.path.endswith("kernel")]
    assert kernel.shape == (WIDTH, 4)
    assert kernel.axes == ("model", None)


@pytest.mark.parametrize("mode", MODES)
def test_factors_of_lora_lie_as_the_dimensions_of_the_kernel(mode):
    found = layouts("multi-head", mode, lora=True)
    assert found["query/lora_kernel_a"] == (None, "model", None)
    assert not any(found["query/lora_kernel_b"])
    assert found["attention_output/lora_kernel_a"] == ("model", None, None)
    assert not any(found["attention_output/lora_kernel_b"])


def sent_by(name, mode):
    """What a step of a quantized model sends over "model"."""
    strategy = strategy_of(BY_TWO)

    def build():
        # Something trains before it, so that there are gradients of its inputs.
        inner = quantized(name, mode)()
        x = keras.Input((TIME, WIDTH))
        return keras.Model(x, inner(L.LayerNormalization()(x)))

    model = built(compiled(build, "sgd"), strategy)
    return sent(program(model, strategy, X[:8], Y[:8]), BY_TWO, "model")


@slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "int8"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in FUSED])
def test_sums_alone_are_sent(name, mode):
    found = sent_by(name, mode)
    sums = SUMS.get(name, 2)
    assert found["all-reduce", "forward"] == sums, found
    assert found["all-reduce", "backward"] == sums, found
    assert set(found) == {("all-reduce", "forward"), ("all-reduce", "backward")}, found


@slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "int8"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_are_sent_and_nothing_gathered(name, mode):
    found = sent_by(name, mode)
    sums = 1 if name in ("halved", "gated") else 2
    assert found == {
        ("all-reduce", "forward"): sums,
        ("all-reduce", "backward"): sums,
        # The kernel of bytes, its scales and zero points. They have no gradients.
        ("all-to-all", "forward"): 3 if mode == "int4" else 1,
        # The gradient of the bias.
        ("all-gather", "backward"): 1,
    }


def results(strategy, name, mode, lora):
    def build():
        inner = quantized(name, mode, lora)()
        x = keras.Input((TIME, WIDTH))
        model = keras.Model(x, inner(L.Dense(WIDTH)(x)))
        model.compile("sgd", "mse")
        return model

    model = built(build, strategy)
    history = model.fit(X, Y, batch_size=13, epochs=2, shuffle=False, verbose=0).history
    assert math.isfinite(history["loss"][-1])
    return [history["loss"], model.predict(X[:5], verbose=0), model.get_weights()]


QUICK = (("grouped", "int4", 0), ("in a row", "int4", 0))


def every_case():
    """Every model, mode and mesh; two are fast."""
    for case in itertools.product(MODELS, MODES, range(len(MESHES))):
        name, mode, mesh = case
        marks = () if case in QUICK else slow
        words = "_".join(MESHES[mesh])
        yield pytest.param(name, mode, MESHES[mesh], marks=marks, id=f"{name}-{mode}-{words}")


@functools.cache
def on_one_device(name, mode, lora):
    return results(None, name, mode, lora)


@pytest.mark.parametrize(("name", "mode", "mesh"), list(every_case()))
def test_equal_to_one_device(name, mode, mesh):
    lora = name in ("multi-head", "by hand, einsum")
    assert_close(results(strategy_of(mesh), name, mode, lora), on_one_device(name, mode, lora))


@slow
def test_stored_in_parts_over_the_data_axes_too():
    expected = results(None, "multi-head", "int4", True)
    strategy = ktd.TPUStrategy(BY_TWO, Planner("auto", min_size=64, memory_bytes=1))
    assert_close(results(strategy, "multi-head", "int4", True), expected)
