"""Models drawn at random, some of which change if rows are added to a batch."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers as kl
from keras import ops

FEATURES, CLASSES, VOCAB = 6, 3, 11


class Of(kl.Layer):
    """A layer that computes a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


class Noise(kl.Layer):
    """Adds numbers that are drawn anew.

    Args:
        draw: Makes numbers like an array, from a seed that changes with every call.
    """

    def __init__(self, draw):
        super().__init__()
        self.draw, self.seeds = draw, keras.random.SeedGenerator(3)

    def call(self, x):
        return x + 0.1 * ops.cast(self.draw(x, self.seeds.next()), x.dtype)

    def compute_output_shape(self, shape):
        return shape


def _count(x):
    return x.shape[0]


# Each keeps the shape of its input, (rows, FEATURES). By row or exact over the true rows:
BY_ROW = {
    "dense": lambda: kl.Dense(FEATURES, "tanh"),
    "gelu": lambda: kl.Dense(FEATURES, "gelu"),
    "layer norm": lambda: kl.LayerNormalization(),
    "unit norm": lambda: kl.UnitNormalization(),
    "softmax": lambda: kl.Softmax(),
    "noise of features": lambda: _noise(lambda x: (1, FEATURES)),
    "noise of rows": lambda: _noise(ops.shape),
    "dropout": lambda: kl.Dropout(0.3, seed=5),
    "dropout without a seed": lambda: kl.Dropout(0.3),
    "dropout of columns": lambda: kl.Dropout(0.3, noise_shape=(None, 1), seed=5),
    "gaussian": lambda: keras.Sequential([kl.GaussianNoise(0.1), kl.GaussianDropout(0.2)]),
    "alpha": lambda: kl.AlphaDropout(0.2, seed=5),
    "channels": lambda: keras.Sequential(
        [kl.Reshape((2, 3)), kl.SpatialDropout1D(0.3, seed=5), kl.Flatten()]
    ),
    "attention dropout": lambda: keras.Sequential(
        [kl.Reshape((3, 2)), _Attends(0.3), kl.Flatten()]
    ),
    "truncated": lambda: Noise(lambda x, s: keras.random.truncated_normal(ops.shape(x), seed=s)),
    "whole numbers": lambda: Noise(lambda x, s: keras.random.randint(ops.shape(x), 0, 9, seed=s)),
    "choices": lambda: Noise(lambda x, s: keras.random.categorical(x, FEATURES, seed=s)),
    "keys of rows": lambda: Noise(_by_row),
    "sorted features": lambda: Of(lambda x: ops.sort(x, axis=1)),
    "running sum": lambda: Of(lambda x: ops.cumsum(x, axis=1)),
    "convolved": lambda: keras.Sequential(
        [kl.Reshape((2, 3)), kl.Conv1D(3, 2, padding="same"), kl.Flatten()]
    ),
    "pooled": lambda: keras.Sequential(
        [kl.Reshape((2, 3)), kl.MaxPooling1D(2, 1, "same"), kl.Flatten()]
    ),
    "recurrent": lambda: keras.Sequential([kl.Reshape((2, 3)), kl.GRU(FEATURES)]),
    "attention": lambda: keras.Sequential([kl.Reshape((3, 2)), _Attends(), kl.Flatten()]),
    "images": lambda: keras.Sequential(
        [kl.Reshape((3, 2, 1)), kl.DepthwiseConv2D(2, padding="same"), kl.Flatten()]
    ),
    "experts": lambda: Of(lambda x: ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1)),
    "penalty": lambda: kl.ActivityRegularization(l2=0.1),
}
OVER_ROWS = {
    "batch norm": lambda: kl.BatchNormalization(),
    "centred": lambda: Of(lambda x: x - ops.mean(x, axis=0)),
    "largest": lambda: Of(lambda x: x / (1 + ops.max(ops.abs(x), axis=0))),
    "smallest": lambda: Of(lambda x: x - ops.min(x)),
    "where it is largest": lambda: Of(lambda x: x + ops.cast(ops.argmax(x, axis=0), "float32")),
    "ranks": lambda: Of(lambda x: ops.sort(x, axis=0)),
    "reversed": lambda: Of(lambda x: ops.flip(x, axis=0)),
    "noise, rows last": lambda: Noise(
        lambda x, s: ops.transpose(keras.random.normal((FEATURES, _count(x)), seed=s))
    ),
    "another generator": lambda: Noise(_by_rbg),
    "gamma": lambda: Noise(lambda x, s: keras.random.gamma(ops.shape(x), 2.0, seed=s)),
    "shuffled": lambda: Noise(lambda x, s: keras.random.shuffle(x, seed=s)),
    "rolled": lambda: Of(lambda x: ops.roll(x, 1, axis=0)),
    "the last": lambda: Of(lambda x: x + x[-1:]),
    "the first": lambda: Of(lambda x: x + x[:1]),
    "sum of rows": lambda: Of(lambda x: x + 0.1 * ops.cumsum(x, axis=0)),
    "sum from the end": lambda: Of(lambda x: x + 0.1 * ops.flip(ops.cumsum(ops.flip(x, 0), 0), 0)),
    "pairs": lambda: Of(lambda x: ops.softmax(x @ ops.transpose(x)) @ x),
    "count": lambda: Of(lambda x: x * _count(x) / 32),
    "root of count": lambda: Of(lambda x: x / _count(x) ** 0.5),
    "odd count": lambda: Of(lambda x: x * (1 + _count(x) % 2)),
    "places": lambda: Of(lambda x: x + 0.1 * ops.cast(ops.arange(_count(x)), "float32")[:, None]),
    "from the end": lambda: Of(
        lambda x: x + 0.1 * ops.cast(ops.arange(_count(x), 0, -1), "float32")[:, None]
    ),
    "middle": lambda: Of(lambda x: x + x[_count(x) // 2]),
    "spread": lambda: Of(lambda x: x / (1e-3 + ops.std(x, axis=0))),
    "median": lambda: Of(lambda x: x - ops.median(x, axis=0)),
    "product": lambda: Of(lambda x: x + ops.prod(1 + 0.01 * x, axis=0)),
    "groups": lambda: Of(lambda x: x + jax.ops.segment_sum(x, _of(x), 4)[_of(x)] * 0.1),
    "both ways": lambda: Of(lambda x: ops.reshape(ops.transpose(x), ops.shape(x))),
    "loop": lambda: Of(lambda x: jax.lax.fori_loop(0, _count(x) // 8, lambda _, v: v * 0.9, x)),
    "branch": lambda: Of(lambda x: jax.lax.cond(x.sum() > 0, lambda v: v * 2, lambda v: -v, x)),
    "until": lambda: Of(_until),
    "constants": lambda: Of(lambda x: x * np.linspace(0, 1, _count(x), dtype="float32")[:, None]),
    "covariance": lambda: Of(lambda x: x @ (ops.transpose(x) @ x) / _count(x)),
    "factors": lambda: Of(lambda x: x @ jnp.linalg.inv(jnp.eye(FEATURES) + x.T @ x)),
}
LAYERS = {**BY_ROW, **OVER_ROWS}
LOSSES = {
    "sparse": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "sum": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
    "whole": lambda: _largest_loss,
}


class _Attends(kl.Layer):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = dropout

    def build(self, shape):
        self.attention = kl.MultiHeadAttention(2, 2, dropout=self.dropout, seed=5)
        self.attention.build(shape, shape)

    def call(self, x, training=None):
        return x + self.attention(x, x, training=training)


def _noise(shape):
    return Noise(lambda x, seed: keras.random.normal(shape(x), seed=seed))


def _by_row(x, seed):
    """A key for each row."""
    keys = jax.random.split(jax.random.wrap_key_data(seed), _count(x))
    return jax.vmap(lambda key: jax.random.normal(key, (FEATURES,)))(keys)


def _by_rbg(x, seed):
    key = jax.random.key(seed[1], impl="rbg")
    return jax.random.normal(key, x.shape)


def _of(x):
    """The group of each row, of four."""
    return jnp.argmax(x[:, :4], axis=1)


def _until(x):
    def more(values):
        return jnp.mean(jnp.abs(values)) > 0.05

    return jax.lax.stop_gradient(jax.lax.while_loop(more, lambda values: values * 0.7, x)) + x


def _largest_loss(y, logits):
    """Of the whole batch one number."""
    losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return 0.5 * ops.max(losses) + ops.mean(losses)


def drawn(seed):
    """The names of some layers, of the loss and the metrics of a model, and other choices."""
    rng = np.random.default_rng(seed)
    # Each layer is the first one of a model.
    first = list(LAYERS)[seed % len(LAYERS)]
    names = [first, *rng.choice(list(BY_ROW), size=2)]
    metrics = [["accuracy"], [], ["auc"], ["iou"], ["top"]][rng.integers(5)]
    weights = rng.choice(["none", "sample", "class"])
    embeds = bool(rng.integers(2))
    loss = rng.choice(list(LOSSES), p=[0.6, 0.2, 0.2])
    return {"layers": names, "loss": loss, "metrics": metrics, "weights": weights, "ids": embeds}


METRICS = {
    "accuracy": lambda: "accuracy",
    "auc": lambda: keras.metrics.MeanMetricWrapper(_margin, name="margin"),
    "iou": lambda: keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False, name="iou"),
    "top": lambda: keras.metrics.SparseTopKCategoricalAccuracy(2),
}


def _margin(y, logits):
    return ops.max(logits, axis=-1) - ops.mean(logits, axis=-1)


def built(choices):
    """The model, compiled."""
    keras.utils.set_random_seed(7)
    if choices["ids"]:
        inputs = keras.Input((2,), dtype="int32")
        x = kl.Flatten()(kl.Embedding(VOCAB, FEATURES // 2)(inputs))
    else:
        inputs = x = keras.Input((FEATURES,))
    for name in choices["layers"]:
        x = LAYERS[name]()(x)
    model = keras.Model(inputs, kl.Dense(CLASSES)(x))
    metrics = [METRICS[name]() for name in choices["metrics"]]
    model.compile(keras.optimizers.SGD(0.05), LOSSES[choices["loss"]](), metrics=metrics)
    return model


def data(choices, rows=77):
    """The rows of a model, and options for `fit`."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, FEATURES)).astype("float32")
    if choices["ids"]:
        x = rng.integers(0, VOCAB, (rows, 2))
    y = rng.integers(0, CLASSES, rows)
    options = {
        "none": {},
        "sample": {"sample_weight": rng.random(rows).astype("float32")},
        "class": {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
    }
    return x, y, options[choices["weights"]]
