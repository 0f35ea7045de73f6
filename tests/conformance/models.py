"""Models as people build them, small.

Weights are drawn from Keras's global generator: call `keras.utils.set_random_seed` before
`build`. Language models take ids (rows, steps) and give logits for every step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import keras
import numpy as np
from keras import layers as kl
from keras import ops

WIDTH, HEADS, KV_HEADS, STEPS, VOCAB, EXPERTS, BLOCKS = 16, 4, 2, 8, 32, 4, 2
HEAD = WIDTH // HEADS
CLASSES = 8


@dataclass(frozen=True)
class ModelCase:
    """A model, its data, and its loss."""

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[int, np.random.Generator], tuple]
    loss: Callable[[], keras.losses.Loss]


register = keras.saving.register_keras_serializable("conformance")
crossentropy = partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
norm = partial(kl.LayerNormalization, epsilon=1e-5)
rms = partial(kl.RMSNormalization, epsilon=1e-6)


# Layers of their own, as models have them.


@register
class PositionEmbedding(keras.Layer):
    """Adds one learned vector for each position, held as a plain weight."""

    def build(self, shape):
        self.table = self.add_weight(
            shape=shape[1:], initializer="glorot_uniform", name="position_embeddings"
        )

    def call(self, x):
        return x + self.table


@register
class ClassToken(keras.Layer):
    """Puts one learned vector before the others."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]), initializer="normal", name="token")

    def call(self, x):
        rows = ops.shape(x)[0]
        return ops.concatenate([ops.tile(self.token, (rows, 1, 1)), x], axis=1)

    def compute_output_shape(self, shape):
        return (shape[0], shape[1] + 1, shape[2])


@register
class Rotary(keras.Layer):
    """Rotates pairs of halves of every head's features by angles that grow with the position."""

    def call(self, x):
        steps, half = x.shape[1], x.shape[-1] // 2
        rates = 10000.0 ** (-np.arange(half) / half)
        angles = (np.arange(steps)[:, None] * rates).astype("float32")[None, :, None]
        a, b = ops.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return ops.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def compute_output_shape(self, shape):
        return shape


@register
class RotaryAttention(keras.Layer):
    """Causal attention with rotated queries and keys, and fewer keys than queries."""

    def build(self, shape):
        self.query = kl.EinsumDense("btd,dhk->bthk", (None, HEADS, HEAD), name="query")
        self.key = kl.EinsumDense("btd,dhk->bthk", (None, KV_HEADS, HEAD), name="key")
        self.value = kl.EinsumDense("btd,dhk->bthk", (None, KV_HEADS, HEAD), name="value")
        self.output_dense = kl.EinsumDense("bthk,hkd->btd", (None, shape[-1]), name="output")
        self.rotary = Rotary()
        for layer in self.query, self.key, self.value:
            layer.build(shape)
        self.output_dense.build((*shape[:-1], HEADS, HEAD))

    def call(self, x):
        q, k = self.rotary(self.query(x)), self.rotary(self.key(x))
        k, v = (ops.repeat(t, HEADS // KV_HEADS, axis=2) for t in (k, self.value(x)))
        scores = ops.einsum("bqhk,bvhk->bhqv", q, k) * HEAD**-0.5
        steps = x.shape[1]
        scores = ops.where(np.tri(steps, dtype=bool), scores, -1e9)
        return self.output_dense(ops.einsum("bhqv,bvhk->bqhk", ops.softmax(scores), v))

    def compute_output_shape(self, shape):
        return shape


@register
class Experts(keras.Layer):
    """A gate that gives every token to `top` of several experts, held as one weight each way.

    The loss of the balance of the gate is added with `add_loss`.
    """

    def __init__(self, experts=EXPERTS, units=2 * WIDTH, top=2, **kwargs):
        super().__init__(**kwargs)
        self.experts, self.units, self.top = experts, units, top

    def build(self, shape):
        n, d, units = self.experts, shape[-1], self.units
        self.gate = self.add_weight(shape=(d, n), initializer="glorot_uniform", name="gate")
        self.up = self.add_weight(shape=(n, d, units), initializer="glorot_uniform", name="up")
        self.down = self.add_weight(shape=(n, units, d), initializer="glorot_uniform", name="down")

    def call(self, x):
        shares = ops.softmax(x @ self.gate)
        best, chosen = ops.top_k(shares, self.top)
        best = best / ops.sum(best, axis=-1, keepdims=True)
        picked = ops.one_hot(chosen, self.experts, dtype=x.dtype)
        weights = ops.einsum("btk,btkn->btn", best, picked)
        load = ops.mean(ops.sum(picked, axis=2), axis=(0, 1))
        self.add_loss(0.01 * self.experts * ops.sum(load * ops.mean(shares, axis=(0, 1))))
        inner = ops.silu(ops.einsum("btd,ndf->btnf", x, self.up))
        return ops.einsum("btnf,nfd,btn->btd", inner, self.down, weights)

    def compute_output_shape(self, shape):
        return shape


@register
class RelativeAttention(keras.Layer):
    """T5's attention: no scaling, a bias for each distance and head; `memory` for another's."""

    def __init__(self, causal=False, biased=True, **kwargs):
        super().__init__(**kwargs)
        self.causal, self.biased = causal, biased

    def build(self, x_shape, memory_shape=None):
        d = x_shape[-1]
        weight = partial(self.add_weight, initializer="glorot_uniform")
        self.query = weight(shape=(d, HEADS, HEAD), name="query")
        self.key = weight(shape=(d, HEADS, HEAD), name="key")
        self.value = weight(shape=(d, HEADS, HEAD), name="value")
        self.output_kernel = weight(shape=(HEADS, HEAD, d), name="output")
        if self.biased:
            self.bias = kl.Embedding(2 * STEPS, HEADS, name="relative_bias")
            self.bias.build(None)

    def call(self, x, memory=None):
        memory = x if memory is None else memory
        q = ops.einsum("btd,dhk->bthk", x, self.query)
        k = ops.einsum("btd,dhk->bthk", memory, self.key)
        v = ops.einsum("btd,dhk->bthk", memory, self.value)
        scores = ops.einsum("bqhk,bvhk->bhqv", q, k)
        to, of = x.shape[1], memory.shape[1]
        if self.biased:
            distance = np.arange(of)[None] - np.arange(to)[:, None] + STEPS
            scores += ops.transpose(self.bias(distance.astype("int32")), (2, 0, 1))[None]
        if self.causal:
            scores = ops.where(np.tri(to, of, dtype=bool), scores, -1e9)
        mixed = ops.einsum("bhqv,bvhk->bqhk", ops.softmax(scores), v)
        return ops.einsum("bqhk,hkd->bqd", mixed, self.output_kernel)

    def compute_output_shape(self, x_shape, memory_shape=None):
        return x_shape


@register
class MeanOfBag(keras.Layer):
    """The mean of a bag's embeddings but for those of id 0."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x, mask=None):
        mask = ops.cast(mask, x.dtype)[..., None]
        return ops.sum(x * mask, axis=1) / ops.maximum(ops.sum(mask, axis=1), 1.0)

    def compute_output_shape(self, shape):
        return (shape[0], shape[2])

    def compute_mask(self, x, mask=None):
        return None


# Language models.


def mlp(x, activation="gelu", width=4 * WIDTH):
    return kl.Dense(x.shape[-1])(kl.Dense(width, activation)(x))


def swiglu(x):
    gate = kl.Dense(2 * WIDTH, "silu", use_bias=False)(x)
    return kl.Dense(WIDTH, use_bias=False)(gate * kl.Dense(2 * WIDTH, use_bias=False)(x))


def llama_like(rotary=False):
    """Untied head, RMSNormalization, grouped queries, SwiGLU."""
    inputs = keras.Input((STEPS,), dtype="int32")
    embedding = kl.ReversibleEmbedding(VOCAB, WIDTH, tie_weights=False, name="token_embedding")
    x = embedding(inputs)
    for _ in range(BLOCKS):
        y = rms()(x)
        if rotary:
            x = x + RotaryAttention()(y)
        else:
            attention = kl.GroupQueryAttention(HEAD, HEADS, KV_HEADS, use_bias=False)
            x = x + attention(y, y, use_causal_mask=True)
        x = x + swiglu(rms()(x))
    return keras.Model(inputs, embedding(rms()(x), reverse=True))


def gpt_like():
    """Tied head, learned positions, LayerNormalization before each part."""
    inputs = keras.Input((STEPS,), dtype="int32")
    embedding = kl.ReversibleEmbedding(VOCAB, WIDTH, name="token_embedding")
    x = PositionEmbedding()(embedding(inputs))
    for _ in range(BLOCKS):
        y = norm()(x)
        x = x + kl.MultiHeadAttention(HEADS, HEAD)(y, y, use_causal_mask=True)
        x = x + mlp(norm()(x))
    return keras.Model(inputs, embedding(norm()(x), reverse=True))


def moe_like():
    """A decoder with `Experts` instead of the dense part."""
    inputs = keras.Input((STEPS,), dtype="int32")
    x = PositionEmbedding()(kl.Embedding(VOCAB, WIDTH)(inputs))
    for _ in range(BLOCKS):
        y = rms()(x)
        x = x + kl.MultiHeadAttention(HEADS, HEAD)(y, y, use_causal_mask=True)
        x = x + Experts()(rms()(x))
    return keras.Model(inputs, kl.Dense(VOCAB)(rms()(x)))


def bert_like():
    """Tokens, segments and positions, a mask from ids of 0, a class from the first token."""
    tokens = keras.Input((STEPS,), dtype="int32", name="token_ids")
    segments = keras.Input((STEPS,), dtype="int32", name="segment_ids")
    real = ops.not_equal(tokens, 0)
    mask = ops.logical_and(ops.expand_dims(real, 1), ops.expand_dims(real, 2))
    x = kl.Embedding(VOCAB, WIDTH)(tokens) + kl.Embedding(2, WIDTH)(segments)
    x = norm()(PositionEmbedding()(x))
    for _ in range(BLOCKS):
        x = norm()(x + kl.MultiHeadAttention(HEADS, HEAD)(x, x, attention_mask=mask))
        x = norm()(x + mlp(x))
    pooled = kl.Dense(WIDTH, "tanh", name="pooled_dense")(x[:, 0])
    return keras.Model([tokens, segments], kl.Dense(CLASSES)(pooled))


def masked_like():
    """The mask of `mask_zero` through attention to an average over the steps and an LSTM."""
    inputs = keras.Input((STEPS,), dtype="int32")
    x = kl.Embedding(VOCAB, WIDTH, mask_zero=True)(inputs)
    x = norm()(x + kl.MultiHeadAttention(HEADS, HEAD)(x, x))
    mean = kl.GlobalAveragePooling1D()(x)
    last = kl.Bidirectional(kl.LSTM(WIDTH))(x)
    return keras.Model(inputs, kl.Dense(CLASSES)(kl.Concatenate()([mean, last])))


def t5_like():
    """An encoder and a decoder with one table of tokens, and relative positions."""
    source = keras.Input((STEPS,), dtype="int32", name="source")
    target = keras.Input((STEPS - 2,), dtype="int32", name="target")
    embedding = kl.ReversibleEmbedding(VOCAB, WIDTH, name="token_embedding")
    x = embedding(source)
    for _ in range(BLOCKS):
        x = x + RelativeAttention()(rms()(x))
        x = x + mlp(rms()(x), "relu")
    memory = rms()(x)
    x = embedding(target)
    for _ in range(BLOCKS):
        x = x + RelativeAttention(causal=True)(rms()(x))
        x = x + RelativeAttention(biased=False)(rms()(x), memory=memory)
        x = x + mlp(rms()(x), "relu")
    logits = embedding(rms()(x) * WIDTH**-0.5, reverse=True)
    return keras.Model([source, target], logits)


# Others.


def vit_like():
    """Patches by a convolution, a class token, positions, attention."""
    inputs = keras.Input((16, 16, 3))
    x = kl.Conv2D(WIDTH, 8, strides=8, name="patches")(inputs)
    x = PositionEmbedding()(ClassToken()(kl.Reshape((-1, WIDTH))(x)))
    for _ in range(BLOCKS):
        y = norm()(x)
        x = x + kl.MultiHeadAttention(HEADS, HEAD)(y, y)
        x = x + mlp(norm()(x))
    return keras.Model(inputs, kl.Dense(CLASSES)(norm()(x)[:, 0]))


def digits_lstm():
    """Rows of an image of 8x8 as steps."""
    return keras.Sequential([keras.Input((8, 8)), kl.LSTM(16), kl.Dense(CLASSES)])


def ranking():
    """Dot products of a user with an item and a history, and a network over all of them."""
    user, item, category = (
        keras.Input((), dtype="int32", name=name) for name in ("user", "item", "category")
    )
    history = keras.Input((6,), dtype="int32", name="history")
    price = keras.Input((4,), name="price")
    items = kl.Embedding(64, WIDTH, mask_zero=True, name="items")
    bag = MeanOfBag()(items(history))
    u = kl.Embedding(32, WIDTH, name="users")(user)
    i = kl.Embedding(64, WIDTH, name="targets")(item)
    c = kl.Embedding(16, 8, name="categories")(category)
    dots = [kl.Dot(1)([u, i]), kl.Dot(1, normalize=True)([bag, i])]
    x = kl.BatchNormalization()(kl.Concatenate()([u, i, c, bag, price, *dots]))
    x = kl.Dense(16, "relu")(kl.Dense(32, "relu")(x))
    return keras.Model([user, item, category, history, price], kl.Dense(1)(x))


def application(name, size, **kwargs):
    """An application without dropout, logits over 10 so that SGD(0.1) is stable.

    ConvNeXt's blocks count for 0.2 instead of 1e-6 at first, so that their gradients do.
    """

    def build():
        shape = (size, size, 3)
        cls = getattr(keras.applications, name)
        options = {"weights": None, "classes": CLASSES, "classifier_activation": None}
        model = cls(input_shape=shape, **options, **kwargs)
        for layer in model._flatten_layers():
            if isinstance(layer, kl.Dropout):
                layer.rate = 0.0
            if type(layer).__name__ == "LayerScale":
                layer.gamma.assign(ops.full(layer.gamma.shape, 0.2))
        return keras.Model(model.inputs, kl.Rescaling(0.1)(model.output))

    return build


# Data.


def next_ids(rows, rng):
    ids = rng.integers(1, VOCAB, (rows, STEPS + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


def labels(rows, rng, high=CLASSES):
    return rng.integers(0, high, rows).astype("int32")


def padded(rows, rng, steps=STEPS):
    """Ids, then zeros; at least one id."""
    mask = np.arange(steps) < rng.integers(1, steps + 1, (rows, 1))
    return (rng.integers(1, VOCAB, (rows, steps)) * mask).astype("int32")


def padded_classes(rows, rng):
    return padded(rows, rng), labels(rows, rng)


def pairs(rows, rng):
    segments = (np.arange(STEPS) >= rng.integers(1, STEPS, (rows, 1))).astype("int32")
    return (padded(rows, rng), segments), labels(rows, rng)


def translations(rows, rng):
    ids, following = next_ids(rows, rng)
    return (ids[:, ::-1].copy(), ids[:, 2:]), following[:, 2:]


def visits(rows, rng):
    user, item, category = (labels(rows, rng, high) for high in (32, 64, 16))
    price = rng.normal(size=(rows, 4)).astype("float32")
    return (user, item, category, padded(rows, rng, 6), price), labels(rows, rng, 2)[:, None]


def pixels(size):
    """Images in [0, 255], as applications that rescale them take them."""
    return lambda rows, rng: (
        rng.uniform(0, 255, (rows, size, size, 3)).astype("float32"),
        labels(rows, rng),
    )


def normal(*shape):
    return lambda rows, rng: (
        rng.normal(size=(rows, *shape)).astype("float32"),
        labels(rows, rng),
    )


clicks = partial(keras.losses.BinaryCrossentropy, from_logits=True)
CASES = (
    *(
        ModelCase(name, application(name, 32, **options), pixels(32), crossentropy)
        for name, options in (
            ("MobileNetV3Small", {"alpha": 0.5}),
            ("EfficientNetB0", {}),
            ("ConvNeXtTiny", {}),
        )
    ),
    ModelCase("Xception", application("Xception", 71), normal(71, 71, 3), crossentropy),
    ModelCase("ranking", ranking, visits, clicks),
    ModelCase("moe_like", moe_like, next_ids, crossentropy),
    ModelCase("llama_like", llama_like, next_ids, crossentropy),
    ModelCase("llama_rotary", partial(llama_like, rotary=True), next_ids, crossentropy),
    ModelCase("gpt_like", gpt_like, next_ids, crossentropy),
    ModelCase("bert_like", bert_like, pairs, crossentropy),
    ModelCase("masked_like", masked_like, padded_classes, crossentropy),
    ModelCase("t5_like", t5_like, translations, crossentropy),
    ModelCase("vit_like", vit_like, normal(16, 16, 3), crossentropy),
    ModelCase("digits_lstm", digits_lstm, normal(8, 8), crossentropy),
)
