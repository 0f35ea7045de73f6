"""Operations of a model by its formula, and whose weight each product reads."""

import jax
import jax.numpy as jnp
import keras
import pytest
from compile_only import lower
from jax import lax
from jax.experimental.pallas import pallas_call

import keras_tpu_dist as ktd
from benchmarks import frozen
from keras_tpu_dist.programs.products import Lookup, lookups_of, operations, products_of
from keras_tpu_dist.tools.dryrun.build import Subject, described

L = keras.layers
ROWS, TIME, WIDTH, VOCABULARY = 8, 32, 64, 100


def compiled(model, loss="mse"):
    model.compile("adam", loss)
    return model


def dense():
    model = keras.Sequential([keras.Input((64,)), L.Dense(256, "relu"), L.Dense(10)])
    return compiled(model), ROWS * (64 * 256 + 256 * 10), 0


def decoder():
    tokens = keras.Input((TIME,), dtype="int32")
    x = L.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(3):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
        x = x + L.Dense(WIDTH)(L.Dense(4 * WIDTH, "gelu")(x))
    model = keras.Model(tokens, L.Dense(VOCABULARY)(x))
    weights = 3 * 12 * WIDTH * WIDTH + WIDTH * VOCABULARY
    # Queries with keys, and weights with values: all of them, although the mask is causal.
    attention = 3 * 2 * TIME * TIME * WIDTH
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(model, loss), ROWS * (TIME * weights + attention), ROWS * attention / 2


def lstm():
    model = keras.Sequential([keras.Input((20, 16)), L.LSTM(32), L.Dense(10)])
    return compiled(model), ROWS * (20 * (16 + 32) * 4 * 32 + 32 * 10), 0


def scanned_lstm():
    model = keras.Sequential([keras.Input((20, 16)), ktd.layers.LSTM(32), L.Dense(10)])
    return compiled(model), ROWS * (20 * (16 + 32) * 4 * 32 + 32 * 10), 0


def convolutions():
    layers = [
        L.Conv2D(8, 3, padding="same"),
        L.DepthwiseConv2D(3, padding="same"),
        L.Conv2D(16, 3, strides=2, padding="same", groups=2),
        L.Flatten(),
        L.Dense(10),
    ]
    model = keras.Sequential([keras.Input((16, 16, 3)), *layers])
    pixels = 256 * (27 * 8 + 9 * 8) + 64 * 9 * 4 * 16
    return compiled(model), ROWS * (pixels + 64 * 16 * 10), 0


@pytest.mark.parametrize(
    "make", [dense, pytest.param(decoder, marks=pytest.mark.slow), lstm, scanned_lstm, convolutions]
)
@pytest.mark.parametrize("remat", [None, "full"])
def test_operations_are_those_of_the_formula(make, remat):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel", remat=remat)
    _, expected, hidden = make()
    for mode, times in (("train", 3), ("predict", 1)):
        lowered = lower(lambda: make()[0], strategy, batch_size=ROWS, mode=mode, platform="cpu")
        assert lowered.model_flops == 2 * times * expected
        assert lowered.hidden_flops == 2 * times * hidden


def test_each_product_knows_its_weight():
    strategy = ktd.TPUStrategy()
    with described(Subject(lambda: decoder()[0], strategy, ROWS), []) as (model, batch):
        from keras_tpu_dist.training.flops import forward_pass

        forward, arguments = forward_pass(model, batch, training=True)
        trace = jax.make_jaxpr(forward)(*arguments)
        products = products_of(trace, len(arguments[0]))
        read = [model.trainable_variables[p.weight].path for p in products if p.weight is not None]
    kernels = [v.path for v in model.trainable_variables if v.path.endswith("kernel")]
    assert sorted(read) == sorted(kernels)
    by_path = dict(zip(read, (p for p in products if p.weight is not None)))
    query = next(p for path, p in by_path.items() if path.endswith("query/kernel"))
    output = next(p for path, p in by_path.items() if path.endswith("attention_output/kernel"))
    assert (query.contracted, output.contracted) == ({0}, {0, 1})
    assert query.read_bytes == 4 * ROWS * TIME * WIDTH


def test_weights_through_reshapes_casts_calls_and_branches():
    def forward(w, x):
        w = w.astype("bfloat16").reshape(4, 2, 6).transpose(2, 0, 1)  # (6, 4, 2) of (8, 6)

        @jax.jit
        def called(w, x):
            return jnp.einsum("nij,bij->bn", w, x)

        y = called(w, x.astype("bfloat16"))
        big = jnp.ones((6, 1000), "bfloat16")
        return lax.cond(x[0, 0, 0] > 0, lambda: (y @ big).sum(), lambda: y.sum())

    w, x = jax.ShapeDtypeStruct((8, 6), "float32"), jax.ShapeDtypeStruct((5, 4, 2), "float32")
    products = products_of(jax.make_jaxpr(forward)(w, x), 1)
    assert products[0].weight == 0
    assert products[0].contracted == {0}
    assert products[0].weight_bytes == 2 * 48
    assert operations(products) == 2 * 5 * (48 + 6000)


def test_places_between_which_zeros_are_put_cost_nothing():
    def product(shape, **how):
        x, kernel = jnp.zeros(shape), jnp.zeros((3, 3, 16, 16))
        call = jax.make_jaxpr(lambda k: lax.conv_transpose(x, k, (2, 2), "SAME", **how))(kernel)
        return operations(products_of(call, 1))

    # Each value of the input meets each place of the window once.
    assert product((1, 8, 8, 16)) == 2 * 8 * 8 * 16 * 9 * 16

    def strided(kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jnp.zeros((1, 8, 8, 16))
        return lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)

    kernel = jnp.zeros((3, 3, 16, 16))
    back = jax.make_jaxpr(lambda k: jax.vjp(strided, k)[1](jnp.zeros((1, 4, 4, 16))))(kernel)
    assert operations(products_of(back, 1)) == 2 * (2 * 4 * 4 * 16 * 9 * 16)


def test_the_body_of_a_while_loop_counts_once():
    def loop(weight, x):
        return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c @ weight, x)

    found = products_of(jax.make_jaxpr(loop)(jnp.zeros((8, 8)), jnp.zeros((4, 8))), 1)
    assert [(p.flops, p.weight, p.times) for p in found] == [(2 * 4 * 8 * 8, 0, 1)]


def test_look_ups_and_windows():
    def forward(table, kernel, ids, image):
        rows = jnp.take(table.astype("bfloat16"), ids, axis=0)
        return rows, lax.conv(image, kernel, (1, 1), "SAME"), jnp.take(image, ids[0], axis=0)

    shapes = (((100, 8), "float32"), ((4, 3, 5, 5), "float32"), ((6, 2), "int32"))
    arguments = [jax.ShapeDtypeStruct(*s) for s in (*shapes, ((7, 3, 9, 9), "float32"))]
    trace = jax.make_jaxpr(forward)(*arguments)
    assert lookups_of(trace, 2) == (Lookup(weight=0, taken_bytes=2 * 6 * 2 * 8, ids=2 * 6),)
    (product,) = products_of(trace, 2)
    assert (product.weight, product.taps) == (1, 25)


@pytest.mark.parametrize("name", frozen.MODELS)
def test_a_model_with_frozen_parts_needs_what_its_step_executes(name):
    counted, thrice, executed, everything = frozen.counted(frozen.MODELS[name])
    assert counted == executed
    assert (counted < thrice) == ("all" not in name and "embedding" not in name)
    assert counted < everything < 1.25 * counted


def test_what_remat_computes_again_is_not_counted():
    make = frozen.MODELS["a frozen middle"]
    plain = frozen.counted(make)
    counted, _, executed, _ = frozen.counted(make, {"up_*": "full", "attention_*": "full"})
    assert counted == plain[0] < executed


def passes(function, *arrays, trained=1):
    """How often a step computes each product of a function whose first arrays are trained."""
    trace = jax.make_jaxpr(function)(*arrays)
    return [p.passes for p in products_of(trace, 0, trained)]


def test_gradients_flow_through_every_kind_of_call():
    w, x = jnp.ones((4, 4)), jnp.ones((4, 4))

    def in_scan(w, x):
        # The first round has a carry without gradients; the others have one.
        return jax.lax.scan(lambda h, _: ((h @ x) @ w, None), x, None, length=3)[0]

    def in_branch(w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda a: (a @ x) @ w, lambda a: a, x) @ x

    def in_loop(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, h: h @ w, x) @ x

    assert passes(lambda w, x: (x @ x) @ w @ x, w, x) == [1, 2, 2]
    assert passes(in_scan, w, x) == [2, 3]
    assert passes(jax.checkpoint(in_scan), w, x) == [2, 3]
    assert passes(jax.jit(in_branch), w, x) == [1, 2, 2]
    assert passes(in_loop, w, x) == [3, 2]
    assert passes(lambda w, x: jax.nn.relu(x @ w) @ x, w, x) == [2, 2]
    assert passes(lambda w, x: jax.lax.stop_gradient(x @ w) @ x, w, x) == [2, 1]
    assert passes(lambda w, x: jnp.argmax(w, 0) @ x, w, x) == [1]
    assert passes(lambda w, x: x @ w, w, x, trained=0) == [1]


def test_a_product_of_integers_with_a_rule_for_gradients_hands_them_on():
    @jax.custom_vjp
    def quantized(x, kernel):
        return jnp.dot(x.astype("int8"), kernel, preferred_element_type="int32").astype("float32")

    quantized.defvjp(lambda x, k: (quantized(x, k), k), lambda k, g: (g @ k.T, None))
    kernel = jnp.ones((4, 4), "int8")
    found = passes(lambda w, x: quantized(x @ w, kernel) @ x, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert found == [2, 2, 2]


def test_gradients_pass_a_kernel_written_by_hand():
    def copied(source, target):
        target[...] = source[...]

    def forward(trained, frozen, x):
        h = x @ trained
        h = pallas_call(copied, out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype))(h)
        return h @ frozen

    weights = jnp.ones((8, 8)), jnp.ones((8, 8))
    traced = jax.make_jaxpr(forward)(*weights, jnp.ones((4, 8)))
    # The second product's input needs a gradient, and its kernel none.
    assert [p.passes for p in products_of(traced, 2, 1)] == [2, 2]
    assert [p.passes for p in products_of(traced, 2, 2)] == [2, 3]
