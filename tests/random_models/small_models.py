"""Small classifiers, each with something of its own."""

import jax
import keras
import numpy as np
from keras import layers as kl
from keras import ops

import keras_tpu_dist as ktd

CLASSES, FEATURES, STEPS, VOCAB = 4, 7, 6, 11


def _wide(x, activation="relu", use_bias=True):
    x = kl.Dense(16, activation, name="wide")(x)
    return kl.Dense(8, use_bias=use_bias, name="narrow")(x)


def vectors() -> keras.Model:
    x = keras.Input((FEATURES,))
    return keras.Model(x, kl.Dense(CLASSES)(kl.Dropout(0.2, seed=3)(_wide(x))))


def normalized() -> keras.Model:
    x = keras.Input((FEATURES,))
    y = _wide(x, use_bias=False)  # batch statistics undo a bias: its gradient is rounding
    return keras.Model(x, kl.Dense(CLASSES)(ops.tanh(kl.BatchNormalization()(y))))


def masked() -> keras.Model:
    ids = keras.Input((STEPS,), dtype="int32")
    x = kl.Embedding(VOCAB, 8, mask_zero=True)(ids)
    return keras.Model(ids, kl.Dense(CLASSES)(kl.Bidirectional(kl.LSTM(8))(x)))


def images() -> keras.Model:
    x = keras.Input((8, 8, 2))
    y = kl.MaxPooling2D()(kl.Conv2D(8, 3, padding="same", activation="relu")(x))
    y = kl.AveragePooling2D(2)(kl.DepthwiseConv2D(3, padding="same")(y))
    return keras.Model(x, kl.Dense(CLASSES)(kl.Flatten()(y)))


def tokens() -> keras.Model:
    """A class for each token."""
    ids = keras.Input((STEPS,), dtype="int32")
    x = kl.Embedding(VOCAB, 8)(ids)
    x = x + kl.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    return keras.Model(ids, kl.Dense(CLASSES)(kl.LayerNormalization()(_wide(x, "gelu") + x)))


def nested() -> keras.Model:
    inner = keras.Sequential([keras.Input((FEATURES,)), kl.Dense(16, "relu"), kl.Dense(FEATURES)])
    x = keras.Input((FEATURES,))
    outer = keras.Model(x, inner(x) + x)
    x = keras.Input((FEATURES,))
    return keras.Model(x, keras.Sequential([outer, kl.Dense(CLASSES)])(x))


def nested_masked() -> keras.Model:
    """A mask that the inner model makes and the outer one uses."""
    ids = keras.Input((STEPS,), dtype="int32")
    x = kl.Dense(8, "tanh")(kl.Embedding(VOCAB, 8, mask_zero=True)(ids))
    inner = keras.Model(ids, kl.LayerNormalization()(x))
    ids = keras.Input((STEPS,), dtype="int32")
    return keras.Model(ids, kl.Dense(CLASSES)(kl.GlobalAveragePooling1D()(inner(ids))))


def shared() -> keras.Model:
    x = keras.Input((FEATURES,))
    dense = kl.Dense(FEATURES, "tanh")
    return keras.Model(x, kl.Dense(CLASSES)(dense(dense(x)) + dense(x)))


def two_inputs() -> keras.Model:
    inputs = {"a": keras.Input((FEATURES,), name="a"), "b": keras.Input((STEPS,), name="b")}
    x = kl.Concatenate()([inputs["b"], inputs["a"]])
    return keras.Model(inputs, kl.Dense(CLASSES)(_wide(x)))


def recurrent() -> keras.Model:
    x = keras.Input((STEPS, FEATURES))
    y = ktd.layers.LSTM(8, return_sequences=True)(x)
    return keras.Model(x, kl.Dense(CLASSES)(ktd.layers.GRU(8, unroll=True)(y)))


@keras.saving.register_keras_serializable("random_models")
class Experts(keras.Layer):
    """Mixes four kernels by a gate and adds a loss of its own."""

    def build(self, shape):
        weight = self.add_weight
        self.gate = weight(shape=(shape[-1], 4), initializer="glorot_uniform", name="gate")
        self.up = weight(shape=(4, shape[-1], 8), initializer="glorot_uniform", name="up")
        self.down = weight(shape=(4, 8, shape[-1]), initializer="glorot_uniform", name="down")

    def call(self, x):
        shares = ops.softmax(x @ self.gate)
        self.add_loss(0.01 * ops.mean(ops.square(shares)))
        inner = ops.gelu(ops.einsum("btd,ndf->btnf", x, self.up))
        return ops.einsum("btnf,nfd,btn->btd", inner, self.down, shares)

    def compute_output_shape(self, shape):
        return shape


def experts() -> keras.Model:
    """A class for each token."""
    ids = keras.Input((STEPS,), dtype="int32")
    x = kl.Embedding(VOCAB, 8)(ids)
    return keras.Model(ids, kl.Dense(CLASSES)(x + Experts()(x)))


def assigned() -> keras.Model:
    x = keras.Input((FEATURES,))
    one = ktd.assign(kl.Dense(16, "relu"), 0)(x)
    other = ktd.assign(keras.Sequential([kl.Dense(8), kl.Dense(16)]), 1)(x)
    return keras.Model(x, kl.Dense(CLASSES)(kl.Add()([one, other])))


def split() -> keras.Model:
    x = keras.Input((FEATURES,))
    y = ktd.split(kl.Dense(16, "relu"), kernel=(None, "model"), output=(None, "model"))(x)
    y = ktd.split(kl.Dense(8), kernel=("model", None))(y)
    return keras.Model(x, ktd.replicate(kl.Dense(CLASSES))(y))


@keras.saving.register_keras_serializable("random_models")
class Block(kl.Layer):
    """Attention, a state that each call writes, and what the block before made."""

    def build(self, shape):
        self.attention = kl.MultiHeadAttention(2, 4, dropout=0.1, seed=3)
        self.attention.build(shape, shape)
        self.normal = kl.BatchNormalization()
        self.normal.build(shape)

    def call(self, x):
        y = ops.tanh(self.normal(x))
        return x + self.attention(y, y)


def blocks() -> keras.Model:
    """Equal blocks that follow one another, and are fed one mask."""
    ids = keras.Input((STEPS,), dtype="int32")
    x = kl.Embedding(VOCAB, 8, mask_zero=True)(ids)
    for number in range(3):
        x = Block(name=f"block_{number}")(x)
    return keras.Model(ids, kl.Dense(CLASSES)(x))


@keras.saving.register_keras_serializable("random_models")
class Penalized(keras.Model):
    """A functional model with a loss of its own, which looks at all rows and at the weights."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        rows = [ops.reshape(each, (ops.shape(each)[0], -1)) for each in keras.tree.flatten(y_pred)]
        spread = sum(ops.mean(ops.var(ops.cast(each, "float32"), axis=0)) for each in rows)
        return loss + 0.1 * spread + 1e-3 * ops.sum(ops.square(self.trainable_variables[-1]))


def two_outputs() -> keras.Model:
    x = keras.Input((FEATURES,))
    y = kl.Dropout(0.2, seed=3)(_wide(x))
    outputs = {"class": kl.Dense(CLASSES, name="class")(y), "value": kl.Dense(1, name="value")(y)}
    return keras.Model(x, outputs)


def augmented() -> keras.Model:
    """Images that are changed at random while training, normalized, and upsampled."""
    x = keras.Input((8, 8, 2))
    y = kl.RandomFlip(seed=3, data_format="channels_last")(x)
    y = kl.GaussianNoise(0.1, seed=4)(kl.Rescaling(0.5)(y))
    y = kl.Conv2D(8, 3, 2, padding="same")(y)
    y = kl.UpSampling2D()(kl.GroupNormalization(2)(y))
    y = kl.SpatialDropout2D(0.2, seed=5)(kl.SeparableConv2D(8, 3, activation="tanh")(y))
    return keras.Model(x, kl.Dense(CLASSES)(kl.GlobalAveragePooling2D()(y)))


def grouped() -> keras.Model:
    """Grouped queries that see all of time but the padding; a class for each token."""
    ids = keras.Input((STEPS,), dtype="int32")
    x = kl.Embedding(VOCAB, 8, mask_zero=True)(ids)
    y = kl.RMSNormalization()(x)
    x = kl.Add()([x, kl.GroupQueryAttention(4, 4, 2)(y, y)])
    x = kl.TimeDistributed(kl.Dense(8, "gelu", name="wide"))(x)
    return keras.Model(ids, kl.Dense(CLASSES)(x))


def strided() -> keras.Model:
    """Convolutions in time: causal, strided, dilated and transposed."""
    x = keras.Input((STEPS, FEATURES))
    y = kl.Conv1D(8, 3, padding="causal", activation="tanh")(x)
    y = kl.Conv1D(8, 2, 2)(kl.Conv1D(8, 2, dilation_rate=2, padding="same")(y))
    y = kl.UnitNormalization()(kl.Conv1DTranspose(8, 2, 2)(y))
    y = ktd.layers.TimeDistributed(kl.BatchNormalization())(y)
    y = kl.Bidirectional(kl.SimpleRNN(4, return_sequences=True))(y)
    return keras.Model(x, kl.Dense(CLASSES)(kl.GlobalMaxPooling1D()(y)))


@keras.saving.register_keras_serializable("random_models")
class Shift(kl.Layer):
    """Moves rows and features by one place, and writes what comes last: a token for the start."""

    def build(self, shape):
        self.start = self.add_weight(shape=(shape[-1],), initializer="normal", name="start")

    def call(self, x):
        rows = x.at[:-1].set(x[1:]).at[-1].set(ops.cast(self.start, x.dtype))
        moved = ops.roll(x, 1, axis=-1).at[:, 0].set(0.5).at[0].add(x[-1])
        return ops.concatenate([x, 0.1 * rows, moved], axis=-1)


def shifted() -> keras.Model:
    """Operations that go along the rows, and along what may be split."""
    x = keras.Input((FEATURES,))
    return keras.Model(x, kl.Dense(CLASSES)(Shift()(_wide(x, "tanh"))))


def _at(axis: int, index) -> tuple:
    return (slice(None),) * axis + (index,)


def _moved(x, move: str, axis: int):
    """x, its rows or steps at other places."""
    length, last = x.shape[axis], _at(axis, slice(None, -1))
    later, first = x[_at(axis, slice(1, None))], x[_at(axis, slice(0, 1))]
    if move == "shift":
        return x.at[last].set(later)
    if move == "back":
        return x.at[_at(axis, slice(1, None))].set(x[last])
    if move == "roll":
        return ops.roll(x, 2, axis=axis)
    if move == "gather":
        return ops.take(x, (np.arange(length) * 3 + 1) % length, axis=axis)
    if move == "concatenate":
        return ops.concatenate([later, first], axis=axis)
    if move == "flip":
        return ops.flip(x, axis=axis)
    if move == "pad":
        return ops.pad(later, [(0, int(a == axis)) for a in range(x.ndim)])
    assert move == "update", move
    return jax.lax.dynamic_update_slice_in_dim(x, later, 0, axis)


def _written(x, write: str, axis: int, value):
    """x after a value was written into some of it, or something was made of all of it."""
    length = x.shape[axis]
    places = {"last": -1, "first": 0, "many": slice(None, None, 2), "slice": slice(1, 3)}
    if write in places:
        return x.at[_at(axis, places[write])].set(value)
    if write == "add":
        return x.at[_at(axis, 0)].add(value)
    if write == "multiply":
        return x.at[_at(axis, -1)].multiply(value)
    if write == "scatter":
        return x.at[_at(axis, (np.arange(length) + 2) % length)].add(0.5 * x)
    if write == "sums":
        return ops.cumsum(x, axis=axis) / length + value
    if write == "windows":
        window = [3 if a == axis else 1 for a in range(x.ndim)]
        lowest = np.array(-np.inf, x.dtype)
        return jax.lax.reduce_window(x, lowest, jax.lax.max, window, [1] * x.ndim, "SAME") + value
    if write == "mean":
        return x - ops.mean(x, axis=axis, keepdims=True) + value
    assert write == "largest", write
    return x - ops.max(x, axis=axis, keepdims=True) + value


@keras.saving.register_keras_serializable("random_models")
class Moves(kl.Layer):
    """A layer of the user's own that moves rows or time and writes a weight there, twice."""

    def __init__(self, move: str, write: str, axis: int, **kwargs):
        super().__init__(**kwargs)
        self.move, self.write, self.axis = move, write, axis

    def get_config(self):
        own = {"move": self.move, "write": self.write, "axis": self.axis}
        return {**super().get_config(), **own}

    def build(self, shape):
        self.start = self.add_weight(shape=(shape[-1],), initializer="normal", name="start")

    def call(self, x):
        value = ops.cast(self.start, x.dtype)
        y = _written(_moved(x, self.move, self.axis), self.write, self.axis, value)
        z = _moved(_written(ops.tanh(x), self.write, self.axis, value), self.move, self.axis)
        return x + y + 0.5 * z

    def compute_output_shape(self, shape):
        return shape


def moved_rows(move: str, write: str) -> keras.Model:
    x = keras.Input((FEATURES,))
    y = Moves(move, write, 0, name="moves")(_wide(x, "tanh"))
    return keras.Model(x, kl.Dense(CLASSES)(y))


def moved_time(move: str, write: str) -> keras.Model:
    """A class for each token, of which each looks at others."""
    ids = keras.Input((STEPS,), dtype="int32")
    x = kl.Embedding(VOCAB, 8)(ids)
    y = Moves(move, write, 1, name="moves")(_wide(x, "tanh"))
    return keras.Model(ids, kl.Dense(CLASSES)(x + y))


@keras.saving.register_keras_serializable("random_models")
class SelfAttention(kl.Layer):
    """Attention of a sequence to itself."""

    def build(self, shape):
        self.attention = kl.MultiHeadAttention(2, 4)
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)

    def compute_output_shape(self, shape):
        return shape


_ASSIGNED = {
    "dense": lambda: kl.Dense(8, "relu"),
    "conv": lambda: kl.Conv1D(8, 3, padding="same"),
    "depthwise": lambda: kl.DepthwiseConv1D(3, padding="same"),
    "separable": lambda: kl.SeparableConv1D(8, 3, padding="same"),
    "batch_norm": lambda: kl.BatchNormalization(momentum=0.8),
    "layer_norm": kl.LayerNormalization,
    "rms_norm": kl.RMSNormalization,
    "group_norm": lambda: kl.GroupNormalization(2),
    "lstm": lambda: kl.LSTM(8, return_sequences=True),
    "gru": lambda: ktd.layers.GRU(8, return_sequences=True),
    "attention": SelfAttention,
    "dropout": lambda: kl.Dropout(0.3, seed=11),
    "spatial_dropout": lambda: kl.SpatialDropout1D(0.3, seed=12),
    "einsum": lambda: kl.EinsumDense("btf,fg->btg", output_shape=(None, 8), bias_axes="g"),
    "pool": lambda: kl.MaxPooling1D(3, 1, padding="same"),
    "distributed": lambda: kl.TimeDistributed(kl.Dense(8, "gelu")),
    "sequential": lambda: keras.Sequential([kl.Dense(4, "tanh"), kl.Dense(8)]),
    "experts": Experts,
    "prelu": kl.PReLU,
    "moves": lambda: Moves("shift", "last", 1),
}


def assigned_pair(one: str, other: str, devices: str, in_turn: bool) -> keras.Model:
    """Two layers, each computed by one logical device of a replica; a class for each token."""
    ids = keras.Input((STEPS,), dtype="int32")
    x = kl.Embedding(VOCAB, 8)(ids)
    y = ktd.assign(_ASSIGNED[one](), int(devices[0]))(x)
    z = ktd.assign(_ASSIGNED[other](), int(devices[1]))(y if in_turn else x)
    return keras.Model(ids, kl.Dense(CLASSES)(kl.Dense(8, name="narrow")(x) + y + z))


def deep() -> keras.Model:
    """More variables than an update in place is waited for: 130."""
    x = keras.Input((FEATURES,))
    y = _wide(x, "tanh")
    for _ in range(62):
        y = y + 0.1 * kl.Dense(8, "tanh")(y)
    return keras.Model(x, kl.Dense(CLASSES)(y))


MODELS = {
    function.__name__: function
    for function in (
        *(vectors, normalized, masked, images, tokens, nested, shared, two_inputs),
        *(recurrent, experts, assigned, split, blocks, nested_masked),
        *(two_outputs, augmented, grouped, strided, shifted),
        *(moved_rows, moved_time, assigned_pair, deep),
    )
}
