"""Attention against float64, the seam into Keras, and what stock Keras computes instead."""

import dataclasses
import functools
import logging
import math
import pathlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from helpers import loaded
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from keras_tpu_dist import TPUStrategy, _keras, attention
from keras_tpu_dist.attention import dispatch, kernel
from keras_tpu_dist.hardware.chips import CHIPS

# Keras 3.16 has it elsewhere.
NN = getattr(keras.src.backend, "nn", None) or keras.src.backend.ops.nn
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
SEQUENCES = {"data": 2, "sequence": 2, "model": 2}


def reference(query, key, value, g, *, bias=None, mask=None, scale=None, causal=False, cap=None):
    """Output and gradients of `sum(output * g)` in float64, by the textbook formulas."""
    q, k, v, g = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (query, key, value, g))
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, groups, axis=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    raw = np.einsum("bnth,bnsh->bnts", q, k) * scale
    logits = raw if cap is None else cap * np.tanh(raw / cap)
    logits = logits if bias is None else logits + np.asarray(bias, np.float64)
    visible = np.ones(logits.shape, bool) if mask is None else np.broadcast_to(mask, logits.shape)
    if causal:
        visible = visible & np.tril(np.ones(logits.shape[2:], bool))
    # A row that sees nothing weighs all keys alike, as in Keras and JAX.
    logits = np.where(visible, logits, -1e30)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("bnth,bnsh->bnts", g, v)
    d_logits = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) * visible
    d_raw = d_logits if cap is None else d_logits * (1 - np.tanh(raw / cap) ** 2)
    d_q = np.einsum("bnts,bnsh->bnth", d_raw, k) * scale
    d_k = np.einsum("bnts,bnth->bnsh", d_raw, q) * scale
    d_v = np.einsum("bnts,bnth->bnsh", weights, g)
    d_k, d_v = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2) for x in (d_k, d_v))
    output = np.einsum("bnts,bnsh->bnth", weights, v)
    result = [x.transpose(0, 2, 1, 3) for x in (output, d_q, d_k, d_v)]
    return [*result, d_logits] if bias is not None else result


@dataclasses.dataclass(frozen=True)
class Case:
    mask: str = "none"
    time: int = 100
    source: int | None = None
    batch: int = 4
    heads: int = 4
    kv_heads: int = 4
    value_width: int = 16
    scale: float | None = None
    causal: bool = False
    cap: float | None = None
    bias: bool = False
    dtype: str = "float32"

    def __str__(self):
        changed = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        return "-".join(f"{k}={v}" for k, v in changed.items()) or "plain"


# Sampled from (mask kind, causal, grouped heads, scale, lengths, batch) so that every two values
# that interact meet: 520 is cut into 2 x 2 blocks, 5 rows do not divide 4 devices, 1 and 2 key
# heads are replicated and split over 2 devices, 3 heads cannot be split.
CASES = [
    Case(time=128),
    Case(time=520, causal=True, kv_heads=2),
    Case(time=100, source=520, kv_heads=1, scale=0.4),
    Case(time=520, source=100, causal=True, batch=5, value_width=24),
    Case("keys", time=520, heads=3, kv_heads=3),
    Case("keys", time=100, causal=True, kv_heads=2, batch=5),
    Case("queries", time=200, kv_heads=1, scale=0.4, heads=6),
    Case("keys per head", time=520, kv_heads=2),
    Case("keys per head", time=100, source=200, causal=True, batch=5),
    Case("keys per head of all rows", time=128, causal=True),
    Case("queries per head", time=100, kv_heads=2, causal=True),
    Case("dense", time=520, kv_heads=2, batch=5),
    Case("dense", time=100, source=200, causal=True, scale=0.4),
    Case("dense per head", time=128, kv_heads=1),
    Case("shared", time=520, causal=True, cap=2.0),
    Case(time=100, causal=True, cap=2.0, bias=True, kv_heads=2),
    Case("dense", time=128, bias=True, scale=0.4, value_width=8),
    Case("keys", time=200, causal=True, kv_heads=1, dtype="bfloat16"),
    Case("dense", time=100, kv_heads=2, cap=2.0, dtype="bfloat16"),
    Case("dense", time=100, bias=True, kv_heads=2, dtype="bfloat16"),
]


def inputs(case, seed=0):
    rng = np.random.default_rng(seed)
    source = case.source or case.time

    def normal(*shape):
        return np.asarray(jnp.asarray(rng.normal(size=shape), case.dtype))

    arrays = (
        normal(case.batch, case.time, case.heads, 16),
        normal(case.batch, source, case.kv_heads, 16),
        normal(case.batch, source, case.kv_heads, case.value_width),
    )
    g = normal(case.batch, case.time, case.heads, case.value_width)
    bias = normal(1, case.heads, case.time, source) if case.bias else None
    shape = {
        "none": None,
        "keys": (case.batch, 1, 1, source),
        "queries": (case.batch, 1, case.time, 1),
        "keys per head": (case.batch, case.heads, 1, source),
        "keys per head of all rows": (1, case.heads, 1, source),
        "queries per head": (case.batch, case.heads, case.time, 1),
        "dense": (case.batch, 1, case.time, source),
        "dense per head": (case.batch, case.heads, case.time, source),
        "shared": (1, 1, case.time, source),
    }[case.mask]
    mask = None if shape is None else rng.random(shape) > 0.3
    if mask is not None and shape[0] > 1:
        mask[0] = False  # rows that see nothing
        mask[1, ..., : shape[3] // 2] = False  # left padding; whole blocks empty
        mask[2, :, : shape[2] // 2] = False
    return arrays, g, bias, mask


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.mark.slow
@pytest.mark.parametrize("time_axis", [None, "sequence"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_float64(case, time_axis, mesh, caplog):
    if time_axis is not None:
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(SEQUENCES))
    (q, k, v), g, bias, mask = inputs(case)

    @jax.jit
    def ours(q, k, v, bias):
        def loss(q, k, v, bias):
            output = attention.dot_product_attention(
                q, k, v,
                bias=bias,
                mask=mask,
                scale=case.scale,
                is_causal=case.causal,
                attn_logits_soft_cap=case.cap,
                mesh=mesh,
                data_axes=("data",),
                time_axis=time_axis,
                platform="tpu",
                interpret=True,
            )  # fmt: skip
            return jnp.sum(output.astype(jnp.float32) * g), output

        wrt = (0, 1, 2, 3) if case.bias else (0, 1, 2)
        (_, output), grads = jax.value_and_grad(loss, wrt, has_aux=True)(q, k, v, bias)
        return output, *grads

    got = ours(q, k, v, bias)
    want = reference(
        q, k, v, g, bias=bias, mask=mask, scale=case.scale, causal=case.causal, cap=case.cap
    )
    if case.bias:
        want[4] = want[4].sum(0, keepdims=True)
        assert "the kernel has no bias" in caplog.text
    else:
        assert not caplog.records
    tolerance = TOLERANCE[case.dtype]
    for name, x, y in zip(("output", "query", "key", "value", "bias"), got, want):
        assert x.dtype == case.dtype
        # Relative to the array's own scale: a gradient sums over hundreds of rows.
        scale = max(1.0, np.abs(y).max())
        error = np.abs(np.asarray(x, np.float64) - y).max() / scale
        assert error < tolerance, (name, error)


def test_each_device_gets_only_the_key_heads_it_needs(mesh, monkeypatch):
    shapes = []

    def local(q, k, v, mask, **options):
        shapes.append((q.shape, k.shape, v.shape))
        return q

    monkeypatch.setattr(kernel, "flash_attention", local)
    q, k = jnp.zeros((3, 8, 4, 16)), jnp.zeros((3, 8, 1, 16))
    attention.dot_product_attention(
        *(q, k, k), mesh=mesh, data_axes=("data",), platform="tpu", flash_attention=True
    )
    assert shapes[0] == ((1, 8, 2, 16), (1, 8, 1, 16), (1, 8, 1, 16))


@pytest.mark.slow
def test_inside_a_mapped_function(mesh):
    """As under `strategy.run`, which has already split the batch."""
    case = Case("keys", causal=True)
    (q, k, v), _, _, mask = inputs(case)
    options = {
        "mesh": mesh,
        "data_axes": ("data",),
        "is_causal": True,
        "platform": "tpu",
        "interpret": True,
    }
    want = attention.dot_product_attention(q, k, v, mask=mask, **options)
    for axes in ({"data"}, {"data", "model"}):
        mapped = jax.shard_map(
            lambda q, k, v, m: attention.dot_product_attention(q, k, v, mask=m, **options),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names=axes,
            check_vma=False,
        )
        np.testing.assert_allclose(jax.jit(mapped)(q, k, v, mask), want, atol=1e-5)


@pytest.fixture
def pretend_tpu(monkeypatch):
    """Takes the TPU path on simulated devices, the kernel in interpret mode."""
    monkeypatch.setattr(dispatch, "_platform", lambda mesh: "tpu")
    interpreted = functools.partial(dispatch.dot_product_attention, interpret=True)
    monkeypatch.setattr(dispatch, "dot_product_attention", interpreted)
    # Short sequences take the kernel here too, so that small arrays show how it is called.
    monkeypatch.setattr(dispatch, "_FEWEST_ELSEWHERE", 0)
    monkeypatch.setattr(dispatch, "_BLOCK", 0)
    calls, flash = [], kernel.flash_attention

    def counted(query, key, *args, **options):
        calls.append((*query.shape, key.shape[2]))
        return flash(query, key, *args, **options)

    monkeypatch.setattr(kernel, "flash_attention", counted)
    return calls


def small_transformer(time=72):
    tokens = keras.Input((time,), dtype="int32")
    x = keras.layers.Embedding(11, 16, mask_zero=True)(tokens)
    x = keras.layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    y = keras.layers.GroupQueryAttention(8, 4, 2, sliding_window=9)(x, x)
    return keras.Model(tokens, y)


def loss_and_gradients(model, tokens):
    def loss(trainable):
        y, _ = model.stateless_call(trainable, model.non_trainable_variables, tokens)
        return jnp.mean(jnp.sin(y)), y

    values = [jnp.asarray(np.asarray(v)) for v in model.trainable_variables]
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(values)


def padded_tokens(time=72):
    tokens = np.random.default_rng(1).integers(1, 11, (5, time)).astype("int32")
    tokens[:, -9:] = 0
    tokens[2] = 0
    return tokens


# 5 rows on 4 or 2 devices, 72 queries on 1 or 2, 2 and 4 heads on 2, of 2 and 2 keys.
SHARES = (
    ({"data": 4, "model": 2}, [(2, 72, 1, 8, 1), (2, 72, 2, 8, 1)]),
    (SEQUENCES, [(3, 36, 1, 8, 1), (3, 36, 2, 8, 1)]),
)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "shares"), SHARES, ids=str)
@pytest.mark.filterwarnings("ignore:Layer .* does not support masking")  # Keras's grouped layer
def test_layers_under_a_strategy_equal_stock(mesh, shares, pretend_tpu):
    model, tokens = small_transformer(), padded_tokens()
    want = loss_and_gradients(model, tokens)
    assert not pretend_tpu
    with TPUStrategy(mesh).scope():
        got = loss_and_gradients(model, tokens)
    assert pretend_tpu == shares
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got, want)


def test_disable_and_enable_flash_attention(mesh, pretend_tpu):
    x = jax.ShapeDtypeStruct((8, 128, 16), "float32")

    def kernels():
        layer = keras.layers.MultiHeadAttention(2, 8)
        layer.build(x.shape, x.shape)
        pretend_tpu.clear()
        with TPUStrategy(mesh).scope():
            jax.eval_shape(lambda x: layer(x, x), x)
            jax.eval_shape(lambda x: keras.ops.dot_product_attention(x, x, x), x.update(
                shape=(8, 128, 2, 8)
            ))  # fmt: skip
        return len(pretend_tpu)

    assert kernels() == 2
    keras.config.disable_flash_attention()
    try:
        assert kernels() == 0
    finally:
        keras.config.enable_flash_attention()
    assert kernels() == 2


def test_dropout_and_scores_keep_keras_own_path(mesh, pretend_tpu):
    x = np.random.default_rng(0).normal(size=(8, 128, 16)).astype("float32")
    layer = keras.layers.MultiHeadAttention(2, 8, dropout=0.5, seed=3)
    want, scores = layer(x, x, return_attention_scores=True)
    with TPUStrategy(mesh).scope():
        jax.eval_shape(lambda x: layer(x, x, training=True), x)
        got = layer(x, x, training=False)
    assert not pretend_tpu
    assert scores.shape == (8, 2, 128, 128)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_stock_untouched_without_our_strategy(mesh, pretend_tpu, monkeypatch):
    TPUStrategy()  # the first one replaces it
    stock = NN.dot_product_attention.__wrapped__
    is_new = not keras.__version__.startswith("3.15.")
    assert stock.__module__ == f"keras.src.backend.jax.{'ops.' if is_new else ''}nn"
    calls = []

    def recorded(stock, *args, **options):
        calls.append(options)
        return stock(*args, **options)

    x = jnp.ones((8, 128, 2, 8))
    for strategy in (None, keras.distribution.DataParallel()):
        keras.distribution.set_distribution(strategy)
        got = dispatch._under_strategy(functools.partial(recorded, stock), x, x, x, is_causal=True)
        np.testing.assert_array_equal(got, stock(x, x, x, is_causal=True))
    assert all(tuple(call) == _keras.ATTENTION_OPTIONS for call in calls)
    assert [{k for k, v in call.items() if v} for call in calls] == [{"is_causal"}] * 2
    keras.distribution.set_distribution(TPUStrategy(mesh))
    monkeypatch.setattr(dispatch, "_platform", lambda mesh: "cpu")
    dispatch._under_strategy(functools.partial(recorded, stock), x, x, x)
    assert len(calls) == 3


def test_stock_on_tpu_is_causal_unscaled_and_drops_the_bias(monkeypatch):
    """Fails when Keras mends its TPU path: then the seam may step aside."""
    nn = NN
    stock = getattr(nn.dot_product_attention, "__wrapped__", nn.dot_product_attention)
    case = Case(time=128, batch=2, bias=True)
    (q, k, v), g, bias, _ = inputs(case)
    make = nn.splash_attention_kernel.make_splash_mha
    interpreted = functools.partial(make, interpret=True)
    monkeypatch.setattr(nn.splash_attention_kernel, "make_splash_mha", interpreted)
    tpu = type("Device", (), {"platform": "tpu"})()
    monkeypatch.setattr(nn.jax, "devices", lambda *args: [tpu])
    got = np.asarray(stock(q, k, v, bias=bias))
    monkeypatch.undo()
    asked = reference(q, k, v, g, bias=bias)[0]
    computed = reference(q, k, v, g, scale=1.0, causal=True)[0]
    np.testing.assert_allclose(got, computed, atol=2e-5)
    assert np.abs(got - asked).max() > 1


OPTIONS = {"data_axes": ("data",), "platform": "tpu", "interpret": True}


def test_flash_attention_true_is_an_order(mesh):
    x = jnp.ones((2, 8, 2, 4), "float16")
    with pytest.raises(ValueError, match="float32 or bfloat16, not float16") as error:
        attention.dot_product_attention(x, x, x, flash_attention=True, mesh=mesh, **OPTIONS)
    assert "Leave flash_attention=None" in str(error.value)
    with pytest.raises(ValueError, match="of platform 'cpu', not 'tpu'"):
        attention.dot_product_attention(
            x, x, x, flash_attention=True, mesh=mesh, data_axes=("data",)
        )


@pytest.mark.parametrize(
    ("time", "source", "chips", "width", "masked"),
    [
        (196, 196, "", 64, False),
        (255, 256, "", 64, False),
        (256, 256, "v5e", 64, False),
        (256, 256, "", 64, True),
        (256, 256, "v5e", 128, True),
        (196, 196, "", 128, False),
        (384, 384, "v4 v5e v5p v6e", 64, False),
        (384, 384, "v4 v5e v5p v6e", 64, True),
        (512, 512, "v4 v5e v5p v6e tpu7x", 64, False),
        (4096, 77, "", 64, False),
        (4096, 200, "v4 v5e v5p v6e tpu7x", 64, False),
        (1, 100_000, "", 64, False),
        (200, 4096, "v4 v5e v5p v6e tpu7x", 64, False),
    ],
)
def test_short_sequences_are_left_to_xla(time, source, chips, width, masked):
    """As the compiler's schedules say (`python benchmarks/attention.py --short`)."""
    query, key = (jax.ShapeDtypeStruct((1, n, 2, width), "float32") for n in (time, source))
    mask = jax.ShapeDtypeStruct((1, 1, 1, source), "bool") if masked else None
    found = []
    for name in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        device = type("Chip", (), {"device_kind": CHIPS[name].device_kind})()
        mesh = type("Mesh", (), {"devices": np.array([device])})()
        if dispatch._why_wasteful(query, key, mask, mesh) is None:
            found.append(name)
    assert found == chips.split()


def test_old_chips_and_short_sequences_take_xla(mesh, caplog):
    caplog.set_level(logging.INFO, "keras_tpu_dist")
    x = jnp.ones((4, 8, 2, 4))
    for _ in range(2):
        attention.dot_product_attention(x, x, x, mesh=mesh, **OPTIONS)
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "of 8 queries and 8 keys XLA computes it in fewer cycles" in caplog.text
    chip = type("Chip", (), {"device_kind": "TPU v3", "platform": "tpu"})()
    old = type("Mesh", (), {"devices": np.array([chip])})()
    assert "TPU v4 or later, these are TPU v3" in dispatch._why_not_kernel(x, x, None, old, None)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((8, 2, 4), (2, 8, 2, 4), (2, 8, 2, 4)), "rank 4"),
        (((2, 8, 3, 4), (2, 8, 2, 4), (2, 8, 2, 4)), "key heads must divide"),
        (((2, 8, 2, 4), (2, 8, 2, 4), (2, 9, 2, 4)), "key and value in length"),
    ],
)
def test_shapes_that_do_not_fit(mesh, shapes, words):
    with pytest.raises(ValueError, match=words) as error:
        attention.dot_product_attention(*map(jnp.zeros, shapes), mesh=mesh, **OPTIONS)
    assert "query.shape=" in str(error.value)


def test_masks_of_lower_rank(mesh):
    shape = (3, 2, 8, 9)
    assert dispatch._rank4("mask", np.ones((8, 9)), shape).shape == (1, 1, 8, 9)
    assert dispatch._rank4("mask", np.ones((2, 1, 9)), shape).shape == (1, 2, 1, 9)
    assert dispatch._rank4("mask", np.ones((3, 8, 9)), shape).shape == (3, 1, 8, 9)
    with pytest.raises(ValueError, match=r"bias must be broadcastable to .*\(3, 2, 8, 9\)"):
        dispatch._rank4("bias", np.ones((3, 4, 8, 9)), shape)


@pytest.mark.slow
def test_the_example_trains_as_on_one_device(monkeypatch, capsys):
    path = pathlib.Path(__file__).parents[2] / "examples" / "char_transformer.py"
    example = loaded(path, "char_transformer")
    monkeypatch.setattr(example, "STEPS", 3)
    monkeypatch.setattr(example, "CONTEXT", 32)
    codes = example.corpus(20_000)
    (alone,) = example.train(example.language_model(), codes, 1)
    with TPUStrategy({"data": 4, "model": 2}, example.LAYOUT).scope():
        model = example.language_model()
    (together,) = example.train(model, codes, 1)
    assert alone < np.log(example.VOCABULARY)
    assert abs(alone - together) < 1e-5
    split = [v.path for v in model.trainable_variables if "model" in v.value.sharding.spec]
    assert len(split) == 2 * (3 * 2 + 1 + 2 + 1)


@pytest.mark.parametrize("length", [1, 100, 128, 129, 520, 1000, 1024, 1408, 4096, 5000])
def test_tiling_covers_and_divides(length):
    tiling = kernel.tiling(length)
    assert tiling.padded >= length
    assert tiling.padded % tiling.block == tiling.block % 128 == 0
    assert tiling.padded <= max(1.5 * length, -(-length // 128) * 128)
