"""Mixtures of experts as KerasHub has them, in plain Keras: every expert computed for every token.

The forms are those of https://github.com/keras-team/keras-hub at 71453d0: `MixtralSparseMoeBlock`,
`Qwen3SparseMoeBlock`, `Qwen3_5MoeSparseMoeBlock`, `GptOssSparseMoeBlock`, `Gemma4MoEBlock`.
"""

import keras
from keras import ops

L = keras.layers


def register(kind):
    return keras.saving.register_keras_serializable("experts_of_keras_hub")(kind)


class Configured(L.Layer):
    """A layer whose config is what it was made with."""

    def __init__(self, count=8, hidden=6, top=2, **kwargs):
        super().__init__(**kwargs)
        self.count, self.hidden, self.top = count, hidden, top

    def get_config(self):
        return super().get_config() | {
            "count": self.count,
            "hidden": self.hidden,
            "top": self.top,
        }

    def kernel(self, name, *shape):
        return self.add_weight(shape=(self.count, *shape), initializer="glorot_uniform", name=name)


def weights_of_all(probabilities, top, count, normed=True):
    """For each token, the weights of all experts: zero but for the chosen ones."""
    best, which = ops.top_k(probabilities, k=top)
    if normed:
        best = best / ops.sum(best, axis=-1, keepdims=True)
    one_hot = ops.cast(ops.one_hot(which, count), best.dtype)
    return ops.sum(one_hot * best[..., None], axis=1)


def balance(logits, top, count):
    """The loss that keeps experts in use."""
    probabilities = ops.softmax(logits, axis=-1)
    _, which = ops.top_k(probabilities, k=top)
    tokens = ops.mean(ops.one_hot(which, count), axis=(0, 1))
    return count * ops.sum(tokens * ops.mean(probabilities, axis=0))


@register
class MixtralBank(Configured):
    def build(self, shape):
        self.gate = self.kernel("gate", shape[-1], self.hidden)
        self.up = self.kernel("up", shape[-1], self.hidden)
        self.down = self.kernel("down", self.hidden, shape[-1])
        self.built = True

    def call(self, x):
        gate = ops.einsum("th,ehm->etm", x, self.gate)
        gate = ops.cast(ops.silu(ops.cast(gate, "float32")), self.compute_dtype)
        hidden = ops.einsum("th,ehm->etm", x, self.up) * gate
        return ops.einsum("eti,eih->eth", hidden, self.down)


@register
class QwenBank(Configured):
    def build(self, shape):
        self.gate_up = self.kernel("gate_up", shape[-1], 2 * self.hidden)
        self.down = self.kernel("down", self.hidden, shape[-1])
        self.built = True

    def call(self, x):
        gate, up = ops.split(ops.einsum("th,ehm->etm", x, self.gate_up), 2, axis=-1)
        return ops.einsum("eti,eih->eth", up * ops.silu(gate), self.down)


@register
class GptOssBank(Configured):
    def build(self, shape):
        self.gate_up = self.kernel("gate_up", shape[-1], 2 * self.hidden)
        self.gate_up_bias = self.kernel("gate_up_bias", 2 * self.hidden)
        self.down = self.kernel("down", self.hidden, shape[-1])
        self.down_bias = self.kernel("down_bias", shape[-1])
        self.built = True

    def call(self, x):
        gate_up = ops.einsum("th,ehm->etm", x, self.gate_up) + self.gate_up_bias[:, None, :]
        gate = ops.clip(gate_up[..., ::2], -1e9, 7.0)
        up = ops.clip(gate_up[..., 1::2], -7.0, 7.0)
        hidden = (up + 1) * (gate * ops.sigmoid(gate * 1.702))
        return ops.einsum("etm,emh->eth", hidden, self.down) + self.down_bias[:, None, :]


class Block(Configured):
    """A router and a bank of experts."""

    bank: type = MixtralBank
    shared = False
    bias = False

    def build(self, shape):
        policy = self.dtype_policy
        self.router = L.Dense(self.count, use_bias=self.bias, name="router", dtype=policy)
        self.router.build(shape)
        self.experts = self.bank(self.count, self.hidden, name="experts", dtype=policy)
        self.experts.build(shape)
        if self.shared:
            self.also = L.Dense(shape[-1], activation="silu", name="shared", dtype=policy)
            self.also.build(shape)
        self.built = True

    def weights_for(self, logits):
        return weights_of_all(ops.softmax(logits, axis=-1), self.top, self.count)

    def call(self, x, training=None):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        logits = self.router(flat)
        weights = ops.cast(ops.transpose(self.weights_for(logits), (1, 0)), flat.dtype)
        y = ops.sum(self.experts(flat) * weights[:, :, None], axis=0)
        if self.shared:
            y = y + self.also(flat)
        if training:
            self.add_loss(0.01 * balance(logits, self.top, self.count))
        return ops.reshape(y, (-1, x.shape[1], x.shape[2])), logits


@register
class Mixtral(Block):
    pass


@register
class Qwen(Block):
    bank = QwenBank
    shared = True

    def weights_for(self, logits):
        return weights_of_all(ops.softmax(logits, axis=-1), self.top, self.count, normed=False)


@register
class GptOss(Block):
    bank = GptOssBank
    bias = True

    def weights_for(self, logits):
        best, which = ops.top_k(logits, k=self.top)
        mask = ops.cast(ops.one_hot(which, self.count), best.dtype)
        return ops.sum(mask * ops.expand_dims(ops.softmax(best, axis=-1), axis=-1), axis=1)


@register
class GemmaBank(MixtralBank):
    """Combines by itself; what is chosen comes from a router beside it."""

    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(shape=(self.count,), initializer="ones", name="scale")

    def call(self, x, weights):
        y = super().call(x) * ops.reshape(self.scale, (self.count, 1, 1))
        return ops.sum(y * ops.transpose(weights, (1, 0))[:, :, None], axis=0)


@register
class Gemma(Configured):
    """A block in whose call alone the router and the experts meet."""

    def build(self, shape):
        self.router = L.Dense(self.count, use_bias=False, name="router", dtype=self.dtype_policy)
        self.router.build(shape)
        self.experts = GemmaBank(self.count, self.hidden, name="experts", dtype=self.dtype_policy)
        self.experts.build(shape)
        self.built = True

    def call(self, x):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        probabilities = ops.softmax(self.router(flat), axis=-1)
        _, which = ops.top_k(probabilities, k=self.top)
        best = ops.take_along_axis(probabilities, which, axis=-1)
        best = best / ops.maximum(ops.sum(best, axis=-1, keepdims=True), 1e-9)
        one_hot = ops.cast(ops.one_hot(which, self.count), best.dtype)
        weights = ops.sum(one_hot * ops.expand_dims(best, axis=-1), axis=1)
        return ops.reshape(self.experts(flat, weights), (-1, x.shape[1], x.shape[2]))


KINDS = {"mixtral": Mixtral, "qwen": Qwen, "gpt_oss": GptOss, "gemma": Gemma}


def model_of(kind, *, time=6, width=8, layers=2, dtype=None, **options):
    """A model with residual mixtures of one kind, compiled with plain gradient descent."""
    x = inputs = keras.Input((time, width))
    for number in range(layers):
        y = L.LayerNormalization(name=f"norm_{number}")(x)
        made = KINDS[kind](name=f"mixture_{number}", dtype=dtype, **options)(y)
        x = x + (made[0] if isinstance(made, (tuple, list)) else made)
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
